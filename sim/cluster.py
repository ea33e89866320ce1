"""The http level: a whole cluster in one process. Everything is real but the clock and the wires.

    engines (llmgw.simengine.server)  ◄── HTTP ──  gateway (llmgw.server)  ◄── HTTP ──  clients (sim.clients)

Order of a run: engines listen · the gateway starts and finds them · load begins at virtual time 0 of the records · faults come
when they are due · the last session ends (or `grace` is over) · what should be empty is looked at · the gateway drains · all
is closed. What each part says of every request is handed to `sim.checkers`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import msgspec
import trio
import yaml
from trio.testing import MockClock

from llmgw import config
from llmgw.errors import ConfigError, Problem
from llmgw.server.gateway import Gateway
from llmgw.simengine.server import Engine
from llmgw.units import Tcp

from .checkers import Evidence, check
from .clients import Clients, Switchboard
from .determinism import deterministic
from .load import Session
from .network import Link, Network
from .records import Result, Sample
from .scenario import EngineGroup, Fault, Scenario

GATEWAY = "gateway"
PORT = 8000
READY = 120.0
"""Virtual seconds after which engines that the gateway does not find are a failure of the scenario."""
SETTLE = 2.0
"""Virtual seconds after the last answer for aborts and closings to arrive."""


class MemoryLog:
    """Where the gateway's log goes (`llmgw.logs.Target`)."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    async def wait(self) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        pass

    def lines(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in bytes(self._data).splitlines()]


@attrs.define(eq=False)
class Host:
    """One engine's machine: what runs there may die and come back."""

    name: str
    group: EngineGroup
    journal: list[bytes] = attrs.Factory(list)
    engine: Engine | None = None
    scope: trio.CancelScope | None = None
    lives: list[Engine] = attrs.Factory(list)  # every engine that ran here
    muted: bool = False


class Cluster:
    """A scenario under way. `run` once, inside trio."""

    def __init__(self, scenario: Scenario, seed: int, progress: Callable[[float, int, int], None] | None) -> None:
        self.scenario = scenario
        self.seed = seed
        self.result = Result()
        self.log = MemoryLog()
        self.hosts = {name: Host(name, group) for name, group in scenario.groups()}
        self._progress = progress
        self._start = 0.0
        self.sessions = sessions_of(scenario, seed)

    def note(self, what: str) -> None:
        self.result.seen[what] += 1

    async def run(self) -> Result:
        server = server_of(self.scenario)
        tasks, descriptors = _tasks(), _descriptors()
        async with trio.open_nursery() as everything:
            network = Network(self.seed, everything, self.scenario.latency)
            for target in {fault.target for fault in self.scenario.faults if fault.kind == "link"}:
                for name in self.hosts if target == "*" else [target]:
                    network.link(name).wired = True
            board = Switchboard()
            await everything.start(board.run)
            for host in self.hosts.values():
                await self._boot(host, network, everything)
            gateway = Gateway(server, network.host(GATEWAY), self.log)
            await everything.start(gateway.run)
            with trio.move_on_after(READY) as ready:
                await gateway.wait_serving(len(self.hosts))
            if ready.cancelled_caught:
                raise ConfigError([Problem(f"the gateway found not all {len(self.hosts)} engines in {READY:g} s")])
            self._start = trio.current_time()
            clients = Clients(network.host("clients"), board, Tcp(GATEWAY, 8080), self.result.records, self.note)
            with trio.CancelScope() as beside:
                async with trio.open_nursery() as watching:
                    watching.start_soon(self._sample, clients)
                    for fault in self.scenario.faults:
                        watching.start_soon(self._fault, fault, network, everything)
                    await self._load(clients)
                    beside.cancel()
            self.result.end = trio.current_time() - self._start
            await trio.sleep(SETTLE)
            evidence = Evidence(
                journals={
                    name: [msgspec.json.decode(line) for line in host.journal] for name, host in self.hosts.items()
                },
                killed={name for name, host in self.hosts.items() if len(host.lives) > 1 or host.engine is None},
                left=self._left(gateway),
            )
            gateway.drain()
            await trio.sleep(SETTLE)
            self._note_engines()
            everything.cancel_scope.cancel("the rehearsal is over")
        evidence.log = [line for line in self.log.lines() if line.get("kind") == "request"]
        evidence.bugs = [line for line in self.log.lines() if line.get("event") == "bug"]
        await trio.lowlevel.checkpoint()
        for what, before, after in (("tasks", tasks, _tasks()), ("descriptors", descriptors, _descriptors())):
            if after != before:
                evidence.left.append(f"{after - before:+} {what} at the end")
        for record in self.result.records:
            record.at, record.end = record.at - self._start, record.end - self._start
            record.first = record.first - self._start if record.first >= 0 else -1.0
            record.last = record.last - self._start if record.last >= 0 else -1.0
        check(self.scenario, self.result, evidence)
        return self.result

    # Engines

    async def _boot(self, host: Host, network: Network, nursery: trio.Nursery) -> None:
        options = attrs.evolve(host.group.options(self.seed), listen=(f"{host.name}:{PORT}",))
        engine = Engine(options, network.host(host.name), host.journal.append)
        engine.mute = host.muted
        host.engine = engine
        host.lives.append(engine)
        scope = host.scope = trio.CancelScope()

        async def life(*, task_status: trio.TaskStatus[list[str]]) -> None:
            with scope:
                async with trio.open_nursery() as inside:
                    task_status.started(await inside.start(engine.serve))

        await nursery.start(life)

    def _left(self, gateway: Gateway) -> list[str]:
        """What should be empty and is not, while all is quiet."""
        found = []
        for name, host in self.hosts.items():
            engine = host.engine
            if engine is None:
                continue
            core = engine.core
            for what, value in (
                ("requests", engine.load),
                ("running sequences", core.running),
                ("waiting sequences", core.waiting),
                ("used blocks", core.pool.used - core.pinned),
            ):
                if value:
                    found.append(f"{name}: {value} {what} at the end")
            if core.pinned:  # a prefill keeps them for a while if its decode never came
                self.note("pinned_left")
        if gateway.brain.inflight:
            found.append(f"gateway: {gateway.brain.inflight} requests in flight at the end")
        for relay in gateway.relays:
            if relay.inflight:
                found.append(f"gateway: {relay.inflight} exchanges at the end")
        fleet = gateway.fleet
        for place, view in zip(fleet.places.values(), fleet.router.snapshot(trio.current_time()).views, strict=True):
            for what in ("inflight", "prefill_tokens", "decode_tokens"):
                if value := getattr(view, what):
                    found.append(f"gateway: {what} of {place.endpoint.name} is {value} at the end")
        return found

    def _note_engines(self) -> None:
        for name, host in self.hosts.items():
            total: Counter[str] = Counter()
            busy = 0.0
            for engine in host.lives:
                telemetry = engine.core.telemetry
                busy += telemetry.busy
                total.update(
                    prompt_tokens=telemetry.prompt_tokens,
                    cached_tokens=telemetry.prefix_hits,
                    generation_tokens=telemetry.generation_tokens,
                    preemptions=telemetry.preemptions,
                    steps=telemetry.steps,
                )
            self.result.engines[name] = {**total, "busy": busy}

    # Load

    async def _load(self, clients: Clients) -> None:
        """All sessions, each from its time; then until the last has ended, or `grace` is over."""
        async with trio.open_nursery() as nursery:
            for session in self.sessions:
                shifted = attrs.evolve(session, at=session.at + self._start, until=session.until + self._start)
                await trio.sleep_until(shifted.at)
                nursery.start_soon(clients.session, shifted)
            nursery.cancel_scope.deadline = trio.current_time() + self._longest() + self.scenario.grace
        if nursery.cancel_scope.cancelled_caught:
            self.result.problems.append(f"sessions were still open {self.scenario.grace:g} s after the load had ended")

    def _longest(self) -> float:
        """How long closed loops go on after the last session has begun."""
        return max(load.start + load.duration for load in self.scenario.load)

    async def _sample(self, clients: Clients) -> None:
        while True:
            now = trio.current_time() - self._start
            for name, host in self.hosts.items():
                if host.engine is not None:
                    gauges = host.engine.core.gauges()
                    waiting = gauges.waiting + gauges.deferred
                    self.result.samples.append(Sample(now, name, gauges.running, waiting, gauges.kv_usage))
                    if waiting:
                        self.note("engine_queue")
            if self._progress is not None:
                self._progress(now, len(self.result.records), clients.active)
            await trio.sleep(self.scenario.sample)

    # Faults

    async def _fault(self, fault: Fault, network: Network, everything: trio.Nursery) -> None:
        await trio.sleep_until(self._start + fault.at)
        self.note(fault.kind)
        undo = self._begin(fault, network)
        if fault.lasts is None:
            return
        await trio.sleep(fault.lasts)
        if fault.kind in ("kill", "restart"):
            await self._boot(self.hosts[fault.target], network, everything)
        else:
            undo()

    def _begin(self, fault: Fault, network: Network) -> Callable[[], None]:
        """Starts it; returns what ends it."""
        if fault.kind == "skew":
            network.skew[fault.target] = fault.seconds
            return partial(network.skew.__setitem__, fault.target, 0.0)
        if fault.kind == "link":
            links = [network.link(name) for name in (self.hosts if fault.target == "*" else [fault.target])]
            for link in links:
                if fault.mode == "latency":
                    link.change(latency=fault.latency)
                elif fault.mode == "clog":
                    link.change(clogged=True)
                else:
                    link.change(cut=True)
            return partial(_mend, links, self.scenario.latency)
        host = self.hosts[fault.target]
        engine = host.engine
        if fault.kind in ("kill", "restart"):
            if host.scope is not None:
                host.scope.cancel("killed by the scenario")
            host.engine = None
            return lambda: None
        if engine is None:
            return lambda: None
        if fault.kind == "stall":
            engine.stall(True)
            return partial(engine.stall, False)
        if fault.kind == "slow":
            engine.slow(fault.factor)
            return partial(engine.slow, 1.0)
        host.muted = engine.mute = True

        def unmute() -> None:
            host.muted = False
            if host.engine is not None:
                host.engine.mute = False

        return unmute


def server_of(scenario: Scenario) -> config.Server:
    """The server's configuration: the scenario's parts, and an endpoint for each engine."""
    endpoints = [
        {
            "name": name,
            "url": f"http://{name}:{PORT}",
            "models": [group.model],
            "phases": list(group.phases),
            **({"fabrics": list(group.fabrics)} if group.fabrics else {}),
            "engine": "sim",
        }
        for name, group in scenario.groups()
    ]
    given = {
        "version": 1,
        "listeners": [{"address": f"{GATEWAY}:8080"}],
        "admin": {"addresses": []},
        **scenario.server,
        "endpoints": endpoints,
    }
    return config.parse(yaml.safe_dump(given, sort_keys=False), f"server of scenario {scenario.name}")


def _mend(links: list[Link], latency: float) -> None:
    for link in links:
        link.change(latency=latency, clogged=False, cut=False)


def sessions_of(scenario: Scenario, seed: int) -> list[Session]:
    """Everything that clients will do, by time. Who names no model means the first engine's."""
    model = scenario.engines[0].model
    found = [session for load in scenario.load for session in load.sessions(seed)]
    return sorted(
        (attrs.evolve(session, model=session.model or model) for session in found), key=lambda session: session.at
    )


def _tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def run(
    scenario: Scenario, seed: int | None = None, progress: Callable[[float, int, int], None] | None = None
) -> Result:
    """Rehearse *scenario* at the http level. *progress* is called with (virtual seconds, requests so far, open sessions)."""
    seed = scenario.seed if seed is None else seed
    cluster = Cluster(scenario, seed, progress)
    with deterministic(seed):
        result: Result = trio.run(cluster.run, clock=MockClock(autojump_threshold=0))
    return result
