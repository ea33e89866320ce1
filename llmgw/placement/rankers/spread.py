"""Do not put all replicas of a model into one basket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from llmgw.placement.candidates import Candidate
from llmgw.placement.world import World, domain_of


class Spread:
    """How few replicas of the model are on the same node and in the same domain."""

    api = 1
    name: ClassVar[str] = "spread"
    weight: ClassVar[float] = 20.0

    def rank(self, world: World, candidates: Sequence[Candidate]) -> list[float]:
        demand = candidates[0].demand
        nodes = world.models.get(demand.name, {})
        domains = world.domains(demand.name, demand.spread_by)

        def crowd(candidate: Candidate) -> float:
            place = candidate.place
            near, here = domains.get(domain_of(place, demand.spread_by), 0), nodes.get(place.name, 0)
            return here + (near - here) / 2 if demand.spread_by != "node" else here

        return (
            [1.0 / (1.0 + max(crowd(m) for m in c.members)) for c in candidates] if nodes else [1.0] * len(candidates)
        )
