"""Engines as real processes that misbehave, under the real host; only waiting times are shortened."""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import msgspec
import pytest
import trio

from llmgw.agent import liveness, local, supervise
from llmgw.agent import replica as machine
from llmgw.agent.account import account
from llmgw.agent.files import Root
from llmgw.agent.local import LocalHost
from llmgw.agent.state import State
from llmgw.agent.supervise import Refusal, Supervisor, launch_of
from llmgw.control.observed import Desired, Ports
from llmgw.engines.base import Launch
from llmgw.net.client import Client
from llmgw.net.world import RealWorld
from tests.agent.processes import gone

ENGINE = Path(__file__).parent / "fake_engine.py"


def free_block() -> Ports:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return Ports(sock.getsockname()[1], 1)


@attrs.define
class Ground:
    """A node on which everything is well, unless a test says otherwise."""

    state: State
    mode: str = "ok"
    refusal: Refusal | None = None
    held: list[str] = attrs.field(factory=list)

    async def check(self, desired: Desired) -> Refusal | None:
        return self.refusal

    def launch(self, desired: Desired, key: str) -> Launch:
        return launch_of(
            desired,
            key,
            program=(sys.executable, str(ENGINE), self.mode),
            model="/weights",
            host="127.0.0.1",
            folder=str(self.state.folder(desired.replica)),
            fabric_env={},
        )

    def version(self, engine: str) -> str:
        return "1.0"

    def fabrics(self, desired: Desired) -> tuple[str, ...]:
        return ("ib-a",)

    def boot_id(self) -> str:
        return Root().text("/proc/sys/kernel/random/boot_id") or ""

    def secret(self, size: int) -> str:
        return secrets.token_urlsafe(size)

    def effort(self, desired: Desired) -> float | None:
        return None

    async def still_held(self, desired: Desired, pids: frozenset[int]) -> str:
        return self.held.pop(0) if self.held else ""


class Bench:
    """One agent's surroundings; `life()` of it can be had several times over the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.ports = free_block()
        self.desired = Desired(
            replica="llama-1", model="llama", epoch=7, generation=1, engine="sim", weights="w", ports=self.ports
        )

    @asynccontextmanager
    async def supervisor(self, mode: str = "ok", **more: object) -> AsyncIterator[Supervisor]:
        """Running; cancelled at the end, so that nothing is left."""
        state = State.open(str(self.folder), account(""))
        self.ground = Ground(state, mode)
        self.host = LocalHost(state, log_size=1 << 16, log_files=2)
        desired = msgspec.structs.replace(self.desired, **more)
        world = RealWorld(seed=1)
        client = Client(world)
        supervisor = Supervisor(desired, self.host, self.ground, client, world, self.lines.append)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run, state.records.get(desired.replica))
            yield supervisor
            nursery.cancel_scope.cancel()
        client.close()

    async def until(self, supervisor: Supervisor, condition: Callable[[], bool], within: float = 30.0) -> None:
        with trio.fail_after(within):
            while not condition():
                with trio.move_on_after(0.05):
                    await supervisor.changed.wait()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in [
        (supervise, "TICK", 0.05),
        (supervise, "READY_EVERY", 0.05),
        (supervise, "LOG_EVERY", 0.05),
        (supervise, "TERM_GRACE", 0.5),
        (supervise, "FREE_WAIT", 0.5),
        (supervise, "PROBE_EVERY", 0.1),
        (supervise, "CANARY", 0.5),
        (supervise, "KEEP_EVERY", 0.05),
        (liveness, "STALL", 0.6),
        (machine, "BACKOFF_FIRST", 0.2),
        (machine, "CANARY_PAUSE", 0.05),
    ]:
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "state")


async def get(ports: Ports, path: str) -> None:
    try:
        async with await trio.open_tcp_stream("127.0.0.1", ports.base) as stream:
            await stream.send_all(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            with trio.move_on_after(1):
                await stream.receive_some(100)
    except (OSError, trio.BrokenResourceError):
        pass


async def test_a_replica_becomes_an_endpoint(bench: Bench) -> None:
    async with bench.supervisor() as one:
        await bench.until(one, lambda: one.replica.state == "ready")
        run = one.observed()
        facts = run.endpoint
        assert facts is not None
        assert (run.state, run.epoch, run.pid is not None) == ("ready", 7, True)
        assert facts.url == f"http://127.0.0.1:{bench.ports.base}"
        assert (facts.version, facts.fabrics, facts.max_model_len) == ("1.0", ("ib-a",), 4096)
        assert (facts.block_size, facts.blocks) == (16, 512)
        assert len(facts.api_key) >= 32
        assert facts.api_key not in repr(run)
        assert run.measured is not None
        assert run.measured.load is not None
        record = bench.host.state.records["llama-1"]
        assert record.ready
        assert Root().number(f"/proc/{run.pid}/oom_score_adj") == local.OOM_SCORE
        pid = run.pid
    assert pid is not None
    assert await gone(pid)  # the nursery owned it
    assert bench.host.state.records == {}


async def test_folders_and_files_are_nobody_elses(bench: Bench) -> None:
    async with bench.supervisor() as one:
        await bench.until(one, lambda: one.replica.state == "ready")
        modes = {
            name: (bench.folder / name).stat().st_mode & 0o777
            for name in ("", "run", "replicas/llama-1", "run/llama-1.json")
        }
    assert modes == {"": 0o700, "run": 0o700, "replicas/llama-1": 0o700, "run/llama-1.json": 0o600}


async def test_a_stop_leaves_nothing(bench: Bench) -> None:
    async with bench.supervisor("children") as one:
        await bench.until(one, lambda: one.replica.state == "ready")
        line = next(text for text in one.last_lines() if text.startswith("children"))
        pids = [int(word) for word in line.split()[1:]]
        one.stop(0.0)
        await bench.until(one, lambda: one.replica.state == "gone")
        for pid in pids:
            assert await gone(pid)
    assert not (bench.folder / "run" / "llama-1.json").exists()


async def test_an_engine_that_ignores_term_is_killed(bench: Bench) -> None:
    async with bench.supervisor("ignores-term") as one:
        await bench.until(one, lambda: one.replica.state == "ready")
        pid = one.observed().pid
        one.stop(0.0)
        await bench.until(one, lambda: one.replica.state == "gone")
        assert pid is not None
        assert await gone(pid)


async def test_a_stop_waits_for_requests(bench: Bench) -> None:
    async with bench.supervisor("drains") as one:
        await bench.until(one, lambda: one.replica.state == "ready")
        pid = one.observed().pid
        assert pid is not None
        one.stop(30.0)
        await trio.sleep(0.5)
        assert one.observed().state == "stopping"
        os.kill(pid, 0)  # still there
        os.kill(pid, signal.SIGUSR1)
        await bench.until(one, lambda: one.replica.state == "gone", within=5.0)


@pytest.mark.parametrize(
    ("mode", "cause", "words"),
    [
        (
            "missing-library",
            "missing-library",
            "libgomp.so.1 is missing (exit code 127): Debian/Ubuntu: apt install libgomp1",
        ),
        pytest.param("bad-flag", "bad-flag", "--frobnicate", marks=pytest.mark.full),
    ],
)
async def test_what_would_repeat_itself_is_not_tried_again(bench: Bench, mode: str, cause: str, words: str) -> None:
    async with bench.supervisor(mode) as one:
        await bench.until(one, lambda: one.replica.state == "failed")
        run = one.observed()
        assert run.failure is not None
        assert (run.failure.cause, run.failure.deterministic) == (cause, True)
        assert words in run.failure.message
        assert run.failure.log
        assert run.detail == "not tried again before the node or the model changes"
        bench.ground.mode = "ok"
        one.inputs_changed()
        await bench.until(one, lambda: one.replica.state == "ready")


@pytest.mark.parametrize(
    ("mode", "cause"), [pytest.param("crash", "signal-11", marks=pytest.mark.full), ("exit0", "exit-0")]
)
async def test_a_crash_after_ready_is_restarted_with_backoff(bench: Bench, mode: str, cause: str) -> None:
    async with bench.supervisor(mode) as one:
        await bench.until(one, lambda: one.replica.state == "ready")
        first = one.observed()
        await get(bench.ports, "/crash")
        await bench.until(one, lambda: one.observed().state == "failed")
        await bench.until(one, lambda: one.replica.state == "ready")
        again = one.observed()
        assert again.start_id != first.start_id
        assert again.endpoint is not None
        assert first.endpoint is not None
        assert again.endpoint.api_key != first.endpoint.api_key
        assert again.failure is not None
        assert again.failure.cause == cause


@pytest.mark.full
async def test_a_slow_start_lives_by_its_progress(bench: Bench) -> None:
    async with bench.supervisor("slow", start_deadline=1.5) as one:
        await bench.until(one, lambda: one.replica.state == "ready")
        assert one.observed().failure is None


@pytest.mark.parametrize("mode", ["silent", pytest.param("repeats", marks=pytest.mark.full)])
async def test_a_start_without_progress_is_given_up(bench: Bench, mode: str) -> None:
    async with bench.supervisor(mode, start_deadline=0.8) as one:
        await bench.until(one, lambda: one.replica.state == "failed")
        failure = one.observed().failure
        assert failure is not None
        assert failure.cause == "no-progress"
        assert failure.message.startswith("no progress for 0.8 s")


@pytest.mark.full
async def test_healthy_but_unable_to_serve(bench: Bench) -> None:
    async with bench.supervisor("no-canary") as one:
        await bench.until(one, lambda: one.replica.state == "failed")
        failure = one.observed().failure
        assert failure is not None
        assert failure.message == "healthy, but it cannot serve: 500 CUDA error: no kernel image"


async def test_a_hung_engine_is_found_though_its_health_is_fine(bench: Bench) -> None:
    async with bench.supervisor("hangs") as one:
        await bench.until(one, lambda: one.replica.state == "ready")
        await bench.until(one, lambda: one.replica.failure is not None)
        failure = one.observed().failure
        assert failure is not None
        assert failure.cause == "hung"
        assert "one token was not served" in failure.message


@pytest.mark.full
async def test_a_flood_of_log_is_rotated(bench: Bench) -> None:
    async with bench.supervisor("floods") as one:
        await bench.until(one, lambda: one.replica.state == "ready")
        logs = bench.folder / "logs"
        await bench.until(one, (logs / "llama-1.log.2").exists)
        await trio.sleep(0.3)
        assert sorted(p.name for p in logs.iterdir()) == ["llama-1.log", "llama-1.log.1", "llama-1.log.2"]
        assert (logs / "llama-1.log").stat().st_size < 1 << 22
        assert one.replica.state == "ready"


async def test_the_ground_is_checked_before_each_start(bench: Bench) -> None:
    async with bench.supervisor() as one:
        bench.ground.refusal = Refusal("WGT-3", "WGT-3: model.safetensors: truncated")
        await bench.until(one, lambda: one.replica.state == "failed")
        failure = one.observed().failure
        assert failure is not None
        assert (failure.cause, failure.deterministic) == ("WGT-3", True)


async def test_a_port_in_use_is_named_with_its_holder(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        async with bench.supervisor(ports=Ports(sock.getsockname()[1], 1)) as one:
            await bench.until(one, lambda: one.replica.state == "failed")
            failure = one.observed().failure
            assert failure is not None
            assert failure.cause == "NET-1"
            assert f"by pid {os.getpid()}" in failure.message
            assert not failure.deterministic


async def test_flags_of_the_agent_are_refused(bench: Bench) -> None:
    async with bench.supervisor(flags=("--listen", "0.0.0.0:1"), env={"LD_PRELOAD": "x"}) as one:
        await bench.until(one, lambda: one.replica.state == "failed")
        failure = one.observed().failure
        assert failure is not None
        assert "flag --listen is set by the agent" in failure.message
        assert "LD_PRELOAD" in failure.message


@pytest.mark.full
async def test_gpu_memory_that_stays_held_is_told(bench: Bench) -> None:
    async with bench.supervisor("exit0", gpus=("GPU-1",)) as one:
        await bench.until(one, lambda: one.replica.state == "ready")
        bench.ground.held = ["GPU 2: 71 GiB still held by pid 9912"] * 10
        await get(bench.ports, "/crash")
        await bench.until(one, lambda: one.replica.state == "failed")
        failure = one.observed().failure
        assert failure is not None
        assert failure.message.endswith("GPU 2: 71 GiB still held by pid 9912")


async def test_an_engine_survives_its_agent(bench: Bench) -> None:
    async with bench.supervisor() as one:
        await bench.until(one, lambda: one.replica.state == "ready")
        first = one.observed()
        one.leave()
    assert first.pid is not None
    os.kill(first.pid, 0)
    async with bench.supervisor() as two:
        assert two.replica.state in ("waiting", "ready")
        await bench.until(two, lambda: two.replica.state == "ready")
        await bench.until(two, lambda: (f := two.observed().endpoint) is not None and f.max_model_len == 4096)
        second = two.observed()
        assert (second.pid, second.start_id) == (first.pid, first.start_id)
        assert second.endpoint is not None
        assert first.endpoint is not None
        assert second.endpoint.api_key == first.endpoint.api_key
        assert "adopted" in " ".join(bench.lines)
        os.kill(first.pid, signal.SIGKILL)  # its end is seen, though it is nobody's child
        await bench.until(two, lambda: two.replica.failure is not None)
        assert two.replica.failure is not None
        assert "exit code unknown (adopted process)" in two.replica.failure.message
        await bench.until(two, lambda: two.replica.state == "ready")
        assert two.observed().pid != first.pid


async def test_an_engine_that_died_meanwhile_is_started_anew(bench: Bench) -> None:
    async with bench.supervisor("children") as one:
        await bench.until(one, lambda: one.replica.state == "ready")
        pids = [int(w) for t in one.last_lines() if t.startswith("children") for w in t.split()[1:]]
        pid = one.observed().pid
        one.leave()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert await gone(pid)
    async with bench.supervisor() as two:
        await bench.until(two, lambda: two.replica.state == "ready")
        for survivor in pids:  # the workers of the dead one were ended before the new one began
            assert await gone(survivor)


@pytest.mark.full
async def test_a_life_that_was_not_written_down_is_found(bench: Bench) -> None:
    async with bench.supervisor() as one:
        await bench.until(one, lambda: one.replica.state == "ready")
        pid = one.observed().pid
        state = bench.host.state
        state.keep(msgspec.structs.replace(state.records["llama-1"], pid=None, start_time=0))
        one.leave()
    async with bench.supervisor() as two:
        await bench.until(two, lambda: two.replica.state == "ready")
        assert two.observed().pid == pid


@pytest.mark.full
async def test_a_record_of_another_boot_is_void(bench: Bench) -> None:
    async with bench.supervisor() as one:
        await bench.until(one, lambda: one.replica.state == "ready")
        pid = one.observed().pid
        record = bench.host.state.records["llama-1"]
        assert await bench.host.adopt(msgspec.structs.replace(record, boot_id="other")) is None
        assert await bench.host.adopt(msgspec.structs.replace(record, start_time=1, start_id="0" * 16)) is None
        assert pid is not None


@pytest.mark.full
def test_a_stop_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    """At every instant of a start."""

    async def one_try(delay: float, bench: Bench) -> None:
        async with bench.supervisor() as one:
            await trio.sleep(delay)
            one.stop(0.0)
            await bench.until(one, lambda: one.replica.state == "gone")
        marks = local.marked(Root(), "none", bench.folder / "replicas" / "llama-1")
        assert marks == frozenset()

    rng = random.Random(3)
    for n in range(6):
        trio.run(one_try, 0.05 + 0.2 * rng.random(), Bench(tmp_path / str(n)))
