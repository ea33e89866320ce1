"""Fill nodes that are in use before opening an empty one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from llmgw.placement.candidates import Candidate
from llmgw.placement.world import World


class Packing:
    """How full the node is already (not: afterwards, which would favour large shapes)."""

    api = 1
    name: ClassVar[str] = "packing"
    weight: ClassVar[float] = 15.0

    def rank(self, world: World, candidates: Sequence[Candidate]) -> list[float]:
        found = []
        for candidate in candidates:
            total = sum(len(m.place.inventory.devices) for m in candidate.members)
            used = sum(len(m.place.holders) for m in candidate.members)
            found.append(used / total if total else 1.0)
        return found
