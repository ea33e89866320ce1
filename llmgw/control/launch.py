"""From an assignment to orders: what each of its nodes is told to run."""

from __future__ import annotations

from collections.abc import Sequence

from llmgw.control.catalog import ModelSpec, switches
from llmgw.control.observed import Desired, Group, Ports
from llmgw.placement.demand import SIM, Shape
from llmgw.placement.fabrics import evidence
from llmgw.placement.inventory import Inventory
from llmgw.placement.memory import start_deadline
from llmgw.placement.snapshot import PORTS
from llmgw.placement.verdict import Assignment
from llmgw.placement.world import fraction

RENDEZVOUS = 1  # offset in the block of ports of rank 0 where a group meets; 0 is the API's


def launch(
    spec: ModelSpec, shape: Shape, assignment: Assignment, epoch: int, generation: int, inventories: Sequence[Inventory]
) -> tuple[Desired, ...]:
    """One order a node, rank 0 first. *inventories*: of the assignment's nodes, as far as they are known."""
    known = {i.node: i for i in inventories}
    engine = spec.engine_of(shape)
    ref = spec.weights_of(shape)
    size = max((w.bytes_total or w.bytes for i in inventories for w in i.weights if w.ref == ref), default=0)
    many = len(assignment.nodes) > 1
    head = known.get(assignment.nodes[0])
    return tuple(
        Desired(
            replica=assignment.replica,
            model=spec.name,
            epoch=epoch,
            generation=generation,
            engine=engine,
            weights=ref,
            dtype=spec.dtype_of(shape),
            quantisation=spec.quantisation_of(shape),
            max_model_len=shape.max_model_len or spec.max_model_len,
            gpus=gpus,
            tp=shape.tp,
            pp=shape.pp,
            dp=shape.dp,
            memory_fraction=None if shape.cpu or engine == SIM else fraction(engine, shape),
            max_num_seqs=shape.max_num_seqs,
            max_batched_tokens=shape.max_batched_tokens,
            ports=Ports(base, PORTS),
            phases=spec.phases,
            group=Group(
                rank=rank,
                size=len(assignment.nodes),
                leader=(head.address if head else "") or assignment.nodes[0],
                port=assignment.ports[0] + RENDEZVOUS,
                fabric=assignment.fabric,
                hcas=_hcas(known.get(node), assignment.fabric),
            )
            if many
            else None,
            env=spec.env_of(shape),
            flags=switches(engine, shape) + spec.flags_of(shape),
            start_deadline=start_deadline(size),
        )
        for rank, (node, gpus, base) in enumerate(zip(assignment.nodes, assignment.gpus, assignment.ports, strict=True))
    )


def _hcas(inventory: Inventory | None, fabric: str) -> tuple[str, ...]:
    """The node's ports on *fabric*: only these are shown to the engine."""
    ports = inventory.ports if inventory else ()
    return tuple(f"{p.device}:{p.port}" for p in ports if p.state == "active" and fabric in (p.fabric, evidence(p)))
