"""The latency model beside published measurements; ``pytest -s`` prints them side by side.

Constants are those of `llmgw.simengine.latency`: one set a GPU type. The efficiencies of the two RTX cards come from the
step-time table below; the end-to-end table and the shape past capacity were not used to choose any number.
"""

from __future__ import annotations

import random
from math import inf

import pytest

from llmgw.simengine.core import EngineCore, Job, Seq, Shape, State
from llmgw.simengine.latency import GPUS, MODELS, Physics, StepModel, hardware
from llmgw.simengine.options import API_SECONDS

TOKENS = (1, 32, 128, 256, 512, 1024, 2048, 4096)
LINEAR = (  # milliseconds of all linear layers in a step of so many tokens (profiles of Vidur and LLMServingSim)
    ("7b", "h100", 1, (5.6, 5.8, 6.4, 9.2, 12.0, 21.0, 40.3, 83.5)),
    ("7b", "a100-80", 1, (9.3, 9.5, 12.2, 17.8, 33.4, 67.9, 133, 258)),
    ("8b", "a100-80", 1, (9.7, 10.9, 13.2, 19.5, 34.6, 75.1, 146, 274)),
    ("llama2-70b", "h100", 4, (14.3, 15.3, 15.9, 19.2, 30.0, 62.1, 111, 223)),
    ("llama2-70b", "h100", 8, (8.4, 9.3, 10.0, 11.5, 17.7, 32.6, 63.7, 122)),
    ("llama2-70b", "a100-80", 4, (24.9, 26.1, 33.2, 51.0, 89.3, 184, 330, 641)),
    ("codellama-34b", "h100", 2, (12.9, 13.6, 14.4, 18.0, 29.3, 57.2, 107, 213)),
    ("7b", "a40", 1, (23.9, 26.5, 30.3, 44.6, 71.1, 137, 259, 523)),
    ("8b", "rtxpro6000", 1, (10.2, 10.7, 11.7, 14.0, 22.4, 40.1, 77.0)),
    ("8b", "rtx4090", 1, (15.3, 17.0, 19.8, 24.1, 46.1, 91.1, 181)),
)
SERVED = (  # vLLM 0.15.1 on H100: model, tp, requests/s, prompt, output, budget, blocks; TTFT, ITL, end to end in ms
    ("qwen-7b", 1, 6.0, 750, 251, 2048, 65368, 26.7, 7.0, 1772),
    ("qwen-7b", 1, 1.0, 1034, 1448, 1024, 65368, 30.8, 7.4, 10662),
    ("12b", 1, 5.0, 566, 247, 2048, 19251, 31.9, 9.9, 2450),
    ("12b", 1, 10.0, 566, 247, 2048, 19251, 33.7, 10.6, 2628),
    ("12b", 2, 2.5, 547, 248, 1024, 48009, 22.0, 6.0, 1498),
    ("12b", 2, 6.0, 547, 248, 1024, 48009, 21.6, 6.2, 1549),
    ("34b", 2, 2.5, 547, 248, 2048, 20793, 46.6, 15.1, 3780),
    ("34b", 2, 6.0, 547, 248, 2048, 20793, 47.1, 15.8, 3940),
    ("70b", 4, 2.5, 547, 248, 8192, 30425, 52.0, 17.1, 4208),
    ("70b", 4, 6.0, 547, 248, 8192, 30425, 54.4, 18.8, 4625),
    ("70b", 4, 5.0, 566, 247, 2048, 30425, 54.7, 18.3, 4495),
    ("70b", 4, 10.0, 566, 247, 2048, 30425, 59.8, 20.4, 5014),
)
SESSIONS = 47
"""Distinct prompts of those runs: after the first round every prompt is a cache hit."""


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def open_loop(core: EngineCore, rate: float, count: int, prompt: int, output: int, seed: int = 1) -> list[Seq]:
    """Poisson arrivals over SESSIONS prompts; without the first quarter, while the cache is cold."""
    rng = random.Random(seed)
    prompts = [rng.choices(range(32000), k=prompt) for _ in range(SESSIONS)]
    arrivals, at = [], 0.0
    for _ in range(count):
        at += rng.expovariate(rate)
        arrivals.append((at, rng.choice(prompts)))
    seqs: list[Seq] = []
    now = 0.0
    while True:
        while len(seqs) < count and arrivals[len(seqs)][0] <= now:
            at, tokens = arrivals[len(seqs)]
            seqs.append(core.submit(Job(id=str(len(seqs)), prompt=tokens, output=range(output)), at))
        end = core.begin(now)
        if end is None:
            following = min(core.wake, arrivals[len(seqs)][0] if len(seqs) < count else inf)
            if following == inf:
                return seqs[count // 4 :]
            now = max(now, following)
            continue
        now = end
        core.end(now)


def closed_loop(model: StepModel, shape: Shape, clients: int, prompt: int, output: int) -> tuple[float, float, float]:
    """(TTFT, ITL, tokens/s) with so many clients that ask again at once, each time something new."""
    core = EngineCore(shape, model)
    rng = random.Random(clients)
    now = 0.0
    done: list[Seq] = []

    def ask() -> None:
        tokens = rng.choices(range(32000), k=prompt)
        core.submit(Job(id=str(rng.random()), prompt=tokens, output=range(output)), now)

    for _ in range(clients):
        ask()
    while len(done) < 4 * clients:
        end = core.begin(now)
        assert end is not None
        now = end
        for seq in core.end(now):
            if seq.state is State.DONE:
                done.append(seq)
                ask()
    late = done[2 * clients :]
    span = late[-1].ended - late[0].ended
    return (
        mean([seq.first - seq.arrival for seq in late]),
        mean([(seq.last - seq.first) / (seq.want - 1) for seq in late]),
        (len(late) - 1) * output / span,
    )


def test_step_times_of_linear_layers() -> None:
    errors = []
    for model, gpu, tp, row in LINEAR:
        physics = Physics(GPUS[gpu], MODELS[model], tp)
        pairs = [(physics.linear(tokens) * 1e3, said) for tokens, said in zip(TOKENS, row, strict=False)]
        errors += [abs(ours / said - 1) for ours, said in pairs]
        print(f"{model:14}{gpu:11}x{tp}  " + "  ".join(f"{ours:6.1f} ({said:g})" for ours, said in pairs))
    print(f"mean error {mean(errors):.1%}, worst {max(errors):.1%}")

    assert mean(errors) <= 0.10


def test_latencies_of_served_requests() -> None:
    errors: dict[str, list[float]] = {"TTFT": [], "ITL": [], "E2E": []}
    for model, tp, rate, prompt, output, budget, blocks, ttft, itl, e2e in SERVED:
        shape = Shape(max_num_seqs=128, max_batched_tokens=budget, num_blocks=blocks, overhead=API_SECONDS)
        core = EngineCore(shape, Physics(GPUS["h100"], MODELS[model], tp))
        seqs = open_loop(core, rate, 120, prompt, output)
        ours = (
            mean([seq.first - seq.arrival for seq in seqs]) * 1e3,
            mean([(seq.last - seq.first) / (seq.want - 1) for seq in seqs]) * 1e3,
            mean([seq.ended - seq.arrival for seq in seqs]) * 1e3,
        )
        row = [(name, a, b) for name, a, b in zip(errors, ours, (ttft, itl, e2e), strict=True)]
        for name, a, b in row:
            errors[name].append(abs(a / b - 1))
        print(f"{model:8}x{tp} {rate:4}/s  " + "   ".join(f"{n} {a:8.1f} ({b:g}) {a / b - 1:+.0%}" for n, a, b in row))
    for name, found in errors.items():
        print(f"{name}: mean error {mean(found):.1%}, worst {max(found):.1%}")

    assert max(errors["TTFT"]) <= 0.35
    assert max(errors["ITL"] + errors["E2E"]) <= 0.20
    assert mean(errors["ITL"]) <= 0.10
    assert mean(errors["E2E"]) <= 0.10


def test_past_kv_capacity_itl_and_throughput_freeze_and_ttft_grows_linearly() -> None:
    """70B in 8 bits on two H100, 5000 tokens in and 500 out (NVIDIA's sweep of that pair freezes at 100 clients)."""
    physics = hardware("h100-70b-fp8-tp2")
    capacity = 16  # a third of what fits beside the weights, so that the test is short
    shape = Shape(num_blocks=capacity * 5500 // 64, block_size=64, max_num_seqs=256)
    assert shape.num_blocks < physics.blocks(64)
    found = {}
    for factor in (0.5, 1.5, 2.0, 2.5):
        clients = int(capacity * factor)
        ttft, itl, rate = found[factor] = closed_loop(physics, shape, clients, 5000, 500)
        print(
            f"{clients:4} clients ({factor:.1f} of capacity): TTFT {ttft:6.1f} s, ITL {itl * 1e3:5.1f} ms, {rate:5.0f} tok/s"
        )

    below, one, two, three = (found[factor] for factor in (0.5, 1.5, 2.0, 2.5))
    assert below[1] < one[1]
    assert two[1] == pytest.approx(one[1], rel=0.05)
    assert three[1] == pytest.approx(one[1], rel=0.05)
    assert three[2] == pytest.approx(one[2], rel=0.10)
    assert three[0] - two[0] == pytest.approx(two[0] - one[0], rel=0.35)
    assert two[0] > 5 * below[0]


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "said"),
    [
        ("7b", "h100", 1, 7463),
        ("qwen-7b", "h100", 1, 65368),
        ("12b", "h100", 1, 19251),
        ("12b", "h100", 2, 48009),
        ("34b", "h100", 2, 20793),
        ("70b", "h100", 4, 30425),
    ],
)
def test_blocks_that_fit(model: str, gpu: str, tp: int, said: int) -> None:
    ours = Physics(GPUS[gpu], MODELS[model], tp).blocks(16, 0.90)
    print(f"{model} {gpu} x{tp}: {ours} ({said}) {ours / said - 1:+.0%}")

    assert ours == pytest.approx(said, rel=0.15)


def test_unknown_hardware_names_what_there_is() -> None:
    with pytest.raises(Exception, match=r"GPUs a100-40, .*; models 0\.5b"):
        hardware("h100-9b")
    with pytest.raises(Exception, match="do not fit"):
        hardware("l4-70b")
