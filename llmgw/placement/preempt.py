"""Who would have to go, so that a more important replica finds room. Asked only where nothing is feasible.

Never: equal or higher priority · a copy that stands in for a drained one · what is being drained or merely nominated ·
a replica whose model would fall below its floor · a victim whose going does not help. Victims go by drain, not by kill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from llmgw.placement.demand import Pending, natural
from llmgw.placement.inventory import Inventory
from llmgw.placement.snapshot import Reservation, Snapshot
from llmgw.placement.verdict import Preemption, Record

CURABLE = frozenset({"count.free", "count.island", "count.reserved", "memory.vram", "memory.host", "ports"})
"""What freeing others' reservations can cure. `count.unhealthy` may stand beside `count.free` without being cured."""

NODES = 16  # looked at, nearest first: each costs as many decisions on that node as it has replicas

Decide = Callable[[Snapshot, Pending], Record]


def preemption(snapshot: Snapshot, pending: Pending, record: Record, decide: Decide) -> Preemption:
    """The cheapest set of victims on one node, or why there is none. *decide* places into a snapshot."""
    if all(shape.nodes > 1 for shape in pending.demand.shapes):
        return Preemption(possible=False, why="groups do not preempt: make room on their fabric by hand")
    nodes = _curable(record)
    if not nodes:
        return Preemption(possible=False, why="no node fails by occupied GPUs, memory or ports alone")
    best: tuple[tuple[int, int, tuple[tuple[int, int, str], ...]], Preemption] | None = None
    some = False
    for node in nodes[:NODES]:
        lower = _candidates(snapshot, node, pending.demand.priority)
        some = some or bool(lower)
        victims = _minimal(snapshot, node, lower, pending, decide)
        if victims is None:
            continue
        after = decide(_without(snapshot, node, victims, pending), pending)
        assert after.assignment is not None
        found = Preemption(
            possible=True, node=node, gpus=after.assignment.gpus[0], victims=tuple(v.replica for v in victims)
        )
        key = (max(v.priority for v in victims), len(victims), natural(node))
        if best is None or key < best[0]:
            best = (key, found)
    if best is not None:
        return best[1]
    if not some:
        return Preemption(possible=False, why="no replica of lower priority that may go is on those nodes")
    return Preemption(possible=False, why="no set of replicas of lower priority frees enough on one node")


def _curable(record: Record) -> list[str]:
    """Nodes where all that stands in the way is what others hold; nearest first."""
    found: dict[str, int] = {}
    for row in record.rows:
        if row.group or len(row.nodes) != 1 or any(v.ok is None for v in row.verdicts.values()):
            continue
        codes = {f.code for f in row.findings}
        if codes - CURABLE - {"count.unhealthy"} == set() and codes & CURABLE:
            found[row.nodes[0]] = min(len(codes), found.get(row.nodes[0], 99))
    return sorted(found, key=lambda n: (found[n], natural(n)))


def _candidates(snapshot: Snapshot, node: str, priority: int) -> list[Reservation]:
    """Who may go, in the order in which they would: lowest priority, youngest, fewest requests in flight."""
    spanning: dict[str, int] = {}
    ready: dict[str, int] = {}
    for r in snapshot.reservations:
        spanning[r.replica] = spanning.get(r.replica, 0) + 1
        ready[r.model] = ready.get(r.model, 0) + (r.state == "ready")
    going: dict[str, int] = {}
    found = []
    here = [r for r in snapshot.reservations if r.node == node and r.priority < priority]
    for r in sorted(here, key=lambda r: (r.priority, -r.since, r.inflight, natural(r.replica))):
        if r.surge or r.state in ("draining", "nominated") or spanning[r.replica] > 1:
            continue
        left = ready[r.model] - going.get(r.model, 0) - 1
        if r.state == "ready" and left < r.floor:
            continue
        going[r.model] = going.get(r.model, 0) + (r.state == "ready")
        found.append(r)
    return found


def _minimal(
    snapshot: Snapshot, node: str, lower: list[Reservation], pending: Pending, decide: Decide
) -> list[Reservation] | None:
    """The first of *lower* that suffice, less those that turn out not to be needed."""
    victims: list[Reservation] = []
    for one in lower:
        victims.append(one)
        if decide(_without(snapshot, node, victims, pending), pending).assignment is not None:
            break
    else:
        return None
    for one in reversed(victims[:-1]):
        fewer = [v for v in victims if v is not one]
        if decide(_without(snapshot, node, fewer, pending), pending).assignment is not None:
            victims = fewer
    return victims


def _without(snapshot: Snapshot, node: str, victims: Iterable[Reservation], pending: Pending) -> Snapshot:
    """*node* without *victims*. Of the others only what bears on it: where the model runs, what is known of its weights."""
    gone = {v.replica for v in victims}
    kept = tuple(r for r in snapshot.reservations if r.replica not in gone)
    near = {r.node for r in kept if r.model == pending.demand.name}
    for ref in {pending.demand.weights_of(shape) for shape in pending.demand.shapes}:
        have = sorted(
            (bool(w.problem), natural(n.inventory.node), n.inventory.node)
            for n in snapshot.nodes
            for w in n.inventory.weights
            if w.ref == ref
        )
        near |= {have[0][2]} if have else set()
    nodes = tuple(
        n if n.inventory.node == node else msgspec.structs.replace(n, inventory=_bare(n.inventory))
        for n in snapshot.nodes
        if n.inventory.node == node or n.inventory.node in near
    )
    return msgspec.structs.replace(snapshot, nodes=nodes, reservations=kept)


def _bare(inventory: Inventory) -> Inventory:
    return msgspec.structs.replace(inventory, devices=(), islands=(), engines=(), ports=())
