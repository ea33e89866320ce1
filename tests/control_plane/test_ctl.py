"""`llmgw ctl` against a control plane with four nodes: what it shows, what it refuses, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner, Result

from llmgw import catalogue, config
from llmgw.ctl.commands import ctl
from llmgw.net.doors import Door
from llmgw.net.world import RealWorld, Tcp
from llmgw.server.admin import Admin
from llmgw.server.control_api import ControlApi
from tests.control_plane.worlds import Site, big, little, mixed, site
from tests.server.worlds import bench

ROOT = Path(__file__).parent.parent.parent
FILE = """version: 1
models:
  - name: small
    engine: vllm
    weights: /models/small
    max_model_len: 8192
    replicas: 2
    min_available: 1
    grace: 1m
"""
HUGE = """  - name: huge
    engine: vllm
    weights: /models/qwen2.5-72b
    shapes: [{tp: 2, gpus: [H100]}]
"""


class Ctl:
    """The command, which blocks and so runs in a thread, and the world that it looks at."""

    def __init__(self, url: str, world: Site, folder: Path) -> None:
        self.url, self.world, self.folder = url, world, folder

    async def __call__(self, *args: str, code: int = 0, text: str | None = None) -> str:
        found = await self.ask(*args, text=text)
        assert found.exit_code == code, (args, found.output, found.exception)
        return found.stdout if code in (0, 3) and found.stdout else found.stderr

    async def ask(self, *args: str, text: str | None = None) -> Result:
        return await trio.to_thread.run_sync(
            lambda: CliRunner().invoke(ctl, ["--server", self.url, *args], input=text, standalone_mode=True)
        )

    def file(self, text: str) -> str:
        path = self.folder / "cluster.yaml"
        path.write_text(text)
        return str(path)


@asynccontextmanager
async def plane(folder: Path, *, settle: bool = True) -> AsyncIterator[Ctl]:
    """The real loop with heartbeats of 20 ms, behind a real admin port."""
    async with site(mixed(4), heartbeat=0.02, lost_after=1.5, reschedule_after=5.0) as world:
        process = await world.start()
        one, real = bench(), RealWorld()
        api = ControlApi(process.control, config.Server(version=1), real.wall)
        sockets = await real.listen(Tcp("127.0.0.1", 0))
        door = Door(Admin(one.brain, one.metrics, trio.current_time).app((), api.routes()), kind="admin", world=real)
        await world.nursery.start(door.run, sockets)
        if settle:
            with trio.fail_after(20):
                while not process.control.settled:  # noqa: ASYNC110 -- the loop says so to nobody
                    await trio.sleep(0.02)
        yield Ctl(f"http://127.0.0.1:{sockets[0].getsockname()[1]}", world, folder)
        door.close()


async def ready(run: Ctl) -> None:
    with trio.fail_after(20):
        while not (run.world.quiet() and run.world.satisfied()):  # noqa: ASYNC110
            await trio.sleep(0.02)


async def test_a_catalogue_from_diff_to_ready(tmp_path: Path) -> None:
    async with plane(tmp_path) as run:
        assert "There are no replicas" in await run("replicas")
        file = run.file(FILE)
        assert await run("diff", "-f", file) == "+ small\n"
        assert (await run("plan", "-f", file)).startswith("+ small\nsmall-1: gpu-0")
        assert run.world.control.state.models == {}
        assert await run("apply", "-f", "-", text=FILE) == "+ small\n"
        assert await run("apply", "-f", file) == "nothing to change\n"
        await ready(run)
        lines = (await run("replicas")).splitlines()
        assert lines[0].split()[:4] == ["REPLICA", "MODEL", "STATE", "SINCE"]
        assert [line.split()[:3] for line in lines[1:]] == [
            ["small-1", "small", "ready"],
            ["small-2", "small", "ready"],
        ]
        found = json.loads(await run("replicas", "--model", "small", "--json"))
        assert found["items"][0]["ranks"][0]["ports"]["count"] == 32
        assert (await run("models", "small")).splitlines()[1].split()[2] == "2/2"
        assert "small-1  placed -> starting" in (await run("events")) or "small-1" in (await run("events"))
        changed = run.file(FILE.replace("replicas: 2", "replicas: 3").replace("8192", "4096"))
        told = await run("diff", "-f", changed)
        assert told == "~ small: max_model_len: 8192 -> 4096, replicas: 2 -> 3 (replicas are replaced one at a time)\n"


async def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    async with plane(tmp_path, settle=False) as run:
        file = run.file(
            FILE
            + HUGE.replace("tp: 2", "tpp: 2")
            + "    replcas: 1\n    routing: {profile: nonsense, fallback: [zzz]}\n"
        )
        told = (await run("apply", "-f", file, code=2)).splitlines()
        assert told == [
            f"llmgw ctl: {file}:13: models[1].shapes[0].tpp: unknown key 'tpp'; did you mean 'tp'?",
            f"{file}:14: models[1].replcas: unknown key 'replcas'; did you mean 'replicas'?",
        ]
        file = run.file(FILE + "    routing: {profile: nonsense, fallback: [zzz], aliases: [small]}\n")
        told = (await run("diff", "-f", file, code=2)).splitlines()
        assert (
            sum(
                word in "\n".join(told)
                for word in ("alias 'small' is taken", "unknown profile 'nonsense'", "'zzz', which nobody defines")
            )
            == 3
        )
        assert "No such file" in await run("apply", "-f", str(tmp_path / "absent"), code=1)


async def test_models_are_not_stopped_by_accident(tmp_path: Path) -> None:
    async with plane(tmp_path) as run:
        await run.world.apply(little(1), big(0))
        file = run.file(FILE)
        told = await run("apply", "-f", file, code=1)
        assert (
            told == "llmgw ctl: qwen: in the catalogue and not in the file; add it there, or give --remove to stop it\n"
        )
        assert "- qwen" in await run("apply", "-f", file, "--remove")
        assert await run("model", "add", "demo", "--engine", "sim", "--cpu", "--alias", "gpt") == "+ demo\n"
        assert "demo is in the catalogue already" in await run("model", "add", "demo", "--engine", "sim", code=1)
        shown = await run("model", "show")
        assert [m.name for m in catalogue.parse(shown, config.Server(version=1))] == ["small", "demo"]
        assert await run("apply", "-f", run.file(shown)) == "nothing to change\n"
        assert await run("model", "remove", "demo") == "- demo\n"
        assert "no model 'demo'" in await run("model", "remove", "demo", code=3)


async def test_what_fits_nowhere(tmp_path: Path) -> None:
    async with plane(tmp_path) as run:
        file = run.file(FILE + HUGE)
        assert "huge-1: 0 of 4 candidates feasible" in await run("plan", "-f", file, code=3)
        await run("apply", "-f", file)
        with trio.fail_after(20):
            while not run.world.told("pending: 0 of 4"):  # noqa: ASYNC110
                await trio.sleep(0.02)
        told = await run("explain-placement", "huge", code=3)
        assert "node gpu count memory engine fabric" in told
        assert "memory.vram: need 75.75, have 73.28 GiB, short 2.47" in told
        found = json.loads(await run("explain-placement", "huge", "--json", code=3))
        assert (found["kind"], found["feasible"], found["recorded"], len(found["candidates"])) == (
            "placement",
            0,
            True,
            4,
        )
        assert (await run("explain-placement", "small", "--now")).startswith("model small")
        assert "no model 'zzz' in the catalogue; there are: small, huge" in await run(
            "explain-placement", "zzz", code=3
        )


async def test_nodes(tmp_path: Path) -> None:
    async with plane(tmp_path) as run:
        lines = (await run("nodes")).splitlines()
        assert [line.split()[:2] for line in lines[1:]] == [[f"gpu-00{i}", "ready"] for i in range(4)]
        assert "8/8 NVIDIA H200 free" in lines[2]
        assert "ib-a x4" in lines[1]
        assert await run("cordon", "gpu-001", "--why", "fan") == "gpu-001 gets no new replicas\n"
        assert "cordoned: fan" in await run("nodes", "gpu-001")
        found = json.loads(await run("nodes", "gpu-001", "--json"))
        assert (found["cordon"]["why"], len(found["gpus"])) == ("fan", 8)
        assert await run("uncordon", "gpu-001") == "gpu-001 is open for replicas\n"
        assert "no node 'gpu-9'; known: gpu-000, gpu-001" in await run("cordon", "gpu-9", code=3)
        assert "gpu-000 still reports" in await run("node", "forget", "gpu-000", "--yes", code=1)
        run.world.agents["gpu-000"].connected = False
        with trio.fail_after(20):
            while "gpu-000" not in run.world.control.lost():  # noqa: ASYNC110
                await trio.sleep(0.02)
        assert await run("node", "forget", "gpu-000", "--yes") == "gpu-000 is forgotten\n"
        assert len((await run("nodes")).splitlines()) == 4


async def test_a_drain_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmgw.ctl.nodes.POLL", 0.02)
    async with plane(tmp_path) as run:
        await run.world.apply(little(2, min_available=1))
        await ready(run)
        assignment = run.world.control.state.cluster.replicas["small-1"].assignment
        assert assignment is not None
        node = assignment.nodes[0]
        here = len(json.loads(await run("nodes", node, "--json"))["replicas"])
        told = (await run("drain", node)).splitlines()
        assert told[0] == f"{node}: 0 of {here} done"
        assert told[-2] == f"{node}: done: {here} replicas left {node}"
        assert told[-1] == f"{node} stays cordoned; `llmgw ctl uncordon {node}` opens it again"
        assert json.loads((await run("drain", node, "--json", "--no-wait")).splitlines()[-1])["kind"] == "drain"
        await run("drain", node, "--abort")
        assert "is not being drained" in await run("drain", node, "--abort", code=3)


async def test_scale_has_a_floor(tmp_path: Path) -> None:
    async with plane(tmp_path) as run:
        await run.world.apply(little(2, min_available=1))
        assert (await run("scale", "small", "3")).endswith(" of 3 ready\n")
        assert "small cannot have 0 replicas: min_available is 1" in await run("scale", "small", "0", code=1)
        await ready(run)
        await run("retry", "small")
        assert "no failure on record" in await run("logs", "small-1")


async def test_who_is_not_the_leader_says_so(tmp_path: Path) -> None:
    async with plane(tmp_path) as run:
        run.world.stop(run.world.servers[0])
        await trio.sleep(0.1)
        assert "does not lead the control plane" in await run("nodes", code=1)
        assert "does not lead the control plane" in await run("token", "create", code=1)
    assert "does `llmgw server` run there?" in await run("nodes", code=1)


async def test_without_an_authority_or_a_file_to_copy(tmp_path: Path) -> None:
    async with plane(tmp_path) as run:
        assert "make one: llmgw ctl ca init" in await run("token", "create", code=1)
        assert "is not a duration" in await run("token", "create", "--ttl", "soon", code=2)
        assert "etcdctl snapshot save" in await run("backup", str(tmp_path / "copy"), code=1)
        assert not (tmp_path / "copy").exists()


def test_an_authority_is_made_once(tmp_path: Path) -> None:
    args = ["ca", "init", "--state", str(tmp_path), "--root-key", str(tmp_path / "away.key")]
    first = CliRunner().invoke(ctl, [*args, "--json"])
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout)["folder"] == str(tmp_path / "identity")
    second = CliRunner().invoke(ctl, args)
    assert second.exit_code == 2
    assert "a new authority replaces nothing" in second.stderr


def test_a_shell_completes(tmp_path: Path) -> None:
    found = CliRunner().invoke(ctl, ["completion", "bash"])
    assert found.exit_code == 0
    assert "_LLMGW_COMPLETE=bash_complete" in found.stdout


def test_the_example_and_the_page() -> None:
    models = catalogue.parse((ROOT / "examples" / "cluster.yaml").read_text(), config.Server(version=1))
    assert len(models) == 5
    assert all(catalogue.decode(catalogue.encode(m)) == m for m in models)
    page = (ROOT / "docs" / "catalogue.md").read_text()
    assert page == catalogue.reference(), "run: python -m llmgw.catalogue > docs/catalogue.md"
