"""A line never waits: not for a stalled pipe, not for a full disk; what is lost is counted and said."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from llmgw import logs
from llmgw.errors import ConfigError
from llmgw.logs import Log, open_descriptor, open_file
from llmgw.request import Outcome


def outcome(**known: Any) -> Outcome:
    return Outcome(request_id="r1", route="/v1/completions", status=200, model="m", accepted=10.0, **known)


def lines(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    r, w = os.pipe()
    yield r, w
    os.close(r)
    os.close(w)


async def settle() -> None:
    await trio.sleep(2 * logs.PAUSE)
    await trio.testing.wait_all_tasks_blocked()


def test_a_request_in_one_line() -> None:
    log = Log(Memory(), lambda: 1_000_000_000.5)
    log.request(
        outcome(stream=True, first=10.25, last=11.0, admitted=10.0, completion_tokens=3, usage="counted", served="m"),
        "gpu-1",
    )
    log.event("endpoint_ready", endpoint="gpu-1", since=2.0)
    log._write(b"")
    assert lines(log._target.data) == [  # type: ignore[attr-defined]
        {
            "time": "2001-09-09T01:46:40.500000Z",
            "kind": "request",
            "request_id": "r1",
            "route": "/v1/completions",
            "status": 200,
            "stream": True,
            "model": "m",
            "endpoint": "gpu-1",
            "completion_tokens": 3,
            "usage": "counted",
            "queue": 0.0,
            "ttft": 0.25,
            "duration": 1.0,
        },
        {
            "time": "2001-09-09T01:46:40.500000Z",
            "kind": "event",
            "event": "endpoint_ready",
            "level": "info",
            "endpoint": "gpu-1",
            "since": 2.0,
        },
    ]


def test_every_field_is_explained() -> None:
    assert set(logs.FIELDS) == set(logs.RequestLine.__struct_fields__)


class Memory:
    """Takes everything, or what it is told to."""

    def __init__(self) -> None:
        self.data = b""
        self.room = 1 << 30
        self.changed = trio.Event()
        self.closed = False

    def write(self, data: bytes) -> int | None:
        taken = min(len(data), self.room)
        self.room -= taken
        self.data += data[:taken]
        return taken or None

    async def wait(self) -> None:
        await self.changed.wait()

    def close(self) -> None:
        self.closed = True


async def test_a_stalled_pipe_costs_lines_and_nothing_else(pipe: tuple[int, int], nursery: trio.Nursery) -> None:
    r, w = pipe
    before = fcntl.fcntl(w, fcntl.F_GETFL)
    log = Log(open_descriptor(w), lambda: 0.0)
    await nursery.start(log.run)
    for i in range(60_000):
        log.event("x", n=i, fill="." * 100)
        if i % 1000 == 0:
            await trio.lowlevel.checkpoint()
    assert log.dropped > 0
    assert log._size <= logs.BUFFER
    assert fcntl.fcntl(w, fcntl.F_GETFL) == before  # others may share it: not O_NONBLOCK now

    data = b""
    os.set_blocking(r, False)
    while log.written < 60_000 - log.dropped or b"log_lines_lost" not in data:
        try:
            data += os.read(r, 1 << 20)
        except BlockingIOError:
            await trio.sleep(0.001)
    found = lines(data)
    lost = [line["lines"] for line in found if line["event"] == "log_lines_lost"]
    assert sum(lost) == log.dropped
    assert [line["n"] for line in found if line["event"] == "x"] == list(range(60_000 - log.dropped))
    nursery.cancel_scope.cancel()


async def test_a_reader_that_leaves_ends_the_log_not_the_gateway(nursery: trio.Nursery) -> None:
    r, w = os.pipe()
    log = Log(open_descriptor(w), lambda: 0.0)
    os.close(w)
    await nursery.start(log.run)
    log.event("a")
    await settle()
    os.close(r)
    for i in range(3):
        log.event("b", n=i)
        await settle()
    assert log.dropped >= 2
    nursery.cancel_scope.cancel()


async def test_a_socket_as_standard_output(nursery: trio.Nursery) -> None:
    left, right = socket.socketpair()
    with left, right:
        log = Log(open_descriptor(left.fileno()), lambda: 0.0)
        await nursery.start(log.run)
        log.event("a")
        await settle()
        assert lines(right.recv(1000))[0]["event"] == "a"
        assert left.getblocking()
        nursery.cancel_scope.cancel()


async def test_a_descriptor_that_cannot_be_opened_again(pipe: tuple[int, int], nursery: trio.Nursery) -> None:
    r, w = pipe
    log = Log(logs.SharedTarget(w), lambda: 0.0)
    await nursery.start(log.run)
    for i in range(2_000):
        log.event("x", n=i, fill="." * 100)
    await settle()
    data = b""
    os.set_blocking(r, False)
    while data.count(b"\n") < 2_000:
        try:
            data += os.read(r, 1 << 20)
        except BlockingIOError:
            await trio.sleep(0.001)
    assert [line["n"] for line in lines(data)] == list(range(2_000))
    nursery.cancel_scope.cancel()


async def test_files_are_appended_to_and_written_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"old":1}\n')
    async with trio.open_nursery() as nursery:
        log = Log(open_file(str(path)), lambda: 0.0)
        await nursery.start(log.run)
        log.event("a")
        await settle()
        log.event("b")  # still in the buffer when the end comes
        nursery.cancel_scope.cancel()
    assert [line.get("event") for line in lines(path.read_bytes())] == [None, "a", "b"]


async def test_a_full_disk_is_waited_for(autojump_clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    target = logs.FileTarget(full, patient=False)
    log = Log(target, lambda: 0.0)
    await nursery.start(log.run)
    log.event("a")
    await trio.sleep(1)
    assert log.dropped == 0
    nursery.cancel_scope.cancel()


async def test_pieces_are_written_where_they_were_cut(nursery: trio.Nursery) -> None:
    target = Memory()
    target.room = 10
    log = Log(target, lambda: 0.0)
    await nursery.start(log.run)
    log.event("first")
    await settle()
    log.event("second")
    target.room = 1000
    target.changed.set()
    await settle()
    assert [line["event"] for line in lines(target.data)] == ["first", "second"]
    nursery.cancel_scope.cancel()


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent/log: log.file: cannot be opened: No such file"):
        open_file(str(tmp_path / "absent" / "log"))


def test_messages_of_libraries_become_events() -> None:
    target = Memory()
    log = Log(target, lambda: 0.0)
    logger = logging.Logger("lib")
    logger.addHandler(logs.Handler(log))
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("it %s", "failed")
    logger.debug("not this")
    log._write(b"")
    (line,) = lines(target.data)
    assert (line["event"], line["level"], line["logger"], line["message"]) == ("message", "error", "lib", "it failed")
    assert "ValueError: why" in line["exception"]
