"""Do not burn a large GPU on a small model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from llmgw.placement.candidates import Candidate
from llmgw.placement.inventory import is_type
from llmgw.placement.world import Kind, World

GIB = 1 << 30


class Fit:
    """Price of the cheapest feasible candidate over this one's; a type without a price costs by its memory."""

    api = 1
    name: ClassVar[str] = "fit"
    weight: ClassVar[float] = 10.0

    def rank(self, world: World, candidates: Sequence[Candidate]) -> list[float]:
        seen: dict[Kind, float] = {}
        prices = world.snapshot.prices

        def price(candidate: Candidate) -> float:
            kind = candidate.pick.kind
            if kind is None:
                return 0.0
            kept = seen.get(kind)
            if kept is None:
                named = [p for t, p in sorted(prices.items()) if is_type(t, kind[0], kind[1])]
                kept = seen[kind] = named[0] if named else kind[1] / GIB / 100
            return kept * candidate.shape.ranks

        costs = [price(c) for c in candidates]
        least = min((c for c in costs if c > 0), default=0.0)
        return [least / cost if cost > 0 else 1.0 for cost in costs]
