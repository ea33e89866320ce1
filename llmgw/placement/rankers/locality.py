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
        sizes: dict[int, tuple[str, int]] = {}  # by shape: the weights and how much they are

        def present(part: Candidate) -> float:
            if part.index not in sizes:
                ref = part.demand.weights_of(part.shape)
                known = world.known_weights(ref)
                sizes[part.index] = (ref, (known.bytes_total or known.bytes) if known else 0)
            ref, size = sizes[part.index]
            if not size:
                return 1.0
            there = part.place.weights(ref)
            return min(1.0, there.bytes / size) if there else 0.0

        return [min([present(p) for p in c.members]) for c in candidates]
