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
        seen: dict[tuple[int, ...], float] = {}

        def waste(holes: list[int]) -> float:
            """GPUs that a shape drawn from the mix could not use, on average."""
            key = tuple(holes)
            kept = seen.get(key)
            if kept is None:
                kept = seen[key] = sum(w * sum(n % size for n in holes) for size, w in mix if size) / total
            return kept

        found = []
        for candidate in candidates:
            grown = 0.0
            taken = 0
            for member in candidate.members:
                pick = member.pick
                if pick.kind is None:
                    continue
                before, after = [], []
                picked = {d.uuid for d in pick.devices}
                for isle in member.place.isles[pick.kind]:
                    before.append(len(isle.free))
                    after.append(sum(1 for d in isle.free if d.uuid not in picked))
                grown += waste(after) - waste(before)
                taken += len(picked)
            found.append(1.0 - min(1.0, max(0.0, grown / taken)) if taken else 1.0)
        return found
