"""A hundred agents with four types of GPU on two fabrics, and the real control loop, in virtual time."""

from __future__ import annotations

import time

import trio
from trio.testing import MockClock

from tests.control_plane.worlds import big, little, mixed, site


async def test_from_nothing_to_ready(autojump_clock: MockClock) -> None:
    began = time.time()
    async with site(mixed()) as world:
        process = await world.start()
        world.nursery.start_soon(world.watch)
        await world.until(lambda: world.control.term > 0, 5)
        await world.apply(big(10), little(40))
        await trio.sleep(38)
        assert world.states() == {}, "the settle window: nothing is placed"
        await world.converged()
        assert sorted(world.states().items()) == [("ready", 50)]
        assert len(process.router.names()) == 50
        print(time.time() - began, trio.current_time(), world.router.calls)
