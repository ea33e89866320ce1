"""What broke pumps: data and FIN in one wake-up, sockets closed underneath, cancels from inside a handler, recycled numbers."""

from __future__ import annotations

import os
import random
import select
from collections.abc import Callable

import pytest
import trio
import trio.lowlevel
from trio.testing import MockClock

from llmgw.config import ClientLimits
from llmgw.net.channel import Channel
from llmgw.net.pump import Pump
from llmgw.request import Limits
from tests.net.rig import DONE, DRIVERS, SSE, DriverName, Wire, chunk, event, json_answer, post, rig, streams


@pytest.mark.parametrize("driver", DRIVERS)
async def test_data_and_fin_in_one_wake_up(driver: DriverName, autojump_clock: MockClock) -> None:
    """Many engines send and close at once; all bytes arrive, every end is seen."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(SSE + b"".join(chunk(event(f"{i}")) for i in range(300)) + chunk(DONE) + b"0\r\n\r\n")
        wire.close()

    async with rig(driver, script) as r, trio.open_nursery() as nursery:

        async def one() -> None:
            status, _, body = await r.ask(post(stream=True))
            assert (status, body.count(b"data: ")) == (200, 301)

        for _ in range(50):
            nursery.start_soon(one)
    assert {o.reason for o in r.brain.outcomes} == {""}


async def test_socket_closed_under_the_pump_ends_its_exchange_only(autojump_clock: MockClock) -> None:
    """The kernel forgets the registration without a word; its number is given to the next socket."""
    async with rig("pump", streams(20, gap=0.1)) as r, trio.open_nursery() as nursery:
        whole = 0

        async def one() -> None:
            nonlocal whole
            client = await r.dial()
            await client.send(post(stream=True))
            got = await client.until(b"\r\n0\r\n\r\n")
            whole += got.count(b"data: ") == 21 and got.endswith(b"0\r\n\r\n")
            client.close()

        for _ in range(6):
            nursery.start_soon(one)
        await trio.sleep(0.5)
        victim = next(c for c in channels(r.relay._driver) if c.peer.startswith("e"))  # an engine's connection
        os.close(victim.sock.detach())
        for _ in range(6):
            nursery.start_soon(one)
    assert whole == 11
    assert sorted(o.reason for o in r.brain.outcomes) == [""] * 11 + ["idle_timeout"]


def channels(driver: object) -> list[Channel]:
    assert isinstance(driver, Pump)
    return list(driver._channels.values())


@pytest.mark.parametrize("driver", DRIVERS)
async def test_hang_up_while_dialling_cancels_the_dial_from_inside_the_handler(
    driver: DriverName, autojump_clock: MockClock
) -> None:
    async with rig(driver, streams()) as r:
        dialling = trio.Event()
        ended: list[str] = []

        async def slow_dial(_: object) -> object:
            dialling.set()
            try:
                await trio.sleep(100)
            except trio.Cancelled:
                ended.append("cancelled")
                raise
            raise AssertionError("never asked to stop")

        r.relay.world.dial = slow_dial  # type: ignore[method-assign, assignment]  # a world whose links hang
        client = await r.dial()
        await client.send(post())
        await dialling.wait()
        client.close()
        await r.settled()
        await trio.lowlevel.checkpoint()
        await trio.sleep(0.01)
        assert ended == ["cancelled"]
        assert r.brain.outcomes[0].reason == "client_gone"


@pytest.mark.parametrize("driver", DRIVERS)
async def test_dial_that_takes_too_long_fails_by_name(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, streams(), leg=Limits(connect=3), most_attempts=1) as r:

        async def hang(_: object) -> object:
            await trio.sleep(1000)
            raise AssertionError

        r.relay.world.dial = hang  # type: ignore[method-assign, assignment]  # a world whose links hang
        start = trio.current_time()
        status, _, body = await r.ask(post())
        assert status == 502
        assert trio.current_time() - start == pytest.approx(3)
        assert b"connect_failed" in body


async def churn(driver: DriverName, streams_: int, at_once: int, seed: int) -> None:
    """Random cancels, hang-ups and cuts; numbers of sockets are recycled all the time; every byte belongs to its stream."""
    rng = random.Random(seed)

    async def script(wire: Wire) -> None:
        while True:
            _, body = await wire.request()
            if not body:
                return
            name = body.partition(b'"user": "')[2].partition(b'"')[0].decode()
            fate = int(name.partition("-")[2])
            await wire.send(SSE)
            for i in range(6):
                if fate % 7 == i and fate % 3 == 0:
                    wire.reset() if fate % 2 else wire.close()
                    return
                await wire.send(chunk(event(f"{name}:{i}")))
                await trio.sleep(0.001 * (fate % 5))
            await wire.send(chunk(DONE) + b"0\r\n\r\n")

    async with rig(driver, script, script, most_attempts=1) as r, trio.open_nursery() as nursery:
        limit = trio.CapacityLimiter(at_once)

        async def one(number: int, fate: int, patience: float) -> None:
            async with limit:
                name = f"n{number}-{fate}"
                client = await r.dial()
                try:
                    with trio.move_on_after(patience):
                        await client.send(post(stream=True, user=name))
                        got = await client.until(b"\r\n0\r\n\r\n")
                        for piece in got.split(b'"content": "')[1:]:
                            assert piece.startswith(name.encode()), (name, piece)
                finally:
                    client.reset() if fate % 2 else client.close()

        for number in range(streams_):
            patience = rng.choice([0.0005, 0.002, 0.01, 10.0, 10.0])
            nursery.start_soon(one, number, rng.randrange(1000), patience)
    ours = [o for o in r.brain.outcomes if o.reason not in ("", "client_gone", "upstream_closed", "connect_failed")]
    assert ours == []


@pytest.mark.parametrize("driver", DRIVERS)
async def test_churn(driver: DriverName, autojump_clock: MockClock) -> None:
    before = len(os.listdir("/proc/self/fd"))
    await churn(driver, streams_=600, at_once=80, seed=1)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("driver", DRIVERS)
async def test_churn_of_20000_streams(driver: DriverName, autojump_clock: MockClock) -> None:
    before = len(os.listdir("/proc/self/fd"))
    await churn(driver, streams_=20_000, at_once=200, seed=2)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("driver", DRIVERS)
async def test_slow_readers_hold_64_kib_each_and_slow_nobody(driver: DriverName, autojump_clock: MockClock) -> None:
    """Clients that read nothing: their engines are paused; others are served at full speed meanwhile."""

    async def script(wire: Wire) -> None:
        while True:
            _, body = await wire.request()
            if not body:
                return
            if b"slow" not in body:
                await wire.send(json_answer())
                continue
            await wire.send(SSE)
            with trio.move_on_after(1000):
                for _ in range(1000):
                    await wire.send(chunk(event("x" * 60_000)))
            return

    async with rig(driver, script) as r:
        slow = [await r.dial() for _ in range(40)]
        for client in slow:
            await client.send(post(stream=True, user="slow"))
        await trio.sleep(1)
        held = [sum(map(len, c.out or ())) for c in r.relay._driver._channels.values()]
        assert max(held) <= 130_000  # one read's worth, framing and head included
        assert sum(1 for h in held if h) == 40
        start = trio.current_time()
        for _ in range(20):
            assert (await r.ask(post()))[0] == 200
        assert trio.current_time() - start < 0.01
        for client in slow:
            client.close()
        await r.settled(60)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_client_that_reads_a_byte_a_second_is_served_on(driver: DriverName, autojump_clock: MockClock) -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(SSE)
        for _ in range(200):
            await wire.send(chunk(event("x" * 60_000)))
        await wire.closed()

    async with rig(driver, script, leg=Limits(idle=60)) as r:
        client = await r.dial()
        await client.send(post(stream=True))
        for _ in range(150):
            await trio.sleep(1)
            await client.sock.recv(50_000)
        assert r.brain.outcomes == []
        client.close()
        await r.settled()


@pytest.mark.parametrize("driver", ["pump", "tasks"])  # where a client is let in, TLS has not begun
async def test_connections_are_capped_and_the_next_one_waits(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, streams(), limits=ClientLimits(connections=2)) as r:
        first, second, third = await r.dial(), await r.dial(), await r.dial()
        await third.send(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        with trio.move_on_after(1) as scope:
            await third.answer()
        assert scope.cancelled_caught
        first.close()
        assert (await third.answer())[0] == 200
        second.close()
        third.close()


@pytest.mark.parametrize("driver", DRIVERS)
async def test_drain_lets_streams_finish_then_cuts_with_an_event(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, streams(10, gap=1.0)) as r:
        short, idle = await r.dial(), await r.dial()
        await short.send(post(stream=True))
        await short.until(b"data: ")
        r.relay.drain()
        assert await idle.closed()
        await trio.sleep(0.01)
        with pytest.raises(OSError, match="refused"):
            await r.dial()
        body = await short.rest()
        assert body.endswith(chunk(DONE) + b"0\r\n\r\n")
        short.close()
        idle.close()
    async with rig(driver, streams(10, gap=1.0)) as r:
        cut = await r.dial()
        await cut.send(post(stream=True))
        await cut.until(b"data: ")
        r.relay.drain()
        await trio.sleep(2.5)
        r.relay.close()
        assert b'"code":"draining"' in await cut.rest()
        cut.close()


def test_epoll_reports_fin_behind_data_once() -> None:
    """The assumption behind reading on after RDHUP: one edge for both."""
    import socket

    left, right = socket.socketpair()
    with left, right, select.epoll() as epoll:
        left.setblocking(False)
        epoll.register(left.fileno(), select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
        right.sendall(b"data")
        right.shutdown(socket.SHUT_WR)
        ((_, events),) = epoll.poll(0)
        assert events & select.EPOLLIN
        assert events & select.EPOLLRDHUP
        assert left.recv(10) == b"data"
        assert epoll.poll(0) == []
        assert left.recv(10) == b""


Cut = Callable[[], None]


class AtStep(trio.abc.Instrument):
    """Calls *cut* between the k-th step of any task and the next round of steps."""

    def __init__(self, k: int, cut: Cut) -> None:
        self.left = k
        self.cut = cut
        self.token = trio.lowlevel.current_trio_token()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            self.token.run_sync_soon(self.cut)


async def everything(driver: DriverName, k: int, what: str) -> bool:
    """A stream, a JSON answer, a retry, a queue wait and a page; the cut comes at step *k*. True if it came at all."""

    async def flaky(wire: Wire) -> None:
        await wire.request()

    came = False
    async with trio.open_nursery() as clients:
        async with rig(driver, streams(2, gap=0.01), flaky, most_attempts=3) as r:
            wires: list[Wire] = []

            def cut() -> None:
                nonlocal came
                came = True
                if what == "clients":
                    for wire in wires:
                        if wire.sock.fileno() >= 0:
                            wire.close()
                else:
                    for exchange in tuple(r.relay._exchanges):
                        exchange.hang_up()

            async def one(request: bytes, count: int) -> None:
                try:
                    wire = await r.dial()
                    wires.append(wire)
                    for _ in range(count):
                        await wire.send(request)
                        await wire.answer()
                except (OSError, EOFError, trio.ClosedResourceError):
                    pass
                finally:
                    wire.close()

            instrument = AtStep(k, cut)
            trio.lowlevel.add_instrument(instrument)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(one, post(stream=True), 2)
                    nursery.start_soon(one, post(), 2)
                    nursery.start_soon(one, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", 2)
            finally:
                trio.lowlevel.remove_instrument(instrument)
        clients.cancel_scope.cancel()
    ids = [o.request_id for o in r.brain.outcomes]
    assert len(ids) == len(set(ids))
    return came


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("what", ["clients", "exchanges"])
def test_cut_at_every_step(driver: DriverName, what: str) -> None:
    """For every k: after the cut all is at the baseline (the rig checks) and each request was settled once."""
    k = 1
    while trio.run(everything, driver, k, what, clock=MockClock(autojump_threshold=0)):
        k += 1
    assert k > 20
