"""A snapshot prepared for one decision after another: who holds what, which GPUs are free, what a shape needs.

Everything here is derived from the `Snapshot` (plus what this plan has reserved already) and is thrown away with the
plan. What is the same for many candidates is worked out once and kept: that is what makes 1,000 nodes affordable.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from llmgw.placement import llamacpp, memory
from llmgw.placement.demand import GGUF_ENGINES, SIM, Demand, Shape, natural
from llmgw.placement.fabrics import Fabrics, resolve
from llmgw.placement.geometry import Geometry, read
from llmgw.placement.inventory import (
    Check,
    Device,
    EngineInstall,
    IslandKind,
    NodeState,
    Weights,
    is_type,
    node_state,
)
from llmgw.placement.memory import Need
from llmgw.placement.snapshot import PORTS, Node, Reservation, Snapshot

FRACTIONS: dict[str, float] = {"sglang": 0.88}
"""Engines' own defaults of the part of a GPU that they take, where they differ from vLLM's."""

MAX_SEQS, MAX_BATCHED = 256, 8192  # vLLM's defaults on a server GPU

PASSING = frozenset({"starting", "nominated"})
"""States of reservations that do not last: whoever misses these GPUs is told for whom they are kept."""

Kind = tuple[str, int, tuple[int, int] | None, str]
"""What makes two GPUs the same: name, memory, compute capability, MIG profile."""


def kind_of(device: Device) -> Kind:
    return (device.name, device.memory, device.capability, device.mig)


class Isle:
    """An island with the GPUs of one kind in it."""

    __slots__ = ("devices", "free", "kind")

    def __init__(self, kind: IslandKind, devices: list[Device], free: list[Device]) -> None:
        self.kind = kind
        self.devices = devices
        self.free = free  # healthy and held by nobody


class Place:
    """One node, with what is held on it."""

    __slots__ = (
        "checks",
        "engines",
        "holders",
        "host_held",
        "inventory",
        "isles",
        "key",
        "name",
        "node",
        "picks",
        "ports_held",
        "replicas",
        "state",
        "troubled",
    )

    def __init__(self, node: Node) -> None:
        inventory = node.inventory
        self.node = node
        self.inventory = inventory
        self.name = inventory.node
        self.key = natural(inventory.node)
        self.state: NodeState = node_state(inventory)
        self.checks: list[Check] = [c for c in inventory.checks if not c.ok and c.level == "block"]
        self.holders: dict[str, list[Reservation]] = {}
        self.replicas: dict[str, Reservation] = {}
        self.host_held = 0
        self.ports_held: list[tuple[int, int]] = []
        self.isles: dict[Kind, list[Isle]] = {}
        self.troubled = False  # some GPU is blocked, or kept for somebody
        self.picks: dict[object, Any] = {}  # best GPUs by what is asked, kept by llmgw.placement.candidates
        self.engines: dict[str, EngineInstall] = {e.name: e for e in inventory.engines}

    def hold(self, reservation: Reservation) -> None:
        self.replicas[reservation.replica] = reservation
        self.host_held += reservation.host
        self.troubled = self.troubled or reservation.state in PASSING
        if reservation.ports[1]:
            self.ports_held.append(reservation.ports)
        for uuid in reservation.gpus:
            self.holders.setdefault(uuid, []).append(reservation)

    def settle(self) -> None:
        """Work out which GPUs are free. After every `hold`."""
        self.picks.clear()
        by: dict[Kind, dict[str, Isle]] = {}
        kinds: dict[str, IslandKind] = {i.id: i.kind for i in self.inventory.islands}
        holders = self.holders
        last: Kind | None = None
        isles: dict[str, Isle] = {}
        for device in sorted(self.inventory.devices, key=_index):
            kind = (device.name, device.memory, device.capability, device.mig)
            if kind != last:
                last, isles = kind, by.setdefault(kind, {})
            isle = isles.get(device.island or device.uuid)
            if isle is None:
                isle = isles[device.island or device.uuid] = Isle(kinds.get(device.island, "sys"), [], [])
            isle.devices.append(device)
            if device.health == "blocked":
                self.troubled = True
            elif device.uuid not in holders:
                isle.free.append(device)
        self.isles = {k: list(v.values()) for k, v in by.items()}

    def held(self, uuid: str) -> int:
        """Bytes of a GPU that others have reserved."""
        return sum(r.vram for r in self.holders.get(uuid, ()))

    def weights(self, ref: str) -> Weights | None:
        return next((w for w in self.inventory.weights if w.ref == ref), None)

    def port_block(self) -> int | None:
        """Base of the lowest free block of ports, or None."""
        low, high = self.inventory.engine_ports
        if not self.ports_held and not self.inventory.ports_taken:
            return low if low + PORTS - 1 <= high else None
        taken = set(self.inventory.ports_taken)
        for base in range(low, high - PORTS + 2, PORTS):
            overlap = any(base < b + n and b < base + PORTS for b, n in self.ports_held)
            if not overlap and taken.isdisjoint(range(base, base + PORTS)):
                return base
        return None


def _index(device: Device) -> int:
    return device.index


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """What a shape needs of each GPU (of the host, on the CPU). *need* None: not known, *why* says why."""

    need: Need | None
    source: Literal["estimated", "measured", "declared"] = "estimated"
    why: str = ""
    geometry: Geometry | None = None
    weights: int = 0
    largest_file: int | None = None


class World:
    """All places, in the natural order of their names."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.places = sorted(map(Place, snapshot.nodes), key=lambda p: p.key)
        self.by_name = {p.name: p for p in self.places}
        self.models: dict[str, dict[str, int]] = {}  # model → node → its replicas there
        for reservation in snapshot.reservations:
            if place := self.by_name.get(reservation.node):
                self._hold(place, reservation)
        for place in self.places:
            place.settle()
        self._fabrics: Fabrics | None = None
        self._best: dict[str, Weights] | None = None
        self._sizing: dict[tuple[str, Shape, str], Sizing] = {}
        self._types: dict[tuple[tuple[str, ...], Kind], int | None] = {}

    @property
    def fabrics(self) -> Fabrics:
        """Judged on first use: a cluster of single-node replicas never asks."""
        if self._fabrics is None:
            self._fabrics = resolve((p.inventory for p in self.places), self.snapshot.assume_single_fabric)
        return self._fabrics

    def hold(self, reservations: Iterable[Reservation]) -> None:
        """Reserve what this plan has decided, before the next decision."""
        for reservation in reservations:
            place = self.by_name[reservation.node]
            self._hold(place, reservation)
            place.settle()

    def _hold(self, place: Place, reservation: Reservation) -> None:
        place.hold(reservation)
        there = self.models.setdefault(reservation.model, {})
        there[place.name] = there.get(place.name, 0) + 1

    def domains(self, model: str, label: str) -> dict[str, int]:
        """Domain → replicas of *model* in it. *label*: "node", or a label of nodes (without it a node is its own)."""
        found: dict[str, int] = {}
        for name, count in self.models.get(model, {}).items():
            domain = domain_of(self.by_name[name], label)
            found[domain] = found.get(domain, 0) + count
        return found

    def type_rank(self, wanted: tuple[str, ...], kind: Kind) -> int | None:
        """Where *kind* stands in the order of preference; None = it is not wanted."""
        key = (wanted, kind)
        if key not in self._types:
            ranks = (i for i, w in enumerate(wanted) if is_type(w, f"{kind[0]} {kind[3]}", kind[1]))
            self._types[key] = next(ranks, None) if wanted else 0
        return self._types[key]

    def known_weights(self, ref: str) -> Weights | None:
        """What the cluster knows of *ref*: the first complete set, else the first that tells anything."""
        if self._best is None:
            best: dict[str, Weights] = {}
            for place in self.places:
                for weights in place.inventory.weights:
                    if weights.bytes or weights.bytes_total:
                        old = best.get(weights.ref)
                        if old is None or (old.problem and not weights.problem):
                            best[weights.ref] = weights
            self._best = best
        return self._best.get(ref)

    def sizing(self, demand: Demand, shape: Shape, gpu: str = "") -> Sizing:
        """What *shape* needs, on a GPU of that name (only measurements tell types apart)."""
        learned = [n for n in self.snapshot.learned if (n.model, n.shape, n.gpu) == (demand.name, shape.label, gpu)]
        key = (demand.name, shape, gpu if learned else "")
        if (kept := self._sizing.get(key)) is not None:
            return kept
        found = self._size(demand, shape)
        if learned and found.need is not None and found.source == "estimated":
            one = min(learned, key=lambda n: (n.weights, n.overhead or 0))
            need = msgspec.structs.replace(
                found.need, weights=one.weights, overhead=found.need.overhead if one.overhead is None else one.overhead
            )
            found = msgspec.structs.replace(found, need=need, source="measured")
        self._sizing[key] = found
        return found

    def _size(self, demand: Demand, shape: Shape) -> Sizing:
        engine, ref = demand.engine_of(shape), demand.weights_of(shape)
        if engine == SIM:
            return Sizing(need=Need(weights=0, overhead=0, kv=0), source="declared")
        known = self.known_weights(ref)
        geometry = read(known.config, known.format) if known else None
        size = (known.bytes_total or known.bytes) if known else 0
        facts = Sizing(need=None, geometry=geometry, weights=size, largest_file=known.largest_file if known else None)
        if shape.vram is not None:
            need = Need(weights=shape.vram, overhead=0, kv=0)
            return msgspec.structs.replace(facts, need=need, source="declared")
        if known is None:
            why = f"no node has {ref or 'the weights'}: their size is not known"
            return msgspec.structs.replace(facts, why=why)
        if geometry is None:
            why = f"the configuration of {ref} says too little; set vram in the shape"
            return msgspec.structs.replace(facts, why=why)
        length = shape.max_model_len or demand.max_model_len or geometry.context
        if not length:
            return msgspec.structs.replace(facts, why=f"no maximum length is known for {ref}; set max_model_len")
        if engine in GGUF_ENGINES:
            slots = shape.max_num_seqs or 1
            need = llamacpp.need(
                geometry, size, context=length * slots, devices=max(1, shape.ranks), slots=slots, flash=True
            )
        else:
            need = memory.need(
                geometry,
                size,
                memory.Load(
                    tp=shape.tp,
                    pp=shape.pp,
                    dp=shape.dp,
                    expert_parallel=shape.expert_parallel,
                    max_model_len=length,
                    max_num_seqs=shape.max_num_seqs or MAX_SEQS,
                    max_batched_tokens=shape.max_batched_tokens or MAX_BATCHED,
                    kv_dtype=shape.kv_dtype,
                    eager=shape.eager,
                ),
            )
        return msgspec.structs.replace(facts, need=need)


def domain_of(place: Place, label: str) -> str:
    return place.name if label == "node" else place.inventory.labels.get(label, place.name)


def fraction(engine: str, shape: Shape) -> float:
    return shape.memory_fraction or FRACTIONS.get(engine, memory.FRACTION)


def gpu_budget(engine: str, shape: Shape, total: int) -> int:
    """How much of a GPU with *total* bytes the engine may use."""
    if engine == SIM:
        return total
    if engine in GGUF_ENGINES and shape.memory_fraction is None:
        return llamacpp.budget(total)
    return memory.budget(total, fraction(engine, shape))


def gpu_taken(engine: str, shape: Shape, total: int, need: Need) -> int:
    """How much of it the engine then holds: vLLM and its like take their whole budget, llama.cpp what it needs."""
    if engine == SIM or engine in GGUF_ENGINES:
        return need.total
    return gpu_budget(engine, shape, total)
