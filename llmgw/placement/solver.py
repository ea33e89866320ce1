"""Snapshot → decisions. Pure and deterministic: the same snapshot, in whatever order, gives the same answer.

    candidates (one a shape and node, one a shape and fabric) → every constraint for every candidate →
    rankers over the feasible ones → the best, or the record of why there is none

What is chosen is reserved before the next replica is decided, so a plan never gives a GPU twice. It is committed by
comparing the versions of the nodes; a conflict means another snapshot and another plan. Replicas are decided in this
order: priority (high first), size (large first), age, name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import mul

import msgspec

from llmgw.placement import constraints as constraint_package
from llmgw.placement import rankers as ranker_package
from llmgw.placement.candidates import Candidate, on_nodes
from llmgw.placement.constraints import Constraint
from llmgw.placement.constraints.fabric import attachments
from llmgw.placement.demand import Demand, Pending
from llmgw.placement.groups import groups
from llmgw.placement.inventory import GIB
from llmgw.placement.preempt import preemption
from llmgw.placement.rankers import Ranker
from llmgw.placement.snapshot import Exclusion, Reservation, Snapshot, reserve
from llmgw.placement.verdict import (
    OK,
    Assignment,
    Bill,
    Code,
    Finding,
    Record,
    Row,
    Verdict,
    failed,
    span,
)
from llmgw.placement.world import Kind, World, gpu_budget, gpu_taken
from llmgw.plugins import Registry

PIN, BACKOFF = "pin", "backoff"
FILTERS: tuple[Code, ...] = (
    Code(PIN, "The operator pinned the model to other nodes.", "Change the model's `pin`."),
    Code(BACKOFF, "The model failed here lately and waits.", "Cure the cause that it names; a change of the node or of the model ends the wait."),
)  # fmt: skip
"""Not constraints: shown under their own key, never mixed into the six."""


@lru_cache(maxsize=1)
def constraints() -> tuple[Constraint, ...]:
    """All, in the order of explain's columns."""
    found: Registry[Constraint] = Registry("constraint", constraint_package)
    return tuple(sorted((cls() for cls in found.all().values()), key=lambda c: (c.column, c.name)))


@lru_cache(maxsize=1)
def rankers() -> tuple[Ranker, ...]:
    found: Registry[Ranker] = Registry("ranker", ranker_package)
    return tuple(cls() for cls in found.all().values())


def plan(snapshot: Snapshot, pending: Iterable[Pending]) -> list[Record]:
    """A record for each of *pending*, in the order in which they were decided."""
    world = World(snapshot)
    records: list[Record] = []
    hopeless: dict[int, Record] = {}  # by demand: the world only gets fuller, so asking again would say the same
    for one in sorted(pending, key=_precedence):
        before = hopeless.get(id(one.demand))
        if before is not None:
            records.append(msgspec.structs.replace(before, replica=one.replica))
            continue
        record = decide(world, one)
        if record.assignment is not None:
            world.hold(held(record.assignment, one, snapshot.at))
        elif one.demand.preemption == "lower":
            found = preemption(snapshot_with(world), one, record, lambda s, p: decide(World(s), p))
            record = msgspec.structs.replace(record, preemption=found)
        if record.assignment is None:
            hopeless[id(one.demand)] = record
        records.append(record)
    return records


def held(assignment: Assignment, pending: Pending, since: float) -> list[Reservation]:
    """The reservations that committing *assignment* makes."""
    demand = pending.demand
    return reserve(assignment, priority=demand.priority, floor=demand.min_available, since=since)


def snapshot_with(world: World) -> Snapshot:
    """The snapshot with what this plan has reserved since."""
    reservations = tuple(r for place in world.places for r in place.replicas.values())
    return msgspec.structs.replace(world.snapshot, reservations=reservations)


def _precedence(pending: Pending) -> tuple[int, int, float, str]:
    size = max((s.ranks for s in pending.demand.shapes), default=0)
    return (-pending.demand.priority, -size, pending.created, pending.replica)


def decide(world: World, pending: Pending) -> Record:
    """Where *pending* goes, or why it goes nowhere. Reserves nothing."""
    demand = pending.demand
    candidates = [c for index, shape in enumerate(demand.shapes) for c in on_nodes(world, demand, shape, index)]
    verdicts = _judge(world, demand, candidates)
    made, of_groups = _groups(world, demand, candidates, verdicts)
    candidates, verdicts = made + candidates, of_groups + verdicts
    feasible = [i for i, c in enumerate(candidates) if not c.group and _passes(verdicts[i])]
    scores, terms = _score(world, [candidates[i] for i in feasible])
    chosen = min(
        range(len(feasible)), key=lambda k: _preference(demand, candidates[feasible[k]], scores[k]), default=None
    )
    scored = {i: (scores[k], terms[k]) for k, i in enumerate(feasible)}
    rows = _rows(world, candidates, verdicts, scored)
    return Record(
        replica=pending.replica,
        model=demand.name,
        at=world.snapshot.at,
        snapshot=world.snapshot.revision,
        rows=rows,
        rankers=tuple((r.name, r.weight) for r in rankers()),
        rejected_by=_totals(rows),
        feasible=len(feasible),
        nearest=_nearest(rows) if chosen is None else None,
        chosen=None if chosen is None else feasible[chosen],
        assignment=None if chosen is None else _assignment(world, pending, candidates[feasible[chosen]]),
    )


def _passes(verdicts: dict[str, Verdict]) -> bool:
    for verdict in verdicts.values():  # noqa: SIM110 - half the time of all(), 4,000 times a decision
        if verdict.ok is not True:
            return False
    return True


def _failing(verdicts: dict[str, Verdict]) -> int:
    return sum([v.ok is not True for v in verdicts.values()])


def _totals(rows: tuple[Row, ...]) -> dict[str, int]:
    """Constraint → candidates that it rejects, in the order of columns; a candidate may count several times."""
    found = dict.fromkeys((c.name for c in constraints()), 0)
    for row in rows:
        if row.score is None and not row.group:
            for name, verdict in row.verdicts.items():
                if verdict.ok is False:
                    found[name] = found.get(name, 0) + 1
    return {name: n for name, n in found.items() if n}


def _judge(world: World, demand: Demand, candidates: list[Candidate]) -> list[dict[str, Verdict]]:
    """The columns of all constraints, and of the filters where they reject."""
    names = [c.name for c in constraints()]
    columns = [c.evaluate(world, candidates) for c in constraints()]
    judged = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    _filter(world, demand, candidates, judged)
    return judged


def _groups(
    world: World, demand: Demand, candidates: list[Candidate], verdicts: list[dict[str, Verdict]]
) -> tuple[list[Candidate], list[dict[str, Verdict]]]:
    """The groups that can be made of the parts among *candidates*, with their columns."""
    made: list[Candidate] = []
    if any(shape.nodes > 1 for shape in demand.shapes):
        columns = {id(c): v for c, v in zip(candidates, verdicts, strict=True)}
        for index in range(len(demand.shapes)):
            parts = [c for c in candidates if c.index == index and c.group]
            made += groups(world, parts, [_failing(columns[id(p)]) for p in parts])
        return made, [_of_group(world, group, columns) for group in made]
    return [], []


def _filter(
    world: World, demand: Demand, candidates: Sequence[Candidate], judged: Sequence[dict[str, Verdict]]
) -> None:
    now = world.snapshot.at
    waits = [e for e in world.snapshot.exclusions if e.model == demand.name and (e.until is None or e.until > now)]
    if not demand.pin and not waits:
        return
    for candidate, row in zip(candidates, judged, strict=True):
        name = candidate.place.name
        if demand.pin and name not in demand.pin:
            row[PIN] = failed(Finding(code=PIN, text=f"to {', '.join(demand.pin)}"))
        here = [e for e in waits if e.node in ("", name)]
        if here:
            row[BACKOFF] = failed(*(Finding(code=BACKOFF, text=_wait(e, now)) for e in sorted(here, key=_until)))


def _until(exclusion: Exclusion) -> tuple[bool, float, str]:
    return (exclusion.until is not None, exclusion.until or 0.0, exclusion.why)


def _wait(exclusion: Exclusion, now: float) -> str:
    until = "until an input changes" if exclusion.until is None else f"for another {span(exclusion.until - now)}"
    return f"{exclusion.why}; {until}"


def _of_group(world: World, group: Candidate, part: dict[int, dict[str, Verdict]]) -> dict[str, Verdict]:
    """A group's columns: what its members' parts were found to fail, and what the group itself is."""
    columns = [part[id(m)] for m in group.members]
    names = list(dict.fromkeys(name for c in columns for name in c))
    found: dict[str, Verdict] = {}
    for name in names:
        findings: list[Finding] = []
        ok: bool | None = True
        note = ""
        for member, column in zip(group.members, columns, strict=True):
            verdict = column.get(name, OK)
            findings += [
                msgspec.structs.replace(f, text=f"{member.place.name}: {f.text}" if f.text else member.place.name)
                for f in verdict.findings
            ]
            if verdict.ok is False:
                ok = False
            elif verdict.ok is None and ok is not False:
                ok, note = None, verdict.note
        found[name] = OK if ok else Verdict(ok, tuple(findings), note)
    for constraint in constraints():
        if constraint.groups:
            (whole,) = constraint.evaluate(world, [group])
            before = found[constraint.name]
            if whole.findings or before.findings:
                found[constraint.name] = failed(*whole.findings, *before.findings)
    return found


def _score(world: World, candidates: list[Candidate]) -> tuple[list[float], list[tuple[float, ...]]]:
    """Scores 0..100, and what each ranker said."""
    if not candidates:
        return [], []
    terms = list(zip(*(r.rank(world, candidates) for r in rankers()), strict=True))
    weights = [r.weight for r in rankers()]
    total = sum(weights) / 100
    # equal sums of floats in another order differ in the last digits; ties must stay ties
    return [round(sum(map(mul, weights, values)) / total, 6) for values in terms], terms


def _preference(demand: Demand, candidate: Candidate, score: float) -> tuple[object, ...]:
    order = candidate.index if demand.prefer == "order" else 0
    rank = candidate.pick.rank or 0
    first = candidate.pick.devices[0].index if candidate.pick.devices else 0
    return (order, rank, -score, len(candidate.members), candidate.place.key, first, candidate.index, candidate.fabric)


def _rows(
    world: World,
    candidates: list[Candidate],
    verdicts: list[dict[str, Verdict]],
    scored: dict[int, tuple[float, tuple[float, ...]]],
) -> tuple[Row, ...]:
    bills: dict[tuple[int, Kind | None], Bill | None] = {}
    labels = [s.label for s in candidates[0].demand.shapes] if candidates else []
    none: tuple[float | None, tuple[float, ...]] = (None, ())
    rows = []
    for i, candidate in enumerate(candidates):
        pick = candidate.pick
        key = (candidate.index, pick.kind)
        if key not in bills:
            bills[key] = _bill(world, candidate)
        score, terms = scored.get(i, none)
        label = labels[candidate.index]
        parts = candidate.parts
        gpus: tuple[tuple[str, ...], ...] = ()
        indices: tuple[tuple[int, ...], ...] = ()
        if not parts and pick.complete:
            gpus, indices = (pick.uuids,), (pick.indices,)
        elif parts and all(m.pick.complete for m in parts):
            gpus, indices = tuple(m.pick.uuids for m in parts), tuple(m.pick.indices for m in parts)
        rows.append(
            Row(
                shape=label,
                nodes=tuple(m.place.name for m in parts) if parts else (candidate.place.name,),
                gpus=gpus,
                indices=indices,
                island=pick.island or "",
                alternatives=pick.alternatives,
                fabric=candidate.fabric,
                gpu_type=pick.kind[0] if pick.kind else "",
                need=bills[key],
                verdicts=verdicts[i],
                score=score,
                terms=terms,
                group=label if candidate.group and attachments(world, candidate) else "",
            )
        )
    return tuple(rows)


def _bill(world: World, candidate: Candidate) -> Bill | None:
    shape, demand, kind = candidate.shape, candidate.demand, candidate.pick.kind
    sizing = world.sizing(demand, shape, kind[0] if kind else "")
    need = sizing.need
    if need is None:
        return None
    have = gpu_budget(demand.engine_of(shape), shape, kind[1]) if kind else None
    return Bill(
        gpus=shape.ranks,
        total=need.total / GIB,
        weights=need.weights / GIB,
        overhead=need.overhead / GIB,
        kv=need.kv / GIB,
        tokens=(need.tokens(have) or None) if have is not None else None,
        source=sizing.source,
    )


def _nearest(rows: tuple[Row, ...]) -> int | None:
    """The row that fails fewest constraints, then by the smallest shortfall, then the first."""

    failing = {i: _failing(row.verdicts) for i, row in enumerate(rows) if not row.group}
    least = min(failing.values(), default=0)

    def shortfall(i: int) -> tuple[float, int]:
        short = 0.0
        for f in rows[i].findings:
            short += max(0.0, f.need - f.have) / f.need if f.need and f.have is not None else 1.0
        return (round(short, 9), i)

    return min((i for i, n in failing.items() if n == least), key=shortfall, default=None)


def _assignment(world: World, pending: Pending, candidate: Candidate) -> Assignment:
    shape, demand, kind = candidate.shape, candidate.demand, candidate.pick.kind
    engine = demand.engine_of(shape)
    need = world.sizing(demand, shape, kind[0] if kind else "").need
    assert need is not None, "a feasible candidate has a need"
    bases = [m.place.port_block() for m in candidate.members]
    return Assignment(
        replica=pending.replica,
        model=demand.name,
        shape=shape.label,
        nodes=tuple(m.place.name for m in candidate.members),
        gpus=tuple(m.pick.uuids for m in candidate.members),
        ports=tuple(base for base in bases if base is not None),
        fabric=candidate.fabric,
        vram=gpu_taken(engine, shape, kind[1], need) if kind else 0,
        host=need.total if shape.cpu else 0,
        shared=shape.shared,
    )
