"""All replicas of a node in virtual time: sim-engines instead of processes, exact seconds, no sleeping."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import msgspec
import pytest
import trio
import trio.testing

from llmgw.agent.account import account
from llmgw.agent.agent import Replicas
from llmgw.agent.state import State
from llmgw.agent.supervise import Refusal, launch_of
from llmgw.control.observed import Desired, Ports, Run
from llmgw.engines.base import Launch
from llmgw.engines.deaths import Exit
from llmgw.net.client import Client
from sim.network import Network
from tests.agent.sim_host import SimHost

ONE = Desired(replica="llama-1", model="llama", epoch=1, generation=1, engine="sim", weights="w", ports=Ports(20000))


@attrs.define
class Ground:
    """A node on which all is well."""

    numbers: int = 0

    async def check(self, desired: Desired) -> Refusal | None:
        await trio.lowlevel.checkpoint()
        return None

    def launch(self, desired: Desired, key: str) -> Launch:
        return launch_of(desired, key, program=("sim",), model="w", host="gpu-1", folder="/", fabric_env={})

    def version(self, engine: str) -> str:
        return "1"

    def fabrics(self, desired: Desired) -> tuple[str, ...]:
        return ()

    def boot_id(self) -> str:
        return "boot"

    def secret(self, size: int) -> str:
        self.numbers += 1
        return f"secret-{self.numbers}"

    def effort(self, desired: Desired) -> float | None:
        return None

    async def still_held(self, desired: Desired, pids: frozenset[int]) -> str:
        await trio.lowlevel.checkpoint()
        return ""


@attrs.define
class World:
    network: Network
    host: SimHost
    replicas: Replicas

    def run(self, name: str = "llama-1") -> Run:
        return next(r for r in self.replicas.runs() if r.replica == name)

    async def until(self, condition: Callable[[], bool], within: float = 600.0) -> float:
        """The time at which it holds, seen ten times a second."""
        with trio.fail_after(within):
            while not condition():
                with trio.move_on_after(0.1):
                    await self.replicas.changed.wait()
        return trio.current_time()

    def crash(self, how: Exit) -> None:
        for life in tuple(self.host.lives.values()):
            life.end(how)


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[World]:
    state = State.open(str(folder / "state"), account(""))
    async with trio.open_nursery() as engines, trio.open_nursery() as wires:
        network = Network(1, wires)
        world = network.host("gpu-1")
        host, client = SimHost(world, engines), Client(world)
        async with trio.open_nursery() as nursery:
            replicas = Replicas(state, host, Ground(), client, world, lambda _text: None)
            await nursery.start(replicas.run)
            try:
                yield World(network, host, replicas)
            finally:
                client.close()
            nursery.cancel_scope.cancel()
        client.close()
        wires.cancel_scope.cancel()
        engines.cancel_scope.cancel()


@pytest.fixture
def autojump(autojump_clock: trio.testing.MockClock) -> trio.testing.MockClock:
    return autojump_clock


async def test_a_start_takes_as_long_as_the_engine(tmp_path: Path, autojump: trio.testing.MockClock) -> None:
    async with opened(tmp_path) as world:
        world.replicas.apply((ONE,), settled=True)
        at = await world.until(lambda: world.run().state == "ready")
        assert 20 <= at <= 24
        facts = world.run().endpoint
        assert facts is not None
        assert (facts.url, facts.block_size) == ("http://gpu-1:20000", 16)


async def test_a_crash_loop_backs_off(tmp_path: Path, autojump: trio.testing.MockClock) -> None:
    async with opened(tmp_path) as world:
        world.host.startup = 0.0
        world.replicas.apply((ONE,), settled=True)
        waits = []
        for _ in range(7):
            await world.until(lambda: world.run().state == "ready")
            world.crash(Exit(code=0))
            began = await world.until(lambda: world.run().state == "failed")
            waits.append(await world.until(lambda: world.run().state != "failed") - began)
        for wait, expected in zip(waits, [10, 20, 40, 80, 160, 300, 300], strict=True):
            assert 0.79 * expected <= wait <= 1.21 * expected + 2
        failure = world.run().failure
        assert failure is not None
        assert failure.cause == "exit-0"


async def test_a_clogged_engine_is_found_in_two_minutes(tmp_path: Path, autojump: trio.testing.MockClock) -> None:
    async with opened(tmp_path) as world:
        world.network.link("gpu-1").wired = True
        world.replicas.apply((ONE,), settled=True)
        await world.until(lambda: world.run().state == "ready")
        await trio.sleep(400)  # an idle engine lives, whatever time passes
        assert world.run().failure is None
        began = trio.current_time()
        world.network.link("gpu-1").change(clogged=True)
        found = await world.until(lambda: world.run().failure is not None)
        assert found - began < 120
        failure = world.run().failure
        assert failure is not None
        assert failure.cause == "hung"


async def test_another_epoch_waits_for_the_end_of_the_first(tmp_path: Path, autojump: trio.testing.MockClock) -> None:
    async with opened(tmp_path) as world:
        world.replicas.apply((ONE,), settled=True)
        await world.until(lambda: world.run().state == "ready")
        world.replicas.apply((msgspec.structs.replace(ONE, epoch=2),), settled=True)
        await world.until(lambda: world.run().epoch == 2 and world.run().state == "ready")
        assert len(world.host.lives) == 1  # never two at a time
        world.replicas.apply((ONE,), settled=True)
        assert world.replicas.refused == ("llama-1",)
        await trio.sleep(60)
        assert (world.run().epoch, world.run().state) == (2, "ready")
        world.replicas.apply((), settled=False)  # a server that has just started
        await trio.sleep(60)
        assert world.run().state == "ready"
        world.replicas.apply((), settled=True)
        await world.until(lambda: not world.replicas.running)
        assert world.run().state == "gone"
        world.replicas.told(world.replicas.runs())
        assert world.replicas.runs() == ()
        assert world.host.lives == {}


async def test_a_failure_that_would_repeat_itself_waits_for_a_change(
    tmp_path: Path, autojump: trio.testing.MockClock
) -> None:
    async with opened(tmp_path) as world:
        world.replicas.apply((ONE,), settled=True)
        await world.until(lambda: world.run().state == "ready")
        life = next(iter(world.host.lives.values()))
        life.lines.append("engine: error while loading shared libraries: libgomp.so.1: cannot open shared object file")
        life.end(Exit(code=127))
        await world.until(lambda: world.run().state == "failed")
        await trio.sleep(900)
        assert world.run().state == "failed"
        failure = world.run().failure
        assert failure is not None
        assert failure.deterministic
        world.replicas.inputs_changed()
        await world.until(lambda: world.run().state == "ready")
