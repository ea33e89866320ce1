"""HTTP/1.1 for a simulated engine: one task reads a connection, whoever has something to say writes to it at once.

A streamed token costs one format and one `send`. What the socket does not take is kept (bounded) and flushed by a task of
its own. The task that reads also watches for the client's hang-up during the answer.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from math import inf
from typing import Protocol

import attrs
import httptools
import trio

from llmgw.net.world import nodelay

READ = 65536
MAX_BODY = 64 << 20
MAX_HEAD = 65536
MAX_PENDING = 16
"""Pipelined requests kept while one is answered; a client that sends more is cut."""
MAX_UNSENT = 8 << 20
"""Bytes kept for a client that does not read; beyond, it is cut. 40,000 events: far more than any gateway lags."""

PHRASES = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    412: "Precondition Failed",
    413: "Request Entity Too Large",
    422: "Unprocessable Entity",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}


@attrs.define(eq=False)
class Request:
    """One message as received. Header names are lower case; of a repeated one the last counts."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    keep: bool
    received: float


class Handler(Protocol):
    """Answers requests. *handle* must lead to exactly one answer through the connection, now or later."""

    keep_alive: float

    def handle(self, request: Request, connection: Connection) -> None: ...

    def wall(self) -> float: ...


class Connection:
    """One client. `respond`, or `start` … `chunk` … `finish`; `on_gone` is called if the client leaves before that."""

    def __init__(self, sock: socket.socket, handler: Handler, nursery: trio.Nursery) -> None:
        self._sock = sock
        self._handler = handler
        self._nursery = nursery
        self._parser = httptools.HttpRequestParser(self)
        self._pending: deque[Request] = deque()
        self._request: Request | None = None
        self._unsent = b""
        self._closed = False
        self._close_after = False
        self._scope = trio.CancelScope()
        self._url = b""
        self._headers: dict[str, str] = {}
        self._head_size = 0
        self._body: list[bytes] = []
        self._body_size = 0
        self._status = 0
        self._length = 0
        self.on_gone: Callable[[], None] | None = None
        self.on_done: Callable[[Request, int, int], None] | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    async def run(self) -> None:
        """Reads until either side closes."""
        try:
            nodelay(self._sock)
            self._rest()
            with self._scope:
                while not self._closed:
                    await trio.lowlevel.wait_readable(self._sock)
                    try:
                        data = self._sock.recv(READ)
                    except BlockingIOError:
                        continue
                    if not data:
                        break
                    self._parser.feed_data(data)
                    self._next()
        except httptools.HttpParserError:
            if self._request is None and not self._closed:
                self._request = Request("GET", "", {}, b"", False, trio.current_time())
                self.respond(400, b"Invalid HTTP request received.", "text/plain; charset=utf-8")
        except (OSError, trio.ClosedResourceError):
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Ends the connection, whatever is under way. Idempotent."""
        if self._closed:
            return
        self._closed = True
        trio.lowlevel.notify_closing(self._sock)
        self._sock.close()
        gone, self.on_gone = self.on_gone, None
        if gone is not None:
            gone()

    def reset(self) -> None:
        """Ends it with a TCP reset (an ordinary close on AF_UNIX)."""
        if not self._closed and self._sock.family != socket.AF_UNIX:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.close()

    # Parser callbacks

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = {}
        self._head_size = 0
        self._body = []
        self._body_size = 0

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._grow(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        self._grow(len(name) + len(value))

    def _grow(self, size: int) -> None:
        self._head_size += size
        if self._head_size > MAX_HEAD:
            raise httptools.HttpParserError("head too large")

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_size += len(body)
        if self._body_size > MAX_BODY:
            raise httptools.HttpParserError("body too large")
        self._body.append(body)

    def on_message_complete(self) -> None:
        if len(self._pending) >= MAX_PENDING:
            raise httptools.HttpParserError("too many requests at once")
        self._pending.append(
            Request(
                self._parser.get_method().decode("latin-1"),
                self._url.partition(b"?")[0].decode("latin-1"),
                self._headers,
                b"".join(self._body),
                self._parser.should_keep_alive(),
                trio.current_time(),
            )
        )

    # Answers

    def _next(self) -> None:
        while self._pending and self._request is None and not self._closed:
            self._request = request = self._pending.popleft()
            self._scope.deadline = inf
            self._handler.handle(request, self)

    def _rest(self) -> None:
        self._scope.deadline = trio.current_time() + self._handler.keep_alive

    def _head(self, status: int, fields: str) -> bytes:
        date = formatdate(self._handler.wall(), usegmt=True)
        close = "" if self._request is None or self._request.keep else "connection: close\r\n"
        self._status = status
        return f"HTTP/1.1 {status} {PHRASES[status]}\r\ndate: {date}\r\nserver: uvicorn\r\n{fields}{close}\r\n".encode(
            "latin-1"
        )

    def respond(
        self, status: int, body: bytes, content_type: str = "application/json", before: str = "", after: str = ""
    ) -> None:
        """A whole answer. *before* and *after* are further header lines, in front of and behind the usual ones."""
        kind = f"content-type: {content_type}\r\n" if content_type else ""
        vary = "" if status == 401 else "vary: Origin\r\n"
        self._length = len(body)
        head = self._head(status, f"{before}content-length: {len(body)}\r\n{kind}{vary}{after}")
        self.write(head if self._request is not None and self._request.method == "HEAD" else head + body)
        self._done()

    def start(self, after: str = "") -> None:
        """Headers of a stream."""
        self._length = 0
        self.write(
            self._head(
                200,
                f"content-type: text/event-stream; charset=utf-8\r\nvary: Origin\r\n{after}transfer-encoding: chunked\r\n",
            )
        )

    def chunk(self, data: bytes) -> None:
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def finish(self, data: bytes = b"") -> None:
        """The stream is complete; *data* is its last chunk."""
        self.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n")
        self._done()

    def _done(self) -> None:
        request, self._request = self._request, None
        self.on_gone = None
        if request is None or self._closed:
            return
        if self.on_done is not None:
            self.on_done(request, self._status, self._length)
        if request.keep:
            self._rest()
            if self._pending:
                self._nursery.start_soon(self._resume)
        elif self._unsent:
            self._close_after = True
        else:
            self.close()

    async def _resume(self) -> None:
        """Pipelined requests are served from here, not from inside the answer before them."""
        self._next()

    def write(self, data: bytes) -> None:
        if self._closed:
            return
        if self._unsent:
            if len(self._unsent) + len(data) > MAX_UNSENT:
                self.close()
            else:
                self._unsent += data
            return
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        if sent < len(data):
            self._unsent = data[sent:]
            self._nursery.start_soon(self._flush)

    async def _flush(self) -> None:
        try:
            while self._unsent and not self._closed:
                await trio.lowlevel.wait_writable(self._sock)
                try:
                    sent = self._sock.send(self._unsent)
                except BlockingIOError:
                    continue
                self._unsent = self._unsent[sent:]
        except (OSError, trio.ClosedResourceError):
            self.close()
        if self._close_after:
            self.close()


ACCEPT_PAUSE = 0.1
"""Seconds to wait after running out of file descriptors or memory."""


async def accept_loop(listener: socket.socket, handler: Handler, nursery: trio.Nursery, live: set[Connection]) -> None:
    """Accepts until cancelled, in batches; each connection is a task of *nursery* and a member of *live*."""
    while True:
        await trio.lowlevel.wait_readable(listener)
        while True:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    await trio.sleep(ACCEPT_PAUSE)
                continue
            sock.setblocking(False)
            nursery.start_soon(_serve, Connection(sock, handler, nursery), live)


async def _serve(connection: Connection, live: set[Connection]) -> None:
    live.add(connection)
    try:
        await connection.run()
    finally:
        connection.close()
        live.discard(connection)
