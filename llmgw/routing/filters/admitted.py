"""Is one of those that admission grants."""

from __future__ import annotations

from collections.abc import Sequence

from llmgw.endpoint import Snapshot
from llmgw.routing.field import Query


class Admitted:
    """Is one of those that admission lets this request use."""

    api = 1
    name = "admitted"

    def keep(self, query: Query, snapshot: Snapshot, at: Sequence[int], now: float) -> Sequence[int]:
        allowed = query.allowed
        if allowed is None:
            return at
        return [i for i in at if snapshot.endpoints[i].id in allowed]
