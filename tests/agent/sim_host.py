"""Engines of a simulated world: each life is a sim-engine in this very program, on a host of a rehearsal's network."""

from __future__ import annotations

import attrs
import msgspec
import trio

from llmgw.agent.engine_host import Life
from llmgw.agent.state import Record
from llmgw.engines.base import Command
from llmgw.engines.deaths import Exit
from llmgw.net.world import World
from llmgw.simengine.options import Options
from llmgw.simengine.server import serve


@attrs.define(eq=False)
class SimLife:
    record: Record
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    over: trio.Event = attrs.field(factory=trio.Event)
    how: Exit = attrs.field(factory=lambda: Exit(signal=9))
    lines: list[str] = attrs.field(factory=list)

    def end(self, how: Exit) -> None:
        self.how = how
        self.scope.cancel()

    async def wait(self) -> Exit:
        await self.over.wait()
        return self.how

    def new_lines(self) -> list[str]:
        return []

    def last_lines(self) -> tuple[str, ...]:
        return tuple(self.lines)

    def lines_since(self, number: int) -> tuple[int, tuple[str, ...]]:
        return 0, tuple(self.lines)

    def work(self) -> tuple[int, float]:
        return 0, 0.0

    def pids(self) -> frozenset[int]:
        return frozenset()


@attrs.define
class SimHost:
    """*nursery* outlives the agent: engines survive it."""

    world: World
    nursery: trio.Nursery
    startup: float = 20.0  # seconds of loading
    lives: dict[str, SimLife] = attrs.field(factory=dict)  # by start id

    async def start(self, record: Record, command: Command) -> SimLife:
        life = SimLife(msgspec.structs.replace(record, pid=len(self.lives) + 1))
        self.lives[record.start_id] = life
        launch = record.launch
        options = Options(
            listen=(f"{launch.host}:{launch.first_port}",), model=launch.names[0], api_key=launch.key,
            startup_delay=self.startup,
        )  # fmt: skip
        self.nursery.start_soon(self._live, life, options)
        return life

    async def _live(self, life: SimLife, options: Options) -> None:
        try:
            with life.scope:
                await serve(options, self.world)
        finally:
            life.over.set()

    async def adopt(self, record: Record) -> SimLife | None:
        life = self.lives.get(record.start_id)
        return life if life is not None and not life.over.is_set() else None

    def terminate(self, life: Life) -> None:
        assert isinstance(life, SimLife)
        life.end(Exit(code=0))

    async def clear(self, life: Life) -> None:
        assert isinstance(life, SimLife)
        life.end(life.how)
        await life.over.wait()

    async def keep(self, life: Life) -> None:
        await trio.lowlevel.checkpoint()

    def note_ready(self, life: Life) -> None:
        assert isinstance(life, SimLife)
        life.record = msgspec.structs.replace(life.record, ready=True)

    def forget(self, life: Life) -> None:
        self.lives.pop(life.record.start_id, None)

    def leave(self, life: Life) -> None:
        pass

    def port_taken(self, host: str, base: int, count: int) -> str:
        return ""
