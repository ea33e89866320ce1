"""The node itself: alive, ready, open for replicas, wanted by labels, far enough from its like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from llmgw.placement.candidates import Candidate
from llmgw.placement.demand import Demand
from llmgw.placement.verdict import OK, Code, Finding, Verdict, failed, span
from llmgw.placement.world import Place, World, domain_of


class NodeConstraint:
    """The node is alive and ready, not cordoned, and the model's labels, taints, spread and cap allow it."""

    api = 1
    name: ClassVar[str] = "node"
    column: ClassVar[int] = 1
    groups: ClassVar[bool] = False
    codes: ClassVar[tuple[Code, ...]] = (
        Code("node.not-ready", "A check of the node itself fails, or the first round has not ended.",
             "`llmgw ctl nodes NODE` shows the checks with their cures."),
        Code("node.lost", "No heartbeat came within the lease.", "See whether the agent runs and reaches the server."),
        Code("node.cordoned", "Somebody closed the node for new replicas.", "`llmgw ctl uncordon NODE` when it is well."),
        Code("node.draining", "The node is being emptied.", "Wait, or `llmgw ctl drain NODE --abort`."),
        Code("node.taint", "The node has a taint that the model does not tolerate.",
             "Add it to the model's `tolerations`, or take it off the agent's configuration."),
        Code("node.label", "The node lacks a label that the model asks for, or has another value.",
             "Change the model's `labels` or the agent's."),
        Code("node.spread", "`spread: hard`, and a replica of the model is in this domain already.",
             "Add nodes in other domains, or `spread: soft`."),
        Code("node.cap", "The node has as many replicas of the model as `node_cap` allows.", "Raise `node_cap`."),
        Code("node.degraded", "The node is degraded, and the model says `degraded: false`.",
             "Cure what `llmgw ctl nodes NODE` shows, or allow degraded nodes."),
    )  # fmt: skip

    def evaluate(self, world: World, candidates: Sequence[Candidate]) -> list[Verdict]:
        seen: dict[str, Verdict] = {}
        used: dict[str, int] | None = None
        found = []
        for candidate in candidates:
            verdict = seen.get(candidate.place.name)
            if verdict is None:
                demand = candidate.demand
                if used is None:
                    used = world.domains(demand.name, demand.spread_by) if demand.spread == "hard" else {}
                findings = _findings(world, candidate.place, demand, used)
                verdict = seen[candidate.place.name] = failed(*findings) if findings else OK
            found.append(verdict)
        return found


def _findings(world: World, place: Place, demand: Demand, used: dict[str, int]) -> list[Finding]:
    node = place.node
    found = []
    if node.lost is not None:
        found.append(Finding(code="node.lost", text=f"no heartbeat for {span(node.lost)}"))
    if place.state == "not-ready":
        failing = [c for c in place.checks if c.scope == "node"]
        found.append(Finding(code="node.not-ready", text="; ".join(f"{c.id}: {c.message}" for c in failing)))
    elif place.state == "joining":
        found.append(Finding(code="node.not-ready", text="the first round of checks has not ended"))
    elif place.state == "degraded" and not demand.degraded:
        found.append(Finding(code="node.degraded", text="the model asks for nodes without a warning"))
    if node.cordon is not None:
        why = f': "{node.cordon.why}"' if node.cordon.why else ""
        ago = span(max(0.0, world.snapshot.at - node.cordon.at))
        found.append(Finding(code="node.cordoned", text=f"by {node.cordon.by}, {ago} ago{why}"))
    if node.draining:
        found.append(Finding(code="node.draining"))
    if strange := [t for t in place.inventory.taints if t not in demand.tolerations]:
        found.append(Finding(code="node.taint", text=", ".join(strange)))
    labels = place.inventory.labels
    if other := {k: v for k, v in demand.labels.items() if labels.get(k) != v}:
        text = ", ".join(f"want {k}={v}, is {labels.get(k, 'absent')}" for k, v in sorted(other.items()))
        found.append(Finding(code="node.label", text=text))
    if used and (there := used.get(domain := domain_of(place, demand.spread_by))):
        found.append(Finding(code="node.spread", text=f"{demand.spread_by} {domain} has {there} of {demand.name}"))
    if demand.node_cap is not None:
        count = world.models.get(demand.name, {}).get(place.name, 0)
        if count >= demand.node_cap:
            found.append(Finding(code="node.cap", text=f"has {count} of {demand.name}, node_cap {demand.node_cap}"))
    return found
