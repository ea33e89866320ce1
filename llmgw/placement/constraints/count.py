"""How many GPUs are free, healthy and close enough together; whether the model can be divided so."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

from llmgw.placement.candidates import Candidate
from llmgw.placement.demand import GGUF_ENGINES, SIM
from llmgw.placement.rules import divisible
from llmgw.placement.verdict import OK, Code, Finding, Verdict, failed
from llmgw.placement.world import PASSING, World

ON_CPU = Verdict(True, (), "runs without a GPU")


class CountConstraint:
    """Enough free, healthy GPUs in one island, and degrees that divide the model."""

    api = 1
    name: ClassVar[str] = "count"
    column: ClassVar[int] = 3
    groups: ClassVar[bool] = False
    codes: ClassVar[tuple[Code, ...]] = (
        Code("count.free", "Too few GPUs of the wanted types are free.", "Stop or shrink something, or add GPUs."),
        Code("count.unhealthy", "A GPU that would be needed is blocked.", "Do what its reason says (reset, reboot, replace)."),
        Code("count.island", "Enough GPUs are free, but not in one island of the wanted kind.",
             "A smaller `tp`, `island: node` (slower), or move what stands in the way."),
        Code("count.divisible", "The model's heads, widths or layers cannot be divided by these degrees.",
             "Use other degrees: 1, 2, 4, 8 fit most models."),
        Code("count.reserved", "GPUs are kept for a replica that is starting or about to be placed.",
             "Wait: a nomination expires after 10 minutes."),
    )  # fmt: skip

    def evaluate(self, world: World, candidates: Sequence[Candidate]) -> list[Verdict]:
        indivisible: dict[int, list[Finding]] = {}
        found = []
        for candidate in candidates:
            shape = candidate.shape
            if shape.cpu:
                found.append(ON_CPU)
                continue
            why = indivisible.get(candidate.index)
            if why is None:
                why = indivisible[candidate.index] = _indivisible(world, candidate)
            if candidate.pick.complete and not why:
                found.append(OK)
            elif candidate.pick.complete:
                found.append(failed(*why))
            else:
                found.append(failed(*why, *_missing(world, candidate)))
        return found


def _indivisible(world: World, candidate: Candidate) -> list[Finding]:
    shape, demand = candidate.shape, candidate.demand
    if demand.engine_of(shape) in GGUF_ENGINES or demand.engine_of(shape) == SIM:
        return []
    geometry = world.sizing(demand, shape).geometry
    if geometry is None:
        return []
    reasons = divisible(geometry, shape.tp, shape.pp, shape.dp, shape.expert_parallel)
    return [Finding(code="count.divisible", text=reason) for reason in reasons]


def _missing(world: World, candidate: Candidate) -> list[Finding]:
    place, pick, shape = candidate.place, candidate.pick, candidate.shape
    share = shape.share
    if pick.free >= share:
        found = [_island(min(shape.tp, share), pick.largest)]
    else:
        found = [_free(share, pick.free, pick.total)]
    if not place.troubled:
        return found
    kept = []
    for kind, isles in place.isles.items():
        if pick.rank is not None and world.type_rank(shape.gpus, kind) is None:
            continue
        for isle in isles:
            for d in isle.devices:
                if d.health == "blocked":
                    found.append(Finding(code="count.unhealthy", text=f"GPU {d.index} ({d.uuid}): {d.reason}"))
                for r in place.holders.get(d.uuid, ()):
                    if r.state in PASSING:
                        kept.append(f"GPU {d.index} for {r.replica} ({r.state})")
    if kept:
        found.append(Finding(code="count.reserved", text=", ".join(sorted(kept))))
    return found


@lru_cache(maxsize=1024)  # the same few numbers on every node
def _free(need: int, free: int, total: int) -> Finding:
    return Finding(code="count.free", text=f"{free} of {total} free", need=need, have=free, unit="GPUs")


@lru_cache(maxsize=1024)
def _island(need: int, largest: int) -> Finding:
    text = f"largest free island {largest} of {need}"
    return Finding(code="count.island", text=text, need=need, have=largest, unit="GPUs")
