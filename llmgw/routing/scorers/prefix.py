"""Cached prompt."""

from __future__ import annotations

from llmgw.routing.field import Field


class Prefix:
    """Seconds saved, since that part of the prompt is in the endpoint's cache: its own and those of whom it would delay.

    Where the same beginning comes often, a copy on a further endpoint costs its prefill once and serves many: so who has
    not got it is charged its share of that only (1 of all that the copy will serve), and a hot prefix spreads
    as far as its load needs.
    """

    api = 1
    name = "prefix"

    def __init__(self, shared: float = 1.0, common: float = 0.1) -> None:
        """*shared*: how much counts of the wait that a hit saves the answers running there. *common*: the same for what
        is spared everybody alike; as `shared` of `prefill`, which it takes back."""
        self.shared = shared
        self.common = common

    def score(self, field: Field) -> list[float] | None:
        hits = field.hits
        if not hits:
            return None
        rates, common = field.prefill_rates, self.common
        charged = 1.0 / (1.0 + field.query.reuse)
        spared = max(tokens for _, tokens in hits) * (1.0 - charged)
        if spared < 1.0:
            found = [0.0] * len(field.views)
        else:
            found = [
                -spared * (1.0 + common * (v.inflight - v.queued)) / rate
                for v, rate in zip(field.views, rates, strict=True)
            ]
        for at, tokens in hits:
            view = field.views[at]
            delayed = self.shared * charged * (view.inflight - view.queued)
            found[at] -= (1.0 + delayed) * tokens * charged / rates[at]
        return found
