"""Whether the nodes of a group can reach each other by RDMA or NVLink: all on one resolved fabric, enough rails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from llmgw.placement.candidates import Candidate
from llmgw.placement.fabrics import Attachment
from llmgw.placement.inventory import GIB
from llmgw.placement.verdict import OK, Code, Finding, Verdict, failed
from llmgw.placement.world import World

NOT_APPLICABLE = Verdict(True, (), "n/a")
MEMLOCK = GIB  # less, and registering memory with the adapter fails
NVL = "nvl:"  # prefix of a fabric that is an NVLink domain


class FabricConstraint:
    """A group's nodes share one resolved fabric with enough rails. A replica on one node always passes."""

    api = 1
    name: ClassVar[str] = "fabric"
    column: ClassVar[int] = 6
    groups: ClassVar[bool] = True
    codes: ClassVar[tuple[Code, ...]] = (
        Code("fabric.none", "The node has no port on a fabric (or not on the one that the shape names).",
             "Place the group elsewhere, or cable the node."),
        Code("fabric.split", "The nodes that could take the group are on different fabrics.",
             "Free nodes on one fabric: a group never spans two."),
        Code("fabric.unresolved", "Nothing tells which fabric the ports are on.",
             "Name the fabric in the agent's configuration, give it a subnet prefix of its own, or set `assume_single_fabric`."),
        Code("fabric.rails", "Fewer healthy ports than the shape asks for, or unequal numbers with `strict_rails`.",
             "Repair the ports that the text names, or lower `min_rails`."),
        Code("fabric.down", "Ports are there, but none is up.", "See the cable, the switch and the subnet manager."),
        Code("fabric.memlock", "Processes may not lock enough memory for RDMA.", "LimitMEMLOCK=infinity in the agent's unit."),
        Code("fabric.probe-failed", "Two of the nodes could not reach each other over the fabric when it was tried.",
             "See the event of the probe; it is tried again when a port changes."),
        Code("fabric.size", "Too few nodes of the fabric can take their part.", "The rows of its nodes say why each cannot."),
    )  # fmt: skip

    def evaluate(self, world: World, candidates: Sequence[Candidate]) -> list[Verdict]:
        return [
            NOT_APPLICABLE
            if candidate.shape.nodes == 1
            else (_node(world, candidate) if candidate.group else _group(world, candidate))
            for candidate in candidates
        ]


def attachments(world: World, candidate: Candidate) -> dict[str, Attachment]:
    """The fabrics that a node's part could use: its ports', and the NVLink domain of its GPUs."""
    place, wanted = candidate.place, candidate.shape.fabric
    found = dict(world.fabrics.attached.get(place.name, {}))
    domains = {d.nvlink_domain for d in candidate.pick.devices}
    if len(domains) == 1 and (domain := next(iter(domains))):
        found[NVL + domain] = Attachment(fabric=NVL + domain, rails=len(candidate.pick.devices), ports=())
    return {f: a for f, a in found.items() if wanted in ("", f)}


def suits(world: World, candidate: Candidate, fabric: str) -> bool:
    """Could this node's part be joined to a group on *fabric*?"""
    there = attachments(world, candidate).get(fabric)
    if there is None:
        return False
    return fabric.startswith(NVL) or (there.rails >= candidate.shape.min_rails and not _memlock(candidate))


def _node(world: World, candidate: Candidate) -> Verdict:
    shape, name = candidate.shape, candidate.place.name
    there = attachments(world, candidate)
    if any(suits(world, candidate, fabric) for fabric in there):
        return OK
    found = []
    if not there:
        loose, down = world.fabrics.unresolved.get(name, ()), world.fabrics.down.get(name, ())
        if loose and not shape.fabric:
            found.append(Finding(code="fabric.unresolved", text="; ".join(loose)))
        elif down and not shape.fabric:
            found.append(Finding(code="fabric.down", text="; ".join(down)))
        else:
            found.append(Finding(code="fabric.none", text=f"no port on {shape.fabric}" if shape.fabric else ""))
    for fabric, attachment in sorted(there.items()):
        if attachment.rails == 0:
            found.append(Finding(code="fabric.down", text=f"{fabric}: {'; '.join(attachment.troubles)}"))
        elif attachment.rails < shape.min_rails:
            text = "; ".join((fabric, *attachment.troubles))
            found.append(
                Finding(code="fabric.rails", need=shape.min_rails, have=attachment.rails, unit="rails", text=text)
            )
    if there and (memlock := _memlock(candidate)):
        found.append(memlock)
    return failed(*found)


def _memlock(candidate: Candidate) -> Finding | None:
    limit = candidate.place.inventory.host.memlock
    if limit is None or limit >= MEMLOCK:
        return None
    return Finding(code="fabric.memlock", need=MEMLOCK / GIB, have=limit / GIB, unit="GiB")


def _group(world: World, group: Candidate) -> Verdict:
    shape, names = group.shape, [m.place.name for m in group.members]
    found = []
    fit = sum(suits(world, m, group.fabric) for m in group.members)
    if not group.fabric:
        where = ", ".join(
            f"{m.place.name} on {' and '.join(sorted(attachments(world, m))) or 'none'}" for m in group.members
        )
        found.append(Finding(code="fabric.split", text=where))
    elif len(names) < shape.nodes or fit < shape.nodes:
        found.append(Finding(code="fabric.size", need=shape.nodes, have=fit, unit="nodes", text=group.fabric))
    elif shape.strict_rails and not group.fabric.startswith(NVL):
        rails = {m.place.name: attachments(world, m)[group.fabric].rails for m in group.members}
        if len(set(rails.values())) > 1:
            text = ", ".join(f"{n} {r}" for n, r in rails.items())
            least, most = min(rails.values()), max(rails.values())
            found.append(Finding(code="fabric.rails", need=most, have=least, unit="rails", text=text))
    inside = set(names)
    broken = sorted({tuple(sorted(pair)) for pair in world.snapshot.probes_failed if inside.issuperset(pair)})
    if broken and not group.fabric.startswith(NVL):
        text = ", ".join(f"{a} - {b}" for a, b in broken)
        found.append(Finding(code="fabric.probe-failed", text=text))
    return failed(*found) if found else OK
