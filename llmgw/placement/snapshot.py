"""All that a placement decision sees: nodes, what is reserved on them, what was learned. Plain data."""

from __future__ import annotations

from typing import Literal

import msgspec

from llmgw.placement.inventory import Inventory
from llmgw.placement.verdict import Assignment


class Cordon(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """No new replicas here, since somebody said so."""

    by: str
    at: float  # wall clock
    why: str = ""


class Node(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A node as the server sees it: what it says of itself, and what is known about it besides."""

    inventory: Inventory
    version: int = 0  # rises with every change; a commit compares it
    lost: float | None = None  # seconds since its lease lapsed; None = alive
    cordon: Cordon | None = None
    draining: bool = False
    flaps: int = 0  # leases lost within the last hour


class Reservation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one replica holds on one node. It is made at commit and ends only when the agent has seen the stop."""

    replica: str
    model: str
    node: str
    gpus: tuple[str, ...] = ()
    vram: int = 0  # bytes of each GPU
    host: int = 0  # bytes of the node's memory
    shared: bool = False
    ports: tuple[int, int] = (0, 0)  # base, count
    priority: int = 0
    since: float = 0.0  # when it was committed
    state: Literal["starting", "ready", "draining", "nominated"] = "ready"
    surge: bool = False  # a copy that stands in for one that is drained
    inflight: int = 0
    floor: int = 0  # ready replicas that its model must keep


class Exclusion(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A model failed on a node (or on all: *node* "") and waits."""

    model: str
    node: str
    until: float | None  # wall clock; None = until an input changes
    why: str


class Learned(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What an engine reported of itself; replaces the estimate for the same key. Bytes a rank."""

    model: str
    shape: str
    gpu: str  # name of the GPU
    weights: int
    overhead: int | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Decisions see nothing else. Order of the tuples does not matter."""

    revision: int = 0
    at: float = 0.0  # wall clock
    nodes: tuple[Node, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    learned: tuple[Learned, ...] = ()
    speeds: dict[str, dict[str, float]] = {}  # model → name of the GPU → tokens a second
    prices: dict[str, float] = {}  # type of GPU → price of an hour; one that is not listed costs by its memory
    mix: tuple[tuple[int, float], ...] = ()  # (GPUs a node, weight) of the catalogue's shapes: what holes are good for
    probes_failed: tuple[tuple[str, str], ...] = ()  # pairs of nodes that could not reach each other by RDMA
    assume_single_fabric: bool = False  # the operator: all ports that nothing tells apart are on one fabric


PORTS = 32  # a replica's block: API, rendezvous, KV transfer, data-parallel ranks


def reserve(assignment: Assignment, *, priority: int = 0, floor: int = 0, since: float = 0.0) -> list[Reservation]:
    """What committing *assignment* holds, one a node."""
    return [
        Reservation(
            replica=assignment.replica,
            model=assignment.model,
            node=node,
            gpus=gpus,
            vram=assignment.vram,
            host=assignment.host,
            shared=assignment.shared,
            ports=(base, PORTS),
            priority=priority,
            since=since,
            state="starting",
            floor=floor,
        )
        for node, gpus, base in zip(assignment.nodes, assignment.gpus, assignment.ports, strict=True)
    ]
