"""Gateway mode with real processes: ``nox -s pipeline -- single|3epp [--keep-on-failure] [--print-logs]``.

    single  a Coordinator's file → one internal gateway → prefill, decode
    3epp    a Coordinator's file → dispatch → one internal gateway a role → prefill, decode

Each process is the `llmgw` command, on a port of loopback that the kernel chose. A request goes through and must have
been fetched by the decode engine, not computed there. Exit code 0, or 1 with what went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import attrs
import yaml

PATIENCE = 60.0  # seconds for each process to say where it listens, and for the whole to be ready


@attrs.define
class Cast:
    """All processes and their logs, in one folder."""

    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = attrs.Factory(dict)

    def start(self, name: str, *arguments: str) -> None:
        log = (self.folder / f"{name}.log").open("wb")
        command = [sys.executable, "-m", "llmgw", *arguments]
        self.running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def address(self, name: str, which: int = 0) -> str:
        """Where it listens, from its log."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if self.running[name].poll() is not None:
                raise RuntimeError(f"{name} ended: {self.log(name)[-2000:]}")
            for line in self.log(name).splitlines():
                found = _listening(line)
                if found:
                    return found[which]
            time.sleep(0.05)
        raise RuntimeError(f"{name} did not say where it listens")

    def engine(self, name: str, phase: str) -> dict[str, Any]:
        self.start(name, "sim-engine", "--listen", "127.0.0.1:0", "--model", "m", "--phases", phase)
        address = self.address(name)
        return {"name": name, "url": f"http://{address}", "models": ["m"], "phases": [phase], "fabrics": ["a"]}

    def gateway(self, name: str, places: list[dict[str, Any]]) -> str:
        """A server with an internal listener in front of *places*; the listener's URL."""
        document = {
            "version": 1,
            "listeners": [{"address": "127.0.0.1:0"}, {"address": "127.0.0.1:0", "internal": True}],
            "admin": {"addresses": []},
            "probe": {"interval": "200ms"},
            "endpoints": places,
        }
        self._server(name, document)
        return f"http://{self.address(name, 1)}"

    def coordinator(self, address: str) -> str:
        """A server with a Coordinator's file; its client port's URL."""
        steps = [{"type": "prefill"}, {"type": "decode"}]
        document = {
            "server": {"listen_addr": "127.0.0.1:0"},
            "gateway": {"address": address},
            "pipeline": {"kv_connector": "kv-nixl", "steps": steps},
        }
        self._server("coordinator", document, "--admin", f"unix:{self.folder}/admin.sock")
        return f"http://{self.address('coordinator')}"

    def _server(self, name: str, document: dict[str, Any], *more: str) -> None:
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(document))
        self.start(name, "server", "--config", str(file), *more)

    def stop(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _listening(line: str) -> list[str]:
    """The addresses in a line of log: ``{"event": "started", "listen": […]}`` or an engine's own words."""
    try:
        said = json.loads(line)
    except ValueError:
        return [word.strip(".,") for word in line.split() if word.startswith("127.0.0.1:")]
    if isinstance(said, dict) and said.get("event") in ("started", "listening"):
        found = said.get("listen") or said.get("addresses") or said.get("address")
        return [found] if isinstance(found, str) else list(found or ())
    return []


def ask(url: str, body: Any = None) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def play(cast: Cast, topology: str) -> str:
    """Start everything, send one request; "" or what is wrong."""
    prefill, decode = cast.engine("prefill", "prefill"), cast.engine("decode", "decode")
    if topology == "single":
        inside = cast.gateway("gateway", [prefill, decode])
    else:
        roles = [
            {"name": f"gw-{one['phases'][0]}", "url": cast.gateway(f"gateway-{one['name']}", [one])}
            | {key: one[key] for key in ("models", "phases")}
            for one in (prefill, decode)
        ]
        inside = cast.gateway("dispatch", roles)
    front = cast.coordinator(inside)
    body = {"model": "m", "messages": [{"role": "user", "content": "word " * 200}], "max_tokens": 5}
    until = time.monotonic() + PATIENCE
    while True:
        status, answer = ask(front + "/v1/chat/completions", body)
        if status == 200:
            break
        if time.monotonic() > until:
            return f"the answer is {status}: {answer.decode(errors='replace')}"
        time.sleep(0.3)
    print(f"200: {answer.decode()[:200]}")
    _, page = ask(decode["url"] + "/metrics")
    fetched = [line for line in page.decode().splitlines() if "by_source_total{" in line and "external" in line]
    print(*fetched, sep="\n")
    if not any(float(line.rsplit(" ", 1)[1]) > 0 for line in fetched):
        return "the decode engine computed the prompt itself"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topology", choices=["single", "3epp"])
    parser.add_argument("--keep-on-failure", action="store_true", help="leave processes and logs")
    parser.add_argument("--print-logs", action="store_true")
    options = parser.parse_args()
    cast = Cast(Path(tempfile.mkdtemp(prefix="llmgw-topology-")))
    wrong = "interrupted"
    try:
        try:
            wrong = play(cast, options.topology)
        except (RuntimeError, OSError) as error:
            wrong = str(error)
        if options.print_logs:
            for name in cast.running:
                print(f"--- {name}", cast.log(name), sep="\n")
        if wrong:
            print(f"FAILED: {wrong}", file=sys.stderr)
            if options.keep_on_failure:
                pids = {name: process.pid for name, process in cast.running.items()}
                print(f"kept: {pids}, logs in {cast.folder}", file=sys.stderr)
    finally:
        if not (wrong and options.keep_on_failure):
            cast.stop()
            for file in cast.folder.iterdir():
                file.unlink()
            os.rmdir(cast.folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
