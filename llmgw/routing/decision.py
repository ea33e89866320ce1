"""A decision, as it was made: who was chosen, and the columns that say why.

Nothing is formatted when a decision is made; `llmgw.routing.explain` makes the text when somebody asks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from llmgw.endpoint import Endpoint
from llmgw.request import Phase


class Refused(msgspec.Struct, frozen=True, gc=False):
    """Candidates that one filter took out: positions in the snapshot, ascending."""

    filter: str
    at: tuple[int, ...]


class Decision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Which endpoint serves a request (a leg of it), and why. Times are seconds.

    `columns[k]` belongs to `scorers[k]`, weights applied, and runs in step with `candidates`; `costs` is their sum.
    """

    request_id: str
    model: str
    profile: str
    phases: tuple[Phase, ...]
    at: float
    revision: int  # of the snapshot
    endpoint: Endpoint  # the chosen one
    endpoints: tuple[Endpoint, ...]  # of the snapshot; shared by all decisions on one set
    candidates: Sequence[int]  # positions of those that passed all filters
    chosen: int  # position in `candidates`
    scorers: tuple[str, ...]
    columns: tuple[Sequence[float] | None, ...]  # None: all zero
    costs: Sequence[float]
    refused: tuple[Refused, ...]
    prompt_tokens: int
    cached_tokens: int  # that the chosen one is believed to have
    ttft: float  # predicted

    @property
    def uncached(self) -> int:
        return self.prompt_tokens - self.cached_tokens
