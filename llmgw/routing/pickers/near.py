"""One of the cheap ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp

from llmgw.routing.field import Field


class Near:
    """By lot among those near the cheapest, the cheaper the likelier: for several gateways that see the same figures.

    *spread*: seconds in which the chance falls by e.
    """

    api = 1
    name = "near"

    def __init__(self, spread: float = 0.05) -> None:
        if spread <= 0:
            raise ValueError("spread must be more than 0 seconds")
        self.spread = spread

    def pick(self, costs: Sequence[float], field: Field, random: Callable[[], float]) -> int:
        least, spread = min(costs), self.spread
        chances = [exp((least - cost) / spread) for cost in costs]
        left = random() * sum(chances)
        for at, chance in enumerate(chances):
            left -= chance
            if left < 0:
                return at
        return costs.index(least)
