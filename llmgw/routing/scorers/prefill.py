"""Computing the prompt."""

from __future__ import annotations

from llmgw.routing.field import Field


class Prefill:
    """Seconds to compute the whole prompt at the measured speed, and the time it costs those that are decoding there.

    While a prompt is computed the tokens of all running answers wait. *shared*: how much of one's wait counts.
    """

    api = 1
    name = "prefill"

    def __init__(self, shared: float = 0.1) -> None:
        self.shared = shared

    def score(self, field: Field) -> list[float] | None:
        tokens = field.query.request.prompt_tokens
        more = tokens * self.shared
        rates = field.prefill_rates
        return [(tokens + more * (v.inflight - v.queued)) / rate for v, rate in zip(field.views, rates, strict=True)]
