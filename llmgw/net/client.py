"""The data plane's own HTTP/1.1 client, for small questions to engines: probes, scrapes, legs of a pipeline.

One request, one whole answer in memory. The caller sets the deadline with a cancel scope; a cancelled request closes its
connection, and an engine takes that as an abort. Connections are kept for a short while: engines close idle ones after 5 s.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable
from typing import Protocol

import attrs
import httptools
import trio

from llmgw.errors import Unavailable
from llmgw.net.tls import client_context, host_name
from llmgw.net.world import World, parse_address
from llmgw.request import Target

IDLE = 4.0  # seconds; vLLM, SGLang and llama-server close after 5
KEPT = 4  # idle connections an engine; probe, scrape and two legs
KEPT_IN_ALL = 1024
ANSWER = 16 << 20  # bytes: twice the largest metrics page seen, and far above any probe's answer
HEAD = 64 << 10  # bytes of a status line and headers
PIECE = 64 << 10  # bytes a read


class Unreachable(Unavailable):
    """Nobody listens there: nothing was sent, so nothing can have begun."""


@attrs.frozen
class Answer:
    """*headers*: lower-case names; of repeated ones the last."""

    status: int
    headers: dict[str, str]
    body: bytes


class _Wire(Protocol):
    """A connected byte stream."""

    expires: float

    async def send(self, data: bytes | memoryview) -> None: ...

    async def receive(self) -> bytes: ...

    def stale(self) -> bool:
        """Whether the peer has closed it, or said something that nobody asked for."""
        ...

    def close(self) -> None: ...


class _Plain:
    """A socket, tried before it is waited for: most sends and some reads need no wait."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.expires = 0.0

    async def send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._sock)

    async def receive(self) -> bytes:
        while True:
            await trio.lowlevel.wait_readable(self._sock)
            try:
                return self._sock.recv(PIECE)
            except BlockingIOError:
                continue

    def stale(self) -> bool:
        return _stale(self._sock)

    def close(self) -> None:
        self._sock.close()


class _Tls:
    """TLS on top of a socket."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str) -> None:
        self._sock = sock
        self._trio = trio.socket.from_stdlib_socket(sock)
        self._stream = trio.SSLStream(
            trio.SocketStream(self._trio), context, server_hostname=host, https_compatible=True
        )
        self.expires = 0.0

    async def send(self, data: bytes | memoryview) -> None:
        await self._stream.send_all(data)

    async def receive(self) -> bytes:
        return bytes(await self._stream.receive_some(PIECE))

    def stale(self) -> bool:
        return _stale(self._sock)

    def close(self) -> None:
        self._trio.close()  # no close_notify: the answer's own framing said that it was whole


def _stale(sock: socket.socket) -> bool:
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class _Reader:
    """What llhttp calls back; collects one answer."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.parser = httptools.HttpResponseParser(self)
        self.done = False
        self.began = False
        self.too_large = False
        self.surplus = False  # bytes after the end
        self.keep = False
        self._reset()

    def _reset(self) -> None:
        self.headers: dict[str, str] = {}
        self.body: list[bytes] = []
        self.head_done = False
        self._size = 0
        self._head = 0
        self._fields = 0

    def feed(self, data: bytes) -> None:
        self.began = True
        if not self.head_done:
            self._head += len(data)
        self.parser.feed_data(data)
        if not self.head_done and self._head > HEAD:
            self.too_large = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += len(name) + len(value)
        if self._fields > HEAD:
            self.too_large = True
        elif not self.head_done:  # else a trailer
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        self.head_done = True
        self.keep = bool(self.parser.should_keep_alive())  # after the end llhttp has forgotten

    def on_body(self, data: bytes) -> None:
        if self.done:
            return
        self._size += len(data)
        if self._size > self._limit:
            self.too_large = True
        else:
            self.body.append(data)

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() // 100 == 1:
            self._reset()  # an interim answer; the real one follows
        else:
            self.done = True

    def on_message_begin(self) -> None:
        if self.done:
            self.surplus = True

    def at_eof(self) -> bool:
        """The peer has closed; whether that is where the answer ends."""
        return self.head_done and "content-length" not in self.headers and "transfer-encoding" not in self.headers


def _head(target: Target, method: str, path: str, headers: Iterable[tuple[str, str]], length: int) -> bytes:
    lines = [f"{method} {target.path}{path} HTTP/1.1", f"host: {target.host}"]
    lines += [f"{name}: {value}" for name, value in (*target.headers, *headers)]
    if length or method not in ("GET", "DELETE"):
        lines.append(f"content-length: {length}")
    if any("\r" in line or "\n" in line or "\0" in line for line in lines) or " " in path:
        raise ValueError("a header or path with a line break or space would be another request")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Client:
    """A pool of connections to engines. Used by many tasks at once; `close` when nobody does any more."""

    def __init__(self, world: World, *, tls: ssl.SSLContext | None = None) -> None:
        """*tls*: for https targets; None = the roots that this machine trusts."""
        self._world = world
        self._context = tls
        self._idle: dict[tuple[str, bool, str], list[_Wire]] = {}
        self._kept = 0

    def configure(self, tls: ssl.SSLContext) -> None:
        """For connections made from now on."""
        self._context = tls

    async def request(
        self,
        target: Target,
        method: str,
        path: str,
        *,
        headers: Iterable[tuple[str, str]] = (),
        body: bytes | tuple[bytes | memoryview, ...] = b"",
        limit: int = ANSWER,
    ) -> Answer:
        """The whole answer, whatever its status. *body*: in one piece or in several. *limit*: bytes of the answer's body.

        Raises Unreachable if it cannot be connected to, Unavailable if it closes before the answer is whole, speaks no HTTP, says too much.
        """
        pieces = (body,) if isinstance(body, bytes) else body
        length = sum(map(len, pieces))
        head = _head(target, method, path, headers, length)
        data: tuple[bytes | memoryview, ...] = (head, *pieces)
        if length <= PIECE:  # a longer one is not joined: copying 64 MiB would stall everybody
            data = (b"".join(data),)
        wire = self._take(target)
        if wire is not None:
            answer = await self._exchange(target, wire, data, limit, reused=True)
            if answer is not None:
                return answer
        wire = await self._connect(target)
        answer = await self._exchange(target, wire, data, limit, reused=False)
        assert answer is not None
        return answer

    async def _connect(self, target: Target) -> _Wire:
        try:
            sock = await self._world.dial(parse_address(target.address))
        except OSError as error:
            raise Unreachable(f"{target.name}: cannot connect: {error.strerror or error}") from error
        if not target.tls:
            return _Plain(sock)
        try:
            if self._context is None:
                self._context = client_context(now=self._world.wall())
            return _Tls(sock, self._context, host_name(target.host))
        except BaseException:
            sock.close()
            raise

    async def _exchange(
        self, target: Target, wire: _Wire, data: tuple[bytes | memoryview, ...], limit: int, *, reused: bool
    ) -> Answer | None:
        """None: a reused connection that was dead already."""
        reader = _Reader(limit)
        keep = False
        try:
            for part in data:
                await wire.send(part)
            while not reader.done:
                piece = await wire.receive()
                if piece:
                    reader.feed(piece)
                elif reader.at_eof():
                    break
                elif reused and not reader.began:
                    return None
                else:
                    raise Unavailable(f"{target.name}: closed the connection before its answer was whole")
                if reader.too_large:
                    raise Unavailable(
                        f"{target.name}: its answer is larger than {limit} bytes, or its head than {HEAD}"
                    )
            keep = reader.done and reader.keep and not reader.surplus
            return Answer(reader.parser.get_status_code(), reader.headers, b"".join(reader.body))
        except httptools.HttpParserUpgrade as error:
            raise Unavailable(f"{target.name}: wants another protocol than HTTP/1.1") from error
        except httptools.HttpParserError as error:
            raise Unavailable(f"{target.name}: does not answer in HTTP ({error})") from error
        except (OSError, trio.BrokenResourceError) as error:
            if reused and not reader.began:
                return None
            cause = error.__cause__ or error
            what = f"TLS: {cause.reason}" if isinstance(cause, ssl.SSLError) else f"connection broke: {cause}"
            raise Unavailable(f"{target.name}: {what}") from error
        finally:
            if keep:
                self._give(target, wire)
            else:
                wire.close()

    # -- the pool ------------------------------------------------------------------------------------------------

    def _take(self, target: Target) -> _Wire | None:
        found = self._idle.get((target.address, target.tls, target.host))
        now = trio.current_time()
        while found:
            wire = found.pop()
            self._kept -= 1
            if wire.expires > now and not wire.stale():
                return wire
            wire.close()
        return None

    def _give(self, target: Target, wire: _Wire) -> None:
        now = trio.current_time()
        if self._kept >= KEPT_IN_ALL:
            self._sweep(now)
        found = self._idle.setdefault((target.address, target.tls, target.host), [])
        if len(found) >= KEPT or self._kept >= KEPT_IN_ALL:
            wire.close()
            return
        wire.expires = now + IDLE
        found.append(wire)
        self._kept += 1

    def _sweep(self, now: float) -> None:
        """Close what has expired, everywhere."""
        for key, wires in tuple(self._idle.items()):
            alive = [w for w in wires if w.expires > now]
            for wire in wires:
                if wire not in alive:
                    wire.close()
                    self._kept -= 1
            if alive:
                self._idle[key] = alive
            else:
                del self._idle[key]

    def close(self) -> None:
        """Close idle connections."""
        self._sweep(float("inf"))
