"""The cheapest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmgw.routing.field import Field

EQUAL = 1e-9  # seconds: less is the order of additions, not a difference


class Best:
    """The cheapest one; by lot among equals."""

    api = 1
    name = "best"

    def pick(self, costs: Sequence[float], field: Field, random: Callable[[], float]) -> int:
        equals = cheapest(costs)
        return equals[0] if len(equals) == 1 else equals[int(random() * len(equals))]


def cheapest(costs: Sequence[float]) -> list[int]:
    """Positions of those that cost no more than the cheapest."""
    limit = min(costs) + EQUAL
    return [at for at, cost in enumerate(costs) if cost <= limit]
