"""Emptying a node, one replica at a time, without anybody noticing.

    cordon → for each replica: a copy elsewhere → copy ready → traffic moved → the old one ends → next → done

Replicas whose model has other ready copies go first, then the single ones. At most one replica of a model is on its way
in the whole cluster, and *parallel* of a drain. No room for a copy = blocked, with the reason of its placement; the node
stays cordoned and the drain goes on by itself when room appears. Never is something deleted first in hope, unless the
operator said so (`--no-surge`), and never below the model's floor.

The record is remembered with the cluster: a restart of the server, or a second order, continues it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from llmgw.control.catalog import ModelSpec
from llmgw.control.state import COMING, LEAVING, Cluster, Drain, NodeRecord, Replica
from llmgw.placement.demand import natural
from llmgw.placement.snapshot import Cordon


class Move(msgspec.Struct, frozen=True):
    """What a drain asks for: a copy of *replica* (surge), or its end."""

    replica: str
    surge: bool


def cordon(cluster: Cluster, node: str, by: str, at: float, why: str = "") -> Cluster:
    """No new replicas on *node*. Said twice, the first one stands."""
    record = cluster.nodes.get(node) or NodeRecord(name=node)
    if record.cordon is not None:
        return cluster
    return _with(cluster, msgspec.structs.replace(record, cordon=Cordon(by=by, at=at, why=why)))


def uncordon(cluster: Cluster, node: str) -> Cluster:
    """*node* is open again. A drain that is under way must be aborted instead."""
    record = cluster.nodes.get(node)
    if record is None or record.draining:
        return cluster
    drains = {n: d for n, d in cluster.drains.items() if n != node}
    return msgspec.structs.replace(_with(cluster, msgspec.structs.replace(record, cordon=None)), drains=drains)


def begin(
    cluster: Cluster, node: str, by: str, at: float, *, why: str = "", surge: bool = True, parallel: int = 1
) -> Cluster:
    """Cordon *node* and empty it. While a drain is under way, a second order joins it."""
    old = cluster.drains.get(node)
    if old is not None and not old.finished:
        return cluster
    record = cluster.nodes.get(node) or NodeRecord(name=node)
    was = record.cordon is not None
    cluster = cordon(cluster, node, by, at, why or "drain")
    order = Drain(node=node, by=by, started=at, surge=surge, parallel=parallel, was_cordoned=was)
    cluster = msgspec.structs.replace(cluster, drains=cluster.drains | {node: order})
    return _with(cluster, msgspec.structs.replace(cluster.nodes[node], draining=True))


def abort(cluster: Cluster, node: str) -> Cluster:
    """Stop emptying *node*. What has left stays away; copies on their way are kept only if nothing else would be lost."""
    order = cluster.drains.get(node)
    if order is None:
        return cluster
    record = cluster.nodes[node]
    cordon_ = record.cordon if order.was_cordoned else None
    replicas = {
        r.id: r
        for r in cluster.replicas.values()
        if not (r.why == f"drain {node}" and r.replaces and r.state == "pending")
    }
    drains = {n: d for n, d in cluster.drains.items() if n != node}
    cluster = msgspec.structs.replace(cluster, drains=drains, replicas=replicas)
    return _with(cluster, msgspec.structs.replace(record, draining=False, cordon=cordon_))


def advance(
    order: Drain, here: Collection[Replica], everywhere: Iterable[Replica], specs: Mapping[str, ModelSpec]
) -> tuple[Drain, list[Move]]:
    """The drain after a look at the replicas *here* (on its node), and what it asks for next."""
    everywhere = list(everywhere)
    remaining = {r.id: r for r in here}
    done = order.done + tuple(r for r in order.current if r not in remaining)
    current = [r for r in order.current if r in remaining]
    if not remaining:
        return msgspec.structs.replace(order, done=done, current=(), blocked="", finished=True), []
    copies = {r.replaces: r for r in everywhere if r.replaces}
    going = [r for r in remaining.values() if r.id in copies or r.state in LEAVING]
    current = sorted({*current, *(r.id for r in going)}, key=natural)
    busy = {r.model for r in everywhere if r.replaces or r.state == "draining"}
    moves: list[Move] = []
    why = [f"{copies[r].id} has no place: {copies[r].reason}" for r in current if r in copies and _stuck(copies[r])]
    for replica in sorted(remaining.values(), key=lambda r: _turn(r, everywhere)):
        if len(current) >= order.parallel:
            break
        if replica.id in current or replica.model in busy:
            continue
        ready = [r for r in everywhere if r.model == replica.model and r.state == "ready"]
        spec = specs.get(replica.model)
        if replica.state != "ready" or spec is None:
            moves.append(Move(replica.id, surge=False))  # it serves nobody: it is made anew elsewhere
        elif order.surge:
            moves.append(Move(replica.id, surge=True))
        elif len(ready) - 1 >= spec.min_available:
            moves.append(Move(replica.id, surge=False))
        else:
            why.append(
                f"{replica.id}: {len(ready)} ready, min_available {spec.min_available}: stopping it first would break that"
            )
            continue
        current.append(replica.id)
        busy.add(replica.model)
    return msgspec.structs.replace(order, done=done, current=tuple(current), blocked="; ".join(why)), moves


def progress(order: Drain, here: Collection[Replica]) -> str:
    """One line for `ctl drain`: ``2 of 5 done, moving qwen-3``."""
    total = len(order.done) + len(here)
    if order.finished:
        return f"done: {len(order.done)} replicas left {order.node}"
    doing = f", moving {', '.join(order.current)}" if order.current else ""
    return f"{len(order.done)} of {total} done{doing}" + (f"; blocked: {order.blocked}" if order.blocked else "")


def _stuck(copy: Replica) -> bool:
    return copy.state == "pending" and bool(copy.reason)


def _turn(replica: Replica, everywhere: Iterable[Replica]) -> tuple[bool, bool, tuple[tuple[int, int, str], ...]]:
    """What serves nobody first, then what has other ready copies, then the single ones."""
    others = any(r.model == replica.model and r.id != replica.id and r.state == "ready" for r in everywhere)
    return (replica.state == "ready" or replica.state in COMING, not others, natural(replica.id))


def _with(cluster: Cluster, record: NodeRecord) -> Cluster:
    return msgspec.structs.replace(cluster, nodes=cluster.nodes | {record.name: record})
