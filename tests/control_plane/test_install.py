"""docs/install.md, run as it is written, with real processes over loopback; then a drain under load on what it built."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import httpx2
import pytest

ROOT = Path(__file__).parent.parent.parent
BLOCK = re.compile(r"^```(\w+) ?([^\n]*)\n(.*?)^```$", re.M | re.S)
PATIENCE = 60.0  # seconds for anything that the document says will come


def free_ports(count: int) -> list[int]:
    socks = [socket.socket() for _ in range(count)]
    for sock in socks:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return ports


@attrs.define
class Machine:
    """Server and nodes at once, in a folder of their own."""

    folder: Path
    clients: int
    admin: int
    cluster: int
    processes: list[subprocess.Popen[bytes]] = attrs.Factory(list)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "LLMGW_SERVER": f"http://127.0.0.1:{self.admin}",
            "COLUMNS": "200",
        }

    def here(self, text: str) -> str:
        """*text* with this folder and these ports instead of the document's machines."""
        for old, new in (
            ("/etc/llmgw", f"{self.folder}/etc"),
            ("/var/lib/llmgw", f"{self.folder}/lib"),
            ("/root/", f"{self.folder}/"),
            ("10.0.0.2", "127.0.0.1"),
            ("10.0.0.1", "127.0.0.1"),
            ('":8080"', f'"127.0.0.1:{self.clients}"'),
            (":8080", f":{self.clients}"),
            ("127.0.0.1:9090", f"127.0.0.1:{self.admin}"),
            ('":9443"', f'"127.0.0.1:{self.cluster}"'),
            (":9443", f":{self.cluster}"),
        ):
            text = text.replace(old, new)
        return text

    def write(self, name: str, text: str) -> None:
        path = self.folder / self.here(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = self.here(text)
        if name.endswith("server.yaml"):  # the same story in a tenth of the time
            text += "  heartbeat: 0.5s\n  lost_after: 2s\n  reschedule_after: 20s\n"
        if name.endswith("agent.yaml"):
            base = 20_000 + os.getpid() % 40 * 200
            text += f"ports: {base}-{base + 199}\n"
        path.write_text(text)

    def run(self, command: str, *, check: bool = True) -> str:
        done = subprocess.run(
            ["bash", "-euc", self.here(command)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout

    def until(self, command: str, pattern: str) -> str:
        limit = time.monotonic() + PATIENCE
        while not re.search(pattern, out := self.run(command, check=False)):
            assert time.monotonic() < limit, f"{command}\n{out}\n{self.logs()}"
            time.sleep(1.0)  # each try is a process
        return out

    def begin(self, command: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"log-{len(self.processes)}"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-euc", "exec " + self.here(command)],
                cwd=self.folder,
                env=self.environment,
                stdout=out,
                stderr=out,
            )
        self.processes.append(process)
        return process

    def ctl(self, *args: str) -> Any:
        return json.loads(self.run(f"llmgw ctl {' '.join(args)} --json"))

    def logs(self) -> str:
        return "\n".join(p.read_text()[-2000:] for p in sorted(self.folder.glob("log-*")))

    def ready(self, *names: str) -> None:
        """Until the gateway itself may send to *count* endpoints."""
        limit = time.monotonic() + PATIENCE
        while True:
            serving = {e["name"] for e in self.ctl("endpoints")["items"] if e["health"]["state"] == "ready"}
            if set(names) <= serving:
                return
            assert time.monotonic() < limit, self.logs()
            time.sleep(0.3)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    clients, admin, cluster = free_ports(3)
    made = Machine(tmp_path, clients, admin, cluster)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "llmgw"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m llmgw "$@"\n')
    program.chmod(0o755)
    try:
        yield made
    finally:
        for process in reversed(made.processes):
            process.send_signal(signal.SIGTERM)
        for process in made.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        for record in tmp_path.glob("lib/*/run/*.json"):  # engines outlive their agents, on purpose
            _end(record)


def _end(record: Path) -> None:
    try:
        os.killpg(int(json.loads(record.read_text())["pid"]), signal.SIGKILL)
    except (OSError, ValueError, KeyError, TypeError):
        pass


@attrs.define
class Clients:
    """Streams, one after the other in each thread, until told to stop. Every one must come to its end."""

    url: str
    done: int = 0
    lost: list[str] = attrs.Factory(list)
    stop: threading.Event = attrs.Factory(threading.Event)
    threads: list[threading.Thread] = attrs.Factory(list)

    def start(self, count: int) -> None:
        self.threads = [threading.Thread(target=self._go) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def _go(self) -> None:
        body = {"model": "demo", "stream": True, "max_tokens": 40, "messages": [{"role": "user", "content": "Hello"}]}
        with httpx2.Client(timeout=30, trust_env=False) as client:
            while not self.stop.is_set():
                try:
                    with client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as answer:
                        text = "".join(answer.iter_text())
                except httpx2.HTTPError as error:
                    self.lost.append(repr(error))
                    continue
                if answer.status_code == 200 and text.rstrip().endswith("data: [DONE]"):
                    self.done += 1
                else:
                    self.lost.append(f"{answer.status_code} {text[-300:]}")

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(30)


def install(machine: Machine) -> None:
    """Every block of the document, in its order."""
    for kind, info, text in BLOCK.findall((ROOT / "docs" / "install.md").read_text()):
        if kind == "yaml":
            machine.write(info, text)
        elif info == "background":
            machine.begin(text)
            time.sleep(0.2)
        elif info.startswith("until="):
            machine.until(text, info.removeprefix("until="))
        elif info != "skip":
            limit = time.monotonic() + PATIENCE
            first = text.splitlines()[0]
            while "ctl token" in text and time.monotonic() < limit:  # the cluster port opens within seconds
                if machine.run("llmgw ctl token create --ttl 1s --json", check=False):
                    break
            assert kind == "sh", first
            machine.run(text)


@pytest.mark.timeout(240)
def test_the_document(machine: Machine) -> None:
    install(machine)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_drain_under_load(machine: Machine) -> None:
    """One story, since each step stands on the one before."""
    install(machine)

    # A second node, while the first serves.
    machine.run("llmgw ctl token create --node gpu-2 > join-token-2")
    base = 28_000 + os.getpid() % 9 * 200
    (machine.folder / "etc" / "agent-2.yaml").write_text(
        f"version: 1\nnode: gpu-2\naddress: 127.0.0.1\nstate: {machine.folder}/lib/agent-2\nports: {base}-{base + 199}\n"
    )
    agent = "llmgw agent --config /etc/llmgw/agent-2.yaml --server 10.0.0.1:9443"
    second = machine.begin(f"{agent} --join-token-file join-token-2")
    machine.until("llmgw ctl nodes gpu-2", "ready|degraded")
    machine.run("llmgw ctl scale demo 3")
    machine.until("llmgw ctl replicas", r"gpu-2")
    machine.until("llmgw ctl models demo", r"3/3")

    clients = Clients(f"http://127.0.0.1:{machine.clients}")
    machine.ready("demo-1", "demo-2", "demo-3")
    clients.start(6)
    try:
        time.sleep(1.0)
        lines = machine.run("llmgw ctl drain gpu-1 --json").splitlines()
        assert json.loads(lines[-1])["finished"]
        assert machine.ctl("nodes", "gpu-1")["replicas"] == []
        nodes = {r["node"] for one in machine.ctl("replicas")["items"] for r in one["ranks"]}
        assert nodes == {"gpu-2"}
        drained = clients.done

        # The server restarts, an agent restarts: engines stay as they are.
        before = {one["id"]: (one["epoch"], one["ranks"][0]["pid"]) for one in machine.ctl("replicas")["items"]}
        second.send_signal(signal.SIGTERM)
        second.wait(10)
        machine.begin(agent)
        time.sleep(3.0)
        limit = time.monotonic() + PATIENCE
        while clients.done < drained + 12:
            assert time.monotonic() < limit, clients
            time.sleep(0.1)
    finally:
        clients.end()
    assert clients.lost == []
    assert drained > 6
    after = {one["id"]: (one["epoch"], one["ranks"][0]["pid"]) for one in machine.ctl("replicas")["items"]}
    assert after == before, "adopted by the agent's next life"

    server = machine.processes[0]
    machine.run("llmgw ctl backup copy.db")
    server.send_signal(signal.SIGKILL)
    server.wait(10)
    machine.begin("llmgw server --config /etc/llmgw/server.yaml")
    machine.until("llmgw ctl models demo", r"3/3")
    machine.ready(*before)
    time.sleep(4.0)  # past the settle window
    again = {one["id"]: (one["epoch"], one["ranks"][0]["pid"]) for one in machine.ctl("replicas")["items"]}
    assert again == before, "a restart of the server moves nothing"

    machine.run("llmgw ctl node revoke gpu-1 --yes")
    machine.until("llmgw ctl nodes", r"gpu-1 +lost")
    machine.run("llmgw ctl node forget gpu-1 --yes")
    machine.run("llmgw ctl model remove demo")
    machine.until("llmgw ctl replicas 2>&1", "There are no replicas")
