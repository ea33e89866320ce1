"""The exceptions that cross a package boundary. Nothing else of ours does.

    LlmgwError
    ├── ConfigError      what the operator wrote cannot be used; carries every problem found, exit code 2
    ├── Refused          a request ends with a reason of the closed set (llmgw.reasons); becomes an HTTP answer
    ├── Unavailable      something outside (engine, store, server) cannot be reached or does not answer
    ├── StoreError       closed set in llmgw.stores.base: compacted, lease lost, not leader, …
    └── Denied, JoinFailed  a machine does not become or remain a node; codes in llmgw.pki.issue

Data that decides travels as values (`llmgw.request.Refusal`), not as exceptions; `Refused` is for the
places where a call stack is in the way, and is caught at one boundary: the request handler.
"""

from __future__ import annotations

import attrs

from llmgw.request import Refusal


class LlmgwError(Exception):
    """Base of all exceptions raised on purpose by this package."""


@attrs.frozen
class Problem:
    """One thing wrong with what the operator wrote.

    *where* is a dotted path into the document (``endpoints[0].url``), *file* and *line* (1-based) say where it
    stands; they are empty and 0 for what came from the command line or the environment.
    """

    message: str
    where: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        place = self.file
        if self.line:
            place += f":{self.line}"
        return ": ".join(part for part in (place, self.where, self.message) if part)


class ConfigError(LlmgwError):
    """What the operator wrote cannot be used. Lists *all* problems, never only the first."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


class Refused(LlmgwError):
    """A request ends here with a reason of the closed set."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.reason}: {refusal.message}")
        self.refusal = refusal


class Unavailable(LlmgwError):
    """Something outside this process cannot be reached or does not answer; trying later may help."""
