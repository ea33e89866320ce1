"""The control plane's memory as rows of the store, and the order in which a change of it is written.

    /models/NAME  /replicas/ID  /nodes/NAME  /drains/NODE  /nominations/REPLICA  /exclusions/MODEL NODE  /cluster

A change is usually one transaction. One that is too large for the store becomes several, and a server may die between
them; so they are written in an order that leaves no GPU with two owners at any cut: numbers that must not repeat first,
then what is given up, then what is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import msgspec

from llmgw.catalogue import CatalogueModel, decode, encode
from llmgw.control.state import Cluster, Drain, NodeRecord, Nomination, Replica
from llmgw.placement.snapshot import Exclusion
from llmgw.stores.base import MAX_OPS, MAX_TXN, Compare, Delete, Entry, Put

MODELS = "/models/"
TOTALS = "/cluster"
PREFIXES: dict[str, tuple[str, type]] = {
    "/replicas/": ("replicas", Replica),
    "/nodes/": ("nodes", NodeRecord),
    "/drains/": ("drains", Drain),
    "/nominations/": ("nominations", Nomination),
    "/exclusions/": ("exclusions", Exclusion),
}
"""Prefix → field of `Cluster`, type of a row."""

OPS = MAX_OPS - 8  # of one transaction; a leader's adds its fence
BYTES = MAX_TXN // 2  # of values in one transaction: keys, base64 and the rest of a request come on top


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What `Cluster` has besides its rows."""

    epoch: int = 0
    serial: dict[str, int] = {}
    generations: dict[str, int] = {}
    built: dict[str, str] = {}
    inputs: dict[str, str] = {}
    frozen: str = ""
    thawed: float = 0.0


@attrs.frozen
class State:
    """All that is stored."""

    cluster: Cluster
    models: Mapping[str, CatalogueModel]

    def rows(self) -> dict[str, Any]:
        """Key → value, not yet encoded: what has not changed is the same object as before."""
        found: dict[str, Any] = {MODELS + name: model for name, model in self.models.items()}
        for prefix, (field, _) in PREFIXES.items():
            found |= {prefix + name: value for name, value in getattr(self.cluster, field).items()}
        totals = {name: getattr(self.cluster, name) for name in Totals.__struct_fields__}
        found[TOTALS] = Totals(**totals)
        return found


def load(entries: Iterable[Entry]) -> tuple[State, dict[str, int]]:
    """The state, and the revision of every row. Rows of others are passed over."""
    parts: dict[str, dict[str, Any]] = {field: {} for field, _ in PREFIXES.values()}
    models: dict[str, CatalogueModel] = {}
    totals = Totals()
    revisions = {}
    for entry in entries:
        if entry.key == TOTALS:
            totals = msgspec.json.decode(entry.value, type=Totals)
        elif entry.key.startswith(MODELS):
            model = decode(entry.value)
            models[model.name] = model
        else:
            prefix = entry.key[: entry.key.find("/", 1) + 1]
            if prefix not in PREFIXES:
                continue
            field, kind = PREFIXES[prefix]
            parts[field][entry.key.removeprefix(prefix)] = msgspec.json.decode(entry.value, type=kind)
        revisions[entry.key] = entry.mod_revision
    whole: dict[str, Any] = {**parts, **msgspec.structs.asdict(totals)}
    cluster = Cluster(**whole)
    return State(cluster, dict(sorted(models.items()))), revisions


@attrs.frozen
class Batch:
    """One transaction."""

    compares: tuple[Compare, ...]
    ops: tuple[Put | Delete, ...]


def batches(before: Mapping[str, Any], after: Mapping[str, Any], revisions: Mapping[str, int]) -> list[Batch]:
    """What makes *after* of *before*; empty where nothing has changed. *revisions*: of the rows as they were read."""
    found: list[Batch] = []
    ops: list[Put | Delete] = []
    size = 0
    for op in _changes(before, after):
        weight = len(op.value) if isinstance(op, Put) else 0
        if ops and (len(ops) >= OPS or size + weight > BYTES):
            found.append(_batch(ops, revisions))
            ops, size = [], 0
        ops.append(op)
        size += weight
    return [*found, _batch(ops, revisions)] if ops else found


def _batch(ops: list[Put | Delete], revisions: Mapping[str, int]) -> Batch:
    return Batch(tuple(Compare(op.key, "mod", "==", revisions.get(op.key, 0)) for op in ops), tuple(ops))


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Put | Delete]:
    changed = [k for k, value in after.items() if (old := before.get(k)) is not value and old != value]
    if TOTALS in changed:
        yield Put(TOTALS, _encode(after[TOTALS]))
    yield from (Delete(key) for key in before if key not in after)
    for key in sorted(changed, key=lambda k: (_takes(before.get(k), after[k]), k)):
        if key != TOTALS:
            yield Put(key, _encode(after[key]))


def _takes(old: Any, new: Any) -> bool:
    """Does this row take GPUs that it did not have?"""
    if not isinstance(new, Replica) or new.assignment is None:
        return False
    return not isinstance(old, Replica) or old.assignment != new.assignment


def _encode(value: Any) -> bytes:
    return encode(value) if isinstance(value, CatalogueModel) else msgspec.json.encode(value)
