"""Which sets of GPUs are considered at all: one a shape and node, one a shape and fabric for groups.

No combinatorial search: sort and take. The best set of a node is the smallest island that suffices (large ones stay
whole), within it one NUMA node if possible, then the lowest indices. A candidate exists also where nothing suffices:
it then stands for the node, so that every constraint can say what it has against it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from llmgw.placement.demand import Demand, Shape
from llmgw.placement.inventory import NVLINK, Device, IslandKind
from llmgw.placement.world import Isle, Kind, Place, World

FULL = 0.95  # of a shared GPU: beyond, the engines' own errors of measurement make them fail


class Pick(msgspec.Struct, eq=False, gc=False):
    """GPUs of one node. *complete* False: they only stand for the node, there are not enough free ones."""

    devices: list[Device]
    complete: bool
    island: IslandKind | None = None
    kind: Kind | None = None
    rank: int | None = None  # of the type in the shape's order of preference; None = not a wanted type
    alternatives: int = 0
    free: int = 0  # GPUs of a wanted type that are free and healthy
    total: int = 0  # GPUs of a wanted type
    largest: int = 0  # most free ones in one island of the wanted kind

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple([d.uuid for d in self.devices])

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple([d.index for d in self.devices])


NO_GPUS = Pick([], False)
ON_CPU = Pick([], True, rank=0)


class Candidate(msgspec.Struct, eq=False, gc=False):
    """One possibility: a shape on a node, or on several. *group*: a node's part, considered for a group."""

    demand: Demand
    shape: Shape
    index: int  # of the shape
    place: Place  # of rank 0
    pick: Pick
    group: bool = False
    parts: tuple[Candidate, ...] = ()  # of a group: its nodes' parts
    fabric: str = ""

    @property
    def members(self) -> tuple[Candidate, ...]:
        return self.parts or (self,)


def on_nodes(world: World, demand: Demand, shape: Shape, index: int) -> list[Candidate]:
    """One candidate a node; for a group's shape these are the parts of which groups are made."""
    group = shape.nodes > 1
    if shape.cpu:
        return [Candidate(demand, shape, index, place, ON_CPU, group) for place in world.places]
    share = shape.share
    key = ("pick", shape.gpus, share, min(shape.tp, share), shape.island, shape.shared and shape.memory_fraction)
    found = []
    for place in world.places:
        pick = place.picks.get(key)
        if pick is None:
            pick = place.picks[key] = _pick(world, place, shape, share) if place.inventory.devices else NO_GPUS
        found.append(Candidate(demand, shape, index, place, pick, group))
    return found


def _pick(world: World, place: Place, shape: Shape, share: int) -> Pick:
    wanted: list[tuple[int | None, Kind]] = []
    for kind in place.isles:
        rank = world.type_rank(shape.gpus, kind)
        if rank is not None:
            wanted.append((rank, kind))
    if not wanted:  # no type that the shape names: the others show what else would be in the way
        wanted = [(None, kind) for kind in place.isles]
    if len(wanted) == 1 and not shape.shared and len(isles := place.isles[wanted[0][1]]) == 1:
        return _in_one(isles[0], *wanted[0], shape, share)
    wanted.sort(key=lambda w: w[0] or 0)
    total = sum(len(i.devices) for _, kind in wanted for i in place.isles[kind])
    free_of = _shareable(place, shape) if shape.shared else _free
    free = largest = 0
    best: Pick | None = None
    for rank, kind in wanted:
        isles = place.isles[kind]
        available = [(isle, spots) for isle in isles if (spots := free_of(isle))]
        free += sum(len(spots) for _, spots in available)
        kin = [(i, s) for i, s in available if shape.island != "nvlink" or i.kind in NVLINK]
        largest = max(largest, max((len(s) for _, s in kin), default=0))
        if best is None and (found := _choose(kin, share, min(shape.tp, share), shape.island == "node")):
            devices, island, alternatives = found
            best = Pick(devices, True, island, kind, rank, alternatives)
    if best is None:
        rank, kind = wanted[0]
        isles = place.isles[kind]
        best = Pick(_all(isles)[:share], False, isles[0].kind, kind, rank)
    best.free, best.total, best.largest = free, total, largest
    return best


def _in_one(isle: Isle, rank: int | None, kind: Kind, shape: Shape, share: int) -> Pick:
    """The common case, all GPUs in one island: the same answer as the general way, sooner."""
    free = len(isle.free)
    reach = free if shape.island != "nvlink" or isle.kind in NVLINK else 0
    complete = reach >= share
    devices = _near(isle.free, share) if complete else isle.devices[:share]
    return Pick(devices, complete, isle.kind, kind, rank, 0, free, len(isle.devices), reach)


def _choose(
    isles: list[tuple[Isle, list[Device]]], share: int, degree: int, across: bool
) -> tuple[list[Device], IslandKind, int] | None:
    """*share* GPUs in groups of *degree*, each group in one island (or *across* islands), and how else it could be."""
    whole = [(len(spots), spots[0].index, isle, spots) for isle, spots in isles if len(spots) >= share]
    if whole:
        _, _, isle, spots = min(whole, key=lambda w: w[:2])
        return _near(spots, share), isle.kind, len(whole) - 1
    if across:
        spots = [d for _, s in sorted(isles, key=lambda i: (-len(i[1]), i[1][0].index)) for d in s]
        return (spots[:share], "sys", 0) if len(spots) >= share else None
    if degree == share or sum(len(s) // degree for _, s in isles) * degree < share:
        return None
    chosen: list[Device] = []
    for _, spots in sorted(isles, key=lambda i: (-(len(i[1]) // degree), i[1][0].index)):
        take = min(len(spots) // degree * degree, share - len(chosen))
        chosen += _near(spots, take) if take else []
        if len(chosen) == share:
            break
    return chosen, "sys", 0  # stages of a pipeline talk across islands


def _near(spots: list[Device], count: int) -> list[Device]:
    """*count* of one island: on one NUMA node if possible (the fullest that is left the least), lowest indices first."""
    if len(spots) == count or spots[0].numa == spots[-1].numa:
        return spots[:count]
    by: dict[int | None, list[Device]] = {}
    for device in spots:
        by.setdefault(device.numa, []).append(device)
    fits = [(len(s), s[0].index, s) for n, s in by.items() if n is not None and len(s) >= count]
    return min(fits, key=lambda f: f[:2])[2][:count] if fits else spots[:count]


def _all(isles: list[Isle]) -> list[Device]:
    return [d for isle in isles for d in isle.devices]


def _free(isle: Isle) -> list[Device]:
    return isle.free


def _shareable(place: Place, shape: Shape) -> Callable[[Isle], list[Device]]:
    """GPUs that are free, or held by shared replicas alone with room for one more."""
    fraction = shape.memory_fraction or 0.0

    def room(device: Device) -> bool:
        holders = place.holders.get(device.uuid, ())
        if any(not r.shared or r.state == "nominated" for r in holders):
            return False
        return place.held(device.uuid) + fraction * device.memory <= FULL * device.memory

    def spots(isle: Isle) -> list[Device]:
        return [d for d in isle.devices if d.health != "blocked" and room(d)]

    return spots
