"""Prefer nodes that have the weights already: copying them takes minutes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from llmgw.placement.candidates import Candidate
from llmgw.placement.world import World


class Locality:
    """Which part of the weights is there already, on the node that has least of them."""

    api = 1
    name: ClassVar[str] = "locality"
    weight: ClassVar[float] = 15.0

    def rank(self, world: World, candidates: Sequence[Candidate]) -> list[float]:
        seen: dict[tuple[str, str], float] = {}

        def present(member: Candidate) -> float:
            ref = member.demand.weights_of(member.shape)
            key = (member.place.name, ref)
            kept = seen.get(key)
            if kept is None:
                there, known = member.place.weights(ref), world.known_weights(ref)
                size = (known.bytes_total or known.bytes) if known else 0
                kept = 1.0 if not size else min(1.0, (there.bytes if there else 0) / size)
                seen[key] = kept
            return kept

        return [min(present(m) for m in c.members) for c in candidates]
