"""Requests at work."""

from __future__ import annotations

from llmgw.routing.field import Field


class Inflight:
    """One second for every request that it has, ours and foreign ones, by its weight."""

    api = 1
    name = "inflight"

    def score(self, field: Field) -> list[float] | None:
        return [(v.inflight + v.foreign) / e.weight for v, e in zip(field.views, field.endpoints, strict=True)]
