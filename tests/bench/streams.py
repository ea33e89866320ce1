"""Two figures of streams that do next to nothing: the memory each holds, and how soon the engine knows that a client left."""

from __future__ import annotations

import random
import socket
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from tests.bench.page import spread, table
from tests.bench.programs import HAPROXY, Bench, resident

QUIET_US = 500_000
"""Between two tokens of a stream that holds memory: idle, and yet alive."""

MUST_KIB = 20


def ask(name: str) -> bytes:
    body = b'{"model":"llama","messages":[{"role":"user","content":"hello"}],"stream":true}'
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nX-Request-Id: {name}\r\n"
    )
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def open_stream(port: int, name: str) -> socket.socket:
    """A stream whose first event has come."""
    one = socket.create_connection(("127.0.0.1", port), timeout=60)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.sendall(ask(name))
    seen = b""
    while b"data: {" not in seen:
        data = one.recv(65536)
        if not data:
            raise ConnectionError(f"no stream: {seen[:200]!r}")
        seen += data
    return one


def memory(programs: Bench, counts: tuple[int, ...], rounds: int) -> str:
    """Resident bytes a stream, by how many there are."""
    rows = []
    for count in counts:
        found = []
        for _ in range(rounds):
            with programs.engine(2000, QUIET_US) as engine, programs.gateway("llmgw", engine) as (port, pid):
                for one in [open_stream(port, f"warm-{i}") for i in range(20)]:
                    one.close()
                time.sleep(0.5)
                before = resident(pid)
                held = [open_stream(port, f"held-{i}") for i in range(count)]
                time.sleep(1.0)
                found.append((resident(pid) - before) / count / 1024)
                for one in held:
                    one.close()
        rows.append([f"{count} streams, plain", spread(found, 1), str(MUST_KIB)])
    return table(["memory", "KiB a stream", "must"], rows)


def told(engine: int) -> dict[str, int]:
    """What the engine saw leave since the last question: request id → nanoseconds (CLOCK_MONOTONIC)."""
    with urllib.request.urlopen(f"http://127.0.0.1:{engine}/gone", timeout=30) as answer:
        lines = answer.read().decode().split("\n")
    return {name: int(at) for name, at in (line.split(" ") for line in lines if line)}


@contextmanager
def background(programs: Bench, port: int, seconds: float) -> Iterator[None]:
    """64 other streams of the same engine."""
    argv = [str(programs.folder / "load"), str(port), "64", str(seconds), "1", "64"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as process:
        time.sleep(0.5)
        try:
            yield
        finally:
            process.terminate()


def leaving(programs: Bench, count: int) -> str:
    """Milliseconds from a client's close to the engine's end of file, with and without other streams."""
    rows = []
    for busy in (False, True):
        for name in ("direct", *(("haproxy",) if HAPROXY else ()), "llmgw"):
            with programs.engine(2000, 5_000) as engine:
                started = nullcontext((engine, 0)) if name == "direct" else programs.gateway(name, engine)
                with started as (port, _), background(programs, port, count) if busy else nullcontext():
                    found = _leave(port, engine, count)
            rows.append([f"{name}, {'64 other streams' if busy else 'nothing else'}", *_tail(found), str(len(found))])
    return table(["client leaves", "p50 ms", "p99 ms", "max ms", "streams"], rows)


def _leave(port: int, engine: int, count: int) -> list[float]:
    rng = random.Random(1)
    left: dict[str, int] = {}
    told(engine)
    for i in range(count):
        name = f"leaves-{i:05d}"
        one = open_stream(port, name)
        time.sleep(rng.uniform(0.0, 0.02))
        left[name] = time.monotonic_ns()
        one.close()
    time.sleep(0.5)
    seen = {name[: len("leaves-00000")]: at for name, at in told(engine).items()}
    missing = left.keys() - seen.keys()
    if missing:
        raise SystemExit(f"bench: the engine never saw {len(missing)} of {count} clients leave")
    return [(seen[name] - at) / 1e6 for name, at in left.items()]


def _tail(found: list[float]) -> list[str]:
    ordered = sorted(found)
    return [f"{x:.2f}" for x in (statistics.median(ordered), ordered[len(ordered) * 99 // 100], ordered[-1])]
