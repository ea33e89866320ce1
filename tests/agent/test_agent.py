"""The whole agent as a process of its own, against the real cluster port: join, sync, partition, restart, fencing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import attrs
import msgspec
import pytest
import trio

from llmgw.control.observed import Desired, Ports
from llmgw.placement.inventory import node_state
from tests.agent.fake_server import Control, Site, open_site
from tests.agent.processes import gone

ROOT = Path(__file__).parents[2]
ENGINE = Path(__file__).parent / "fake_engine.py"


def desired(port: int, **more: object) -> Desired:
    one = Desired(
        replica="llama-1", model="llama", epoch=7, generation=1, engine="sim", weights="w", ports=Ports(port, 1)
    )
    return msgspec.structs.replace(one, **more)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@attrs.define
class Agents:
    """Agents of one node, one after the other, over one state folder."""

    folder: Path
    site: Site
    kind: str = "sim"
    command: str = f"[{sys.executable}, {ENGINE}, ok]"
    pids: list[int] = attrs.field(factory=list)  # of engines, to be ended at the end

    @asynccontextmanager
    async def agent(self, token: str = "", *flags: str) -> AsyncIterator[trio.Process]:
        config = self.folder / "agent.yaml"
        config.write_text(
            f"version: 1\nnode: gpu-1\naddress: 127.0.0.1\nstate: {self.folder}/state\nlabels: {{rack: r7}}\n"
            f"engines: {{{self.kind}: {{command: {self.command}}}}}\nweights: []\nports: 1024-65535\n"
        )
        argv = [
            sys.executable,
            "-m",
            "llmgw",
            "agent",
            "--server",
            str(self.site.address),
            "--config",
            str(config),
            *flags,
        ]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "LLMGW_JOIN_TOKEN": token}
        with self._log() as log:
            process = await trio.lowlevel.open_process(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=self.folder
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            with trio.move_on_after(5, shield=True):
                await process.wait()

    def _log(self) -> BinaryIO:
        return (self.folder / "agent.log").open("ab")

    def log(self) -> str:
        return (self.folder / "agent.log").read_text()


@pytest.fixture
async def agents(tmp_path: Path) -> AsyncIterator[Agents]:
    async with open_site(tmp_path, Control()) as site:
        agents = Agents(tmp_path, site)
        yield agents
    for pid in agents.pids:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


async def test_from_a_token_to_an_endpoint_through_restart_and_stop(agents: Agents) -> None:
    """One story, since each step stands on the one before."""
    site, control = agents.site, agents.site.control
    async with agents.agent(await site.token()) as process:
        await site.until(lambda: control.observed is not None)
        assert control.observed is not None
        inventory = control.observed.inventory
        assert (inventory.node, inventory.address, inventory.labels) == ("gpu-1", "127.0.0.1", {"rack": "r7"})
        await site.until(lambda: not control.checking())
        inventory = control.observed.inventory
        assert node_state(inventory) in ("ready", "degraded")
        assert {c.id for c in inventory.checks} >= {"DRV-1", "ENG-2", "CPU-1", "CLK-1"}

        control.desired = (desired(free_port()),)
        await site.until(lambda: control.state("llama-1") == "ready")
        run = control.run("llama-1")
        assert run is not None
        assert run.endpoint is not None
        assert run.endpoint.url.startswith("http://127.0.0.1:")
        assert run.endpoint.api_key
        assert run.pid is not None
        agents.pids.append(run.pid)

        control.follow = "llama-1"
        await site.until(lambda: any(line.startswith("listening on") for line in control.followed))
        control.follow = ""

        count = len(control.syncs)  # nothing changes now: bodies are left out
        await site.until(lambda: len(control.syncs) >= count + 3)
        assert all(s.observed is None for s in control.syncs[-2:])
        assert run.endpoint.api_key not in agents.log()

        process.send_signal(signal.SIGTERM)
        with trio.fail_after(10):
            assert await process.wait() == 0
        os.kill(run.pid, 0)

    async with agents.agent() as process:  # an upgrade: no token any more, the engine is adopted
        seen = len(control.syncs)
        await site.until(lambda: len(control.syncs) > seen and control.state("llama-1") == "ready")
        again = control.run("llama-1")
        assert again is not None
        assert (again.pid, again.start_id) == (run.pid, run.start_id)
        process.kill()  # kill -9: the same
        await process.wait()
        os.kill(run.pid, 0)

    async with agents.agent():
        seen = len(control.syncs)
        await site.until(lambda: len(control.syncs) > seen and control.state("llama-1") == "ready")
        control.desired = (desired(run.ports.base if run.ports else 0, epoch=6),)  # a server that speaks late
        await site.until(lambda: control.syncs[-1].refused == ("llama-1",))
        assert control.state("llama-1") == "ready"
        control.desired = ()
        await site.until(lambda: control.run("llama-1") is None or control.state("llama-1") == "gone")
        assert await gone(run.pid)


@pytest.mark.full
async def test_a_partition_changes_nothing(tmp_path: Path) -> None:
    control = Control()
    async with open_site(tmp_path, control) as site:
        agents = Agents(tmp_path, site)
        token, store, port = await site.token(), site.store, site.address.port
        control.desired = (desired(free_port()),)
        async with agents.agent(token):
            await site.until(lambda: control.state("llama-1") == "ready")
            run = control.run("llama-1")
            assert run is not None
            assert run.pid is not None
            agents.pids.append(run.pid)
            site.scope.cancel()
            with trio.fail_after(20):
                while "no server can be reached, engines go on" not in agents.log():  # noqa: ASYNC110
                    await trio.sleep(0.1)
            os.kill(run.pid, 0)
            control.settled = False  # it has just come back and knows of nothing yet
            control.desired, control.observed, control.digest = (), None, ""
            async with open_site(tmp_path, control, port, store) as back:
                await back.until(lambda: control.state("llama-1") == "ready")
                count = len(control.syncs)
                await back.until(lambda: len(control.syncs) >= count + 3)
                os.kill(run.pid, 0)
                control.settled, control.term = True, 0  # one that was replaced
                count = len(control.syncs)
                await back.until(lambda: len(control.syncs) > count)
                os.kill(run.pid, 0)
                control.term = 2
                await back.until(lambda: control.run("llama-1") is None or control.state("llama-1") == "gone")
                assert await gone(run.pid)
        assert "a later one has been heard: it was replaced" in agents.log()


@pytest.mark.full
async def test_a_new_epoch_replaces_and_a_skewed_clock_is_told(agents: Agents) -> None:
    site, control = agents.site, agents.site.control
    control.skew = -5.0
    port = free_port()
    control.desired = (desired(port),)
    async with agents.agent(await site.token()):
        await site.until(lambda: control.state("llama-1") == "ready")
        first = control.run("llama-1")
        assert first is not None
        control.desired = (desired(port, epoch=8, grace=0.0),)
        await site.until(lambda: (r := control.run("llama-1")) is not None and r.epoch == 8 and r.state == "ready")
        second = control.run("llama-1")
        assert second is not None
        assert second.pid != first.pid
        assert first.pid is not None
        assert await gone(first.pid)

        def clock() -> str:
            checks = control.observed.inventory.checks if control.observed else ()
            return next((c.message for c in checks if c.id == "CLK-1" and not c.ok), "")

        await site.until(lambda: "ahead of the server" in clock())
        control.desired = ()
        await site.until(lambda: control.run("llama-1") is None or control.state("llama-1") == "gone")


@pytest.mark.parametrize(
    ("token", "code", "words"),
    [
        ("", 2, "this node has not joined: give --join-token-file"),
        ("nonsense", 2, "token"),
        ("lgwj1.aaaaaaaaaa." + "a" * 26 + "." + "a" * 52, 1, "another certificate authority"),
    ],
)
async def test_a_join_that_cannot_be(agents: Agents, token: str, code: int, words: str) -> None:
    async with agents.agent(token) as process:
        with trio.fail_after(20):
            assert await process.wait() == code
    assert words in agents.log()


async def test_a_damaged_state_kills_nothing(agents: Agents) -> None:
    run = agents.folder / "state" / "run"
    run.mkdir(parents=True)
    (run / "llama-1.json").write_text("{")
    async with agents.agent() as process:
        with trio.fail_after(20):
            assert await process.wait() == 2
    assert "llama-1.json: it is damaged" in agents.log()
