"""What TLS adds to the relay; all else runs over it in the other files (`DRIVERS`)."""

from __future__ import annotations

import socket
import tracemalloc
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from llmgw.config import ClientLimits, Listener
from llmgw.net import secure
from llmgw.net.channel import SIZE, Channel
from llmgw.net.relay import Relay
from llmgw.net.tls import client_context
from llmgw.net.world import RealWorld, Tcp
from llmgw.request import Target
from llmgw.units import Duration
from tests.net.brains import RoundRobin
from tests.net.rig import (
    DONE,
    SSE,
    DriverName,
    TlsSocket,
    Wire,
    answers,
    chunk,
    contexts,
    event,
    json_answer,
    post,
    rig,
    streams,
)

TLS_DRIVERS: tuple[DriverName, ...] = ("pump-tls", "tasks-tls")
over_tls = pytest.mark.parametrize("driver", TLS_DRIVERS)


async def plain(port: int) -> Wire:
    wire = Wire(socket.socket())
    await wire.connect(("127.0.0.1", port))
    return wire


@over_tls
async def test_who_does_not_shake_hands_is_dropped(driver: DriverName, autojump_clock: MockClock) -> None:
    limits = ClientLimits(head_timeout=Duration(60.0))
    async with rig(driver, answers(json_answer()), limits=limits) as r:
        silent, slow = await plain(r.port), await r.dial()
        start = trio.current_time()
        await slow.sock.stream.do_handshake()
        assert await silent.closed()
        assert trio.current_time() - start == pytest.approx(secure.HANDSHAKE_SECONDS)
        assert await slow.closed()
        assert trio.current_time() - start == pytest.approx(secure.HANDSHAKE_SECONDS + 60)
        silent.close()
        slow.close()
    assert r.brain.outcomes == []


@over_tls
async def test_plain_http_is_told(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, answers(json_answer())) as r:
        wire = await plain(r.port)
        await wire.send(post())
        said = await wire.rest()
        assert b"HTTP/1.1 400" in said
        assert said.endswith(b"ask it with https://.\r\n")
        wire.close()


@over_tls
@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 600, b"\0" * 9, b"\xff"])
async def test_garbage_ends_its_connection_only(driver: DriverName, garbage: bytes, autojump_clock: MockClock) -> None:
    async with rig(driver, answers(json_answer())) as r:
        wire = await plain(r.port)
        await wire.send(garbage)
        wire.shutdown()
        await wire.rest()
        wire.close()
        assert (await r.ask(post()))[0] == 200


@over_tls
async def test_versions_and_alpn(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, answers(json_answer())) as r:
        wire = await r.dial()
        await wire.send(post())
        assert (await wire.answer())[0] == 200
        assert wire.sock.stream.selected_alpn_protocol() == "http/1.1"
        assert wire.sock.stream.version() == "TLSv1.3"
        wire.close()


@over_tls
async def test_large_both_ways_and_a_reader_that_stalls(driver: DriverName, autojump_clock: MockClock) -> None:
    size = 3 << 20

    async def echo(wire: Wire) -> None:
        while (request := await wire.request())[0]:
            await wire.send(json_answer(request[1]))

    async with rig(driver, echo) as r:
        body = b'{"model":"llama","messages":[],"user":"' + b"x" * size + b'"}'
        client = await r.dial()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send, post(body))
            await trio.sleep(5)  # the answer fills every buffer on its way
            status, _, back = await client.answer()
        assert (status, back) == (200, body)
        client.close()


@over_tls
async def test_a_slow_reader_holds_no_more_than_one_read(driver: DriverName, autojump_clock: MockClock) -> None:
    sent = 0

    async def flood(wire: Wire) -> None:
        nonlocal sent
        await wire.request()
        await wire.send(SSE)
        while True:
            await wire.send(chunk(event("x" * 1000)))
            sent += 1000

    async with rig(driver, flood) as r:
        client = await r.dial()
        await client.send(post(stream=True))
        await trio.sleep(5)
        before = sent
        (exchange,) = r.relay._exchanges
        client_side = exchange._client
        assert isinstance(client_side, secure.SecureChannel)
        held = sum(len(piece) for pieces in (client_side.out or (), client_side._plain) for piece in pieces)
        assert 0 < held <= SIZE + 4096
        await trio.sleep(5)
        assert sent == before
        client.close()
        await r.settled()


@over_tls
async def test_a_cut_without_goodbye_is_the_clients_end(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, streams(100, gap=1.0)) as r:
        client = await r.dial()
        await client.send(post(stream=True))
        await trio.sleep(3)
        client.shutdown()
        await r.settled()
        assert (r.brain.outcomes[0].status, r.brain.outcomes[0].aborted) == (499, True)
        client.close()


@over_tls
async def test_an_answer_that_ends_with_the_connection_ends_with_a_goodbye(
    driver: DriverName, autojump_clock: MockClock
) -> None:
    async with rig(driver, streams(3)) as r:
        client = await r.dial()
        client.sock.stream._https_compatible = False  # from now on a missing close_notify is an error
        await client.send(post(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        got = b""
        while more := bytes(await client.sock.stream.receive_some(65536)):
            got += more
        assert got.endswith(DONE)
        client.close()


@pytest.mark.parametrize("driver", ["pump", "tasks"])
@pytest.mark.parametrize("close", ["clean", "cut", "keep"])
async def test_an_engine_behind_tls(driver: DriverName, close: str, autojump_clock: MockClock) -> None:
    server, client_side = contexts()
    lone = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + event("a") + DONE

    async def serve(stream: trio.SocketStream) -> None:
        tls = trio.SSLStream(stream, server, server_side=True, https_compatible=close == "keep")
        try:
            data = bytes(await tls.receive_some(65536))
            while data:
                await tls.send_all(json_answer() if close == "keep" else lone)
                if close == "clean":
                    await tls.aclose()
                    return
                if close == "cut":
                    await stream.aclose()
                    return
                data = bytes(await tls.receive_some(65536))
        except trio.BrokenResourceError:
            pass

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        target = Target(endpoint="e", name="e", address=f"tcp:127.0.0.1:{port}", host=f"localhost:{port}", tls=True)
        world = RealWorld(seed=1)
        brain = RoundRobin([target])
        bugs: list[BaseException] = []
        relay = Relay(
            world, brain, limits=ClientLimits(), listener=Listener(), driver="pump" if driver == "pump" else "tasks",
            engine_tls=lambda: client_side, bug=lambda _, e: bugs.append(e),
        )  # fmt: skip
        sockets = await world.listen(Tcp("127.0.0.1", 0))
        here = sockets[0].getsockname()[1]
        await nursery.start(relay.run, sockets)
        wire = await plain(here)
        for _ in range(2 if close == "keep" else 1):
            await wire.send(post(stream=close != "keep"))
            if close == "keep":
                assert (await wire.answer())[0] == 200
            else:
                await wire.rest()
        wire.close()
        await trio.sleep(1)
        assert [o.reason for o in brain.outcomes] == (
            ["upstream_closed"] if close == "cut" else [""] * (2 if close == "keep" else 1)
        )
        assert relay.idle_upstreams == (close == "keep")
        relay._engine_tls = lambda: client_context(now=world.wall())  # trusts nobody that this engine knows
        relay._pool.close()
        brain.most_attempts = 1
        wire = await plain(here)
        await wire.send(post())
        status, _, _ = await wire.answer()
        assert status == 502
        assert brain.outcomes[-1].detail == "TLS: CERTIFICATE_VERIFY_FAILED"
        wire.close()
        assert bugs == []
        nursery.cancel_scope.cancel()


class Nobody:
    """A driver for a channel alone."""

    now = 0.0

    def attach(self, channel: Channel) -> None: ...
    def detach(self, channel: Channel) -> None: ...
    def want_write(self, channel: Channel) -> None: ...
    def soon(self, call: object) -> None: ...


async def test_memory_of_an_idle_session(autojump_clock: MockClock) -> None:
    """Python's share; OpenSSL's own is some 15 KiB more, since its buffers are given back between records."""
    server, client_side = contexts()
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        channel = secure.serve(left, Nobody(), "", server)
        other = TlsSocket(trio.socket.from_stdlib_socket(right), client_side)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other.stream.do_handshake)
            for _ in range(4):
                await trio.sleep(0.01)
                channel.readable()
        assert not channel.opening
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 128 << 10  # trio's client side is in it
    channel.close()
    right.close()
