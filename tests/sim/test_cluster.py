"""The http level: the real gateway and engines, in virtual time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from llmgw.units import Tcp
from sim import policies
from sim.cluster import run
from sim.determinism import SHUFFLER, SWITCH, deterministic
from sim.network import Network
from sim.records import Record
from sim.report import document, encode
from sim.scenario import Scenario, load, parse

ROOT = Path(__file__).parents[2]


def scenario(text: str) -> Scenario:
    return parse("version: 1\n" + text)


def test_the_smoke_scenario() -> None:
    result = run(load("smoke"))

    assert result.problems == []
    summary = result.summary()
    assert summary["served"] > 150
    assert set(summary["refused"]) <= {"upstream_closed", "connect_failed", "none_healthy"}
    assert sum(engine["generation_tokens"] for engine in result.engines.values()) >= summary["tokens"]


def test_prefill_and_decode_on_engines_of_their_own() -> None:
    result = run(load("pd"))

    assert result.problems == []
    assert all(record.served for record in result.records)
    assert {record.endpoint.rpartition("-")[0] for record in result.records} == {"decode"}
    assert sum(e["generation_tokens"] for n, e in result.engines.items() if n.startswith("prefill")) >= 1


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_million_tokens_take_two_minutes_at_most() -> None:
    """Measured by processor time, so that what else runs here does not count."""
    start = time.process_time()
    result = run(load("tokens"))
    spent = time.process_time() - start

    assert result.problems == []
    tokens = result.summary()["tokens"]
    print(f"{tokens} tokens, {spent / tokens * 1e6:.1f} µs each")
    assert spent / tokens <= 120e-6


ALIKE = """
name: alike
engines:
  - {name: fast, count: 2, hardware: h100-8b}
  - {name: slow, count: 2, hardware: l40s-8b, max_model_len: 8192}
load:
  - {kind: poisson, rate: 8, duration: 20s, prompt_tokens: 400, output_tokens: 60, output_spread: 0.4}
"""


def test_both_levels_choose_alike_and_tell_alike() -> None:
    one = scenario(ALIKE)
    http, decisions = run(one), policies.run(one, one.seed)

    assert http.problems == decisions.problems == []

    def kind(record: Record) -> str:  # between engines that are alike, chance decides
        return record.endpoint.rpartition("-")[0]

    chosen = {record.id: kind(record) for record in http.records}
    same = sum(chosen[record.id] == kind(record) for record in decisions.records)
    assert len(decisions.records) == len(chosen)
    assert same / len(chosen) >= 0.9
    a, b = http.summary(), decisions.summary()
    assert a["tokens"] == b["tokens"]
    for figure in ("ttft_p50", "itl_p50", "e2e_p50", "tokens_per_second"):
        assert a[figure] == pytest.approx(b[figure], rel=0.1), figure


REGRESSIONS = Path(__file__).parent / "regressions"


@pytest.mark.parametrize("path", sorted(REGRESSIONS.glob("*.yaml")), ids=lambda path: path.stem)
def test_books_agree_whatever_goes_wrong(path: Path) -> None:
    """A rehearsal that found something once is kept as a file (`--report` writes it), and must stay good."""
    result = run(load(str(path)))

    assert result.problems == []
    assert result.summary()["served"] > 100


REPEAT = """
import sys
from sim.cluster import run
from sim.records import Record
from sim.report import document, encode
from sim.scenario import parse
scenario = parse(open(sys.argv[1]).read())
sys.stdout.buffer.write(encode(document(scenario, scenario.seed, "http", run(scenario))))
"""


def reports(tmp_path: Path, seeds: list[int]) -> list[bytes]:
    path = tmp_path / "scenario.yaml"
    path.write_text((REGRESSIONS / "trouble.yaml").read_text().replace("30s", "5s"))
    found = []
    for seed in seeds:
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", REPEAT, str(path)]
        found.append(subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    return found


def test_the_same_seed_gives_the_same_report_to_the_byte(tmp_path: Path) -> None:
    one, two = reports(tmp_path, [1, 2])

    assert len(one) > 10_000
    assert one == two


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_same_report_ten_times_with_burners_beside_it(tmp_path: Path) -> None:
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        found = reports(tmp_path, list(range(10)))
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()

    assert len(set(found)) == 1


def test_another_seed_gives_another_report() -> None:
    one = scenario(ALIKE.replace("20s", "3s"))

    first, second = (encode(document(one, seed, "http", run(one, seed))) for seed in (1, 2))

    assert first != second


# Determinism: trio's names


def test_trio_still_has_the_two_names() -> None:
    assert hasattr(trio._core._run, SWITCH)
    assert hasattr(trio._core._run, SHUFFLER)


def test_the_order_of_tasks_is_a_function_of_the_seed() -> None:
    def order(seed: int) -> list[int]:
        found: list[int] = []

        async def main() -> None:
            async def one(number: int) -> None:
                await trio.lowlevel.checkpoint()
                found.append(number)

            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(one, number)

        with deterministic(seed):
            trio.run(main)
        return found

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(10)}) == 10


# Links


async def exchange(network: Network) -> float:
    """Seconds from sending a byte to the echo of it, over the link to `far`."""
    sock = await network.host("near").dial(Tcp("far", 1))
    try:
        start = trio.current_time()
        sock.send(b"x")
        await trio.lowlevel.wait_readable(sock)
        if sock.recv(10) != b"x":
            return float("inf")
        return trio.current_time() - start
    finally:
        sock.close()


async def echo(network: Network, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
    listener = (await network.host("far").listen(Tcp("far", 1)))[0]
    task_status.started()
    try:
        while True:
            await trio.lowlevel.wait_readable(listener)
            sock, _ = listener.accept()
            sock.setblocking(False)
            await trio.lowlevel.wait_readable(sock)
            with contextlib.suppress(OSError):  # the link may be cut by now
                sock.send(sock.recv(10))
            sock.close()
    finally:
        listener.close()


async def test_a_link_adds_latency_clogs_and_is_cut(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        network = Network(1, nursery)
        await nursery.start(echo, network)
        assert await exchange(network) == 0.0
        link = network.link("far")
        link.wired = True
        link.change(latency=0.25)
        assert await exchange(network) == pytest.approx(0.5)

        link.change(latency=0.0, clogged=True)

        async def unclog() -> None:
            await trio.sleep(7)
            link.change(clogged=False)

        nursery.start_soon(unclog)
        assert await exchange(network) == pytest.approx(7.0)

        async def cut() -> None:
            await trio.sleep(3)
            link.change(cut=True)

        link.change(clogged=True)
        nursery.start_soon(cut)
        assert await exchange(network) == float("inf")
        with pytest.raises(OSError, match="cut"):
            await exchange(network)
        nursery.cancel_scope.cancel()
