"""The programs of a measurement, each its own process: engine, clients, HAProxy, the gateway; and what the kernel says of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NATIVE = Path(__file__).parent / "native"

HAPROXY = shutil.which("haproxy") or ("/usr/sbin/haproxy" if Path("/usr/sbin/haproxy").exists() else "")

HAPROXY_CONFIG = """
global
  nbthread 1
  maxconn 8000
defaults
  mode http
  option http-no-delay
  option abortonclose
  timeout connect 5s
  timeout client 120s
  timeout server 120s
listen relay
  bind 127.0.0.1:{port}
  server engine 127.0.0.1:{engine}
"""
"""One thread, as the gateway has; nothing logged."""

COLLECTED = (
    "import gc; gc.freeze = lambda: None; gc.set_threshold = lambda *_: None; from llmgw.cli import main; main()"
)
"""The gateway with the garbage collector as the interpreter has it."""


def build(into: Path) -> None:
    """Compile what is written in C. Raises SystemExit where there is no compiler."""
    if not shutil.which("gcc"):
        raise SystemExit("bench: gcc is needed: its engine and clients are written in C")
    for name in ("engine", "load"):
        subprocess.run(["gcc", "-O2", "-Wall", "-o", into / name, NATIVE / f"{name}.c"], check=True)


def cpu_seconds(pid: int) -> float:
    """Time on a processor, user and system, of all threads: the scheduler's own nanoseconds."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def resident(pid: int) -> int:
    """Bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10
    raise ProcessLookupError(pid)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def running(argv: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Ended by SIGTERM, and if that does not help within 10 s, killed."""
    with subprocess.Popen(argv, text=True, **options) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


class Bench:
    """What was built, and how to start each program. *folder* is for logs and configurations."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        build(folder)

    @contextmanager
    def engine(self, tokens: int, gap_us: int) -> Iterator[int]:
        """Its port."""
        with running([str(self.folder / "engine"), str(tokens), str(gap_us)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            yield int(process.stdout.readline())

    @contextmanager
    def gateway(self, name: str, engine: int) -> Iterator[tuple[int, int]]:
        """Port and process id of *name*: haproxy, llmgw, or `llmgw, gc untouched`."""
        if name == "haproxy":
            port = free_port()
            path = self.folder / "haproxy.cfg"
            path.write_text(HAPROXY_CONFIG.format(port=port, engine=engine))
            with running([HAPROXY, "-db", "-q", "-f", str(path)]) as process:
                wait_port(port, process)
                yield port, process.pid
            return
        start = ["-m", "llmgw"] if name == "llmgw" else ["-c", COLLECTED]
        log = self.folder / "llmgw.log"
        log.unlink(missing_ok=True)
        argv = [sys.executable, *start, "server", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
        argv += ["--log-file", str(log), "--endpoint", f"e=http://127.0.0.1:{engine}=llama,engine=vllm"]
        with running(argv) as process:
            yield wait_ready(log, process), process.pid

    def load(self, port: int, connections: int, seconds: float, stream: bool, body: int) -> dict[str, Any]:
        argv = [str(self.folder / "load"), str(port), str(connections), str(seconds), str(int(stream)), str(body)]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=seconds + 60)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@contextmanager
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as folder:
        yield Bench(Path(folder))


def wait_port(port: int, process: subprocess.Popen[str], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"bench: {process.args!r} ended with {process.returncode}")
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"bench: nothing listens on port {port}")


def wait_ready(log: Path, process: subprocess.Popen[str], seconds: float = 60.0) -> int:
    """The client port of a gateway, once it has an endpoint that can serve."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"bench: the gateway ended with {process.returncode}")
        text = log.read_text() if log.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        events = {line["event"]: line for line in lines if line["kind"] == "event"}
        if "started" in events and "endpoint_ready" in events:
            return int(events["started"]["listen"][0].rpartition(":")[2])
        time.sleep(0.05)
    raise SystemExit("bench: the gateway did not become ready")


def machine() -> str:
    """What the figures hang on."""
    import platform

    import trio

    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    parts = [f"{cpu}, {os.cpu_count()} processors", f"Linux {platform.release()}"]
    parts += [f"Python {platform.python_version()}", f"trio {trio.__version__}"]
    if HAPROXY:
        said = subprocess.run([HAPROXY, "-v"], capture_output=True, text=True, check=True).stdout
        parts.append(" ".join(said.split()[:3]))
    else:
        parts.append("HAProxy is not installed")
    return ", ".join(parts)


def revision() -> str:
    """The commit that was measured, "+" if files have changed since; "" outside a repository."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip()
