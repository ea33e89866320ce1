"""A relay between a client and fake engines, all in one trio program, over real loopback sockets.

A fake engine is a script: a coroutine that is given each connection (`Wire`) and does what it likes with the bytes. A
client is a `Wire` too. Both ends set TCP_NODELAY, so that virtual time is exact.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import attrs
import trio

from llmgw.config import ClientLimits, Listener
from llmgw.net.relay import Relay
from llmgw.net.tls import server_context
from llmgw.net.world import RealWorld, Tcp, nodelay
from llmgw.request import Brain, Limits, Mover, Target
from tests.net.brains import RoundRobin
from tests.pki.certs import make_certs
from tests.seam.ends import MoverEnd, RemoteBrain
from tests.seam.link import Link

DriverName = Literal["pump", "tasks", "pump-tls", "tasks-tls", "seam"]
DRIVERS: tuple[DriverName, ...] = ("pump", "tasks", "seam", "pump-tls")
"""How a relay is run. `-tls`: its clients speak TLS. `seam`: the pump, with its brain at the other end of a socketpair, as in
another process."""


class TlsSocket:
    """A trio socket's calls that `Wire` uses, over TLS."""

    def __init__(self, sock: trio.socket.SocketType, context: ssl.SSLContext) -> None:
        self.raw = sock
        self.stream = trio.SSLStream(
            trio.SocketStream(sock), context, server_hostname="localhost", https_compatible=True
        )

    async def send(self, data: memoryview) -> int:
        try:
            await self.stream.send_all(data)
        except trio.BrokenResourceError as error:
            raise ConnectionResetError from error
        return len(data)

    async def recv(self, size: int) -> bytes:
        try:
            return bytes(await self.stream.receive_some(size))
        except trio.BrokenResourceError as error:
            raise ConnectionResetError from error

    def fileno(self) -> int:
        return self.raw.fileno()

    def shutdown(self, how: int) -> None:
        self.raw.shutdown(how)

    def setsockopt(self, *arguments: Any) -> None:
        self.raw.setsockopt(*arguments)

    def close(self) -> None:
        self.raw.close()


@cache
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's, and that of a client who trusts it."""
    with tempfile.TemporaryDirectory() as folder:
        certs = make_certs(Path(folder), time.time())
        pair = certs.server_files("localhost", "127.0.0.1")
        return server_context(*pair, now=certs.now), certs.client_context()


class Wire:
    """One end of a connection, for scripts: exact bytes, no HTTP library in between."""

    def __init__(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        sock.setblocking(False)
        nodelay(sock)
        self.sock: Any = trio.socket.from_stdlib_socket(sock)
        self.tls = tls
        self.buffer = b""

    async def connect(self, address: tuple[str, int]) -> None:
        await self.sock.connect(address)
        if self.tls is not None:
            self.sock = TlsSocket(self.sock, self.tls)

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[await self.sock.send(view) :]

    async def some(self) -> bytes:
        """What is there next; b"" = the peer has closed or reset."""
        if self.buffer:
            data, self.buffer = self.buffer, b""
            return data
        try:
            found: bytes = await self.sock.recv(65536)
            return found
        except OSError:
            return b""

    async def until(self, mark: bytes) -> bytes:
        """Bytes up to and with *mark*; what there is if the peer closes before."""
        data = b""
        while mark not in data:
            more = await self.some()
            if not more:
                return data
            data += more
        end = data.index(mark) + len(mark)
        self.buffer = data[end:]
        return data[:end]

    async def exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = await self.some()
            if not more:
                break
            data += more
        self.buffer = data[size:]
        return data[:size]

    async def rest(self) -> bytes:
        """Everything until the peer closes."""
        data = b""
        while more := await self.some():
            data += more
        return data

    async def drained(self) -> None:
        """Read to the end; raises OSError if that end is a reset."""
        while await self.sock.recv(65536):
            pass

    async def request(self) -> tuple[bytes, bytes]:
        """Head and body of one request (or response) with a Content-Length or none; (b"", b"") if the peer closes."""
        head = await self.until(b"\r\n\r\n")
        return head, await self.exactly(length_of(head)) if head else b""

    async def answer(self) -> tuple[int, bytes, bytes]:
        """Status, head, body (without framing) of one answer that has a length or is chunked."""
        head = await self.until(b"\r\n\r\n")
        if not head:
            return 0, b"", b""
        status = int(head.split(b" ", 2)[1])
        if b"transfer-encoding: chunked" not in head.lower():
            return status, head, await self.exactly(length_of(head))
        body = b""
        while True:
            line = await self.until(b"\r\n")
            if not line:
                raise EOFError(f"cut in the middle of a chunked body: {body!r}")
            size = int(line.split(b";")[0], 16)
            piece = await self.exactly(size + 2)
            if len(piece) < size + 2:
                raise EOFError(f"cut in the middle of a chunk: {body + piece!r}")
            if not size:
                return status, head, body
            body += piece[:-2]

    async def closed(self) -> bool:
        """Wait for the peer's end; True when it came without a byte before it."""
        return await self.some() == b""

    def shutdown(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        self.sock.close()


def length_of(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


Script = Callable[[Wire], Awaitable[None]]


def post(
    body: object = None, *, path: str = "/v1/chat/completions", headers: Sequence[str] = (), **fields: Any
) -> bytes:
    """A request as bytes. *body*: an object or bytes; else a small chat request with *fields*."""
    if body is None:
        body = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], **fields}
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: gw",
        "Content-Type: application/json",
        f"Content-Length: {len(raw)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


def event(text: str) -> bytes:
    """A chat chunk as vLLM sends it."""
    data = {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}]}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def json_answer(
    body: bytes = b'{"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}', status: int = 200
) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


def streams(tokens: int = 3, gap: float = 0.0) -> Script:
    """An engine that streams *tokens* words, *gap* seconds apart, on keep-alive connections."""

    async def script(wire: Wire) -> None:
        while (await wire.request())[0]:
            await wire.send(SSE)
            for i in range(tokens):
                await trio.sleep(gap)
                await wire.send(chunk(event(f" w{i}")))
            await wire.send(chunk(DONE) + b"0\r\n\r\n")

    return script


def answers(*replies: bytes) -> Script:
    """An engine that sends one of *replies* a request, in turn, the last one again and again."""
    left = list(replies)

    async def script(wire: Wire) -> None:
        while (await wire.request())[0]:
            await wire.send(left.pop(0) if len(left) > 1 else left[0])

    return script


@attrs.define
class Engine:
    """A listening script. *connections*: accepted so far; *gone*: virtual times at which a peer closed during a script."""

    script: Script
    port: int = 0
    connections: int = 0

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", self.port))
            listener.listen(4096)
            listener.setblocking(False)
            self.port = listener.getsockname()[1]
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    await trio.lowlevel.wait_readable(listener)
                    try:
                        sock, _ = listener.accept()
                    except BlockingIOError:
                        continue
                    self.connections += 1
                    nursery.start_soon(self._serve, sock)

    async def _serve(self, sock: socket.socket) -> None:
        wire = Wire(sock)
        try:
            await self.script(wire)
        except OSError:
            pass  # the peer reset while the script wrote: its own affair
        finally:
            wire.close()

    def target(self) -> Target:
        return Target(
            endpoint=f"e{self.port}",
            name=f"e{self.port}",
            address=f"tcp:127.0.0.1:{self.port}",
            host=f"127.0.0.1:{self.port}",
        )


@attrs.define
class Rig:
    relay: Relay
    brain: RoundRobin
    engines: list[Engine]
    port: int
    bugs: list[BaseException]
    mover: Mover  # as the brain sees it: the relay, or the seam's end
    tls: ssl.SSLContext | None = None

    async def dial(self) -> Wire:
        sock = socket.socket()
        sock.setblocking(False)
        wire = Wire(sock, self.tls)
        try:
            await wire.connect(("127.0.0.1", self.port))
        except BaseException:
            wire.close()
            raise
        return wire

    async def ask(self, request: bytes) -> tuple[int, bytes, bytes]:
        """One request on a connection of its own."""
        wire = await self.dial()
        try:
            await wire.send(request)
            return await wire.answer()
        finally:
            wire.close()

    async def settled(self, count: int = 1) -> None:
        """Wait until *count* outcomes have come. Bounded by the test's own clock."""
        with trio.fail_after(600):
            while len(self.brain.outcomes) < count:  # noqa: ASYNC110 -- a brain without a bell
                await trio.sleep(0.001)

    def check_baseline(self) -> None:
        """Nothing is held: no lease, no ticket, no bug; only idle pooled sockets are registered."""
        assert self.brain.open == {}
        assert self.brain.waiting == {}
        assert self.bugs == []
        assert self.relay.connections == 0
        assert self.relay.registered == self.relay.idle_upstreams


@asynccontextmanager
async def rig(
    driver: DriverName,
    *scripts: Script,
    limits: ClientLimits | None = None,
    listener: Listener | None = None,
    leg: Limits | None = None,
    **brain_options: Any,
) -> AsyncIterator[Rig]:
    """A running relay. On leaving: every connection ended, everything back at its base, no bug met."""
    engines = [Engine(script) for script in scripts]
    bugs: list[BaseException] = []
    world = RealWorld(seed=1)
    async with trio.open_nursery() as nursery:
        for engine in engines:
            await nursery.start(engine.run)
        brain = RoundRobin([e.target() for e in engines], limits=leg, **brain_options)
        seen: Brain = brain
        mover: Mover | None = None
        if driver == "seam":
            near, far = socket.socketpair()
            seen = remote = RemoteBrain(Link(near), trio.current_time)
            mover = end = MoverEnd(Link(far), brain, trio.current_time)
        relay = Relay(
            world,
            seen,
            limits=limits or ClientLimits(),
            listener=listener or Listener(),
            driver="tasks" if driver.startswith("tasks") else "pump",
            tls=(lambda: contexts()[0]) if driver.endswith("-tls") else None,
            bug=lambda _, error: bugs.append(error),
        )
        if driver == "seam":
            nursery.start_soon(remote.run, relay)
            nursery.start_soon(end.run)
        sockets = await world.listen(Tcp("127.0.0.1", 0))
        made = Rig(relay, brain, engines, sockets[0].getsockname()[1], bugs, mover or relay)
        made.tls = contexts()[1] if driver.endswith("-tls") else None
        await nursery.start(relay.run, sockets)
        yield made
        with trio.move_on_after(5):
            while relay.connections or brain.open or brain.waiting:  # noqa: ASYNC110 -- as above
                await trio.sleep(0.01)
        made.check_baseline()
        nursery.cancel_scope.cancel()
