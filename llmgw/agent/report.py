"""`llmgw agent --discover` and `--preflight`: tables for a person, JSON for a program."""

from __future__ import annotations

import msgspec
import trio
from rich.console import Console
from rich.table import Table

from llmgw.agent.discover import Discovery
from llmgw.agent.settings import Settings
from llmgw.placement.inventory import GIB, Inventory


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
