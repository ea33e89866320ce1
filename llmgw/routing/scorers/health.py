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

    def score(self, field: Field) -> list[float]:
        now, ramp, degraded = field.now, self.ramp, self.degraded
        return [
            (degraded if v.health == "degraded" else 0.0)
            if (age := now - v.since) >= ramp or not v.inflight
            else v.inflight * (1.0 - age / ramp)
            for v in field.views
        ]
