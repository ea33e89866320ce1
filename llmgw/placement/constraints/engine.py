"""The program and what it loads: installed, able to start, new enough; weights there; ports free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from llmgw.placement.candidates import Candidate
from llmgw.placement.demand import SIM
from llmgw.placement.inventory import GIB
from llmgw.placement.snapshot import PORTS
from llmgw.placement.verdict import OK, Code, Finding, Verdict, failed
from llmgw.placement.world import Place, World

DISK_SLACK, DISK_SPARE = 1.05, 5 * GIB  # a download needs some more than it brings


class EngineConstraint:
    """The engine is installed and starts there, knows the model; weights are there or can be fetched; ports are free."""

    api = 1
    name: ClassVar[str] = "engine"
    column: ClassVar[int] = 5
    groups: ClassVar[bool] = False
    codes: ClassVar[tuple[Code, ...]] = (
        Code("engine.missing", "The node has not got the engine, or a build without GPU support.",
             "Install it there and name it in the agent's configuration."),
        Code("engine.preflight", "A check of the engine on that node fails: it would not start.",
             "The message names the cure; `llmgw ctl nodes NODE` shows all."),
        Code("engine.version", "The engine is older than the model asks for.", "Upgrade it, or lower `engine_version`."),
        Code("engine.arch", "The engine does not know the model's architecture.", "Upgrade it, or use another engine."),
        Code("weights.missing", "The weights are not on the node, and may not be fetched.",
             "Copy them there, or set `fetch: true` (a repository id only)."),
        Code("weights.invalid", "The weights on the node are incomplete or damaged.", "Copy them again."),
        Code("weights.disk", "The disk has no room to fetch the weights.", "Free room, or point the cache elsewhere."),
        Code("ports", "No block of free ports is left on the node.", "Widen `engine_ports` in the agent's configuration."),
    )  # fmt: skip

    def evaluate(self, world: World, candidates: Sequence[Candidate]) -> list[Verdict]:
        seen: dict[tuple[str, tuple[str, str, bool]], Verdict] = {}
        asks: dict[int, tuple[str, str, bool]] = {}  # by shape: what it asks of this column
        names: dict[int, str] = {}  # by shape: the model's architecture
        found = []
        for candidate in candidates:
            if candidate.index not in asks:
                demand, shape = candidate.demand, candidate.shape
                asks[candidate.index] = (demand.engine_of(shape), demand.weights_of(shape), shape.cpu)
                geometry = world.sizing(demand, shape).geometry
                names[candidate.index] = geometry.architecture if geometry else ""
            key = (candidate.place.name, asks[candidate.index])
            verdict = seen.get(key)
            if verdict is None:
                findings = _program(candidate, names[candidate.index]) + _weights(world, candidate)
                if candidate.place.port_block() is None:
                    low, high = candidate.place.inventory.engine_ports
                    findings.append(Finding(code="ports", text=f"no {PORTS} free ports in a row in {low}-{high}"))
                verdict = seen[key] = failed(*findings) if findings else OK
            found.append(verdict)
        return found


def version_key(version: str) -> tuple[int, ...]:
    """Numbers of the release: ``0.11.1rc2`` → (0, 11, 1). A build of llama.cpp (``b4500``) → (4500,)."""
    numbers = []
    for part in version.lstrip("vb").split("."):
        digits = ""
        for c in part:
            if not c.isdigit():
                break
            digits += c
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def _program(candidate: Candidate, architecture: str) -> list[Finding]:
    place, demand, shape = candidate.place, candidate.demand, candidate.shape
    name = demand.engine_of(shape)
    install = place.engines.get(name)
    if install is None:
        has = ", ".join(sorted(place.engines)) or "none"
        return [Finding(code="engine.missing", text=f"want {name}, has {has}")]
    found = []
    if not install.gpu and not shape.cpu and name != SIM:
        found.append(Finding(code="engine.missing", text=f"{name} {install.version} there has no GPU support"))
    found += [
        Finding(code="engine.preflight", text=f"{c.id}: {c.message}" + (f" ({c.fix})" if c.fix else ""))
        for c in place.checks
        if c.scope == f"engine:{name}"
    ]
    if demand.engine_version and version_key(install.version) < version_key(demand.engine_version):
        text = f"{name} {install.version or 'of unknown version'} < {demand.engine_version}"
        found.append(Finding(code="engine.version", text=text))
    if architecture and install.architectures and architecture not in install.architectures:
        text = f"{name} {install.version} does not know {architecture}"
        found.append(Finding(code="engine.arch", text=text))
    return found


def _weights(world: World, candidate: Candidate) -> list[Finding]:
    place, demand, shape = candidate.place, candidate.demand, candidate.shape
    ref = demand.weights_of(shape)
    if demand.engine_of(shape) == SIM and not ref:
        return []
    checks = [c for c in place.checks if c.scope == f"weights:{ref}"]
    there = place.weights(ref)
    if there is not None and there.path and not there.problem and not checks:
        return []
    fetchable = demand.fetch and not ref.startswith(("/", "."))
    if not fetchable:
        if there is None or not there.path:
            return [Finding(code="weights.missing", text=ref)]
        texts = [f"{c.id}: {c.message}" for c in checks] or [there.problem]
        return [Finding(code="weights.invalid", text=text) for text in texts]
    return _room(place, world, ref, there.bytes if there else 0)


def _room(place: Place, world: World, ref: str, present: int) -> list[Finding]:
    known = world.known_weights(ref)
    size = (known.bytes_total or known.bytes) if known else 0
    need = max(0, size - present) * DISK_SLACK + DISK_SPARE
    disks = [d for d in place.inventory.disks if not d.read_only]
    have = max((d.free for d in disks if d.inodes_free != 0), default=0)
    if have >= need:
        return []
    return [Finding(code="weights.disk", need=need / GIB, have=have / GIB, unit="GiB", text=ref)]
