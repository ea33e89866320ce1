"""`llmgw agent`, put together: node, link, and a supervisor for every replica.

    services     node: looks and checks · link: sync, renew · log
    replicas     one task each; the server's full desired set is compared with them at every answer

Level-triggered: what runs and is not desired is stopped, another epoch replaces, lower ones are refused. The agent's own
end leaves every engine as it is; the next life adopts them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from functools import partial

import attrs
import trio

from llmgw.agent.account import Account, account
from llmgw.agent.discover import Discovery, hostname
from llmgw.agent.engine_host import EngineHost
from llmgw.agent.files import Root
from llmgw.agent.gpus import Ailments
from llmgw.agent.link import Link
from llmgw.agent.local import LocalHost, raise_limits
from llmgw.agent.node import Node
from llmgw.agent.preflight import Preflight
from llmgw.agent.settings import Settings
from llmgw.agent.state import REPLICA_NAME, Record, State
from llmgw.agent.supervise import Ground, Supervisor
from llmgw.control.observed import Answer, Desired, LogLines, Observed, Run
from llmgw.errors import ConfigError, Problem
from llmgw.logs import Log, open_descriptor
from llmgw.net.client import Client
from llmgw.net.world import RealWorld, Tcp, World

ORPHAN_GRACE = 30.0  # seconds for requests in flight of a replica that is no longer desired
INPUTS_EVERY = 5.0  # seconds between two looks at what can make a failed start succeed
GONE_KEPT = 256  # replicas whose end has not been told yet


class Replicas:
    """All supervisors of this node, and what follows from an answer. Used by one task nursery, the agent's."""

    def __init__(
        self, state: State, host: EngineHost, ground: Ground, client: Client, world: World, log: Callable[[str], None]
    ) -> None:  # fmt: skip
        self._state, self._host, self._ground, self._client, self._world, self._log = (
            state, host, ground, client, world, log,
        )  # fmt: skip
        self.running: dict[str, Supervisor] = {}
        self.refused: tuple[str, ...] = ()
        self.changed = trio.Event()
        self._next: dict[str, Desired] = {}  # to be started when what runs under the same name is gone
        self._gone: dict[str, Run] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Adopts what an earlier life left behind, then waits for `apply`. Cancelling it leaves the engines running."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for record in tuple(self._state.records.values()):
                    self._begin(record.desired, record)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    def apply(self, desired: tuple[Desired, ...], settled: bool) -> None:
        """The full set. Refuses lower epochs, one by one."""
        refused, wanted = [], {}
        for one in desired:
            if not REPLICA_NAME.fullmatch(one.replica) or not self._state.accepts_epoch(one):
                refused.append(one.replica)
            else:
                wanted[one.replica] = one
        self.refused = tuple(refused)
        for name, supervisor in self.running.items():
            asked = wanted.get(name)
            if asked is None:
                if settled and name not in refused:
                    self._next.pop(name, None)
                    supervisor.stop(ORPHAN_GRACE)
            elif asked.epoch > supervisor.desired.epoch:
                self._next[name] = asked
                supervisor.stop(asked.grace)
            elif asked.goal == "stop":
                self._next.pop(name, None)
                supervisor.stop(asked.grace)
        for name, asked in wanted.items():
            if name not in self.running and asked.goal == "run":
                self._begin(asked, None)

    def _begin(self, desired: Desired, record: Record | None) -> None:
        if self._nursery is None:
            return
        supervisor = Supervisor(desired, self._host, self._ground, self._client, self._world, self._log)
        supervisor.leave()  # the agent's end, however it comes, is not the engine's
        self.running[desired.replica] = supervisor
        self._gone.pop(desired.replica, None)
        self._nursery.start_soon(self._one, supervisor, record)
        self.notify()

    async def _one(self, supervisor: Supervisor, record: Record | None) -> None:
        name = supervisor.desired.replica
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pass_on, supervisor)
            await supervisor.run(record)
            nursery.cancel_scope.cancel("the replica is gone")
        del self.running[name]
        while len(self._gone) >= GONE_KEPT:
            del self._gone[next(iter(self._gone))]
        self._gone[name] = supervisor.observed()
        self.notify()
        following = self._next.pop(name, None)
        if following is not None and following.goal == "run":
            self._begin(following, None)

    async def _pass_on(self, supervisor: Supervisor) -> None:
        while True:
            await supervisor.changed.wait()
            self.notify()

    def notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    def runs(self) -> tuple[Run, ...]:
        return (*(s.observed() for s in self.running.values()), *self._gone.values())

    def told(self, runs: tuple[Run, ...]) -> None:
        """The server has heard of *runs*: those that are gone need not be told again."""
        for run in runs:
            if run == self._gone.get(run.replica):
                del self._gone[run.replica]

    def logs(self, wanted: Mapping[str, int]) -> tuple[LogLines, ...]:
        found = (self.running[name].lines_since(number) for name, number in wanted.items() if name in self.running)
        return tuple(lines for lines in found if lines is not None and lines.lines)

    def inputs_changed(self) -> None:
        for supervisor in self.running.values():
            supervisor.inputs_changed()

    def stop_all(self) -> None:
        for supervisor in self.running.values():
            supervisor.stop(ORPHAN_GRACE)

    def members(self) -> Mapping[int, str]:
        return {pid: name for name, s in self.running.items() for pid in s.pids()}

    def ports(self) -> frozenset[int]:
        return frozenset(port for s in self.running.values() for port in s.ports())

    def references(self) -> tuple[str, ...]:
        return tuple(s.desired.weights for s in self.running.values() if s.desired.engine != "sim")


@attrs.define
class NodeAgent:
    """What the link talks to."""

    state: State
    node: Node
    replicas: Replicas

    @property
    def changed(self) -> trio.Event:
        return self.replicas.changed

    def observe(self) -> Observed:
        return Observed(inventory=self.node.inventory, runs=self.replicas.runs())

    @property
    def term(self) -> int:
        return self.state.memory.term

    @property
    def refused(self) -> tuple[str, ...]:
        return self.replicas.refused

    def logs(self, wanted: Mapping[str, int]) -> tuple[LogLines, ...]:
        return self.replicas.logs(wanted)

    def obey(self, answer: Answer) -> bool:
        if not self.state.accepts_term(answer.term):
            return False
        references = dict.fromkeys((*answer.weights, *(d.weights for d in answer.desired if d.engine != "sim")))
        self.node.want(tuple(references))
        self.replicas.apply(answer.desired, answer.settled)
        return True

    def told(self, observed: Observed) -> None:
        self.replicas.told(observed.runs)

    def clock(self, offset: float) -> None:
        self.node.preflight.clock_offset = offset

    async def watch_inputs(self) -> None:
        """A failure that would repeat itself is tried again when the node is not as it was."""
        before = self.node.inputs()
        while True:
            await self.node.changed.wait()
            now = self.node.inputs()
            if now != before:
                before = now
                self.replicas.inputs_changed()
                self.replicas.notify()
            await trio.sleep(INPUTS_EVERY)

    async def remember_ailments(self) -> None:
        """GPU errors that NVML tells once are kept over a restart, until the machine boots anew."""
        while True:
            await self.node.changed.wait()
            memory, xids = self.state.memory, self.node.discovery.ailments.xids
            if memory.xids != xids or memory.boot_id != self.node.boot_id():
                memory.xids, memory.boot_id = dict(xids), self.node.boot_id()
                self.state.save()
            await trio.sleep(INPUTS_EVERY)


async def serve(settings: Settings, servers: tuple[Tcp, ...], token: str) -> None:
    """`llmgw agent`: until SIGTERM or SIGINT, which leave the engines running.

    Raises ConfigError for settings, state or identity that cannot be used, JoinFailed if the server refuses the node.
    """
    user = account(settings.user)
    settings = attrs.evolve(settings, node=settings.node or hostname().lower())
    state = State.open(settings.state, user)
    if state.memory.node not in ("", settings.node):
        text = (
            f"this state belongs to node {state.memory.node!r}, not {settings.node!r}: give --node, or another --state"
        )
        raise ConfigError([Problem(text, file=settings.state)])
    if state.memory.node != settings.node:
        state.memory.node = settings.node
        state.save()
    raise_limits()
    world, log = RealWorld(), Log(open_descriptor(1), RealWorld().wall)
    async with trio.open_nursery() as outer:
        await outer.start(log.run)
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(_run, settings, servers, token, state, user, world, log))
                async for number in signals:
                    log.event("stopping", signal=signal.Signals(number).name, engines=sorted(state.records))
                    nursery.cancel_scope.cancel("signalled")
                    break
        outer.cancel_scope.cancel("the agent has ended")


async def _run(
    settings: Settings, servers: tuple[Tcp, ...], token: str, state: State, user: Account, world: World, log: Log
) -> None:
    def say(text: str) -> None:
        log.event("agent", message=text)

    root = Root()
    boot = root.text("/proc/sys/kernel/random/boot_id") or ""
    ailments = Ailments(dict(state.memory.xids)) if state.memory.boot_id == boot else Ailments()
    link = Link(servers, state.path / "identity", settings.node, boot, world, say)
    client = Client(world)
    async with Discovery(settings, root, ailments=ailments) as discovery:
        node = Node(discovery, Preflight(discovery, user), state, world, say)
        host = LocalHost(state, settings.log_size, settings.log_files, root)
        replicas = Replicas(state, host, node, client, world, say)
        node.members, node.ports = replicas.members, replicas.ports
        agent = NodeAgent(state, node, replicas)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(node.run)
                await nursery.start(replicas.run)
                node.want(replicas.references())
                nursery.start_soon(agent.watch_inputs)
                nursery.start_soon(agent.remember_ailments)
                if not link.member:
                    await link.become_member(token)
                if settings.stop_after is not None:
                    nursery.start_soon(_stop_after, settings.stop_after, link, replicas, say)
                await link.run(agent)
        finally:
            client.close()


async def _stop_after(limit: float, link: Link, replicas: Replicas, say: Callable[[str], None]) -> None:
    """The operator's choice: engines that nobody steers end after a while."""
    began = trio.current_time()
    while True:
        since = link.last_answer if link.last_answer is not None else began
        left = since + limit - trio.current_time()
        if left <= 0:
            if replicas.running:
                say(f"no server was reached for {limit:g} s: stopping all engines")
                replicas.stop_all()
            left = limit
        await trio.sleep(left)
