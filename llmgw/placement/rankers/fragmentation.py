"""Keep large islands whole: a small replica goes where an odd hole is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from llmgw.placement.candidates import Candidate
from llmgw.placement.world import World


class Fragmentation:
    """How few GPUs become useless for the catalogue's other shapes by this choice."""

    api = 1
    name: ClassVar[str] = "fragmentation"
    weight: ClassVar[float] = 30.0

    def rank(self, world: World, candidates: Sequence[Candidate]) -> list[float]:
        mix = world.snapshot.mix
        total = sum(weight for _, weight in mix)
        if not total:
            return [1.0] * len(candidates)
        seen: dict[int, float] = {}

        def waste(hole: int) -> float:
            """GPUs of a hole that a shape drawn from the mix could not use, on average."""
            kept = seen.get(hole)
            if kept is None:
                kept = seen[hole] = sum([w * (hole % size) for size, w in mix if size]) / total
            return kept

        def grown(part: Candidate) -> float:
            pick = part.pick
            if pick.kind is None:
                return 0.0
            isles = part.place.isles[pick.kind]
            if len(isles) == 1:
                free = len(isles[0].free)
                return waste(max(0, free - len(pick.devices))) - waste(free)
            picked = {d.uuid for d in pick.devices}
            more = 0.0
            for isle in isles:
                left = sum(1 for d in isle.free if d.uuid not in picked)
                more += waste(left) - waste(len(isle.free))
            return more

        found = []
        for candidate in candidates:
            parts = candidate.members
            taken = sum([len(p.pick.devices) for p in parts])
            more = sum([grown(p) for p in parts])
            found.append(1.0 - min(1.0, max(0.0, more / taken)) if taken else 1.0)
        return found
