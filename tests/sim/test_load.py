"""Workloads, traces and scenarios: what is drawn, and what is refused."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from llmgw.errors import ConfigError
from sim.load import Load
from sim.scenario import Scenario, parse
from sim.traces import read

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"

needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="no traces beside this checkout")


def test_poisson_comes_at_its_rate_and_twice_the_same() -> None:
    load = Load(rate=50.0, duration=100.0, output_spread=0.5)
    one, two = load.sessions(3), load.sessions(3)

    assert len(one) == pytest.approx(5000, rel=0.1)
    assert [session.at for session in one] == [session.at for session in two]
    assert [list(session.turns) for session in one[:50]] == [list(session.turns) for session in two[:50]]
    assert [session.at for session in load.sessions(4)] != [session.at for session in two]


def test_bursts_keep_the_mean_rate() -> None:
    sessions = Load(kind="bursts", rate=50.0, burst=25, duration=200.0).sessions(1)

    assert len(sessions) == pytest.approx(10_000, rel=0.25)
    assert len({session.at for session in sessions}) == len(sessions) // 25


def test_sizes_have_their_mean() -> None:
    turns = [
        next(s.turns)
        for s in Load(rate=100.0, duration=50.0, prompt_tokens=5, output_tokens=200, output_spread=1.0).sessions(1)
    ]

    assert sum(turn.output for turn in turns) / len(turns) == pytest.approx(200, rel=0.1)
    assert {len(turn.prompt) for turn in turns} == {5}


def test_closed_loops_go_on_and_conversations_do_not() -> None:
    closed = Load(kind="closed", clients=3).sessions(1)
    talk = Load(rate=1.0, turns=4, think=2.0).sessions(1)[0]

    assert len(closed) == 3
    assert len(list(islice(closed[0].turns, 100))) == 100
    assert len(list(talk.turns)) == 4


def test_groups_share_their_prefix() -> None:
    sessions = Load(rate=20.0, prefix_groups=3, prefix_tokens=50).sessions(1)

    assert len({session.prefix for session in sessions}) == 3
    assert {len(session.prefix) for session in sessions} == {50}


@needs_traces
def test_the_azure_trace() -> None:
    rows = read(str(TRACES / "azure_llm_2023_conversation.csv"), "azure")

    assert len(rows) == 19_366
    assert (rows[0].at, rows[0].prompt, rows[0].output) == (0.0, 374, 44)
    assert rows[1].at == pytest.approx(4.314579)
    assert 3400 < rows[-1].at < 3700


@needs_traces
def test_the_mooncake_trace_repeats_its_prefixes() -> None:
    load = Load(kind="trace", file=str(TRACES / "mooncake_conversation.jsonl"), format="mooncake", limit=2)
    one, two = (next(session.turns).prompt for session in load.sessions(1))

    assert (len(one), len(two)) == (6758, 7322)
    assert one[:512] == two[:512]
    assert one[512:1024] != two[512:1024]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\nnonsense\n",
            "azure",
            ":3: expected time",
        ),
        ("a,b,c\n", "azure", "expected the head"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "azure", "the trace is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,0,4\n", "azure", "cannot be"),
        (
            '{"timestamp": 0, "input_length": 3, "output_length": 4}\n{"timestamp": 1}\n',
            "mooncake",
            ":2: not a request",
        ),
    ],
)
def test_a_bad_trace_names_its_line(text: str, kind: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(text)

    with pytest.raises(ConfigError, match=message):
        read(str(path), kind)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read(str(tmp_path / "none"), "azure")


def test_a_scenario_in_words() -> None:
    scenario = parse(
        """
version: 1
name: two
engines:
  - {name: gpu, count: 2, hardware: h100-8b, fabrics: [ib0]}
load:
  - {kind: poisson, rate: 3, duration: 2m, prompt_tokens: 100, output_tokens: 10}
faults:
  - {at: 30s, kind: kill, target: gpu-1}
"""
    )

    assert isinstance(scenario, Scenario)
    assert scenario.engine_names() == ["gpu-0", "gpu-1"]
    assert scenario.load[0].duration == 120.0


def test_every_problem_of_a_scenario_is_told_with_its_line() -> None:
    text = """
version: 1
engines:
  - {name: gpu, hardware: h100-9b}
  - {name: gpu, num_gpu_blocks: 10}
load:
  - {kind: trace}
faults:
  - {at: 30s, kind: kill, target: cpu}
"""
    with pytest.raises(ConfigError) as caught:
        parse(text, "s.yaml")

    told = str(caught.value)
    assert "s.yaml:4: engines[0].hardware: hardware 'h100-9b' is no GPU-MODEL" in told
    assert "engine 'gpu' is defined twice" in told
    assert "s.yaml:5: engines[1].max_model_len: one request of 32768 tokens needs 2048 KV blocks" in told
    assert "s.yaml:7: load[0].file: a trace needs its file" in told
    assert "s.yaml:9: faults[0].target: no engine is called 'cpu'" in told


def test_unknown_keys_are_told_with_what_was_meant() -> None:
    with pytest.raises(ConfigError, match="did you mean 'prefill_tps'"):
        parse("engines: [{name: a, prefil_tps: 3}]\nload: [{kind: poisson}]\n")
