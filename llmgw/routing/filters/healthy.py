"""Is healthy."""

from __future__ import annotations

from collections.abc import Sequence

from llmgw.endpoint import Snapshot
from llmgw.routing.field import Query
from llmgw.routing.health import SERVING


class Healthy:
    """Is ready or degraded: not loading, draining, quarantined or gone."""

    api = 1
    name = "healthy"

    def keep(self, query: Query, snapshot: Snapshot, at: Sequence[int], now: float) -> Sequence[int]:
        views = snapshot.views
        return [i for i in at if views[i].health in SERVING]
