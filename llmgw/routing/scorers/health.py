"""Doubtful health."""

from __future__ import annotations

from llmgw.routing.field import Field


class Health:
    """Seconds against an endpoint that failed lately, or that has just become ready and is cold."""

    api = 1
    name = "health"

    def __init__(self, degraded: float = 5.0, ramp: float = 10.0) -> None:
        """*degraded*: seconds. *ramp*: for so many seconds after it became ready a request in flight there counts
        as up to one second, so that a new engine is not flooded before it has shown its speed."""
        self.degraded = degraded
        self.ramp = ramp

    def score(self, field: Field) -> list[float] | None:
        young = field.now - self.ramp
        doubtful = [at for at, v in enumerate(field.views) if v.since > young or v.health != "ready"]
        if not doubtful:
            return None
        found = [0.0] * len(field.views)
        for at in doubtful:
            view = field.views[at]
            if view.health != "ready":
                found[at] = self.degraded
            if self.ramp and view.since > young:
                found[at] += view.inflight * (view.since - young) / self.ramp
        return found
