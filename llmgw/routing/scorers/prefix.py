"""Cached prompt."""

from __future__ import annotations

from llmgw.routing.field import Field


class Prefix:
    """Seconds saved, since that part of the prompt is in the endpoint's cache: its own and those of whom it would delay.

    *shared*: as in `prefill`.
    """

    api = 1
    name = "prefix"

    def __init__(self, shared: float = 1.0) -> None:
        self.shared = shared

    def score(self, field: Field) -> list[float] | None:
        hits = field.hits
        if not hits:
            return None
        found = [0.0] * len(field.views)
        rates = field.prefill_rates
        for at, tokens in hits:
            view = field.views[at]
            found[at] = -(1.0 + self.shared * (view.inflight - view.queued)) * tokens / rates[at]
        return found
