"""This node as the agent and its replicas know it: looked at again and again, checked again when something changed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import attrs
import msgspec
import trio

from llmgw.agent.discover import Discovery, changes
from llmgw.agent.preflight import Preflight
from llmgw.agent.state import State
from llmgw.agent.supervise import Refusal, launch_of
from llmgw.control.observed import Desired, Group
from llmgw.engines import ENGINES
from llmgw.engines.base import Launch
from llmgw.engines.network import Kind, fabric_env
from llmgw.errors import ConfigError, Problem
from llmgw.net.world import World
from llmgw.placement.fabrics import evidence
from llmgw.placement.inventory import GIB, Inventory

LOOK_EVERY = 10.0  # seconds between two looks at GPUs, ports, host
CHECK_EVERY = 30.0  # between two rounds of the rows that must be tried, if nothing changes
FIRST_ROUND = 120.0  # for the first round of preflight; what is slower comes with the next
HOST_MEMORY_SPARE = 2 * GIB  # beside the largest file, which is mapped while it is copied
ETHERNET = "ethernet"  # the fabric of groups that the operator lets run without RDMA


@attrs.define
class Node:
    """*members*: processes of our replicas by pid → replica; *ports*: those that they use."""

    discovery: Discovery
    preflight: Preflight
    state: State
    world: World
    log: Callable[[str], None]
    members: Callable[[], Mapping[int, str]] = dict
    ports: Callable[[], frozenset[int]] = frozenset
    wanted: tuple[str, ...] = ()  # references of weights that the server asks for
    inventory: Inventory = attrs.field(factory=lambda: Inventory(node=""))
    checking: bool = True
    changed: trio.Event = attrs.field(factory=trio.Event)  # set and replaced at every look
    _busy: trio.Lock = attrs.field(factory=trio.Lock)  # the NVML helper answers one at a time
    _again: trio.Event = attrs.field(factory=trio.Event)

    # -- looking -----------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Started when the node has been looked at once; checked in the background."""
        await self.look()
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._looking)
            nursery.start_soon(self._checking)

    async def look(self) -> None:
        async with self._busy:
            seen = await self.discovery.look(self.members(), self.ports())
        before = self.inventory
        self._settle(seen)
        if before.node:
            found = changes(before, seen)
            for line in found:
                self.log(line)
            if found:
                self._again.set()

    def _settle(self, seen: Inventory) -> None:
        self.inventory = self.preflight.complete(seen, self.world.wall(), self.checking)
        self.changed.set()
        self.changed = trio.Event()

    async def _looking(self) -> None:
        while True:
            await trio.sleep(LOOK_EVERY)
            await self.look()

    async def _checking(self) -> None:
        while True:
            self._again = trio.Event()
            with trio.move_on_after(FIRST_ROUND) if self.checking else trio.CancelScope():
                await self.check_all()
            self.checking = False
            self._settle(self.inventory)
            with trio.move_on_after(CHECK_EVERY):
                await self._again.wait()

    async def check_all(self) -> None:
        """The rows that must be tried, each as often as it needs."""
        wall = self.world.wall()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.preflight.try_engines, wall)
            nursery.start_soon(self.preflight.try_gpus, wall)
            nursery.start_soon(self.preflight.try_name)
            nursery.start_soon(self.preflight.try_weights, self.wanted)

    def want(self, references: tuple[str, ...]) -> None:
        """The server asks for other weights."""
        if references != self.wanted:
            self.wanted = references
            self._again.set()

    def hurry(self) -> None:
        """Something happened: check again now."""
        self._again.set()

    def inputs(self) -> bytes:
        """What can make a start end otherwise than the last one; compare with an earlier value."""
        seen = self.inventory
        return msgspec.json.encode(
            [
                [(d.uuid, d.health) for d in seen.devices],
                [(p.device, p.port, p.state) for p in seen.ports],
                [(e.name, e.version, e.path) for e in seen.engines],
                [(w.ref, w.digest, w.problem) for w in seen.weights],
                sorted((c.id, c.scope) for c in seen.checks if not c.ok and c.level == "block"),
                seen.driver,
            ]
        )

    # -- the ground of replicas --------------------------------------------------------------------------------------

    async def check(self, desired: Desired) -> Refusal | None:
        while self.checking:  # the first round of preflight: it has an end
            await self.changed.wait()
        self.preflight.weights.pop(desired.weights, None)  # looked at anew, however short ago that was
        await self.preflight.try_weights([*self.wanted, *self._weights_of(desired)])
        await self.look()
        scopes = {f"engine:{desired.engine}", f"weights:{desired.weights}", *(f"gpu:{uuid}" for uuid in desired.gpus)}
        if desired.group is not None:
            scopes |= {f"fabric:{hca.replace(':', '/')}" for hca in desired.group.hcas}
        for check in self.inventory.checks:
            if check.scope in scopes and not check.ok and check.level == "block":
                return Refusal(check.id, f"{check.id}: {check.message} ({check.fix})".replace(" ()", ""))
        known = {d.uuid for d in self.inventory.devices}
        gone = [uuid for uuid in desired.gpus if uuid not in known]
        if gone:
            return Refusal(
                "GPU-1", f"GPU-1: {', '.join(gone)} is not on this node: {self.inventory.gpu_problem}".rstrip(": ")
            )
        return self._memory(desired) or self._gpu_memory(desired)

    def _weights_of(self, desired: Desired) -> tuple[str, ...]:
        return () if desired.engine == "sim" else (desired.weights,)

    def _memory(self, desired: Desired) -> Refusal | None:
        weights = next((w for w in self.inventory.weights if w.ref == desired.weights), None)
        free = self.inventory.host.memory_available
        if weights is None or free is None:
            return None
        need = HOST_MEMORY_SPARE + (weights.largest_file or 0) if desired.gpus else weights.bytes
        if free >= need:
            return None
        text = f"MEM-1: host memory: {free / GIB:.0f} GiB available, loading needs about {need / GIB:.0f} GiB"
        return Refusal("MEM-1", text, "backoff")

    def _gpu_memory(self, desired: Desired) -> Refusal | None:
        """Strangers on the GPU: vLLM refuses to start if less is free than its share."""
        if desired.memory_fraction is None or not ENGINES.make(desired.engine, {}).takes_share:
            return None
        for device in self.inventory.devices:
            if device.uuid not in desired.gpus or device.memory_free is None:
                continue
            need = desired.memory_fraction * device.memory
            if device.memory_free < need:
                holders = (
                    ", ".join(f"pid {p.pid} ({p.name or p.replica})" for p in device.processes) or "nobody visible"
                )
                text = f"GPU-4: GPU {device.index}: {device.memory_free / GIB:.1f} GiB free, {need / GIB:.1f} needed; held by {holders}"
                return Refusal("GPU-4", text, "gpu-free")
        return None

    def launch(self, desired: Desired, key: str) -> Launch:
        settings = self.discovery.settings
        program = settings.programs().get(desired.engine)
        if not program:
            raise ConfigError(
                [Problem(f"engine {desired.engine!r} is not on this node: set `engines` in its settings")]
            )
        weights = next((w.path for w in self.inventory.weights if w.ref == desired.weights and w.path), "")
        if not weights and desired.engine != "sim":
            raise ConfigError([Problem(f"weights {desired.weights!r} are not on this node")])
        return launch_of(
            desired,
            key,
            program=program,
            model=weights or desired.weights,
            host=self.inventory.address,
            folder=str(self.state.folder(desired.replica)),
            fabric_env=self._fabric_env(desired.group) if desired.group is not None else {},
        )

    def _fabric_env(self, group: Group) -> dict[str, str]:
        settings = self.discovery.settings
        layers = {p.layer for p in self.inventory.ports if f"{p.device}:{p.port}" in group.hcas}
        kind: Kind = "roce" if "roce" in layers else "ib"
        if not group.hcas:
            kind = "nvlink" if group.fabric and group.fabric != ETHERNET else "ethernet"
        return fabric_env(kind, group.hcas, settings.interface or default_interface(self), self.inventory.address)

    def version(self, engine: str) -> str:
        return next((e.version for e in self.inventory.engines if e.name == engine), "")

    def fabrics(self, desired: Desired) -> tuple[str, ...]:
        """Of the node's ports: what routing pairs prefill and decode by."""
        if desired.group is not None and desired.group.fabric:
            return (desired.group.fabric,)
        active = [p for p in self.inventory.ports if p.state == "active" and p.usable]
        return tuple(dict.fromkeys(name for p in active if (name := p.fabric or evidence(p))))

    def boot_id(self) -> str:
        return self.inventory.host.boot_id

    def secret(self, size: int) -> str:
        return secrets.token_urlsafe(size)

    def effort(self, desired: Desired) -> float | None:
        powers = [d.power for d in self.inventory.devices if d.uuid in desired.gpus and d.power is not None]
        return sum(powers) if powers else None

    async def still_held(self, desired: Desired, pids: frozenset[int]) -> str:
        await self.look()
        for device in self.inventory.devices:
            held = [p for p in device.processes if p.pid in pids]
            if device.uuid in desired.gpus and held:
                size = sum(p.memory or 0 for p in held) / GIB
                return f"GPU {device.index}: {size:.0f} GiB still held by pid {held[0].pid}"
        return ""


def default_interface(node: Node) -> str:
    """The interface of the default route."""
    for line in (node.discovery.root.text("/proc/net/route") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == "00000000" and fields[7] == "00000000":
            return fields[0]
    return ""
