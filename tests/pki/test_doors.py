"""The door in front of hypercorn: who is there, streams, disconnects, drain, force, revocation, expiry.

The conformance test for the pinned hypercorn: what the door relies on is asserted here over real sockets.
"""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from llmgw.net import doors
from llmgw.net.doors import Door, Peer
from llmgw.net.world import RealWorld, Tcp, Unix
from tests.pki.certs import Certs, make_certs

ANY = Tcp("127.0.0.1", 0)
GET = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"


@attrs.define
class App:
    """A small ASGI app that does what admin and cluster apps do, and notes how its requests ended."""

    seen: list[Peer] = attrs.field(factory=list)
    gone: list[tuple[str, float]] = attrs.field(factory=list)
    running: int = 0

    async def __call__(
        self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        self.seen.append(scope["state"]["peer"])
        self.running += 1
        try:
            await self._serve(scope["path"], receive, send)
        finally:
            self.running -= 1

    async def _serve(
        self, path: str, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if path == "/crash":
            raise RuntimeError("an app with a bug")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if path == "/stream":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, path, receive, nursery)
                while True:
                    await send({"type": "http.response.body", "body": b"tick", "more_body": True})
                    await trio.sleep(1)
        if path == "/flood":
            while True:
                await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        if path == "/slow":
            await trio.sleep(5)
        peer = self.seen[-1]
        await send({"type": "http.response.body", "body": json.dumps([peer.kind, peer.name]).encode()})

    async def _watch(self, path: str, receive: Callable[[], Awaitable[Any]], nursery: trio.Nursery) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.append((path, trio.current_time()))
        nursery.cancel_scope.cancel()


class World(RealWorld):
    """The real one, with a wall clock that tests can move."""

    ahead = 0.0

    def wall(self) -> float:
        return time.time() + self.ahead + trio.current_time() - self.start

    def __init__(self) -> None:
        super().__init__(0)
        self.start = trio.current_time()


@attrs.define
class House:
    """A running door with what it needs to be knocked at."""

    door: Door
    app: App
    world: World
    address: Tcp | Unix
    done: trio.Event = attrs.field(factory=trio.Event)

    async def connect(self, context: ssl.SSLContext | None = None) -> trio.abc.Stream:
        stream: trio.abc.Stream = trio.SocketStream(trio.socket.from_stdlib_socket(await self.world.dial(self.address)))
        if context is not None:
            secure = trio.SSLStream(stream, context, server_hostname="127.0.0.1", https_compatible=True)
            try:
                await secure.do_handshake()
            except BaseException:
                await trio.aclose_forcefully(stream)
                raise
            stream = secure
        return stream


@asynccontextmanager
async def house(certs: Certs | None = None, address: Tcp | Unix = ANY) -> AsyncIterator[House]:
    world, app = World(), App()
    context = certs.server_context() if certs else None
    door = Door(app, kind="cluster" if certs else "admin", world=world, tls=(lambda: context) if context else None)
    sockets = await world.listen(address)
    if isinstance(address, Tcp):
        address = Tcp("127.0.0.1", sockets[0].getsockname()[1])
    home = House(door, app, world, address)

    async def run(*, task_status: trio.TaskStatus[None]) -> None:  # noqa: ASYNC114
        async with trio.open_nursery() as running:
            await running.start(door.run, sockets)
            task_status.started()
        home.done.set()

    async with trio.open_nursery() as nursery:
        await nursery.start(run)
        yield home
        door.close()
        with trio.fail_after(2):
            await home.done.wait()
        assert door.connections == 0
        assert app.running == 0


async def read_until(stream: trio.abc.Stream, mark: bytes) -> bytes:
    got = b""
    while mark not in got:
        part = await stream.receive_some(65536)
        if not part:
            raise EOFError(got)
        got += part
    return got


async def ended(stream: trio.abc.Stream) -> bool:
    """The other end closed, politely or not."""
    try:
        while await stream.receive_some(65536):
            pass
    except (trio.BrokenResourceError, OSError):
        pass
    return True


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return make_certs(tmp_path_factory.mktemp("pki"), time.time())


async def test_loopback_peer(autojump_clock: MockClock) -> None:
    async with house() as home, await home.connect() as stream:
        await stream.send_all(GET % b"/who")
        assert b'["loopback", "127.0.0.1"]' in await read_until(stream, b"]")


async def test_unix_peer_is_vouched_for_by_the_kernel(tmp_path: Path, autojump_clock: MockClock) -> None:
    import os

    async with house(address=Unix(str(tmp_path / "s"))) as home, await home.connect() as stream:
        await stream.send_all(GET % b"/who")
        assert f'["unix", "uid:{os.getuid()}"]'.encode() in await read_until(stream, b"]")
        assert home.app.seen[0].uid == os.getuid()


async def test_certificate_peer_and_peer_without(certs: Certs, autojump_clock: MockClock) -> None:
    async with house(certs) as home:
        async with await home.connect(certs.client_context("gpu-1")) as stream:
            await stream.send_all(GET % b"/who")
            assert b'["certificate", "gpu-1"]' in await read_until(stream, b"]")
        async with await home.connect(certs.client_context()) as stream:
            await stream.send_all(GET % b"/who")
            assert b'["loopback", "127.0.0.1"]' in await read_until(stream, b"]")
    peer = home.app.seen[0]
    assert peer.node == "gpu-1"
    assert peer.serial
    assert peer.expires == pytest.approx(certs.now + 86_400, abs=1)


@pytest.mark.parametrize("secure", [False, True])
async def test_disconnect_of_a_streaming_client_reaches_the_app(
    certs: Certs, secure: bool, autojump_clock: MockClock
) -> None:
    async with house(certs if secure else None) as home:
        stream = await home.connect(certs.client_context() if secure else None)
        await stream.send_all(GET % b"/stream")
        await read_until(stream, b"tick")
        await trio.sleep(2.5)
        left = trio.current_time()
        await trio.aclose_forcefully(stream)
        await trio.sleep(0.1)
        ((path, when),) = home.app.gone
        assert path == "/stream"
        assert when == pytest.approx(left, abs=0.01)


async def test_keep_alive_then_idle_close(autojump_clock: MockClock) -> None:
    async with house() as home, await home.connect() as stream:
        for _ in range(3):
            await stream.send_all(GET % b"/who")
            await read_until(stream, b"]")
        start = trio.current_time()
        assert await ended(stream)
        assert trio.current_time() - start == pytest.approx(doors.IDLE, abs=0.1)


async def test_half_a_head_does_not_hold_the_door(autojump_clock: MockClock) -> None:
    async with house() as home, await home.connect() as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\nHo")
        with trio.fail_after(doors.IDLE + 1):
            assert await ended(stream)


async def test_a_crashing_app_ends_its_own_request_only(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with house() as home:
        async with await home.connect() as stream:
            await stream.send_all(GET % b"/crash")
            assert b" 500 " in await read_until(stream, b"\r\n\r\n")
        async with await home.connect() as stream:
            await stream.send_all(GET % b"/who")
            assert await read_until(stream, b"]")
    assert "an app with a bug" in caplog.text


async def test_drain_lets_requests_finish_and_takes_no_more(autojump_clock: MockClock) -> None:
    async with house() as home, await home.connect() as idle, await home.connect() as busy:
        await busy.send_all(GET % b"/slow")
        await trio.sleep(1)
        home.door.drain(30)
        with trio.fail_after(1):
            assert await ended(idle)
        with pytest.raises(OSError, match="REFUSED"):
            await home.connect()
        assert not home.done.is_set()
        assert b"loopback" in await read_until(busy, b"]")
        with trio.fail_after(1):
            await home.done.wait()


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("path", [b"/stream", b"/flood"])
async def test_drain_ends_by_force(certs: Certs, secure: bool, path: bytes, autojump_clock: MockClock) -> None:
    """A client that stopped reading pins hypercorn's shielded write; only closing the socket frees it."""
    async with house(certs if secure else None) as home:
        stream = await home.connect(certs.client_context() if secure else None)
        await stream.send_all(GET % path)
        await read_until(stream, b"\r\n\r\n")
        await trio.sleep(1)
        start = trio.current_time()
        home.door.drain(7)
        with trio.fail_after(8):
            await home.done.wait()
        assert trio.current_time() - start == pytest.approx(7, abs=0.01)
        await trio.aclose_forcefully(stream)


@pytest.mark.parametrize("secure", [False, True])
async def test_cancelling_the_door_ends_it_at_once(certs: Certs, secure: bool, autojump_clock: MockClock) -> None:
    app, world = App(), World()
    context = certs.server_context() if secure else None
    door = Door(app, kind="admin", world=world, tls=(lambda: context) if context else None)
    sockets = await world.listen(Tcp("127.0.0.1", 0))
    home = House(door, app, world, Tcp("127.0.0.1", sockets[0].getsockname()[1]))
    with trio.fail_after(3):
        async with trio.open_nursery() as nursery:
            await nursery.start(door.run, sockets)
            stream = await home.connect(certs.client_context() if secure else None)
            await stream.send_all(GET % b"/flood")
            await read_until(stream, b"\r\n\r\n")
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
    assert app.running == 0
    await trio.aclose_forcefully(stream)


async def test_revocation_cuts_living_connections_and_later_ones(certs: Certs, autojump_clock: MockClock) -> None:
    async with house(certs) as home:
        bad, good = certs.client_context("gpu-1"), certs.client_context("gpu-2")
        async with await home.connect(bad) as cut, await home.connect(good) as kept:
            for stream in (cut, kept):
                await stream.send_all(GET % b"/stream")
                await read_until(stream, b"tick")
            assert home.door.revoke("gpu-1") == 1
            with trio.fail_after(1):
                assert await ended(cut)
            await kept.receive_some(65536)
        late = await home.connect(bad)  # TLS 1.3: the refusal shows at the first read
        with trio.fail_after(1):
            assert await ended(late)
        await trio.aclose_forcefully(late)
        home.door.pardon("gpu-1")
        async with await home.connect(bad) as again:
            await again.send_all(GET % b"/who")
            await read_until(again, b"gpu-1")


async def test_connection_is_closed_when_its_certificate_expires(certs: Certs, autojump_clock: MockClock) -> None:
    async with house(certs) as home, await home.connect(certs.client_context("gpu-1")) as stream:
        await stream.send_all(GET % b"/stream")
        await read_until(stream, b"tick")
        home.world.ahead = 86_400 - 60  # the clock was set: a minute is left
        start = trio.current_time()
        assert await ended(stream)
        assert trio.current_time() - start == pytest.approx(60, abs=doors.CLOCK_STEP)


async def test_a_peer_that_says_nothing_is_dropped(certs: Certs, autojump_clock: MockClock) -> None:
    async with house(certs) as home, await home.connect() as stream:
        start = trio.current_time()
        assert await ended(stream)
        assert trio.current_time() - start == pytest.approx(doors.HANDSHAKE, abs=0.1)


async def test_plain_http_at_a_tls_door(certs: Certs, autojump_clock: MockClock) -> None:
    async with house(certs) as home, await home.connect() as stream:
        await stream.send_all(GET % b"/who")
        assert await ended(stream)
        assert home.app.seen == []


async def test_connections_are_bounded(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "MAX_CONNECTIONS", 1)
    async with house() as home, await home.connect() as first:
        await first.send_all(GET % b"/who")
        await read_until(first, b"]")
        async with await home.connect() as second:
            assert await ended(second)


async def test_a_door_without_handles_complains_once_and_recovers(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with house() as home:
        stream = socket.socket()
        stream.setblocking(False)
        used = socket.socket()
        resource.setrlimit(resource.RLIMIT_NOFILE, (used.fileno() + 1, hard))
        try:
            stream.connect_ex((home.address.host, home.address.port))  # type: ignore[union-attr]
            await trio.sleep(5)
            assert caplog.text.count("raise the limit of open files") == 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            used.close()
        await trio.sleep(1)
        assert home.door.connections == 1
        stream.close()
