"""The decisions made lately, and what came true of them: a ring, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from llmgw.request import Outcome
from llmgw.routing.decision import Decision

BYTES = 16 << 20  # some 10,000 decisions over 8 endpoints, or 100 over 1,000
EACH = 800  # bytes a decision takes without its columns
CELL = 32  # bytes of one figure


class Record(msgspec.Struct, gc=False):
    """One request: its decisions in order (more than one where attempts failed), and how it ended."""

    decisions: list[Decision]
    outcome: Outcome | None = None
    size: int = 0


class Recent:
    """By request id, oldest first. A request id that comes again replaces the one before."""

    def __init__(self, limit: int = BYTES) -> None:
        self._limit = limit
        self._records: OrderedDict[str, Record] = OrderedDict()
        self.size = 0

    def add(self, decision: Decision, *, again: bool = False) -> None:
        """*again*: the next attempt of a request that is here already."""
        key = decision.request_id
        size = EACH + CELL * len(decision.candidates) * (1 + sum(c is not None for c in decision.columns))
        record = self._records.get(key) if again else None
        if record is None:
            self._drop(key)
            record = self._records[key] = Record([])
        record.decisions.append(decision)
        record.size += size
        self.size += size
        while self.size > self._limit and len(self._records) > 1:
            self._drop(next(iter(self._records)))

    def ended(self, outcome: Outcome) -> None:
        """What came true."""
        record = self._records.get(outcome.request_id)
        if record is not None:
            record.outcome = outcome

    def get(self, request_id: str) -> Record | None:
        return self._records.get(request_id)

    def latest(self, count: int) -> list[Record]:
        """At most *count*, newest first."""
        return [self._records[key] for key, _ in zip(reversed(self._records), range(count), strict=False)]

    def _drop(self, key: str) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self.size -= record.size
