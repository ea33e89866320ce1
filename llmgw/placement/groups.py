"""Groups: replicas that span nodes of one fabric. Sort and take, so that the same snapshot gives the same group.

Parts (one a node) have been through all constraints already. A group is made for each fabric and GPU type; where too
few parts pass, the least failing ones fill it up, so that the group's row tells what is in the way.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmgw.placement.candidates import Candidate
from llmgw.placement.constraints.fabric import NVL, attachments, suits
from llmgw.placement.world import Kind, World

RACK = "rack"  # label of nodes behind one leaf switch


def groups(world: World, parts: Sequence[Candidate], failures: Sequence[int]) -> list[Candidate]:
    """One candidate a fabric and GPU type; *failures[i]* counts the constraints that *parts[i]* fails. NVLink first."""
    if not parts:
        return []
    shape = parts[0].shape
    on: dict[str, dict[Kind | None, list[tuple[int, Candidate]]]] = {}
    for part, failed in zip(parts, failures, strict=True):
        for fabric in attachments(world, part):
            on.setdefault(fabric, {}).setdefault(part.pick.kind, []).append((failed, part))
    found = []
    enough = False
    for fabric in sorted(on, key=lambda f: (not f.startswith(NVL), f)):
        for kind in sorted(on[fabric], key=repr):
            members = on[fabric][kind]
            passing = [p for failed, p in members if not failed and suits(world, p, fabric)]
            enough = enough or len(passing) >= shape.nodes
            chosen = _take(passing, shape.nodes)
            rest = sorted((m for m in members if m[1] not in chosen), key=lambda m: (m[0], m[1].place.key))
            chosen += [p for _, p in rest[: shape.nodes - len(chosen)]]
            found.append(_group(chosen, fabric))
    if not enough:
        apart = [p for p, failed in zip(parts, failures, strict=True) if not failed]
        if len(apart) >= shape.nodes and len(on) > 1:
            found.append(_group(_apart(world, apart, shape.nodes), ""))
    return found


def _apart(world: World, parts: list[Candidate], count: int) -> list[Candidate]:
    """*count* parts that could serve if they were on one fabric: as many fabrics as it takes, in order."""
    parts = sorted(parts, key=lambda p: p.place.key)
    first: dict[str, Candidate] = {}
    for part in parts:
        first.setdefault(min(attachments(world, part)), part)
    chosen = list(first.values())[:count]
    return chosen + [p for p in parts if p not in chosen][: count - len(chosen)]


def _take(passing: list[Candidate], count: int) -> list[Candidate]:
    """*count* of them: of one rack if a rack suffices (the one that is left with least), else from the fullest racks."""
    racks: dict[str, list[Candidate]] = {}
    for part in sorted(passing, key=_order):
        racks.setdefault(part.place.inventory.labels.get(RACK, ""), []).append(part)
    whole = sorted((len(parts), rack) for rack, parts in racks.items() if rack and len(parts) >= count)
    if whole:
        return racks[whole[0][1]][:count]
    by_size = sorted(racks, key=lambda r: (r == "", -len(racks[r]), r))
    return [p for rack in by_size for p in racks[rack]][:count]


def _order(part: Candidate) -> tuple[bool, int, tuple[tuple[int, int, str], ...]]:
    weights = part.place.weights(part.demand.weights_of(part.shape))
    left = part.pick.free - len(part.pick.devices)
    return (weights is None or not weights.path or bool(weights.problem), left, part.place.key)


def _group(members: list[Candidate], fabric: str) -> Candidate:
    members = sorted(members, key=lambda m: m.place.key)
    first = members[0]
    return Candidate(
        first.demand, first.shape, first.index, first.place, first.pick, parts=tuple(members), fabric=fabric
    )
