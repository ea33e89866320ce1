"""The better of two."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmgw.routing.field import Field


class Two:
    """The cheaper of two that are drawn by lot: for large pools and several gateways, whose figures lag behind."""

    api = 1
    name = "two"

    def pick(self, costs: Sequence[float], field: Field, random: Callable[[], float]) -> int:
        count = len(costs)
        one = int(random() * count)
        if count == 1:
            return one
        other = int(random() * (count - 1))
        other += other >= one
        return one if costs[one] <= costs[other] else other
