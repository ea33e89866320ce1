"""Nodes, replicas and models of the catalogue, as the admin API shows them. docs/ctl.md documents the fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from llmgw.catalogue import CatalogueModel
from llmgw.control.observed import Run
from llmgw.control.state import NodeRecord, Replica, Seen
from llmgw.placement.demand import natural
from llmgw.placement.fabrics import Fabrics
from llmgw.placement.inventory import GIB, Inventory, node_state


def node(
    record: NodeRecord,
    seen: Seen | None,
    lost: float | None,
    now: float,
    fabrics: Fabrics,
    users: Mapping[str, str],
    replicas: Iterable[Replica],
) -> dict[str, Any]:
    """*lost*: seconds since its lease lapsed. *users*: GPU → replica that it is assigned to."""
    inventory = seen.observed.inventory if seen and seen.observed else None
    state = "lost" if lost is not None else node_state(inventory) if inventory else "joining"
    found: dict[str, Any] = {
        "kind": "node",
        "name": record.name,
        "state": state,
        "cordon": None if record.cordon is None else msgspec.to_builtins(record.cordon),
        "draining": record.draining,
        "heard_seconds": None if seen is None else round(now - seen.at, 1),
        "address": (inventory.address if inventory else "") or (seen.address if seen else ""),
        "replicas": sorted((r.id for r in replicas), key=natural),
        "gpus": [],
        "fabrics": [],
        "engines": [],
        "problems": [],
        "labels": {},
        "taints": [],
        "driver": "",
        "agent_version": "",
    }
    if inventory is not None:
        found |= _inventory(inventory, fabrics, users)
    return found


def _inventory(inventory: Inventory, fabrics: Fabrics, users: Mapping[str, str]) -> dict[str, Any]:
    problems = [
        {"id": c.id, "scope": c.scope, "level": c.level, "message": c.message, "fix": c.fix}
        for c in inventory.checks
        if not c.ok
    ]
    if inventory.gpu_problem:
        problems.insert(0, {"id": "", "scope": "node", "level": "block", "message": inventory.gpu_problem, "fix": ""})
    attached = fabrics.attached.get(inventory.node, {})
    return {
        "gpus": [
            {
                "index": d.index,
                "uuid": d.uuid,
                "name": d.name,
                "memory_gib": round(d.memory / GIB, 1),
                "free_gib": None if d.memory_free is None else round(d.memory_free / GIB, 1),
                "island": d.island,
                "health": d.health,
                "reason": d.reason,
                "replica": users.get(d.uuid),
            }
            for d in inventory.devices
        ],
        "fabrics": [{"fabric": name, "rails": a.rails, "troubles": list(a.troubles)} for name, a in attached.items()]
        + [{"fabric": None, "rails": 0, "troubles": [text]} for text in fabrics.unresolved.get(inventory.node, ())],
        "engines": [{"name": e.name, "version": e.version} for e in inventory.engines],
        "problems": problems,
        "labels": dict(inventory.labels),
        "taints": list(inventory.taints),
        "driver": inventory.driver,
        "agent_version": inventory.agent_version,
    }


def replica(found: Replica, seen: Mapping[str, Seen], inflight: int) -> dict[str, Any]:
    """With its shards: one entry of `ranks` for each node that it runs on."""
    assignment = found.assignment
    ranks = []
    url = None
    for rank, name in enumerate(assignment.nodes if assignment else ()):
        assert assignment is not None
        known = seen.get(name)
        run = _run(known, found)
        devices = known.observed.inventory.devices if known and known.observed else ()
        indices = {d.uuid: d.index for d in devices}
        gpus = assignment.gpus[rank]
        order = found.desired[rank] if rank < len(found.desired) else None
        ranks.append(
            {
                "rank": rank,
                "node": name,
                "gpus": [{"uuid": uuid, "index": indices.get(uuid)} for uuid in gpus],
                "ports": None if order is None else {"base": order.ports.base, "count": order.ports.count},
                "state": run.state if run else None,
                "pid": run.pid if run else None,
            }
        )
        if rank == 0 and run is not None and run.endpoint is not None:
            url = run.endpoint.url
    return {
        "kind": "replica",
        "id": found.id,
        "model": found.model,
        "state": found.state,
        "since": found.since,
        "reason": found.reason,
        "engine": found.desired[0].engine if found.desired else "",
        "shape": assignment.shape if assignment else "",
        "fabric": (assignment.fabric or None) if assignment else None,
        "epoch": found.epoch,
        "generation": found.generation,
        "url": url,
        "inflight": inflight,
        "ranks": ranks,
        "replaces": found.replaces or None,
        "why": found.why,
        "faults": [msgspec.to_builtins(f) for f in found.faults],
        "retry_at": found.retry_at,
    }


def _run(known: Seen | None, found: Replica) -> Run | None:
    runs = known.observed.runs if known and known.observed else ()
    return next((r for r in runs if (r.replica, r.epoch) == (found.id, found.epoch)), None)


def wanted(spec: CatalogueModel, replicas: Sequence[Replica]) -> dict[str, Any]:
    """What the catalogue says of a model, and how far that has come; added to what routing says of it."""
    states: dict[str, int] = {}
    for one in replicas:
        states[one.state] = states.get(one.state, 0) + 1
    reasons = [r.reason for r in replicas if r.state in ("pending", "failed") and r.reason]
    return {
        "engine": spec.engine,
        "shapes": [s.label for s in spec.shapes],
        "priority": spec.priority,
        "replicas": {"wanted": spec.replicas, "ready": states.get("ready", 0), "states": states},
        "reason": reasons[0] if reasons else "",
    }
