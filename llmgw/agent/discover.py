"""What this node is: GPUs, RDMA ports, host, disks, engines, put together into one `Inventory`."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping
from typing import Self

import attrs
import trio

from llmgw import __version__
from llmgw.agent import gpus, host, rdma
from llmgw.agent.files import Root
from llmgw.agent.gpus import KILL_WAIT
from llmgw.agent.settings import Settings
from llmgw.placement.inventory import Disk, EngineInstall, Inventory

PORTS_TAKEN_KEPT = 256  # of the engines' span; a node with more strangers there has another problem


@attrs.define
class Discovery:
    """Looks at the node, again and again. Owns the NVML helper, and ends it when it is left."""

    settings: Settings
    root: Root = attrs.field(factory=Root)
    helper: gpus.Helper = attrs.field(factory=gpus.Helper)
    ailments: gpus.Ailments = attrs.field(factory=gpus.Ailments)
    gpus: gpus.Gpus = attrs.field(factory=gpus.Gpus)
    installs: tuple[EngineInstall, ...] = ()  # as the engines' preflight found them

    async def look(self, replicas: Mapping[int, str] | None = None, ours: frozenset[int] = frozenset()) -> Inventory:
        """The inventory now, without weights and checks. *replicas*: pid → replica; *ours*: ports of our engines."""
        report = await self.helper.report()
        now = trio.current_time()
        self.ailments.note(report, now)
        self.gpus = gpus.assemble(report, self.root, self.ailments, now, replicas)
        return self._put_together(ours)

    def _put_together(self, ours: frozenset[int]) -> Inventory:
        settings, found = self.settings, self.gpus
        low, high = settings.span()
        disks = [d for path in settings.weights if (d := host.read_disk(self.root, path)) is not None]
        unique: dict[str, Disk] = {d.path: d for d in disks}
        return Inventory(
            node=settings.node or hostname(),
            agent_version=__version__,
            hostname=hostname(),
            address=settings.address or default_address(),
            os=os_name(self.root),
            driver=found.driver,
            cuda=found.cuda,
            gpu_library=found.library,
            gpu_problem=found.problem,
            devices=found.devices,
            islands=found.islands,
            ports=rdma.read_ports(self.root, [f.rule() for f in settings.fabrics], found.devices),
            host=host.read_host(self.root),
            disks=tuple(unique.values()),
            engines=self.installs,
            labels=dict(settings.labels),
            taints=settings.taints,
            engine_ports=(low, high),
            ports_taken=tuple(sorted(set(host.listening_ports(self.root, low, high)) - ours))[:PORTS_TAKEN_KEPT],
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        with trio.move_on_after(2 * KILL_WAIT, shield=True):
            await self.helper.close()


def hostname() -> str:
    return socket.gethostname().partition(".")[0]


def os_name(root: Root) -> str:
    for line in (root.text("/etc/os-release") or "").splitlines():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return value.strip('"')
    return platform.system()


def default_address() -> str:
    """The address that the default route would be used from; no packet is sent. 127.0.0.1 without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: routed like any foreign address
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def changes(before: Inventory, after: Inventory) -> list[str]:
    """What came, went or changed its health between two looks, one line each, for the log."""
    lines = []
    old, new = {d.uuid: d for d in before.devices}, {d.uuid: d for d in after.devices}
    lines += [
        f"GPU {d.index} ({d.uuid}) disappeared: {after.gpu_problem}".rstrip(": ")
        for u, d in old.items()
        if u not in new
    ]
    lines += [f"GPU {d.index} ({d.uuid}) appeared: {d.name}" for u, d in new.items() if u not in old]
    lines += [
        f"GPU {d.index} ({d.uuid}) is {d.health}: {d.reason}".rstrip(": ")
        for u, d in new.items()
        if u in old and (d.health, d.reason) != (old[u].health, old[u].reason)
    ]
    ports_before = {(p.device, p.port): p for p in before.ports}
    ports_after = {(p.device, p.port): p for p in after.ports}
    lines += [f"port {d}/{n} disappeared" for d, n in ports_before if (d, n) not in ports_after]
    lines += [f"port {d}/{n} appeared" for d, n in ports_after if (d, n) not in ports_before]
    for where, port in ports_after.items():
        was = ports_before.get(where)
        if was is not None and (was.state, was.rate, was.fabric) != (port.state, port.rate, port.fabric):
            lines.append(
                f"port {port.device}/{port.port} is {port.state}, {port.rate:g} Gb/s: {port.reason}".rstrip(": ")
            )
    return lines
