"""The log: one JSON object a line, for requests and for what happens to the process.

    request(outcome) ─┐                       ┌─ file: written in one piece, every 20 ms
    event(name, …)  ──┴► buffer (≤ 4 MiB) ──run()──┤
                         full: drop and count      └─ pipe, terminal, socket: what it takes without waiting

Writing a line never waits and never raises. A reader of standard output that has stopped costs lines, not latency:
when it reads again, the log says how many were lost. Standard output may be shared with others (a terminal, a pipe),
so its blocking mode is never changed: a pipe or terminal is opened once more through /proc, which gives a file
description of our own; a socket is written to with MSG_DONTWAIT.

Never in it: prompts, completions, keys.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import stat
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

import msgspec
import trio

from llmgw.errors import ConfigError, Problem
from llmgw.request import Outcome

BUFFER = 4 << 20  # bytes: some 10,000 lines, a few seconds of a very busy gateway
PIECE = 64 << 10  # bytes a write: a pipe's capacity; keeps one visit short
PAUSE = 0.02  # seconds that lines gather: a wake-up and a write for each would cost as much as all else about it
RETRY = 0.05  # seconds until a target that cannot be waited for is tried again

GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ECONNRESET)  # the reader of a pipe, terminal or socket has left

Level = Literal["info", "warning", "error"]

_encode = msgspec.json.Encoder(enc_hook=str).encode
_nothing = msgspec.UNSET


class RequestLine(msgspec.Struct, omit_defaults=True, gc=False):
    """One request. docs/operations.md is made from this: a field that is missing was not known or is empty."""

    time: datetime
    kind: str
    request_id: str
    route: str
    status: int
    reason: str = ""
    detail: str = ""
    stream: bool = False
    model: str = ""
    served: str = ""
    principal: str = ""
    flow: str = ""
    band: str = ""
    profile: str = ""
    endpoint: str = ""
    endpoints: dict[str, str] | msgspec.UnsetType = _nothing
    upstream_request_id: str = ""
    upstream_status: int | None = None
    attempts: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    usage: str | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    queue: float | None = None
    ttft: float | None = None
    duration: float | None = None
    aborted: bool = False


FIELDS: dict[str, str] = {
    "time": "when the line was written, UTC",
    "kind": "`request`",
    "request_id": "the client's `x-request-id` if well-formed, else made here; the answer carries it",
    "route": "path without query",
    "status": "as the client saw it; 499 = it left before it saw one",
    "reason": "why it was not served, or not wholly: a code of docs/reasons.md",
    "detail": "the same in words",
    "stream": "whether it asked for a stream",
    "model": "as the client asked",
    "served": "the name used towards the engine, where another",
    "principal": "who asked",
    "flow": "whose turn it was (fairness)",
    "band": "priority class",
    "profile": "how endpoints were scored",
    "endpoint": "name of the endpoint that answered, or of the last one tried",
    "endpoints": "by phase, where several took part",
    "upstream_request_id": "the id that the engine was given",
    "upstream_status": "what the engine said",
    "attempts": "how many endpoints were tried",
    "prompt_tokens": "tokens of the prompt",
    "cached_tokens": "of these, found in the engine's cache",
    "completion_tokens": "tokens of the answer",
    "usage": "how tokens are known: engine, counted, estimated",
    "bytes_in": "bytes of the request's body",
    "bytes_out": "bytes sent to the client",
    "queue": "seconds from its first byte to its admission",
    "ttft": "seconds from its first byte to the first byte of the answer's body",
    "duration": "seconds from its first byte to the end",
    "aborted": "whether an engine was stopped at work",
}
"""What each field of a request's line means."""


class Target(Protocol):
    """Where bytes go. *write* takes what it can without waiting, None = nothing now; *wait* until it may take more."""

    def write(self, data: bytes) -> int | None: ...

    async def wait(self) -> None: ...

    def close(self) -> None: ...


class FileTarget:
    """A file descriptor of our own: a regular file, or a pipe or terminal in non-blocking mode."""

    def __init__(self, fd: int, *, patient: bool) -> None:
        self._fd = fd
        self._patient = patient  # can be waited for

    def write(self, data: bytes) -> int | None:
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return None  # somebody will make room
            raise

    async def wait(self) -> None:
        if self._patient:
            await trio.lowlevel.wait_writable(self._fd)
        else:
            await trio.sleep(RETRY)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class SharedTarget:
    """A descriptor whose blocking mode is not ours to change, and that cannot be opened again: ask first, write little."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, data: bytes) -> int | None:
        if not self._poll.poll(0):
            return None
        return os.write(self._fd, data[: select.PIPE_BUF])  # a pipe that is writable takes so much without waiting

    async def wait(self) -> None:
        await trio.sleep(RETRY)

    def close(self) -> None:
        return None


class SocketTarget:
    """A socket as standard output (systemd's journal)."""

    def __init__(self, fd: int) -> None:
        self._sock = socket.socket(fileno=os.dup(fd))

    def write(self, data: bytes) -> int | None:
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return None

    async def wait(self) -> None:
        await trio.lowlevel.wait_writable(self._sock)

    def close(self) -> None:
        self._sock.close()


def open_file(path: str) -> Target:
    """Append to *path*. Raises ConfigError. A named pipe without a reader is refused rather than waited for."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o640)
    except OSError as error:
        raise ConfigError([Problem(f"cannot be opened: {error.strerror}", "log.file", path)]) from error
    return FileTarget(fd, patient=not stat.S_ISREG(os.fstat(fd).st_mode))


def open_descriptor(fd: int) -> Target:
    """What descriptor *fd* (standard output) leads to, without touching its mode."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        return SocketTarget(fd)
    if stat.S_ISREG(mode):
        return FileTarget(os.dup(fd), patient=False)  # shares the offset, so that nothing is overwritten
    try:
        again = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return SharedTarget(fd)
    return FileTarget(again, patient=stat.S_ISFIFO(mode) or os.isatty(again))


class Log:
    """Takes lines from anywhere in the event loop; `run` writes them."""

    def __init__(self, target: Target, wall: Callable[[], float], *, requests: bool = True) -> None:
        self._target = target
        self._wall = wall
        self._requests = requests
        self._lines: list[bytes] = []
        self._size = 0
        self._lost = 0  # since the last line about it
        self._wake = trio.Event()
        self.dropped = 0
        self.written = 0  # lines

    def request(self, outcome: Outcome, endpoint: str = "", phases: dict[str, str] | None = None) -> None:
        """The line of a request. *endpoint*: its name; *phases*: names by phase, where several took part."""
        if not self._requests:
            return
        o = outcome
        start = o.accepted
        self._put(
            _encode(
                RequestLine(
                    datetime.fromtimestamp(self._wall(), UTC),
                    "request",
                    o.request_id,
                    o.route,
                    o.status,
                    o.reason,
                    o.detail,
                    o.stream,
                    o.model,
                    o.served if o.served != o.model else "",
                    o.principal,
                    o.flow,
                    o.band,
                    o.profile,
                    endpoint,
                    phases if phases is not None else _nothing,
                    o.upstream_request_id,
                    o.upstream_status,
                    o.attempts,
                    o.prompt_tokens,
                    o.cached_tokens,
                    o.completion_tokens,
                    o.usage,
                    o.bytes_in,
                    o.bytes_out,
                    round(o.admitted - start, 6) if o.admitted is not None else None,
                    round(o.first - start, 6) if o.first is not None else None,
                    round(o.last - start, 6) if o.last is not None else None,
                    o.aborted,
                )
            )
        )

    def event(self, name: str, level: Level = "info", **fields: Any) -> None:
        """Something that happened to the process: *name* in snake_case, and what there is to know."""
        when = datetime.fromtimestamp(self._wall(), UTC)
        self._put(_encode({"time": when, "kind": "event", "event": name, "level": level, **fields}))

    def _put(self, line: bytes) -> None:
        size = len(line) + 1
        if self._size + size > BUFFER:
            self.dropped += 1
            self._lost += 1
            return
        if not self._lines:
            self._wake.set()
        self._lines.append(line)
        self._size += size

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write lines until cancelled; then what can be written without waiting is still written."""
        rest = b""
        task_status.started()
        try:
            while True:
                rest, complete = self._write(rest)
                if complete:
                    self._wake = trio.Event()
                    if not self._lines:
                        await self._wake.wait()
                    await trio.sleep(PAUSE)
                else:
                    await self._target.wait()
        except OSError as error:
            if error.errno not in GONE:
                raise
            await self._discard()
        finally:
            try:
                self._write(rest)
            except OSError:
                pass  # nobody is left to be told
            self._target.close()

    def _write(self, rest: bytes) -> tuple[bytes, bool]:
        """Hand over *rest* and the buffered lines; what was not taken, and whether all was."""
        while True:
            if not rest:
                if self._lost and self._size < BUFFER // 2:  # else the line about it would be lost as well
                    lost, self._lost = self._lost, 0
                    self.event("log_lines_lost", "warning", lines=lost)
                if not self._lines:
                    return b"", True
                rest = self._next()
            taken = self._target.write(rest)
            if taken is None:
                return rest, False
            rest = rest[taken:]

    def _next(self) -> bytes:
        """Some whole lines, about PIECE bytes of them."""
        size = count = 0
        for line in self._lines:
            if count and size + len(line) + 1 > PIECE:
                break
            size += len(line) + 1
            count += 1
        piece = b"\n".join(self._lines[:count]) + b"\n"
        del self._lines[:count]
        self._size -= size
        self.written += count
        return piece

    async def _discard(self) -> None:
        """The target's reader has left for good: requests go on, lines are counted."""
        while True:
            self.dropped += len(self._lines)
            self._lines.clear()
            self._size = 0
            self._wake = trio.Event()
            await self._wake.wait()


class Handler(logging.Handler):
    """Messages of libraries (and of ours that use `logging`) become events of the log."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.INFO)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        level: Level = "info"
        if record.levelno >= logging.WARNING:
            level = "error" if record.levelno >= logging.ERROR else "warning"
        fields: dict[str, Any] = {"logger": record.name, "message": record.getMessage()}
        if record.exc_info and record.exc_info[1] is not None:
            fields["exception"] = self.formatException(record)
        self._log.event("message", level, **fields)

    @staticmethod
    def formatException(record: logging.LogRecord) -> str:  # noqa: N802
        return logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
