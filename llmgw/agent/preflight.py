"""Preflight: can this node serve? Rows of `llmgw.agent.rows`, from what discovery saw and from trying things.

Cheap rows are pure functions of the inventory; what must be tried (CUDA, engines, weights) has a life of its own and is
tried again when its inputs change or its time is over. A row that the operator accepts becomes a warning.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence

import attrs
import msgspec
import trio

from llmgw.agent import cuda, rdma, starts
from llmgw.agent import gpus as gpus_
from llmgw.agent.account import Account
from llmgw.agent.command import capture
from llmgw.agent.discover import Discovery, hostname
from llmgw.agent.files import Root
from llmgw.agent.rows import result
from llmgw.agent.weights import Checksums, Problems, inspect
from llmgw.placement.inventory import GIB, Check, CheckLevel, Device, EngineInstall, Inventory, Weights

CUDA_SECONDS = 30.0
CUDA_AGAIN = 600.0  # seconds between two probes of an idle GPU
ENGINES_AGAIN = 900.0
WEIGHTS_AGAIN = 300.0
WEIGHTS_KEPT = 64  # catalogues are small; a node looks for that many references
DISK_RESERVE = 5 * GIB
SHM_NEEDED = GIB
MEMLOCK_NEEDED = GIB
NOFILE_NEEDED = 65536
RESOLVE_SECONDS = 5.0
CLOCK_WARN = 2.0
CLOCK_BLOCK = 60.0


def driver_rows(found: gpus_.Gpus, at: float) -> Iterable[Check]:
    """DRV-1 to DRV-3. A node without NVIDIA devices passes: there is nothing to drive."""
    mismatch = found.state == "failed" and found.code == 18
    failed = found.state == "failed" and not mismatch
    yield result("DRV-1", "node", f"driver: {found.problem}" if failed else "", at=at)
    yield result("DRV-2", "node", f"driver: {found.problem}" if mismatch else "", at=at)
    yield result("DRV-3", "node", f"driver: {found.problem}" if found.state == "partial" else "", at=at)


def gpu_rows(inventory: Inventory, fabric_pending: Sequence[int], at: float) -> Iterable[Check]:
    """GPU-1, 2, 4, 5, 6. *fabric_pending*: indices of GPUs whose NVSwitch fabric is not ready."""
    for d in inventory.devices:
        scope = f"gpu:{d.uuid}"
        said = f"GPU {d.index} ({d.uuid}): {d.reason}"
        mig = d.health == "blocked" and "MIG" in d.reason
        yield result("GPU-1", scope, said if d.health == "blocked" and not mig else "", at=at)
        yield result("GPU-2", scope, said if d.health == "degraded" else "", at=at)
        foreign = [p for p in d.processes if not p.replica]
        held = ", ".join(
            f"{gib(p.memory)} held by pid {p.pid} ({p.name or 'name unknown'}{f', user {p.user}' if p.user else ''})"
            for p in foreign[:4]
        )
        text = f"GPU {d.index}: {held}, not managed by llmgw" if foreign else ""
        yield result("GPU-4", scope, text, at=at)
        yield result("GPU-5", scope, said if mig else "", at=at)
    if any(i.kind == "nvswitch" for i in inventory.islands):
        names = ", ".join(map(str, fabric_pending))
        text = f"the NVSwitch fabric is not ready for GPU {names}: CUDA will fail with 802" if fabric_pending else ""
        yield result("GPU-6", "node", text, at=at)


def gib(size: int | None) -> str:
    return "unknown memory" if size is None else f"{size / GIB:.1f} GiB"


def host_rows(inventory: Inventory, root: Root, own: str | None, at: float) -> Iterable[Check]:
    """CPU, limits, disks, ports, name. *own*: as `resolve` says."""
    host = inventory.host
    slow = host.cpu_level in ("x86-64-v1", "x86-64-v2")
    text = f'CPU has no AVX2/FMA/F16C (model "{host.cpu}"): CPU inference and tokenisation 6-9x slower' if slow else ""
    yield result("CPU-1", "node", text, at=at)
    gpus = len({d.bdf or d.uuid for d in inventory.devices})
    few = host.cores < 2 * gpus
    yield result("CPU-2", "node", f"{host.cores:g} cores for {gpus} GPUs" if few else "", at=at)
    small = host.shm is not None and host.shm < SHM_NEEDED
    text = f"/dev/shm is {(host.shm or 0) >> 20} MiB: tensor parallel engines need 1 GiB" if small else ""
    yield result("LIM-2", "node", text, at=at)
    few = host.nofile is not None and host.nofile < NOFILE_NEEDED
    yield result("LIM-3", "node", f"engines may open {host.nofile} files" if few else "", at=at)
    low, high = inventory.engine_ports
    overlap = low <= host.ephemeral[1] and host.ephemeral[0] <= high and not _reserved(root, low, high)
    text = f"ports {low}-{high} overlap the kernel's own {host.ephemeral[0]}-{host.ephemeral[1]}" if overlap else ""
    yield result("NET-3", "node", text, at=at)
    yield result("NET-2", "node", _name_problem(inventory, own), at=at)
    problems = []
    seen = {d.path for d in inventory.disks}
    for disk in inventory.disks:
        if disk.read_only:
            problems.append(f"{disk.path} is mounted read-only")
        elif disk.free < DISK_RESERVE:
            problems.append(f"{disk.path} has {gib(disk.free)} free")
    yield result("DSK-1", "node", "; ".join(problems), at=at, skipped=not seen)


def _reserved(root: Root, low: int, high: int) -> bool:
    for span in (root.text("/proc/sys/net/ipv4/ip_local_reserved_ports") or "").split(","):
        first, _, last = span.partition("-")
        if first.isdigit() and int(first) <= low and high <= int(last or first):
            return True
    return False


def _name_problem(inventory: Inventory, own: str | None) -> str:
    if inventory.address.startswith("127."):
        return "this node has no address but the loopback's: nobody else can reach its engines"
    if own == "":
        return f"the host's name {inventory.hostname!r} does not resolve: gloo and Ray fail with that"
    if own is not None and own.startswith("127.0.1."):
        return f"{inventory.hostname} resolves to {own}: gloo and Ray would use it"
    return ""


async def resolve(hostname: str) -> str | None:
    """The address that the host's own name leads to; "" if to none, None if nobody answered in time."""
    with trio.move_on_after(RESOLVE_SECONDS):
        try:
            found = await trio.socket.getaddrinfo(hostname, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
        except OSError:
            return ""
        return str(found[0][4][0])
    return None


def rdma_rows(inventory: Inventory, root: Root, at: float) -> Iterable[Check]:
    """IB-1 to IB-4, LIM-1, of every port."""
    for bdf in rdma.unbound_adapters(root):
        text = f"IB: adapter {bdf} present, mlx5_ib not loaded"
        yield result("IB-1", f"fabric:{bdf}", text, fix="modprobe mlx5_ib (package rdma-core)", at=at)
    for port in inventory.ports:
        where = f"{port.device}/{port.port}"
        scope = f"fabric:{where}"
        yield result("IB-1", scope, f"{where}: {port.reason}" if port.reason else "", at=at)
        known = port.fabric or port.sm_guid or port.prefix or port.network
        text = (
            "" if known or port.state != "active" else f"{where}: fabric unknown (default prefix fe80::/64, no label)"
        )
        yield result("IB-2", scope, text, at=at)
        yield result("IB-3", scope, "" if port.usable else f"{where}: its verbs device cannot be opened", at=at)
        locked = inventory.host.memlock
        few = locked is not None and locked < MEMLOCK_NEEDED
        text = f"memlock {(locked or 0) >> 10} kB: RDMA registration will fail" if few else ""
        yield result("LIM-1", scope, text, at=at)
    if inventory.ports and inventory.devices:
        direct = root.exists("/sys/module/nvidia_peermem") or "Open Kernel Module" in (
            root.text("/proc/driver/nvidia/version") or ""
        )
        text = "" if direct else "RDMA works without GPUDirect: expect a third of the bandwidth"
        yield result("IB-4", "node", text, at=at)


def clock_row(offset: float | None, at: float) -> Check:
    """*offset*: this clock minus the server's, seconds; None = no server has been asked."""
    if offset is None:
        return result("CLK-1", "node", "no server to compare with", at=at, skipped=True)
    text = f"clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} the server"
    level: CheckLevel = "block" if abs(offset) > CLOCK_BLOCK else "degrade"
    return result("CLK-1", "node", text if abs(offset) > CLOCK_WARN else "", at=at, level=level)


def weight_rows(ref: str, problems: Problems, at: float) -> Iterable[Check]:
    """One row for each of WGT-1 to WGT-6."""
    for row in ("WGT-1", "WGT-2", "WGT-3", "WGT-4", "WGT-5", "WGT-6"):
        texts = [text for id_, text in problems if id_ == row]
        more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        yield result(row, f"weights:{ref}", texts[0] + more if texts else "", at=at)


def accepted(checks: Iterable[Check], accept: Mapping[str, str]) -> tuple[Check, ...]:
    """Failed rows that the operator accepts, by id, become warnings that say so."""
    return tuple(
        msgspec.structs.replace(c, level="degrade", message=f"{c.message} (accepted by the operator: {accept[c.id]})")
        if not c.ok and c.level == "block" and c.id in accept
        else c
        for c in checks
    )


async def cuda_row(device: Device, user: Account, at: float) -> Check:
    """GPU-3 for one GPU: a child opens it and computes."""
    argv = [sys.executable, "-m", "llmgw.agent.cuda"]
    env = {**user.environment(sys.executable), "CUDA_VISIBLE_DEVICES": device.uuid}
    ran = await capture(argv, CUDA_SECONDS, env, user)
    scope, name = f"gpu:{device.uuid}", f"GPU {device.index}"
    if ran.timed_out:
        return result("GPU-3", scope, f"{name}: the CUDA probe hung for {CUDA_SECONDS:g} s", at=at, took=ran.seconds)
    try:
        said = json.loads(ran.output.splitlines()[-1])
        problem = cuda.describe(str(said["call"]), int(said["code"]))
    except (ValueError, KeyError, IndexError):
        problem = f"the CUDA probe ended with {ran.exit()}"
    return result("GPU-3", scope, f"{name}: {problem}" if problem else "", at=at, took=ran.seconds)


@attrs.define
class Preflight:
    """Keeps what was tried, and tries again when it must. One caller at a time."""

    discovery: Discovery
    user: Account
    cuda: dict[str, tuple[float, Check]] = attrs.field(factory=dict)  # uuid → when, outcome
    engines: dict[str, starts.Found] = attrs.field(factory=dict)
    engines_at: float = float("-inf")
    engines_for: tuple[object, ...] = ()
    weights: dict[str, tuple[float, Weights, Problems]] = attrs.field(factory=dict)
    sums: Checksums = attrs.field(factory=Checksums)
    clock_offset: float | None = None
    own_address: str | None = None  # that the host's name leads to

    async def try_name(self) -> None:
        self.own_address = await resolve(hostname())

    def installs(self) -> tuple[EngineInstall, ...]:
        return tuple(f.install for f in self.engines.values() if f.install is not None)

    async def try_engines(self, wall: float, only: str = "") -> None:
        """Starts every engine's probe where its program, the driver or the GPUs changed, or time is over."""
        settings, found = self.discovery.settings, self.discovery.gpus
        programs = {k: p for k, p in settings.programs().items() if only in ("", k)}
        gpus = tuple(sorted(d.uuid for d in found.devices))
        inputs = (found.driver, gpus, tuple((k, starts.stamp(p)) for k, p in sorted(programs.items())))
        now = trio.current_time()
        if inputs == self.engines_for and now - self.engines_at < ENGINES_AGAIN:
            return
        self.engines = await starts.all_engines(programs, self.user, found.devices, found.driver, wall)
        self.engines_for, self.engines_at = inputs, now
        self.discovery.installs = self.installs()

    async def try_gpus(self, wall: float) -> None:
        """The CUDA probe, on every GPU that nobody uses and that was not probed lately. One after the other: they are
        of one driver, and a hang is to be seen on the GPU that has it."""
        now = trio.current_time()
        for device in self.discovery.gpus.devices:
            last = self.cuda.get(device.uuid)
            if device.vendor != "nvidia" or device.processes or (last is not None and now - last[0] < CUDA_AGAIN):
                continue
            check = await cuda_row(device, self.user, wall)
            self.cuda[device.uuid] = (now, check)
            if check.ok and device.health != "blocked":
                self.discovery.ailments.cured(device.uuid)

    async def try_weights(self, refs: Iterable[str], checksums: bool = False) -> None:
        """Looks at the weights that are asked for; forgets those that are not any more."""
        wanted = list(dict.fromkeys(refs))[:WEIGHTS_KEPT]
        self.weights = {ref: seen for ref, seen in self.weights.items() if ref in wanted}
        for ref in wanted:
            now = trio.current_time()
            if ref in self.weights and now - self.weights[ref][0] < WEIGHTS_AGAIN and not checksums:
                continue
            found, problems = await trio.to_thread.run_sync(
                inspect, ref, self.discovery.settings.weights, self.user, abandon_on_cancel=True
            )
            if checksums and found.path:
                damaged = await trio.to_thread.run_sync(self.sums.verify, found.path, abandon_on_cancel=True)
                problems = [*problems, *damaged]
            self.weights[ref] = (now, found, problems)

    def rows(self, inventory: Inventory, wall: float) -> tuple[Check, ...]:
        """All rows as things stand."""
        found, root = self.discovery.gpus, self.discovery.root
        gpus = {d.uuid for d in inventory.devices}
        checks = [
            *driver_rows(found, wall),
            *gpu_rows(inventory, found.fabric_pending, wall),
            *(check for uuid, (_, check) in self.cuda.items() if uuid in gpus),
            *(check for one in self.engines.values() for check in one.checks),
            *(check for ref, (_, _, problems) in self.weights.items() for check in weight_rows(ref, problems, wall)),
            *host_rows(inventory, root, self.own_address, wall),
            *rdma_rows(inventory, root, wall),
            clock_row(self.clock_offset, wall),
        ]
        return accepted(checks, self.discovery.settings.accept)

    def complete(self, inventory: Inventory, wall: float, checking: bool) -> Inventory:
        """The inventory with weights and checks."""
        return msgspec.structs.replace(
            inventory,
            engines=self.installs(),
            weights=tuple(weights for _, weights, _ in self.weights.values()),
            checks=self.rows(inventory, wall),
            checking=checking,
        )


_ORDER = re.compile(r"([A-Z]+)-(\d+)")


def by_row(check: Check) -> tuple[str, int, str]:
    """For sorting a table."""
    found = _ORDER.fullmatch(check.id)
    return (found[1], int(found[2]), check.scope) if found else (check.id, 0, check.scope)
