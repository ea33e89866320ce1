"""Prefer GPUs that reach each other fast, and groups with all the rails of their fabric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from llmgw.placement.candidates import Candidate
from llmgw.placement.constraints.fabric import NVL, attachments
from llmgw.placement.inventory import IslandKind
from llmgw.placement.world import World

REACH: dict[IslandKind | None, float] = {
    "nvswitch": 1.0, "nvlink-mesh": 0.9, "nvlink-pair": 0.8, "pix": 0.6, "pxb": 0.5, "phb": 0.4, "sys": 0.2,
}  # fmt: skip


class Topology:
    """The kind of the island (1 for a single GPU); for a group the least part of the fabric's rails that a node has."""

    api = 1
    name: ClassVar[str] = "topology"
    weight: ClassVar[float] = 5.0

    def rank(self, world: World, candidates: Sequence[Candidate]) -> list[float]:
        found = []
        most: dict[str, int] = {}
        for candidate in candidates:
            if len(candidate.members) == 1:
                pick = candidate.pick
                found.append(REACH.get(pick.island, 0.2) if len(pick.devices) > 1 else 1.0)
                continue
            fabric = candidate.fabric
            if fabric.startswith(NVL):
                found.append(1.0)
                continue
            if fabric not in most:
                everywhere = (a[fabric].rails for a in world.fabrics.attached.values() if fabric in a)
                most[fabric] = max(everywhere, default=1) or 1
            rails = min(attachments(world, m)[fabric].rails for m in candidate.members)
            found.append(rails / most[fabric])
        return found
