"""Cached prompt."""

from __future__ import annotations

from llmgw.routing.field import Field


class Prefix:
    """Seconds saved, since that part of the prompt is in the endpoint's cache (the same sum as `prefill`'s)."""

    api = 1
    name = "prefix"

    def __init__(self, shared: float = 0.1) -> None:
        self.shared = shared

    def score(self, field: Field) -> list[float]:
        if not field.matched:
            return [0.0] * len(field.views)
        shared = self.shared
        return [
            -(1.0 + shared * (v.inflight - v.queued)) * hit / rate if hit else 0.0
            for v, rate, hit in zip(field.views, field.prefill_rates, field.hits, strict=True)
        ]
