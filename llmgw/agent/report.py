"""`llmgw agent --discover` and `--preflight`: tables for a person, JSON for a program."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import trio
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llmgw.agent.account import account
from llmgw.agent.discover import Discovery
from llmgw.agent.preflight import Preflight, by_row
from llmgw.agent.settings import Settings
from llmgw.placement.inventory import GIB, Check, Inventory, node_state


def gib(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size >> 10} KiB"


async def discover(settings: Settings, as_json: bool) -> int:
    """Prints the node's inventory."""
    async with Discovery(settings) as discovery:
        found = await discovery.look()
    if as_json:
        await trio.to_thread.run_sync(print_json, msgspec.json.encode(found))
    else:
        print_inventory(found, Console())
    return 0


def print_json(text: bytes) -> None:
    Console(soft_wrap=True, highlight=False, markup=False).print(msgspec.json.format(text, indent=2).decode())


def print_inventory(found: Inventory, console: Console) -> None:
    host = found.host
    console.print(f"[bold]{found.node}[/] at {found.address} · {found.os} · kernel {host.kernel}", highlight=False)
    level = f" ({host.cpu_level})" if host.cpu_level else ""
    console.print(
        f"CPU     {host.cpu}{level}, {host.cores:g} cores{f', {host.virtual}' if host.virtual else ''}", highlight=False
    )
    console.print(
        f"memory  {gib(host.memory_available)} of {gib(host.memory)} available, /dev/shm {gib(host.shm)},"
        f" memlock {gib(host.memlock) if host.memlock is not None else 'unlimited'}",
        highlight=False,
    )
    for disk in found.disks:
        mode = ", read-only" if disk.read_only else ""
        console.print(f"disk    {disk.path}: {gib(disk.free)} free ({disk.kind}{mode})", highlight=False)
    if found.gpu_problem:
        console.print(f"[red]GPU     {found.gpu_problem}[/]", highlight=False)
    elif not found.devices:
        console.print("GPU     none", highlight=False)
    if found.devices:
        console.print(f"driver  {found.driver}, CUDA up to {found.cuda}, from {found.gpu_library}", highlight=False)
        table = Table("GPU", "uuid", "type", "memory", "free", "island", "NUMA", "health")
        for d in found.devices:
            colour = {"ok": "green", "degraded": "yellow", "blocked": "red"}[d.health]
            health = f"[{colour}]{d.health}[/]{f': {d.reason}' if d.reason else ''}"
            name = f"{d.name} {d.mig}".strip()
            table.add_row(
                str(d.index), d.uuid, name, gib(d.memory), gib(d.memory_free), d.island or "–", str(d.numa), health
            )
        console.print(table)
    if found.ports:
        table = Table("port", "layer", "state", "Gb/s", "fabric", "evidence", "nearest GPUs", "")
        for p in found.ports:
            evidence = p.sm_guid or p.prefix or p.network or f"lid {p.lid} sm {p.sm_lid}"
            near = [str(d.index) for d in found.devices if p.distances.get(d.uuid) in ("PIX", "PXB")]
            state = f"[{'green' if p.state == 'active' else 'red'}]{p.state}[/]"
            fabric = p.fabric or "unresolved"
            table.add_row(
                f"{p.device}/{p.port}", p.layer, state, f"{p.rate:g}", fabric, evidence, ",".join(near) or "–", p.reason
            )
        console.print(table)
    else:
        console.print("RDMA    none", highlight=False)


async def preflight(settings: Settings, only: str, weights: Sequence[str], as_json: bool) -> int:
    """Prints every row; 1 if one of them fails."""
    user = account(settings.user)
    async with Discovery(settings) as discovery:
        checker = Preflight(discovery, user)
        inventory = await discovery.look()
        wall = time.time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(checker.try_engines, wall, only)
            nursery.start_soon(checker.try_gpus, wall)
            nursery.start_soon(checker.try_name)
            nursery.start_soon(checker.try_weights, weights, True)
        inventory = checker.complete(await discovery.look(), wall, checking=False)
    checks = sorted(
        (c for c in inventory.checks if not only or f"engine:{only}" == c.scope or not c.scope.startswith("engine:")),
        key=by_row,
    )
    if as_json:
        document = {"node": inventory.node, "state": node_state(inventory), "checks": checks}
        await trio.to_thread.run_sync(print_json, msgspec.json.encode(document))
    else:
        print_checks(checks, Console())
        Console().print(f"node state: {node_state(inventory)}", highlight=False)
    return int(any(not c.ok and c.level == "block" for c in checks))


def status(check: Check) -> str:
    """ok, warn, fail or skip."""
    if check.skipped:
        return "skip"
    return "ok" if check.ok else "fail" if check.level == "block" else "warn"


def print_checks(checks: Sequence[Check], console: Console) -> None:
    table = Table("row", "concerns", "", "what was seen", "what to do")
    colours = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}
    for check in checks:
        word = status(check)
        table.add_row(
            check.id, escape(check.scope), f"[{colours[word]}]{word}[/]", escape(check.message), escape(check.fix)
        )
    console.print(table)
