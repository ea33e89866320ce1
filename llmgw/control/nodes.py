"""Nodes that report: who is let in, who is lost, and when so many are lost that we doubt ourselves."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from llmgw.control.observed import Observed, Sync, digest
from llmgw.control.state import Cluster, Seen, Settings

HOUR = 3600.0


def accept(seen: Mapping[str, Seen], sync: Sync, address: str, now: float, settings: Settings) -> Seen | str:
    """What is known of the node after *sync*, or why it is refused.

    A node may change its address, restart its agent, reboot. But while one machine speaks under a name, another is
    refused: two machines under one name would stop each other's engines.
    """
    old = seen.get(sync.node)
    if old is None:
        return Seen(at=now, boot=sync.boot, agent=sync.agent, address=address, observed=sync.observed, version=1)
    alive = now - old.at <= settings.lost_after
    if alive and old.boot != sync.boot:
        if sync.observed is None:
            return f"node {sync.node!r} reports another boot without saying what it observes: send the whole report"
        if old.observed is not None and _machine(old.observed) != _machine(sync.observed):
            return f"node id {sync.node!r} already active from {old.address}: give this machine another name, or stop the other agent"
    observed = old.observed if sync.observed is None else sync.observed
    if sync.observed is None and old.agent != sync.agent:
        observed = old.observed if _same(old, sync) else None
    changed = observed is not old.observed or address != old.address
    lapses = tuple(t for t in old.lapses if now - t <= HOUR)
    if not alive:
        lapses = (*lapses, now)
    return Seen(
        at=now,
        boot=sync.boot,
        agent=sync.agent,
        address=address,
        observed=observed,
        version=old.version + changed,
        lapses=lapses,
    )


def _same(old: Seen, sync: Sync) -> bool:
    """A new agent that sees exactly what the old one saw need not send it again."""
    return old.observed is not None and bool(sync.digest) and digest(old.observed) == sync.digest


def _machine(observed: Observed) -> tuple[str, frozenset[str]]:
    inventory = observed.inventory
    return (inventory.host.machine_id, frozenset(d.uuid for d in inventory.devices))


def lost_for(
    cluster: Cluster, seen: Mapping[str, Seen], now: float, started: float, settings: Settings
) -> dict[str, float]:
    """Nodes whose lease lapsed → seconds since. A node not heard of since the start counts from the start."""
    found = {}
    for name in cluster.nodes:
        silent = now - (seen[name].at if name in seen else started)
        if silent > settings.lost_after:
            found[name] = silent - settings.lost_after
    return found


def brake(cluster: Cluster, lost: Mapping[str, float], settings: Settings) -> Cluster:
    """Freeze rescheduling when too many nodes lapse at once; release it when almost all are back."""
    known = len(cluster.nodes)
    if cluster.frozen:
        if len(lost) <= settings.release_share * known:
            return msgspec.structs.replace(cluster, frozen="")
        return cluster
    lately = [name for name, age in lost.items() if age <= settings.reschedule_after]
    if len(lately) > max(settings.brake_nodes, settings.brake_share * known):
        why = f"{len(lately)} of {known} nodes lapsed within {settings.reschedule_after:.0f} s: suspecting this server or its network"
        return msgspec.structs.replace(cluster, frozen=why)
    return cluster
