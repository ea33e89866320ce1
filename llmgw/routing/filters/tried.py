"""Has not failed this request."""

from __future__ import annotations

from collections.abc import Sequence

from llmgw.endpoint import Snapshot
from llmgw.routing.field import Query


class Tried:
    """Has not failed this very request already."""

    api = 1
    name = "tried"

    def keep(self, query: Query, snapshot: Snapshot, at: Sequence[int], now: float) -> Sequence[int]:
        if not query.tried:
            return at
        return [i for i in at if snapshot.endpoints[i].id not in query.tried]
