"""Why a candidate is or is not possible: findings with stable codes and both numbers, and the record of a decision.

A constraint answers with a `Verdict` for every candidate. Codes are declared beside the constraint that uses them;
explain, logs, tests and docs/placement.md read the same objects.
"""

from __future__ import annotations

from typing import Literal

import attrs
import msgspec

Unit = Literal["", "GiB", "GPUs", "nodes", "rails"]


@attrs.frozen
class Code:
    """One way to be rejected. The page of reasons is made from these."""

    code: str
    meaning: str
    remedy: str


class Finding(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One thing in the way. *need* and *have* are in *unit*, where there are numbers to it."""

    code: str
    text: str = ""  # what exactly: names, versions, pids
    need: float | None = None
    have: float | None = None
    unit: Unit = ""
    max_model_len: int | None = None  # it would fit with this maximum length
    shape: str = ""  # it would fit spread like this ("tp4")

    @property
    def short(self) -> float | None:
        """How much is missing, of the numbers as they are printed."""
        if self.need is None or self.have is None:
            return None
        return max(0.0, round(round(self.need, 2) - round(self.have, 2), 2))

    @property
    def hint(self) -> str:
        ways = [f"max_model_len <= {self.max_model_len}"] if self.max_model_len else []
        ways += [self.shape] if self.shape else []
        return " or ".join(ways)

    def __str__(self) -> str:
        parts = []
        if self.need is not None and self.have is not None:
            unit = f" {self.unit}" if self.unit else ""
            parts.append(f"need {figure(self.need)}, have {figure(self.have)}{unit}, short {figure(self.short or 0)}")
        if self.text:
            parts.append(self.text)
        if self.hint:
            parts.append(f"fits if {self.hint}")
        return f"{self.code}: {'; '.join(parts)}" if parts else self.code


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """*ok* None = it cannot be evaluated, *note* says why (and why it passes where it does not apply)."""

    ok: bool | None
    findings: tuple[Finding, ...] = ()
    note: str = ""


OK = Verdict(True)


def failed(*findings: Finding) -> Verdict:
    return Verdict(False, findings)


def unknown(why: str) -> Verdict:
    return Verdict(None, (), why)


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One candidate and everything that was found about it."""

    shape: str
    nodes: tuple[str, ...]
    gpus: tuple[tuple[str, ...], ...] = ()  # UUIDs by node; empty where none could be chosen
    indices: tuple[tuple[int, ...], ...] = ()  # the same as the indices that people know
    island: str = ""
    alternatives: int = 0  # other sets of GPUs on the node that would have done
    fabric: str = ""
    gpu_type: str = ""
    need: Bill | None = None
    verdicts: dict[str, Verdict]
    score: float | None = None
    terms: tuple[float, ...] = ()  # what each ranker said, 0..1, in the order of `Record.rankers`
    group: str = ""  # of a node's row: the group that it was considered for ("fabric ib-a")

    @property
    def feasible(self) -> bool:
        return not self.group and all(v.ok for v in self.verdicts.values())

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(f for v in self.verdicts.values() for f in v.findings)


class Bill(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The need of one GPU (or of the host, for a shape on the CPU), GiB."""

    gpus: int
    total: float
    weights: float
    overhead: float
    kv: float
    tokens: int | None = None  # that the KV cache would hold, where it fits
    source: Literal["estimated", "measured", "declared"] = "estimated"


class Preemption(msgspec.Struct, frozen=True, kw_only=True):
    """Who would have to go. *why* says why nobody can, or may."""

    possible: bool
    why: str = ""
    node: str = ""
    gpus: tuple[str, ...] = ()
    victims: tuple[str, ...] = ()  # replicas, in the order in which they go


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Where a replica goes: what is reserved when this is committed."""

    replica: str
    model: str
    shape: str
    nodes: tuple[str, ...]
    gpus: tuple[tuple[str, ...], ...]  # by node; an empty tuple on the CPU
    ports: tuple[int, ...]  # base of its block, by node
    fabric: str = ""
    vram: int = 0  # reserved of each GPU, bytes
    host: int = 0  # reserved of each node's memory, bytes
    shared: bool = False


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A decision, as it was made: what explain prints, then and later."""

    replica: str
    model: str
    at: float
    snapshot: int  # revision
    rows: tuple[Row, ...]
    rankers: tuple[tuple[str, float], ...] = ()  # (name, weight)
    rejected_by: dict[str, int]  # constraint → candidates that it rejected
    feasible: int
    nearest: int | None = None  # index of the row that fails least
    chosen: int | None = None
    assignment: Assignment | None = None
    preemption: Preemption | None = None
    omitted: int = 0  # rows left out of a stored record

    def trimmed(self, limit: int) -> Record:
        """The same record with at most *limit* rows, for storing: the chosen, the nearest and the first ones stay."""
        if len(self.rows) <= limit:
            return self
        keep = {i for i in (self.chosen, self.nearest) if i is not None}
        for i in range(len(self.rows)):
            if len(keep) >= limit:
                break
            keep.add(i)
        order = sorted(keep)
        place = {old: new for new, old in enumerate(order)}
        return msgspec.structs.replace(
            self,
            rows=tuple(self.rows[i] for i in order),
            nearest=None if self.nearest is None else place[self.nearest],
            chosen=None if self.chosen is None else place[self.chosen],
            omitted=self.omitted + len(self.rows) - len(order),
        )


def figure(number: float) -> str:
    """Whole numbers without decimals, others with two."""
    return str(int(number)) if float(number).is_integer() else f"{number:.2f}"


def span(seconds: float) -> str:
    """A duration as people read it, with two units: ``4m12s``, ``2h5m``, ``3d4h``."""
    whole = int(seconds)
    for size, unit, less, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // less
            return f"{whole // size}{unit}" + (f"{rest}{small}" if rest else "")
    return f"{whole}s"
