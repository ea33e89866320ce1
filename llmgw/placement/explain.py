"""A decision in words: the table of all candidates, what each was rejected for, and what would make the nearest fit.

Made from the solver's own `Record`, never by asking again: what is printed is what was decided. The JSON form has the
same content under stable names (`llmgw ctl explain-placement MODEL --json`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llmgw.placement.constraints.fabric import NOT_APPLICABLE
from llmgw.placement.solver import FILTERS, constraints, rankers
from llmgw.placement.verdict import Bill, Finding, Preemption, Record, Row, Verdict, figure

FEASIBLE, INFEASIBLE = 0, 3
"""Exit codes of `ctl explain-placement`."""


def exit_code(record: Record) -> int:
    return FEASIBLE if record.chosen is not None else INFEASIBLE


def text(record: Record, *, desired: int | None = None, running: int | None = None, pending: int | None = None) -> str:
    """The record as D4 of the reference lays it out: head, need, one line a candidate, totals, nearest."""
    names = [c.name for c in constraints()]
    counts = [("desired", desired), ("running", running), ("pending", pending)]
    told = "  ".join(f"{k} {n}" for k, n in counts if n is not None)
    lines = ["  ".join(part for part in (f"model {record.model}", f"replica {record.replica}", told) if part)]
    lines += _needs(record)
    rows = [_cells(row, names) for row in record.rows]
    where = ["CANDIDATE", *[cells[0] for cells in rows]]
    shapes = ["SHAPE", *[cells[1] for cells in rows]]
    wide = [max(map(len, where)), max(map(len, shapes))]
    head = f"{'CANDIDATE':{wide[0]}}  {'SHAPE':{wide[1]}}  {' '.join(names)}  SCORE  REASON"
    lines.append(head)
    for cells in rows:
        marks = " ".join(f"{mark:^{len(name)}}" for mark, name in zip(cells[2], names, strict=True))
        lines.append(f"{cells[0]:{wide[0]}}  {cells[1]:{wide[1]}}  {marks}  {cells[3]:>5}  {cells[4]}".rstrip())
    if record.omitted:
        lines.append(f"({record.omitted} more candidates were not kept with the decision)")
    lines.append(_totals(record))
    if record.chosen is not None:
        row = record.rows[record.chosen]
        lines.append(f"chosen: {_place(row)} as {row.shape}")
        terms = zip(record.rankers, row.terms, strict=True)
        lines.append("score: " + "  ".join(f"{name} {value:.2f} x {figure(weight)}" for (name, weight), value in terms))
    elif record.nearest is not None:
        lines.append(f"nearest: {_nearest(record.rows[record.nearest])}")
    if record.preemption is not None:
        lines.append(_preemption(record.preemption))
    return "\n".join(lines)


def json(record: Record, *, desired: int | None = None, running: int | None = None) -> dict[str, Any]:
    """One object; sizes in GiB with two decimals, times as seconds since 1970. Documented in docs/placement.md."""
    best = record.chosen if record.chosen is not None else record.nearest
    need = record.rows[best].need if best is not None else None
    return {
        "kind": "placement",
        "model": record.model,
        "replica": record.replica,
        "at": record.at,
        "snapshot": record.snapshot,
        "desired": desired,
        "running": running,
        "feasible": record.feasible,
        "need": None if need is None else _bill(need),
        "candidates": [_candidate(record, row) for row in record.rows],
        "omitted": record.omitted,
        "rejected_by": record.rejected_by,
        "nearest": record.nearest,
        "chosen": record.chosen,
        "preemption": None
        if record.preemption is None
        else {
            "possible": record.preemption.possible,
            "why": record.preemption.why,
            "node": record.preemption.node,
            "gpus": list(record.preemption.gpus),
            "victims": list(record.preemption.victims),
        },
    }


def summary(record: Record) -> str:
    """One line for lists and events: ``0 of 4 candidates feasible: memory 3, node 2; nearest gpu-01: memory.vram …``."""
    if record.chosen is not None:
        return f"{_place(record.rows[record.chosen])}: {_totals(record)}"
    near = "" if record.nearest is None else f"; nearest {_nearest(record.rows[record.nearest])}"
    return _totals(record) + near


def _needs(record: Record) -> list[str]:
    """What each shape needs; one line for each shape and distinct need."""
    seen: dict[tuple[str, Bill], None] = {}
    for row in record.rows:
        if row.need is not None:
            plain = Bill(
                gpus=row.need.gpus,
                total=row.need.total,
                weights=row.need.weights,
                overhead=row.need.overhead,
                kv=row.need.kv,
                source=row.need.source,
            )
            seen.setdefault((row.shape, plain))
    lines = []
    for shape, bill in seen:
        what = f"per GPU {figure(bill.total)} GiB" if bill.gpus else f"of the host {figure(bill.total)} GiB"
        parts = f"weights {bill.weights:.2f} + overhead {bill.overhead:.2f} + kv {bill.kv:.2f}"
        of = "" if bill.source == "declared" else f" = {parts}"
        lines.append(f"need of {shape} ({bill.gpus} GPUs): {what}{of} ({bill.source})")
    return lines


def _cells(row: Row, names: Iterable[str]) -> tuple[str, str, list[str], str, str]:
    reasons = [str(f) for f in row.findings]
    reasons += [f"{name} not evaluated: {v.note}" for name, v in row.verdicts.items() if v.ok is None]
    place = f"  {_place(row)}" if row.group else _place(row)
    score = "-" if row.score is None else f"{row.score:.1f}"
    return place, row.shape, [_mark(row.verdicts.get(n)) for n in names], score, "; ".join(reasons) or "-"


def _mark(verdict: Verdict | None) -> str:
    if verdict is None or verdict.ok is None or verdict == NOT_APPLICABLE:
        return "-"
    return "ok" if verdict.ok else "NO"


def _place(row: Row) -> str:
    """``gpu-01 [0,1] nvswitch``, ``gpu-01 [0-7] + gpu-02 [0-7] on ib-a``."""
    if row.indices:
        parts = [f"{n} [{_ranges(i)}]" if i else n for n, i in zip(row.nodes, row.indices, strict=True)]
    else:
        parts = list(row.nodes)
    place = " + ".join(parts)
    if row.fabric:
        return f"{place} on {row.fabric}"
    return f"{place} {row.island}" if row.indices and any(len(i) > 1 for i in row.indices) else place


def _ranges(indices: tuple[int, ...]) -> str:
    """0,1,2,5 → ``0-2,5``."""
    runs: list[list[int]] = []
    for i in sorted(indices):
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs)


def _totals(record: Record) -> str:
    count = sum(1 for row in record.rows if not row.group) + record.omitted
    causes = ", ".join(f"{name} {n}" for name, n in record.rejected_by.items())
    return f"{record.feasible} of {count} candidates feasible" + (f": {causes}" if causes else "")


def _nearest(row: Row) -> str:
    failing = [name for name, v in row.verdicts.items() if v.ok is not True]
    hints = [f.hint for f in row.findings if f.hint]
    only = "fails only" if len(failing) == 1 else "fails"
    said = f"{_place(row)} ({row.shape}) {only} {', '.join(failing)}"
    if hints and len(failing) == 1:
        return f"{said}; would be placed with {' or '.join(hints)}"
    return f"{said}: {row.findings[0]}" if row.findings else said


def _preemption(found: Preemption) -> str:
    if not found.possible:
        return f"preemption: not possible: {found.why}"
    return f"preemption: on {found.node}, {', '.join(found.victims)} would be drained"


def _bill(bill: Bill) -> dict[str, Any]:
    return {
        "gpus": bill.gpus,
        "vram_gib": round(bill.total, 2),
        "weights_gib": round(bill.weights, 2),
        "overhead_gib": round(bill.overhead, 2),
        "kv_gib": round(bill.kv, 2),
        "kv_tokens": bill.tokens,
        "source": bill.source,
    }


def _candidate(record: Record, row: Row) -> dict[str, Any]:
    return {
        "shape": row.shape,
        "nodes": list(row.nodes),
        "gpus": [uuid for node in row.gpus for uuid in node],
        "gpu_type": row.gpu_type,
        "island": row.island,
        "alternatives": row.alternatives,
        "fabric": row.fabric or None,
        "part_of": row.group or None,
        "feasible": row.feasible,
        "score": row.score,
        "constraints": {name: _verdict(v) for name, v in row.verdicts.items()},
        "terms": {name: value for (name, _), value in zip(record.rankers, row.terms, strict=True)}
        if row.terms
        else None,
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    found: dict[str, Any] = {"ok": verdict.ok}
    if verdict.note:
        found["note"] = verdict.note
    if verdict.findings:
        found["code"] = verdict.findings[0].code
        found["findings"] = [_finding(f) for f in verdict.findings]
    return found


def _finding(finding: Finding) -> dict[str, Any]:
    found: dict[str, Any] = {"code": finding.code, "text": str(finding)}
    if finding.need is not None and finding.have is not None:
        end = "_gib" if finding.unit == "GiB" else ""
        numbers = {"need": finding.need, "have": finding.have, "short": finding.short or 0.0}
        found |= {name + end: round(value, 2) for name, value in numbers.items()}
    hint = {"max_model_len": finding.max_model_len, "shape": finding.shape}
    if hint := {k: v for k, v in hint.items() if v}:
        found["hint"] = hint
    return found


def reasons() -> list[tuple[str, str, str, str]]:
    """(constraint, code, meaning, remedy) of everything that can reject a candidate: the table of docs/placement.md."""
    rows = [(c.name, code.code, code.meaning, code.remedy) for c in constraints() for code in c.codes]
    return rows + [("-", code.code, code.meaning, code.remedy) for code in FILTERS]


def reference() -> str:
    """The table of docs/placement.md."""
    lines = ["| constraint | code | what it means | what to do |", "|---|---|---|---|"]
    lines += [f"| {name} | `{code}` | {meaning} | {remedy} |" for name, code, meaning, remedy in reasons()]
    lines += ["", "| ranker | weight | what it measures |", "|---|---|---|"]
    lines += [f"| {r.name} | {figure(r.weight)} | {(type(r).__doc__ or '').splitlines()[0]} |" for r in rankers()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(reference())
