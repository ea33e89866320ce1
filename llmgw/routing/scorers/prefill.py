"""Computing the prompt."""

from __future__ import annotations

from llmgw.routing.field import Field


class Prefill:
    """Seconds to compute the whole prompt at the measured speed, and the time it costs those that are decoding there.

    While a prompt is computed the tokens of all running answers wait. *shared*: how much of that wait counts.
    """

    api = 1
    name = "prefill"

    def __init__(self, shared: float = 0.1) -> None:
        self.shared = shared

    def score(self, field: Field) -> list[float]:
        tokens, shared = field.query.request.prompt_tokens, self.shared
        return [
            (1.0 + shared * (v.inflight - v.queued)) * tokens / rate + overhead
            for v, rate, overhead in zip(field.views, field.prefill_rates, field.overheads, strict=True)
        ]
