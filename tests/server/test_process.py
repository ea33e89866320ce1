"""`llmgw server` and `llmgw sim-engine` as processes: signals, a log that nobody reads, descriptors that run out, slow readers.

In real time, so each test is short and what it waits for is bounded; addresses are port 0.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.bench.programs import cpu_seconds, resident
from tests.net.rig import SSE, Engine, Wire, chunk, event, json_answer, post

PATIENCE = 60.0
"""Seconds for a whole test: a machine may be busy with other things."""


def said(data: bytes, kind: str) -> list[dict[str, Any]]:
    """Events named *kind* among whole lines of a log."""
    lines = [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    return [line for line in lines if line.get("event") == kind]


@attrs.define
class Server:
    process: trio.Process
    port: int
    admin: int

    async def dial(self, port: int = 0) -> Wire:
        wire = Wire(socket.socket())
        try:
            await wire.sock.connect(("127.0.0.1", port or self.port))
        except BaseException:
            wire.close()
            raise
        return wire

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        wire = await self.dial()
        try:
            await wire.send(request)
            status, _, body = await wire.answer()
        finally:
            wire.close()
        return status, body

    async def metric(self, name: str) -> float:
        wire = await self.dial(self.admin)
        try:
            await wire.send(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            page = await wire.rest()
        finally:
            wire.close()
        return next(
            float(line.split()[-1]) for line in page.splitlines() if line.split(b"{")[0].split()[:1] == [name.encode()]
        )


@asynccontextmanager
async def sim_engine(*flags: str) -> AsyncIterator[int]:
    """Its port."""
    argv = [sys.executable, "-m", "llmgw", "sim-engine", "--listen", "127.0.0.1:0", "--model", "m", *flags]
    async with trio.open_nursery() as nursery:
        start = partial(trio.run_process, argv, stdout=subprocess.PIPE, check=False)
        process: trio.Process = await nursery.start(start)
        assert process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            line += await process.stdout.receive_some()
        yield int(line.rpartition(b":")[2])
        process.terminate()


@asynccontextmanager
async def server(
    folder: Path, *engines: int, text: str = "", files: int | None = None, stdout: int | None = None
) -> AsyncIterator[Server]:
    """A gateway before *engines*, the first of which serves the model m, the second n. *text*: more of its configuration. *files*: most open files, soft and hard.
    *stdout*: where its log goes; nobody has read it yet when this is entered beyond the lines of the start."""
    config = folder / "server.yaml"
    config.write_text("version: 1\n" + text)
    argv = [sys.executable, "-m", "llmgw", "server", "--config", str(config)]
    argv += ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    for engine, model in zip(engines, "mn", strict=False):
        argv += ["--endpoint", f"{model}=http://127.0.0.1:{engine}={model}"]
    log = folder / "log"
    if stdout is None:
        argv += ["--log-file", str(log)]
    if files is not None:
        argv = ["sh", "-c", f'ulimit -n {files}; exec "$0" "$@"', *argv]
    async with trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(partial(trio.run_process, argv, stdout=stdout, check=False))
        try:
            seen = b""
            while not (said(seen, "started") and len(said(seen, "endpoint_ready")) == len(engines)):
                if process.stdout is not None:
                    seen += await process.stdout.receive_some()
                else:
                    await trio.sleep(0.02)
                    seen = log.read_bytes() if log.exists() else b""
                assert process.returncode is None
            (started,) = said(seen, "started")
            ports = [int(started[key][0].rpartition(":")[2]) for key in ("listen", "admin")]
            yield Server(process, *ports)
        finally:
            if process.returncode is None:
                process.kill()


def ask(tokens: int, model: str = "m", **fields: Any) -> bytes:
    return post(
        {
            "model": model,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": tokens,
            "ignore_eos": True,
            **fields,
        }
    )


async def streams(gateway: Server, count: int, tokens: int) -> list[Wire]:
    """So many streams, each of which has given a token."""
    wires = [await gateway.dial() for _ in range(count)]
    for wire in wires:
        await wire.send(ask(tokens, stream=True))
    for wire in wires:
        await wire.until(b'"content":')
    return wires


async def ends(wires: list[Wire]) -> list[bytes]:
    """What comes on each of them until it is closed."""
    found = [b""] * len(wires)

    async def one(i: int) -> None:
        found[i] = await wires[i].rest()
        wires[i].close()

    async with trio.open_nursery() as nursery:
        for i in range(len(wires)):
            nursery.start_soon(one, i)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_first_signal_lets_streams_finish(tmp_path: Path, number: int) -> None:
    with trio.fail_after(PATIENCE):
        async with sim_engine("--decode-tps", "50") as engine, server(tmp_path, engine) as gateway:
            wires = await streams(gateway, 20, tokens=40)
            gateway.process.send_signal(number)
            whole = await ends(wires)
            assert all(data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for data in whole)
            assert await gateway.process.wait() == 0
    log = (tmp_path / "log").read_bytes()
    assert said(log, "draining")
    assert not said(log, "cutting")


@pytest.mark.parametrize(("number", "drain"), [(signal.SIGINT, 30.0), (signal.SIGTERM, 0.3)])
async def test_second_signal_and_the_end_of_the_drain_cut_with_an_error_event(
    tmp_path: Path, number: int, drain: float
) -> None:
    with trio.fail_after(PATIENCE):
        text = f"timeouts: {{drain: {drain}s}}\n"
        async with sim_engine("--decode-tps", "50") as engine, server(tmp_path, engine, text=text) as gateway:
            wires = await streams(gateway, 20, tokens=20_000)
            gateway.process.send_signal(number)
            if drain > 1:
                await trio.sleep(0.1)
                gateway.process.send_signal(number)
            start = trio.current_time()
            for data in await ends(wires):
                assert b'"code":"draining"' in data
                assert b"[DONE]" not in data
                assert not data.endswith(b"\r\n0\r\n\r\n")
            assert await gateway.process.wait() == 0
            assert trio.current_time() - start < 15
    assert said((tmp_path / "log").read_bytes(), "cutting")[0]["requests"] == 20


async def test_reader_of_standard_output_that_has_stopped_delays_no_request(tmp_path: Path) -> None:
    """More lines than pipe and buffer hold: some are dropped and counted, and when it reads again it is told how many."""
    path = "/" + "a" * 1000
    lines = 8000
    with trio.fail_after(PATIENCE):
        async with sim_engine() as engine, server(tmp_path, engine, stdout=subprocess.PIPE) as gateway:
            wire = await gateway.dial()
            request = f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
            for _ in range(lines // 50):
                await wire.send(request * 50)
                for _ in range(50):
                    assert (await wire.answer())[0] == 404
            wire.close()
            for _ in range(10):
                start = trio.current_time()
                assert (await gateway.ask(ask(2)))[0] == 200
                assert trio.current_time() - start < 2
            lost = await gateway.metric("llmgw_log_lines_lost_total")
            assert 0 < lost < lines
            assert gateway.process.stdout is not None
            seen = b""
            while not said(seen[-4000:].partition(b"\n")[2], "log_lines_lost"):
                seen += await gateway.process.stdout.receive_some(1 << 20)
            assert len(seen) < 6 << 20  # the buffer, the pipe, and a little
            gateway.process.terminate()
            while await gateway.process.stdout.receive_some(1 << 20):
                pass
            assert await gateway.process.wait() == 0


async def test_connections_stay_below_the_limit_of_open_files(tmp_path: Path) -> None:
    """Clients get half of what is left after the reserve: engines, log and admin port always have theirs."""
    with trio.fail_after(PATIENCE):
        async with sim_engine() as engine, server(tmp_path, engine, files=400) as gateway:
            most = (400 - 256 - 4) // 2
            wires = [await gateway.dial() for _ in range(most + 30)]
            await trio.sleep(0.3)
            assert await gateway.metric("llmgw_connections") == most
            for wire in wires[:most]:
                await wire.send(ask(2))  # every one of them needs a connection to the engine
            for wire in wires[:most]:
                assert (await wire.answer())[0] == 200
            await wires[-1].send(ask(2))
            for wire in wires[:30]:
                wire.close()
            assert (await wires[-1].answer())[0] == 200
            for wire in wires[30:]:
                wire.close()


async def test_accept_pauses_without_files_and_goes_on_with_them(tmp_path: Path) -> None:
    with trio.fail_after(PATIENCE):
        text = "limits: {connections: 1000}\n"
        async with sim_engine() as engine, server(tmp_path, engine, files=64, text=text) as gateway:
            wires = [await gateway.dial() for _ in range(100)]
            await wires[0].send(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await wires[0].answer())[0] == 200
            before = cpu_seconds(gateway.process.pid)
            await trio.sleep(1.5)
            assert cpu_seconds(gateway.process.pid) - before < 0.4
            assert "cannot accept" in (tmp_path / "log").read_text()
            for wire in wires:
                wire.close()
            assert (await gateway.ask(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"))[0] == 200
            while (await gateway.ask(ask(2)))[0] != 200:  # noqa: ASYNC110 -- a probe without a file may have cost it its engine
                await trio.sleep(0.1)


async def slow_readers(folder: Path, count: int, seconds: float) -> None:
    """Clients that take a few bytes a second of streams that never end: others are served at once, memory stays in bounds.

    The others have an engine of their own: one that is busy with streams that never end has its limit.
    """
    big = chunk(event("x" * 60_000))

    async def script(wire: Wire) -> None:
        while True:
            head, body = await wire.request()
            if not head:
                return
            if b"slow" not in body:
                await wire.send(json_answer())
                continue
            await wire.send(SSE)
            while True:
                await wire.send(big)

    async def slow(wire: Wire) -> None:
        while True:
            await trio.sleep(1)
            await wire.sock.recv(4)

    async with trio.open_nursery() as nursery:
        engine, other = Engine(script), Engine(script)
        await nursery.start(engine.run)
        await nursery.start(other.run)
        async with server(folder, engine.port, other.port) as gateway:
            pid = gateway.process.pid
            for _ in range(20):
                assert (await gateway.ask(ask(2, "n")))[0] == 200
            before = resident(pid)
            wires = [await gateway.dial() for _ in range(count)]
            for wire in wires:
                await wire.send(ask(2, stream=True, user="slow"))
                nursery.start_soon(slow, wire)
            while await gateway.metric("llmgw_inflight") < count:  # noqa: ASYNC110 -- another process
                await trio.sleep(0.05)
            took = []
            end = trio.current_time() + seconds
            while trio.current_time() < end:
                start = trio.current_time()
                assert (await gateway.ask(ask(2, "n")))[0] == 200
                took.append(trio.current_time() - start)
                await trio.sleep(0.02)
            assert sorted(took)[len(took) // 2] < 0.2
            used = cpu_seconds(pid)
            grown = resident(pid) - before
            await trio.sleep(1)
            assert cpu_seconds(pid) - used < 0.5  # a full socket is not tried again and again
            assert grown < count * (160 << 10) + (8 << 20)  # one read's worth each, and the interpreter's own
        nursery.cancel_scope.cancel()
    for wire in wires:
        wire.close()


async def test_slow_readers(tmp_path: Path) -> None:
    with trio.fail_after(PATIENCE):
        await slow_readers(tmp_path, 60, 1.0)


@pytest.mark.full
async def test_500_slow_readers(tmp_path: Path) -> None:
    with trio.fail_after(110):
        await slow_readers(tmp_path, 500, 20.0)
