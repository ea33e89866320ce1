"""GPUs of this node: asks the NVML helper under a deadline, and turns its report into devices, islands and health.

Three states that must not be mistaken for one another: the machine has no NVIDIA device (healthy, CPU only); it has
some and NVML fails (not ready, and why); NVML answers for fewer than PCI lists (partly lost).
"""

from __future__ import annotations

import pwd
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import attrs
import msgspec
import trio

from llmgw.agent.files import Root
from llmgw.agent.nvml import Event, Gpu, Pair, Report
from llmgw.placement.inventory import Device, Health, Island, IslandKind, Process

DEADLINE = 10.0  # seconds for one report; a healthy 8-GPU node needs well under one
KILL_WAIT = 1.0  # seconds; a killed process goes at once, or is stuck in the kernel
LINE_LIMIT = 4 << 20  # bytes of one report; 8 GPUs with 100 processes each are some 100 KB
THROTTLE_GRACE = 60.0  # seconds that a hardware slowdown must last before it counts
HARDWARE_SLOWDOWN = 0x08 | 0x40 | 0x80  # hardware slowdown, hardware thermal, power brake

ERRORS: dict[int, str] = {
    4: "no permission for /dev/nvidia*: add the agent's user to the group that owns them",
    9: "NVIDIA kernel module not loaded (modprobe nvidia; check dkms and secure boot)",
    12: "libnvidia-ml.so.1 not found: NVIDIA driver not installed, or container started without GPU access",
    15: "a GPU has fallen off the bus: reboot needed",
    999: "NVML returned Unknown (999); in a container, access to the devices was revoked: restart it",
}
"""NVML's error number → what it means for an operator. 18 is said with both versions."""

HUNG = -1  # not a number of NVML's

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Caused by the program, not by the GPU."""

XIDS: dict[int, tuple[Health, str]] = {
    46: ("blocked", "GPU stopped processing: reset it"),
    48: ("blocked", "double-bit ECC error: drain and reset it"),
    63: ("degraded", "row remapped: reset it when idle"),
    64: ("blocked", "row remapping failed: replace it"),
    74: ("degraded", "NVLink error: usable alone only, check the link"),
    79: ("blocked", "fallen off the bus: reboot needed"),
    92: ("degraded", "high rate of single-bit ECC errors"),
    95: ("blocked", "uncontained ECC error: reset it"),
    119: ("blocked", "GSP does not answer: reset it"),
    120: ("blocked", "GSP error: reset it"),
}

RECOVERY = {
    1: "reset the GPU", 2: "reboot the node", 3: "drain peer-to-peer work", 4: "drain and reset", 5: "recover the IMEX domain",
    6: "reset the bus", 7: "reboot the system",
}  # fmt: skip


class Helper:
    """The NVML process, replaced when it does not answer. One question at a time (the agent's discovery loop)."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "llmgw.agent.nvml")) -> None:
        self._command = list(command)
        self._process: trio.Process | None = None
        self._stuck: list[trio.Process] = []
        self._decoder = msgspec.json.Decoder(Report)

    async def report(self) -> Report:
        """What NVML says now. Never raises for a driver in trouble: the report says so."""
        with trio.move_on_after(DEADLINE):
            try:
                return await self._ask()
            except (OSError, trio.BrokenResourceError, msgspec.DecodeError, EOFError) as error:
                await self.close()
                return Report(code=HUNG, error=f"the NVML helper ended: {error}")
        await self.close()
        return Report(code=HUNG, error=f"NVML hung: no answer in {DEADLINE:g} s")

    async def _ask(self) -> Report:
        if self._process is None:
            self._process = await trio.lowlevel.open_process(self._command, stdin=-1, stdout=-1)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        await self._process.stdin.send_all(b"?\n")
        line = bytearray()
        while not line.endswith(b"\n"):
            chunk = await self._process.stdout.receive_some(1 << 16)
            if not chunk or len(line) > LINE_LIMIT:
                raise EOFError("its answer ended early")
            line += chunk
        return self._decoder.decode(line)

    async def close(self) -> None:
        """Ends the helper. One stuck in the driver cannot be waited for: it is kept aside until the kernel lets it go."""
        process, self._process = self._process, None
        self._stuck = [p for p in self._stuck if p.poll() is None]
        if process is None:
            return
        process.kill()
        for stream in (process.stdin, process.stdout):
            if isinstance(stream, trio.lowlevel.FdStream):
                stream.close()
        with trio.move_on_after(KILL_WAIT, shield=True):
            await process.wait()
            return
        self._stuck.append(process)


def pci_gpus(root: Root) -> tuple[str, ...]:
    """PCI addresses of NVIDIA display and 3D controllers."""
    base = "/sys/bus/pci/devices"
    return tuple(
        bdf
        for bdf in root.names(base)
        if root.text(f"{base}/{bdf}/vendor") == "0x10de"
        and (root.text(f"{base}/{bdf}/class") or "").startswith(("0x0300", "0x0302"))
    )


@attrs.define
class Ailments:
    """What NVML tells once and forgets: Xids, and since when a slowdown lasts. Kept until the machine reboots."""

    xids: dict[str, tuple[int, float]] = attrs.field(factory=dict)  # uuid → worst Xid and its wall time
    slow_since: dict[str, float] = attrs.field(factory=dict)

    def note(self, report: Report, now: float) -> None:
        """*now*: any clock that runs evenly."""
        for event in report.events:
            if event.xid in XIDS and self._worse(event):
                self.xids[event.uuid] = (event.xid, event.at)
        for gpu in report.gpus:
            if (gpu.clock_reasons or 0) & HARDWARE_SLOWDOWN:
                self.slow_since.setdefault(gpu.uuid, now)
            else:
                self.slow_since.pop(gpu.uuid, None)

    def _worse(self, event: Event) -> bool:
        known = self.xids.get(event.uuid)
        return known is None or XIDS[known[0]][0] != "blocked" or XIDS[event.xid][0] == "blocked"

    def cured(self, uuid: str) -> None:
        """A CUDA probe passed and the driver asks for nothing: what was noted is over."""
        self.xids.pop(uuid, None)


@attrs.frozen
class Gpus:
    """GPU part of the inventory."""

    devices: tuple[Device, ...] = ()
    islands: tuple[Island, ...] = ()
    driver: str = ""
    cuda: str = ""
    library: str = ""
    problem: str = ""  # GPUs are there and cannot be read, or not all of them
    missing: tuple[str, ...] = ()  # PCI addresses that NVML does not know
    state: Literal["none", "ok", "partial", "failed"] = "none"
    code: int = 0  # NVML's number, where it failed
    fabric_pending: tuple[int, ...] = ()  # GPUs behind NVSwitch whose fabric is not ready


def problem_of(report: Report, root: Root) -> str:
    """One line on why NVML failed."""
    if report.code == 18:
        loaded = root.text("/sys/module/nvidia/version") or "unknown"
        library = report.driver or report.library.rpartition(".so.")[2] or "another version"
        return f"driver library {library} does not match loaded kernel module {loaded}; reboot or reload the modules"
    return ERRORS.get(report.code) or report.error or f"NVML error {report.code}"


def assemble(
    report: Report, root: Root, ailments: Ailments, now: float, replicas: Mapping[int, str] | None = None
) -> Gpus:
    """*replicas*: process id → the replica of ours it belongs to."""
    pci = pci_gpus(root)
    if report.code:
        if report.code == 12 and not pci:
            return Gpus()
        return Gpus(
            driver=report.driver, library=report.library, problem=problem_of(report, root), missing=pci, state="failed",
            code=report.code,
        )  # fmt: skip
    known = {g.bdf for g in report.gpus if g.uuid}
    missing = tuple(bdf for bdf in pci if bdf not in known)
    lost = [g for g in report.gpus if not g.uuid]
    islands = islands_of(report.gpus, report.pairs)
    home = {uuid: island.id for island in islands for uuid in island.gpus}
    devices = tuple(
        device for gpu in report.gpus if gpu.uuid for device in _devices(gpu, home, root, ailments, now, replicas or {})
    )
    problem = ""
    if missing or lost:
        total = max(len(pci), len(report.gpus))
        names = ", ".join(missing) or ", ".join(f"index {g.index}" for g in lost)
        problem = f"{total - max(len(missing), len(lost))} of {total} GPUs answer NVML; missing {names}"
    return Gpus(
        devices=devices,
        islands=islands,
        driver=report.driver,
        cuda=report.cuda,
        library=report.library,
        problem=problem,
        missing=missing,
        state="none" if not report.gpus and not pci else "partial" if problem else "ok",
        fabric_pending=tuple(g.index for g in report.gpus if g.fabric_state in (1, 2)),
    )


def _devices(
    gpu: Gpu, home: Mapping[str, str], root: Root, ailments: Ailments, now: float, replicas: Mapping[int, str]
) -> Iterable[Device]:
    """The GPU, or its MIG instances. A GPU in MIG mode without instances stays, blocked: it has to be seen."""
    health, reason = health_of(gpu, ailments, now)
    processes = tuple(
        Process(pid=h.pid, memory=h.memory, replica=replicas.get(h.pid, ""), **_owner(root, h.pid)) for h in gpu.holders
    )
    numa = gpu.numa if gpu.numa is not None else root.number(f"/sys/bus/pci/devices/{gpu.bdf}/numa_node")
    unified = gpu.memory is None
    total = gpu.memory if gpu.memory is not None else meminfo(root, "MemTotal") or 0
    free = gpu.memory_free if not unified else meminfo(root, "MemAvailable")
    whole = Device(
        uuid=gpu.uuid,
        index=gpu.index,
        name=gpu.name,
        memory=total,
        memory_free=free,
        capability=gpu.capability,
        island=home.get(gpu.uuid, ""),
        bdf=gpu.bdf,
        numa=None if numa is None or numa < 0 else numa,
        minor=gpu.minor,
        serial=gpu.serial,
        unified_memory=unified,
        nvlink_domain=_domain(gpu),
        health=health,
        reason=reason,
        processes=processes,
        temperature=gpu.temperature,
        power=None if gpu.power_mw is None else gpu.power_mw / 1000,
        power_limit=None if gpu.power_limit_mw is None else gpu.power_limit_mw / 1000,
        utilisation=None if gpu.utilisation is None else gpu.utilisation / 100,
    )
    if not gpu.migs:
        return [whole]
    return [
        msgspec.structs.replace(
            whole,
            uuid=part.uuid,
            name=gpu.name,
            memory=part.memory,
            memory_free=part.memory_free,
            mig=part.name.rpartition("MIG ")[2],
            island="",
            processes=(),
        )
        for part in gpu.migs
    ]


def _domain(gpu: Gpu) -> str:
    """The multi-node NVLink domain, spelled as the GPU operator's node label does; "" = none."""
    raw = gpu.fabric_cluster
    if gpu.fabric_state != 3 or gpu.fabric_status != 0 or not raw.strip("0"):
        return ""
    return f"{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}.{gpu.fabric_clique}"


def health_of(gpu: Gpu, ailments: Ailments, now: float) -> tuple[Health, str]:
    """The worst thing there is to say of a GPU."""
    xid = ailments.xids.get(gpu.uuid)
    if xid is not None and XIDS[xid[0]][0] == "blocked":
        return "blocked", f"Xid {xid[0]} ({XIDS[xid[0]][1]})"
    if gpu.recovery:
        return "blocked", f"the driver asks: {RECOVERY.get(gpu.recovery, f'recovery action {gpu.recovery}')}"
    if gpu.remap_failed:
        return "blocked", "row remapping failed: replace the GPU"
    lost = next((code for code in gpu.errors.values() if code in (15, 16)), None)
    if lost is not None:
        return "blocked", ERRORS[15] if lost == 15 else "the GPU needs a reset"
    if gpu.compute_mode == 2:
        return "blocked", "compute mode is prohibited (nvidia-smi -c DEFAULT)"
    if gpu.mig_current is not None and gpu.mig_current != gpu.mig_pending:
        return "blocked", "MIG mode changes at the next reset: reset the GPU"
    if gpu.mig_current == 1 and not gpu.migs:
        return "blocked", "MIG enabled, no instance created: 0 usable (nvidia-smi mig -cgi … -C, or nvidia-smi -mig 0)"
    if xid is not None:
        return "degraded", f"Xid {xid[0]} ({XIDS[xid[0]][1]})"
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        return "degraded", f"PCIe x{gpu.pcie_width} of x{gpu.pcie_width_max}: reseat the card"
    since = ailments.slow_since.get(gpu.uuid)
    if since is not None and now - since >= THROTTLE_GRACE:
        heat = "" if gpu.temperature is None else f" at {gpu.temperature} °C"
        return "degraded", f"hardware slowdown{heat}: check cooling and power"
    if gpu.remap_pending:
        return "degraded", "row remapping waits for a reset"
    if gpu.ecc_uncorrected:
        return "degraded", f"{gpu.ecc_uncorrected} uncorrected ECC errors since the driver was loaded"
    return "ok", ""


def islands_of(gpus: Sequence[Gpu], pairs: Sequence[Pair]) -> tuple[Island, ...]:
    """Groups of at least two GPUs: by NVLink where there is any, else by the PCIe tree of one socket."""
    whole = {g.index: g for g in gpus if g.uuid}
    by_bdf = {g.bdf: g.index for g in whole.values()}
    edges: dict[frozenset[int], int] = {}
    switched = [g.index for g in whole.values() if any(link.kind == "switch" for link in g.links)]
    for gpu in whole.values():
        for link in gpu.links:
            other = by_bdf.get(link.bdf) if link.kind == "gpu" else None
            if other is not None and other != gpu.index:
                edge = frozenset({gpu.index, other})
                edges[edge] = edges.get(edge, 0) + 1
    edges = {edge: count // 2 or 1 for edge, count in edges.items()}  # both ends counted each link
    for n, a in enumerate(switched):
        for b in switched[n + 1 :]:
            edges[frozenset({a, b})] = min(len(whole[a].links), len(whole[b].links))
    for pair in pairs:
        hidden = not whole[pair.a].links and not whole[pair.b].links if {pair.a, pair.b} <= set(whole) else False
        if hidden and pair.nvlink:  # a virtual machine: links are not shown, peer access is
            edges.setdefault(frozenset({pair.a, pair.b}), 0)
    found: list[tuple[IslandKind, list[int], int]] = []
    for members in _components(whole, edges):
        links = min(count for edge, count in edges.items() if edge <= set(members))
        kind: IslandKind = (
            "nvswitch" if set(members) & set(switched) else "nvlink-pair" if len(members) == 2 else "nvlink-mesh"
        )
        found.append((kind, members, links))
    taken = {i for _, members, _ in found for i in members}
    levels = {
        frozenset({p.a, p.b}): p.level
        for p in pairs
        if p.level is not None and p.level <= 30 and not {p.a, p.b} & taken and {p.a, p.b} <= set(whole)
    }
    for members in _components([i for i in whole if i not in taken], levels):
        worst = max(level for edge, level in levels.items() if edge <= set(members))
        found.append(("pix" if worst <= 10 else "pxb" if worst <= 20 else "phb", members, 0))
    found.sort(key=lambda f: f[1])
    return tuple(
        Island(id=f"{kind}-{n}", kind=kind, gpus=tuple(whole[i].uuid for i in members), links=links)
        for n, (kind, members, links) in enumerate(found)
    )


def _components(nodes: Iterable[int], edges: Iterable[frozenset[int]]) -> list[list[int]]:
    """Connected components of at least two nodes, each sorted."""
    group = {n: {n} for n in nodes}
    for edge in edges:
        a, b = sorted(edge)
        if group[a] is not group[b]:
            group[a] |= group[b]
            for n in group[b]:
                group[n] = group[a]
    return sorted(sorted(members) for members in {id(g): g for g in group.values()}.values() if len(members) > 1)


def meminfo(root: Root, key: str) -> int | None:
    """Bytes of a row of /proc/meminfo."""
    for line in (root.text("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    return None


def _owner(root: Root, pid: int) -> dict[str, str]:
    """Name and user of a process; nothing where it cannot be seen (another pid namespace)."""
    name = root.text(f"/proc/{pid}/comm") or ""
    user = ""
    for line in (root.text(f"/proc/{pid}/status") or "").splitlines():
        if line.startswith("Uid:"):
            uid = int(line.split()[1])
            try:
                user = pwd.getpwuid(uid).pw_name
            except KeyError:
                user = str(uid)
    return {"name": name, "user": user}
