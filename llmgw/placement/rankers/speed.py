"""Prefer GPUs on which the model was measured to be fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from llmgw.placement.candidates import Candidate
from llmgw.placement.world import World


class Speed:
    """Measured tokens a second over the best measured; 0.5 where nobody has measured."""

    api = 1
    name: ClassVar[str] = "speed"
    weight: ClassVar[float] = 5.0

    def rank(self, world: World, candidates: Sequence[Candidate]) -> list[float]:
        speeds = world.snapshot.speeds.get(candidates[0].demand.name, {})
        best = max(speeds.values(), default=0.0)
        if best <= 0:
            return [0.5] * len(candidates)
        kinds = [c.pick.kind for c in candidates]
        return [speeds[k[0]] / best if k and k[0] in speeds else 0.5 for k in kinds]
