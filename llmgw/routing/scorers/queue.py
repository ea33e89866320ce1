"""Work ahead."""

from __future__ import annotations

from llmgw.routing.field import Field

FOREIGN_TOKENS = 500  # uncached prompt tokens that a waiting request of another gateway is taken for


class Queue:
    """Seconds until the engine turns to the request: uncached prompt tokens ahead of it ÷ measured speed."""

    api = 1
    name = "queue"

    def score(self, field: Field) -> list[float]:
        return [
            (v.prefill_tokens + v.foreign * FOREIGN_TOKENS) / rate + v.queued * overhead
            for v, rate, overhead in zip(field.views, field.prefill_rates, field.overheads, strict=True)
        ]
