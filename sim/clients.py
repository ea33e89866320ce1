"""Clients of a rehearsal: sessions that talk HTTP to the gateway and note every token with its time.

All their sockets are in one epoll set, served by one task; a session's own task sleeps until its answer is complete. So a
streamed token costs a `recv` and a few string searches.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from hashlib import blake2b
from math import inf
from typing import Any

import httptools
import msgspec
import trio

from llmgw.net.world import Address, World
from llmgw.simengine.text import FIRST_WORD, WORDS

from .load import Session, Turn
from .records import Record

HEAD, MARK, CONTENT = b"data: ", b'"content":"', b'"finish_reason":'
EVENTS = 256
"""Ready sockets served a visit."""


def words(tokens: tuple[int, ...]) -> str:
    """Tokens of a workload as the text that has them."""
    return "".join([WORDS[token - FIRST_WORD] for token in tokens])


class Switchboard:
    """Serves the clients' sockets."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._lines: dict[int, Line] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            task_status.started()
            while True:
                await trio.lowlevel.wait_readable(self._epoll.fileno())
                for number, _ in self._epoll.poll(0, EVENTS):
                    line = self._lines.get(number)
                    if line is not None:
                        line.ready()
        finally:
            self._epoll.close()

    def add(self, line: Line) -> None:
        number = line.sock.fileno()
        self._lines[number] = line
        self._epoll.register(number, select.EPOLLIN | select.EPOLLRDHUP)

    def remove(self, line: Line) -> None:
        number = line.sock.fileno()
        if self._lines.pop(number, None) is not None:
            self._epoll.unregister(number)


class Line:
    """One connection, one request at a time."""

    def __init__(self, board: Switchboard, sock: socket.socket) -> None:
        self.sock = sock
        self._board = board
        self._parser: Any = None
        self._record: Record | None = None
        self._done = trio.Event()
        self._left = b""
        self._body: list[bytes] = []
        self._text: list[bytes] = []
        self._stream = False
        self._finished = False  # the last event said why the answer ended
        self._over = False  # `[DONE]` came
        self.open = True
        board.add(self)

    def close(self) -> None:
        if self.open:
            self.open = False
            self._board.remove(self)
            self.sock.close()
            self._done.set()

    async def ask(self, record: Record, body: bytes, headers: str, stream: bool) -> None:
        """Send, and return when the answer is complete or broken. *record* says which."""
        self._record = record
        self._parser = httptools.HttpResponseParser(self)
        self._done = trio.Event()
        self._left, self._body, self._text = b"", [], []
        self._stream = stream
        self._finished = self._over = False
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n{headers}content-length: {len(body)}\r\n\r\n"
        rest = memoryview(head.encode() + body)
        while rest and self.open:
            try:
                rest = rest[self.sock.send(rest) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self.sock)
            except OSError:
                self.close()
        await self._done.wait()

    def ready(self) -> None:
        """The socket has something to say."""
        try:
            data = self.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        if self._parser is None:
            self.close()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._record is not None:
                self._record.reason = "upstream_protocol"
            self.close()

    # Parser callbacks

    def on_headers_complete(self) -> None:
        assert self._record is not None
        self._record.status = self._parser.get_status_code()
        self._stream = self._stream and self._record.status == 200

    def on_body(self, data: bytes) -> None:
        if not self._stream:
            self._body.append(data)
            return
        record = self._record
        assert record is not None
        if self._left:
            data = self._left + data
        events = data.split(b"\n\n")
        self._left = events.pop()
        now = trio.current_time()
        for event in events:
            start = event.find(MARK)
            if start < 0:
                self._other(event)
                continue
            start += len(MARK)
            text = event[start : event.index(b'"', start)]
            if not text:
                continue  # the opening event
            self._text.append(text)
            record.tokens += text.count(b" ")  # every word is a token, and starts with its space
            if record.first < 0:
                record.first = now
            elif now - record.last > record.worst_gap:
                record.worst_gap = now - record.last
            record.last = now
            if event.find(b'"finish_reason":null', start) < 0:
                self._finished = True

    def _other(self, event: bytes) -> None:
        """Usage, an error, the end."""
        record = self._record
        assert record is not None
        if event == b"data: [DONE]":
            self._over = True
        elif event.startswith(b'data: {"error"'):
            record.reason = _reason_of(event[len(HEAD) :])
        elif b'"usage":{' in event:
            usage = msgspec.json.decode(event[len(HEAD) :])["usage"]
            record.prompt_tokens = usage["prompt_tokens"]
            record.cached_tokens = ((usage.get("prompt_tokens_details") or {}).get("cached_tokens")) or 0

    def on_message_complete(self) -> None:
        record = self._record
        assert record is not None
        if self._stream:
            if not record.reason and not (self._finished and self._over):
                record.reason = "truncated"
        else:
            self._whole(record, b"".join(self._body))
        record.digest = blake2b(b"".join(self._text), digest_size=8).hexdigest()
        record.end = trio.current_time()
        if not self._parser.should_keep_alive():
            self.close()
        self._parser = None
        self._done.set()

    def _whole(self, record: Record, body: bytes) -> None:
        if record.status != 200:
            record.reason = _reason_of(body)
            return
        answer = msgspec.json.decode(body)
        usage = answer["usage"]
        record.tokens = usage["completion_tokens"]
        record.prompt_tokens = usage["prompt_tokens"]
        record.cached_tokens = ((usage.get("prompt_tokens_details") or {}).get("cached_tokens")) or 0
        self._text.append(answer["choices"][0]["message"]["content"].encode())
        record.first = record.last = trio.current_time()

    @property
    def said(self) -> str:
        return b"".join(self._text).decode()


ENGINE_ERROR = "engine_error"
"""An error that the engine itself said, with a number for a code, and the gateway passed on."""


def _reason_of(body: bytes) -> str:
    """The code of an error body; what cannot be read is no reason of ours."""
    try:
        code = msgspec.json.decode(body)["error"]["code"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return "unreadable_error"
    return ENGINE_ERROR if isinstance(code, int) else str(code)


class Clients:
    """All sessions of a load."""

    def __init__(
        self, world: World, board: Switchboard, gateway: Address, records: list[Record], note: Callable[[str], None]
    ) -> None:
        self._world = world
        self._board = board
        self._gateway = gateway
        self._records = records
        self._note = note
        self.active = 0

    async def session(self, session: Session) -> None:
        """Runs one session to its end."""
        self.active += 1
        line: Line | None = None
        history: list[dict[str, str]] = []
        if session.prefix:
            history.append({"role": "system", "content": words(session.prefix)})
        prefix = list(history)
        number = 0
        try:
            for turn in session.turns:
                if trio.current_time() >= session.until:
                    return
                messages = [*(history if session.history else prefix), {"role": "user", "content": words(turn.prompt)}]
                record = Record(
                    f"{session.id}.{number}", session.id, trio.current_time(), session.id.rpartition("-")[0], wanted=turn.output
                )  # fmt: skip
                number += 1
                self._records.append(record)
                line = await self._ask(session, turn, messages, record, line)
                if session.history and line is not None and not record.reason:
                    history = [*messages, {"role": "assistant", "content": line.said}]
                if turn.think:
                    await trio.sleep(turn.think)
        finally:
            self.active -= 1
            if line is not None:
                line.close()

    async def _ask(
        self, session: Session, turn: Turn, messages: list[dict[str, str]], record: Record, line: Line | None
    ) -> Line | None:
        """One request; returns the connection if it can be used again."""
        body: dict[str, object] = {"messages": messages, "max_tokens": turn.output, "stream": session.stream}
        if session.model:
            body["model"] = session.model
        if session.stream:
            body["stream_options"] = {"include_usage": True}
        headers = f"x-request-id: {record.id}\r\nx-session-id: {session.id}\r\n"
        headers += f"x-llmgw-band: {session.band}\r\n" if session.band else ""
        headers += f"x-llmgw-profile: {session.profile}\r\n" if session.profile else ""
        limit = record.at + session.patience if session.patience < inf else inf
        with trio.CancelScope(deadline=limit) as scope:
            try:
                if line is None or not line.open:
                    line = Line(self._board, await self._world.dial(self._gateway))
                await line.ask(record, msgspec.json.encode(body), headers, session.stream)
            except OSError:
                record.reason = "connect_failed"
        if scope.cancelled_caught:
            self._note("hung_up")
            record.status, record.reason = 499, "client_gone"
            if line is not None:
                line.close()
        if record.end < 0:
            record.end = trio.current_time()
            record.reason = record.reason or ("truncated" if record.first >= 0 else "connection_lost")
        return line if line is not None and line.open else None
