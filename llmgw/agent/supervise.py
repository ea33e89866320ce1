"""One replica: performs what its state machine says, and tells it what happens.

    tasks                                        events
    _ticks      once a second                    Tick
    _start      checks the ground, starts        (a life), or Ended
    _live       one life: its process, its log,  Progress, Answers, Hung, and Ended when it is over
                its health
    _canary     one smallest request             CanaryPassed, CanaryFailed
    _end        drain, TERM, KILL                (Ended comes from _live)
    _clear      survivors, GPU memory            Released

All of them live in the replica's nursery. Cancelling it performs the stop sequence, unless the engine is to be left
alone (`leave`): an agent that is upgraded goes without its engines.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

import attrs
import msgspec
import trio

from llmgw.agent import replica as machine
from llmgw.agent.asking import Asking, busy
from llmgw.agent.engine_host import EngineHost, Life
from llmgw.agent.enginelog import Novelty
from llmgw.agent.liveness import CANARY, PROBE_EVERY, Liveness, Sample
from llmgw.agent.replica import Event, Replica, advance, failure_of
from llmgw.agent.state import Record
from llmgw.control.observed import Desired, LogLines, Measured, Run, RunState
from llmgw.engines import ENGINES
from llmgw.engines.base import MASTER, Engine, Launch
from llmgw.engines.deaths import Exit, Retry
from llmgw.errors import ConfigError
from llmgw.net.client import Client, Unreachable
from llmgw.net.world import World
from llmgw.placement.inventory import GIB
from llmgw.routing.report import Reading

EVENTS_WAITING = 32  # producers are the six tasks above; none may run far ahead of the machine
TICK = 1.0
LOG_EVERY = 0.5
READY_EVERY = 1.0
HEALTH_DEADLINE = 25.0  # SGLang's /health generates a token and gives up after 20 s by itself
FIRST_CANARY = 120.0  # the first request may compile kernels
FIGURES_DEADLINE = 10.0
TERM_GRACE = 30.0  # seconds between TERM and KILL
FREE_WAIT = 20.0  # seconds that the driver may take to give memory back
STOP_LIMIT = 60.0  # of the stop sequence when the nursery is cancelled
BYTES_OF_NEWS = 1 << 20  # read since the last look: the weights are being loaded
KEY_BYTES = 24
START_BYTES = 9
KEEP_EVERY = 10.0  # seconds between two looks at the log's size


@attrs.frozen
class Refusal:
    """The ground does not bear this replica: which row says so, and whether that can pass."""

    row: str
    message: str
    retry: Retry = "never"


class Ground(Protocol):
    """What a replica must know of its node."""

    async def check(self, desired: Desired) -> Refusal | None:
        """The cheap rows once more, just before a start."""
        ...

    def launch(self, desired: Desired, key: str) -> Launch:
        """The command's inputs. Raises ConfigError."""
        ...

    def version(self, engine: str) -> str: ...

    def fabrics(self, desired: Desired) -> tuple[str, ...]: ...

    def boot_id(self) -> str: ...

    def secret(self, size: int) -> str:
        """Of *size* random bytes, in characters that files, headers and environments take."""
        ...

    def effort(self, desired: Desired) -> float | None:
        """Watts that its GPUs draw; None = not known."""
        ...

    async def still_held(self, desired: Desired, pids: frozenset[int]) -> str:
        """ "" = none of *pids* holds memory of its GPUs; else who holds how much."""
        ...


class Supervisor:
    """Runs one (replica, epoch) until it is gone."""

    def __init__(
        self, desired: Desired, host: EngineHost, ground: Ground, client: Client, world: World, log: Callable[[str], None]
    ) -> None:  # fmt: skip
        self.desired = desired
        self.replica = Replica()
        self.changed = trio.Event()  # set and replaced when there is something new to tell
        self._host, self._ground, self._client, self._world, self._log = host, ground, client, world, log
        self._engine: Engine = ENGINES.make(desired.engine, {})
        self._send, self._receive = trio.open_memory_channel[Event](EVENTS_WAITING)
        self._life: Life | None = None
        self._asking: Asking | None = None
        self._over = trio.Event()  # the present life has ended
        self._leaving = False
        self._reading: Reading | None = None
        self._facts: dict[str, float] = {}
        self._spawned_at = 0.0
        self._load: float | None = None
        self._next_try = datetime.fromtimestamp(0, UTC)
        self._wall_since = world.wall()
        self._nursery: trio.Nursery | None = None
        self._starting: trio.CancelScope | None = None
        self._start_over = trio.Event()

    # -- from outside ------------------------------------------------------------------------------------------------

    async def run(self, record: Record | None = None) -> None:
        """Until it is gone. *record*: of an earlier life of the agent, to be adopted if it goes on."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                if record is not None:
                    await self._adopt(record)
                nursery.start_soon(self._ticks)
                async for event in self._receive:
                    self._advance(event)
                    if self.replica.state == "gone":
                        nursery.cancel_scope.cancel("the replica is gone")
        finally:
            with trio.move_on_after(STOP_LIMIT, shield=True):
                await self._abandon()

    def stop(self, grace: float) -> None:
        self._tell(machine.Stop(grace))

    def inputs_changed(self) -> None:
        self._tell(machine.InputsChanged())

    def leave(self) -> None:
        """From now on cancelling `run` leaves what runs as it is."""
        self._leaving = True

    def ports(self) -> frozenset[int]:
        """In use while there is a life."""
        return frozenset(self.desired.ports.range()) if self._life is not None else frozenset()

    def pids(self) -> frozenset[int]:
        return self._life.pids() if self._life is not None else frozenset()

    def last_lines(self) -> tuple[str, ...]:
        return self._life.last_lines() if self._life is not None else ()

    def lines_since(self, number: int) -> LogLines | None:
        """For whoever follows the log; None while there is no life."""
        if self._life is None:
            return None
        first, lines = self._life.lines_since(number)
        return LogLines(replica=self.desired.replica, start_id=self._life.record.start_id, first=first, lines=lines)

    def observed(self) -> Run:
        """What the server is told."""
        desired, replica, life = self.desired, self.replica, self._life
        ready = replica.state == "ready"
        facts = None
        if ready and self._asking is not None:
            facts = self._asking.facts(
                self._reading, self._ground.version(desired.engine), self._ground.fabrics(desired)
            )
        return Run(
            replica=desired.replica,
            model=desired.model,
            epoch=desired.epoch,
            generation=desired.generation,
            state=self._told_state(),
            engine=desired.engine,
            rank=desired.group.rank if desired.group else 0,
            since=self._wall_since,
            detail=self._told_detail(),
            start_id=life.record.start_id if life is not None else "",
            gpus=desired.gpus,
            ports=desired.ports,
            pid=life.record.pid if life is not None else None,
            endpoint=facts,
            failure=replica.failure,
            measured=self._measured(),
        )

    def _told_state(self) -> RunState:
        state = self.replica.state
        if state == "waiting":
            return "starting"
        if state == "stopping":
            return "failed" if self.replica.then == "failed" else "stopping"
        return state

    def _told_detail(self) -> str:
        replica = self.replica
        if replica.state == "failed":
            if replica.next_try is None:
                return "not tried again before the node or the model changes"
            return f"next try at {self._next_try:%H:%M:%S} UTC"
        return replica.detail

    def _measured(self) -> Measured | None:
        if self._load is None and not self._facts:
            return None

        def size(name: str) -> int | None:
            return int(self._facts[name] * GIB) if name in self._facts else None

        tokens = self._facts.get("kv_tokens")
        return Measured(
            weights=size("weights_gib"), kv=size("kv_gib"), kv_tokens=None if tokens is None else int(tokens), load=self._load
        )  # fmt: skip

    # -- the machine -------------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """From outside, without waiting: a full channel means that the machine is at work and will see the next one."""
        try:
            self._send.send_nowait(event)
        except trio.WouldBlock:
            if isinstance(event, machine.Stop) and self._nursery is not None:
                self._nursery.start_soon(self._send.send, event)

    def _advance(self, event: Event) -> None:
        before = self.replica
        deadline = self.desired.start_deadline
        self.replica, effects = advance(before, event, trio.current_time(), self._world.rng, deadline)
        if self.replica.state != before.state:
            self._wall_since = self._world.wall()
            self._entered(before)
        if (self.replica.state, self.replica.detail) != (before.state, before.detail):
            self.changed.set()
            self.changed = trio.Event()
        for effect in effects:
            self._perform(effect)

    def _entered(self, before: Replica) -> None:
        state, name = self.replica.state, self.desired.replica
        if state == "ready":
            if self._load is None and self._spawned_at:
                self._load = trio.current_time() - self._spawned_at
            if self._life is not None:
                self._host.note_ready(self._life)
        if state == "failed" and self.replica.next_try is not None:
            wall = self._world.wall() + self.replica.next_try - trio.current_time()
            self._next_try = datetime.fromtimestamp(wall, UTC)  # said once: what changes is sent anew at every sync
        failure = self.replica.failure
        why = f": {failure.message}" if state == "failed" and failure is not None else ""
        self._log(f"replica {name} epoch {self.desired.epoch}: {before.state} → {state}{why}")

    def _perform(self, effect: machine.Effect) -> None:
        nursery = self._nursery
        assert nursery is not None
        match effect:
            case machine.Start():
                nursery.start_soon(self._start)
            case machine.AskCanary():
                nursery.start_soon(self._canary, effect.pause)
            case machine.End():
                nursery.start_soon(self._end, effect.grace)
            case machine.Clear():
                nursery.start_soon(self._clear)

    async def _ticks(self) -> None:
        while True:
            await trio.sleep(TICK)
            await self._send.send(machine.Tick())

    # -- a life ------------------------------------------------------------------------------------------------------

    async def _adopt(self, record: Record) -> None:
        life = await self._host.adopt(record)
        if life is None:
            self._log(f"replica {self.desired.replica}: its engine ended while the agent was away")
            return
        self._log(f"replica {self.desired.replica}: adopted pid {life.record.pid}")
        self._advance(machine.Adopted(record.ready))
        self._begin(life, record.launch)

    async def _start(self) -> None:
        """Ends in a life, or in `Ended` with the reason; or is cancelled by `_end`, which then sees what there is."""
        self._start_over = trio.Event()
        try:
            with trio.CancelScope() as self._starting:
                await self._try_start()
        finally:
            self._starting = None
            self._start_over.set()

    async def _try_start(self) -> None:
        desired, now = self.desired, self._world.wall()

        async def refuse(cause: str, message: str, retry: Retry) -> None:
            await self._send.send(machine.Ended(failure_of(cause, message, at=now), retry))

        try:
            problems = self._engine.check(desired.flags, desired.env, f"model {desired.model}")
            if problems:
                raise ConfigError(problems)
            refusal = await self._ground.check(desired)
            if refusal is not None:
                return await refuse(refusal.row, refusal.message, refusal.retry)
            launch = self._ground.launch(desired, self._ground.secret(KEY_BYTES))
            if blocked := self._host.port_taken(launch.host, desired.ports.base, desired.ports.count):
                return await refuse("NET-1", blocked, "backoff")
            command = self._engine.command(launch)
            record = Record(
                desired=desired,
                launch=launch,
                start_id=self._ground.secret(START_BYTES),
                boot_id=self._ground.boot_id(),
                started=now,
            )
            life = await self._host.start(record, command)
        except ConfigError as error:
            return await refuse("config", str(error), "never")
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            return await refuse("ENG-2", f"{desired.engine} cannot be started: {error.strerror}{where}", "backoff")
        self._spawned_at, self._load = trio.current_time(), None
        self._begin(life, launch)
        return None

    def _begin(self, life: Life, launch: Launch) -> None:
        assert self._nursery is not None
        self._life, self._over = life, trio.Event()
        self._asking = Asking.of(self._client, self._engine, launch) if self._engine.serves_http(launch) else None
        self._reading, self._facts = None, {}
        self._nursery.start_soon(self._live, life)

    async def _live(self, life: Life) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow, life)
            nursery.start_soon(self._watch, life)
            nursery.start_soon(self._keep, life)
            ended = await life.wait()
            nursery.cancel_scope.cancel("the process has ended")
        self._over.set()
        await self._send.send(self._judge(life, ended))

    def _judge(self, life: Life, ended: Exit) -> machine.Ended:
        lines = life.last_lines()
        told = msgspec.structs.replace(ended, ready=self.replica.state == "ready")
        verdict = self._engine.diagnose(told, lines)
        how = "" if verdict.cause == str(told) else f" ({told})"
        message = f"{verdict.cause}{how}: {verdict.remedy}"
        failure = failure_of(
            verdict.code, message, at=self._world.wall(), log=lines, code=ended.code, signal=ended.signal
        )
        return machine.Ended(failure, verdict.retry)

    async def _follow(self, life: Life) -> None:
        """The log, and what is read from disks: progress of the start, and figures."""
        novelty, read = Novelty(), 0
        while True:
            lines = life.new_lines()
            phase = next((p for line in reversed(lines) if (p := self._engine.phase(line))), None)
            for line in lines:
                if fact := self._engine.fact(line):
                    self._facts[fact.name] = fact.value
            if self.replica.state == "starting":
                bytes_read, _ = life.work()
                if phase or novelty.news(lines) or bytes_read - read >= BYTES_OF_NEWS:
                    read = bytes_read
                    await self._send.send(machine.Progress(phase or ""))
            await trio.sleep(LOG_EVERY)

    async def _keep(self, life: Life) -> None:
        while True:
            await trio.sleep(KEEP_EVERY)
            await self._host.keep(life)

    async def _watch(self, life: Life) -> None:
        """Readiness, then liveness. A follower has no port: its process is all there is to see."""
        asking = self._asking
        if asking is None:
            await self._send.send(machine.Answers())
            return
        while self.replica.state == "starting":
            with trio.move_on_after(HEALTH_DEADLINE):
                if await asking.healthy():
                    await self._send.send(machine.Answers())
                    break
            await trio.sleep(READY_EVERY)
        if self.replica.state == "ready":  # adopted: what it lists is asked anew
            with trio.move_on_after(HEALTH_DEADLINE):
                await asking.healthy()
        while self.replica.state != "ready":
            await self.changed.wait()
        await self._stay(life, asking)

    def _runs_elsewhere(self) -> str:
        """An engine that was given GPUs and loaded nothing onto them serves, at a tenth of the speed."""
        if self.desired.gpus and self._facts.get("gpu_layers") == 0:
            return "the model was loaded onto the CPU, not onto its GPUs"
        return ""

    async def _stay(self, life: Life, asking: Asking) -> None:
        liveness = Liveness(moved_at=trio.current_time())
        worked = (trio.current_time(), life.work()[1])
        async with trio.open_nursery() as nursery:
            while True:
                now, refused, reading = trio.current_time(), False, None
                with trio.move_on_after(FIGURES_DEADLINE):
                    try:
                        reading = await asking.figures(now)
                    except Unreachable:
                        refused = True
                if reading is not None and not reading.empty:
                    self._reading = reading
                effort = self._ground.effort(self.desired) if self.desired.gpus else None
                if not self.desired.gpus:
                    at, total = trio.current_time(), life.work()[1]
                    effort = (total - worked[1]) / (at - worked[0]) if at > worked[0] else None
                    worked = (at, total)
                progress = reading.progress if reading is not None else None
                verdict = liveness.verdict(Sample(trio.current_time(), progress, effort, refused))
                if verdict == "canary":
                    nursery.start_soon(self._last_word, asking, liveness)
                elif verdict:
                    await self._send.send(machine.Hung(verdict))
                await trio.sleep(PROBE_EVERY)

    async def _last_word(self, asking: Asking, liveness: Liveness) -> None:
        problem = f"no answer in {CANARY:g} s"
        with trio.move_on_after(CANARY):
            problem = await asking.canary()
        if verdict := liveness.answered(not problem, problem, trio.current_time()):
            await self._send.send(machine.Hung(verdict))

    async def _canary(self, pause: float) -> None:
        await trio.sleep(pause)
        asking, problem = self._asking, f"no answer in {FIRST_CANARY:g} s"
        if asking is None:  # a follower
            problem = ""
        else:
            with trio.move_on_after(FIRST_CANARY):
                problem = self._runs_elsewhere() or await asking.canary()
            with trio.move_on_after(FIGURES_DEADLINE):
                try:
                    self._reading = await asking.figures(trio.current_time())
                except Unreachable:
                    pass
        await self._send.send(machine.CanaryFailed(problem) if problem else machine.CanaryPassed())

    # -- the end -----------------------------------------------------------------------------------------------------

    async def _end(self, grace: float) -> None:
        if self._starting is not None:
            self._starting.cancel("it is to end")
            await self._start_over.wait()
        life = self._life
        if life is None:
            await self._send.send(machine.Ended(failure_of("stopped", "stopped", at=self._world.wall()), "backoff"))
            return
        await self._drain(grace)
        self._host.terminate(life)
        with trio.move_on_after(TERM_GRACE):
            await self._over.wait()
            return
        await self._host.clear(life)
        with trio.move_on_after(TERM_GRACE):
            await self._over.wait()
            return
        text = f"pid {life.record.pid} does not end by SIGKILL: the kernel holds it (driver trouble), reboot the node"
        self._log(f"replica {self.desired.replica}: {text}")
        await self._send.send(machine.Stuck(text))

    async def _drain(self, grace: float) -> None:
        """Until it says that no request is with it, or *grace* is over."""
        if self._asking is None:
            return
        with trio.move_on_after(grace):
            while not self._over.is_set():
                try:
                    reading = await self._asking.figures(trio.current_time())
                except Unreachable:
                    return
                if reading is not None and reading.report.running is not None and not busy(reading.report):
                    return
                await trio.sleep(LOG_EVERY)

    async def _clear(self) -> None:
        life, problem = self._life, ""
        if life is not None:
            pids = life.pids() | {life.record.pid or 0}
            await self._host.clear(life)
            if self.desired.gpus:
                with trio.move_on_after(FREE_WAIT):
                    while True:
                        problem = await self._ground.still_held(self.desired, pids)
                        if not problem:
                            break
                        await trio.sleep(1.0)
            self._host.forget(life)
        self._life = self._asking = None
        await self._send.send(machine.Released(problem))

    async def _abandon(self) -> None:
        """The nursery is over. Whatever still runs is ended, or left alone."""
        life, self._life = self._life, None
        if life is None:
            return
        if self._leaving:
            self._host.leave(life)
            return
        self._host.terminate(life)
        with trio.move_on_after(TERM_GRACE):
            await life.wait()
        await self._host.clear(life)
        self._host.forget(life)


def launch_of(
    desired: Desired, key: str, *, program: tuple[str, ...], model: str, host: str, folder: str, fabric_env: dict[str, str]
) -> Launch:  # fmt: skip
    """The engine's inputs, from what the server wants and what the node knows."""
    group = desired.group
    return Launch(
        program=program,
        model=model,
        names=(desired.model,),
        host=host,
        first_port=desired.ports.base,
        folder=folder,
        key=key,
        phases=frozenset(desired.phases),
        gpus=desired.gpus,
        tp=desired.tp,
        pp=desired.pp,
        dp=desired.dp,
        rank=group.rank if group else 0,
        nodes=group.size if group else 1,
        head=group.leader if group else "",
        head_first_port=group.port - MASTER if group else 0,
        max_model_len=desired.max_model_len,
        memory_share=desired.memory_fraction,
        max_seqs=desired.max_num_seqs,
        max_batched_tokens=desired.max_batched_tokens,
        dtype=desired.dtype,
        quantisation=desired.quantisation,
        kv_events=desired.kv_events,
        fabric_env=fabric_env,
        extra=desired.flags,
        env=desired.env,
    )
