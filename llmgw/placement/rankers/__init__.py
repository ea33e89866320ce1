"""The soft wishes: which of the feasible candidates is best. Each gives a value in 0..1, its weight says how much it counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from llmgw.placement.candidates import Candidate
from llmgw.placement.world import World


class Ranker(Protocol):
    """A plug-in of kind ``ranker``. The score is the weighted mean of all rankers, times 100."""

    name: ClassVar[str]
    weight: ClassVar[float]

    def rank(self, world: World, candidates: Sequence[Candidate]) -> list[float]:
        """One value in 0..1 a candidate, 1 = best. All candidates are feasible and of one model."""
        ...
