"""Room in the KV cache."""

from __future__ import annotations

from llmgw.routing.field import Field

FULL = 0.9  # of the cache: beyond it the next long answer preempts another


class Kv:
    """Seconds that a full KV cache costs: nothing up to *start*, then rising; unknown counts as half full."""

    api = 1
    name = "kv"

    def __init__(self, start: float = 0.5, most: float = 10.0) -> None:
        """*most*: seconds for a cache that is `FULL`: an answer must end first, or is preempted and computed anew."""
        self.start = start
        self.most = most

    def score(self, field: Field) -> list[float] | None:
        start, slope = self.start, self.most / (FULL - self.start)
        return [
            max(0.0, (0.5 if (r := v.report) is None or r.kv_usage is None else r.kv_usage) - start) * slope
            for v in field.views
        ]
