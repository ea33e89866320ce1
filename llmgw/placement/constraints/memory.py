"""Whether it fits: GPU memory by the engine's own rules, memory of the host, shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs

from llmgw.placement import memory
from llmgw.placement.candidates import Candidate
from llmgw.placement.demand import GGUF_ENGINES, SIM
from llmgw.placement.inventory import GIB
from llmgw.placement.rules import divisible
from llmgw.placement.verdict import OK, Code, Finding, Verdict, failed, unknown
from llmgw.placement.world import Kind, World, gpu_budget, gpu_taken

SHM = GIB  # what several ranks need of /dev/shm at least
DEGREES = (1, 2, 4, 8, 16)


class MemoryConstraint:
    """Each GPU has what a rank needs, by the engine's rules; the host has what loading needs."""

    api = 1
    name: ClassVar[str] = "memory"
    column: ClassVar[int] = 4
    groups: ClassVar[bool] = False
    codes: ClassVar[tuple[Code, ...]] = (
        Code("memory.vram", "A rank needs more than the engine may use of the GPU, or than others have left of it.",
             "Do what the hint says (shorter `max_model_len`, a larger `tp`), or use larger GPUs."),
        Code("memory.foreign", "Processes that are not ours hold memory that the engine would claim.",
             "End them (`llmgw ctl nodes NODE` names the pids), or lower `memory_fraction`."),
        Code("memory.host", "The host has too little memory to load the weights (or to run on the CPU).",
             "Free memory on the host, or add some."),
        Code("memory.shm", "/dev/shm is too small for several ranks.", "docker: --shm-size or --ipc=host."),
    )  # fmt: skip

    def evaluate(self, world: World, candidates: Sequence[Candidate]) -> list[Verdict]:
        fits: dict[tuple[int, Kind | None, int], Fit] = {}
        found = []
        for candidate in candidates:
            kind = candidate.pick.kind
            if kind is None and not candidate.shape.cpu:
                found.append(unknown("no GPU to measure against"))
                continue
            key = (candidate.index, kind, candidate.pick.total)
            fit = fits.get(key)
            if fit is None:
                fit = fits[key] = _static(world, candidate)
            if fit.unknown:
                found.append(unknown(fit.unknown))
                continue
            findings = [*fit.findings, *_live(candidate, fit.claim), *_host(candidate, fit)]
            found.append(failed(*findings) if findings else OK)
        return found


@attrs.frozen
class Fit:
    """What a shape asks of a kind of GPU and of the host. Worked out once for all nodes with as many of them."""

    unknown: str = ""  # why it cannot be said
    claim: int = 0  # bytes of each GPU
    host: int = 0  # bytes of the host
    shm: int = 0  # bytes of /dev/shm
    findings: tuple[Finding, ...] = ()  # why it does not fit into an empty GPU of this kind


def _static(world: World, candidate: Candidate) -> Fit:
    shape, demand, kind = candidate.shape, candidate.demand, candidate.pick.kind
    engine = demand.engine_of(shape)
    sizing = world.sizing(demand, shape, kind[0] if kind else "")
    need = sizing.need
    if need is None:
        return Fit(unknown=sizing.why)
    host = shm = 0
    if engine != SIM:
        loading = memory.host_need(sizing.largest_file, sizing.weights, shape.share)
        host = need.total if shape.cpu else loading
        shm = SHM if min(shape.tp, shape.share) > 1 and engine not in GGUF_ENGINES else 0
    if kind is None:
        return Fit(host=host, shm=shm)
    claim, have = gpu_taken(engine, shape, kind[1], need), gpu_budget(engine, shape, kind[1])
    if need.total <= have:
        return Fit(claim=claim, host=host, shm=shm)
    wider = ""
    if sizing.geometry is not None and engine not in GGUF_ENGINES and sizing.source != "declared":
        for tp in DEGREES:
            if not shape.tp < tp <= candidate.pick.total or divisible(
                sizing.geometry, tp, shape.pp, shape.dp, shape.expert_parallel
            ):
                continue
            other = world.sizing(demand, attrs.evolve(shape, tp=tp, name="")).need
            if other is not None and other.total <= have:
                wider = f"tp{tp}"
                break
    finding = Finding(
        code="memory.vram",
        need=need.total / GIB,
        have=have / GIB,
        unit="GiB",
        max_model_len=need.longest(have) or None,
        shape=wider,
    )
    return Fit(claim=claim, host=host, shm=shm, findings=(finding,))


def _live(candidate: Candidate, claim: int) -> list[Finding]:
    """What others hold of the very GPUs: reservations of ours, processes of strangers."""
    place, pick = candidate.place, candidate.pick
    found: list[Finding] = []
    holders = place.holders
    for device in pick.devices if pick.complete else ():
        free = device.memory_free
        if device.uuid not in holders and (free is None or claim <= free):
            continue
        held = place.held(device.uuid)
        if held and claim > device.memory - held:
            text = f"GPU {device.index} is shared: {', '.join(sorted(r.replica for r in holders[device.uuid]))}"
            found.append(_vram("memory.vram", claim, device.memory - held, text))
        if free is not None and claim > free:
            strangers = [p for p in device.processes if not p.replica]
            who = ", ".join(f"pid {p.pid} ({p.name or '?'}, user {p.user or '?'})" for p in strangers)
            code = "memory.foreign" if strangers or not held else "memory.vram"
            found.append(_vram(code, claim, free, f"GPU {device.index}: held by {who or 'an unknown process'}"))
    return found


def _vram(code: str, need: int, have: int, text: str) -> Finding:
    return Finding(code=code, need=need / GIB, have=have / GIB, unit="GiB", text=text)


def _host(candidate: Candidate, fit: Fit) -> list[Finding]:
    place = candidate.place
    host = place.inventory.host
    found = []
    have = host.memory_available
    if host.memory and (have is None or host.memory - place.host_held < have):
        have = host.memory - place.host_held
    if have is not None and fit.host > have:
        found.append(Finding(code="memory.host", need=fit.host / GIB, have=have / GIB, unit="GiB"))
    if host.shm is not None and fit.shm > host.shm:
        found.append(Finding(code="memory.shm", need=fit.shm / GIB, have=host.shm / GIB, unit="GiB"))
    return found
