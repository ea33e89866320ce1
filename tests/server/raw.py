"""A fake engine that speaks raw bytes: what it answers is written out, down to the last CRLF."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from llmgw.net.world import RealWorld, Tcp
from llmgw.request import Target

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Script = Callable[["Engine", trio.SocketStream, bytes], Awaitable[None]]
"""Called with each request's bytes (head and body); closes the stream to end the connection."""


def response(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """An answer with a length."""
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@attrs.define(eq=False)
class Engine:
    """Listens on loopback. *pages*: path → what is answered; None = the connection is closed."""

    port: int
    pages: dict[str, bytes | None] = attrs.field(factory=dict)
    script: Script | None = None
    connections: int = 0
    closed: int = 0  # connections that the peer has closed
    requests: list[bytes] = attrs.field(factory=list)
    alive: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    def stop(self) -> None:
        """Gone, with all its connections."""
        self.alive.cancel("the engine has died")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def target(self) -> Target:
        return Target(endpoint="e", name="e", address=f"tcp:127.0.0.1:{self.port}", host=f"127.0.0.1:{self.port}")

    def paths(self) -> list[str]:
        return [r.split(b" ", 2)[1].decode() for r in self.requests]

    async def serve(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        data = b""
        try:
            async with stream:
                while True:
                    while b"\r\n\r\n" not in data:
                        more = bytes(await stream.receive_some(65536))
                        if not more:
                            return
                        data += more
                    head, _, data = data.partition(b"\r\n\r\n")
                    length = 0
                    for line in head.lower().split(b"\r\n"):
                        if line.startswith(b"content-length:"):
                            length = int(line[15:])
                    while len(data) < length:
                        data += bytes(await stream.receive_some(65536))
                    request = head + b"\r\n\r\n" + data[:length]
                    data = data[length:]
                    self.requests.append(request)
                    if self.script is not None:
                        await self.script(self, stream, request)
                    else:
                        answer = self.pages.get(request.split(b" ", 2)[1].decode(), response(b"", "404 Not Found"))
                        if answer is None:
                            return
                        await stream.send_all(answer)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self.closed += 1


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@asynccontextmanager
async def engine(
    pages: dict[str, bytes | None] | None = None, script: Script | None = None, port: int = 0
) -> AsyncIterator[Engine]:
    """A listening engine; when left, it is gone with all its connections."""
    (sock,) = await RealWorld().listen(Tcp("127.0.0.1", port))
    made = Engine(sock.getsockname()[1], pages or {}, script)
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
    async with trio.open_nursery() as nursery:
        await nursery.start(_live, made, listener)
        try:
            yield made
        finally:
            nursery.cancel_scope.cancel()


async def _live(made: Engine, listener: trio.SocketListener, *, task_status: trio.TaskStatus[None]) -> None:
    with made.alive:
        async with listener, trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, made.serve, [listener])
            task_status.started()
