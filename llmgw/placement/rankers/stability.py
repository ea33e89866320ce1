"""Avoid nodes that were lost lately, and degraded ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from llmgw.placement.candidates import Candidate
from llmgw.placement.world import World

FLAPS = 2  # leases lost within an hour that make a node unreliable


class Stability:
    """0 for a node that flaps, 0.5 for a degraded one, 1 for the others; the worst of a group's nodes."""

    api = 1
    name: ClassVar[str] = "stability"
    weight: ClassVar[float] = 20.0

    def rank(self, world: World, candidates: Sequence[Candidate]) -> list[float]:
        return [
            min(0.0 if m.place.node.flaps >= FLAPS else 0.5 if m.place.state == "degraded" else 1.0 for m in c.members)
            for c in candidates
        ]
