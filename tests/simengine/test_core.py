"""The engine core: scheduling, accounting, caching. Time is whatever the test says it is."""

from __future__ import annotations

import random
from math import ceil
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.simengine.core import EngineCore, Job, Seq, Shape, State
from llmgw.simengine.latency import Knobs, StepModel

UNIT = Knobs(prefill_tps=1000.0, decode_tps=10.0, contention=0.0)


def engine(model: StepModel = UNIT, **shape: object) -> EngineCore:
    given_: dict[str, object] = {"num_blocks": 1001, "block_size": 4, "max_num_seqs": 8, **shape}
    return EngineCore(Shape(**given_), model)  # type: ignore[arg-type]


def job(name: str, prompt: int | range | list[int], output: int = 1, **more: object) -> Job:
    tokens = range(1000, 1000 + prompt) if isinstance(prompt, int) else prompt
    return Job(id=name, prompt=list(tokens), output=list(range(5000, 5000 + output)), **more)  # type: ignore[arg-type]


def fresh(name: str, prompt: int, output: int = 1, **more: object) -> Job:
    """A prompt that shares nothing with any other name's."""
    start = crc32(name.encode()) & 0x7FFFFFFF
    return job(name, range(start, start + prompt), output, **more)


def run(core: EngineCore, now: float = 0.0, steps: int = 10_000) -> float:
    """Runs until nothing is left (or for *steps*); checks the invariants at every step."""
    for _ in range(steps):
        end = core.begin(now)
        check(core)
        if end is None:
            if core.wake == float("inf"):
                return now
            now = max(now, core.wake)
            continue
        now = end
        core.end(now)
        check(core)
    return now


def check(core: EngineCore) -> None:
    pool, shape = core.pool, core.shape
    seqs = list(core.sequences())
    held = {block for seq in seqs for block in seq.blocks}
    assert core.running <= shape.max_num_seqs
    assert pool.used + pool.free == pool.usable
    assert pool.used == len(held | {block for blocks in core._pinned.values() for block in blocks})
    for seq in seqs:
        assert seq.computed <= len(seq.blocks) * shape.block_size
        assert seq.total == seq.size + seq.produced


# Oracle 1: bounds and conservation


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(6, 40),
    seqs=st.integers(1, 5),
    budget=st.integers(3, 64),
    by_priority=st.booleans(),
    keep=st.sampled_from([None, 0, 3]),
)
def test_whatever_comes_everything_ends_and_all_is_given_back(
    seed: int, blocks: int, seqs: int, budget: int, by_priority: bool, keep: int | None
) -> None:
    rng = random.Random(seed)
    core = engine(
        num_blocks=blocks, max_num_seqs=seqs, max_batched_tokens=budget, by_priority=by_priority, keep_blocks=keep
    )
    live: list[Seq] = []
    now = 0.0
    for number in range(25):
        size = rng.randint(1, (blocks - 1) * 4)
        group = rng.randint(0, 2)
        new = job(
            f"r{number}",
            range(group * 10_000, group * 10_000 + size),
            rng.randint(0, 30),
            priority=rng.randint(0, 2),
            transfer=(0.05, 0.001) if rng.random() < 0.2 else None,
            pin=rng.random() < 0.1,
        )
        assert core.reject(new) == ""
        live.append(core.submit(new, now))
        for _ in range(rng.randint(0, 6)):
            end = core.begin(now)
            check(core)
            if rng.random() < 0.15:
                core.abort(rng.choice(live), now)
            if end is None:
                now = max(now, core.wake if core.wake < 1e9 else now) + 0.001
                continue
            now = end
            core.end(now)
            check(core)
        for name in list(core._pinned):
            core.release(name)
    while not core.idle:
        now = run(core, now)
        for name in list(core._pinned):
            core.release(name)

    assert all(seq.state is State.DONE for seq in live)
    assert all(seq.produced == seq.want for seq in live if seq.finish == "stop")
    assert core.pool.used == 0
    assert core.pool.usage() == 0.0
    assert sum(core.telemetry.finished.values()) == len(live)


# Oracle 2: the head of the queue blocks those behind it


def test_a_big_head_keeps_a_small_one_waiting_that_would_fit() -> None:
    core = engine(num_blocks=11, max_num_seqs=8)
    first = core.submit(fresh("a", 28, 4), 0.0)  # 7 of 10 blocks, then 8
    now = run(core, steps=1)
    big, small = core.submit(fresh("b", 20), now), core.submit(fresh("c", 4), now)

    now = run(core, now, steps=1)
    assert (first.state, big.state, small.state) == (State.RUNNING, State.WAITING, State.WAITING)
    assert core.pool.free >= 1

    run(core, now)
    assert big.admitted == small.admitted == first.ended


def test_a_prompt_that_never_fits_is_told_at_once() -> None:
    core = engine(num_blocks=11)

    assert "needs 11 KV blocks, but this engine has 10" in core.reject(fresh("a", 41))
    assert core.reject(fresh("a", 40)) == ""


def test_one_that_outgrows_the_pool_alone_ends() -> None:
    core = engine(num_blocks=4)
    seq = core.submit(fresh("a", 8, 100), 0.0)

    run(core)

    assert (seq.finish, seq.produced, seq.preemptions) == ("length", 5, 0)
    assert core.silent == [seq]
    assert core.pool.used == 0


def test_without_room_the_last_is_preempted_and_computes_again() -> None:
    core = engine(num_blocks=9, keep_blocks=0)
    one, two = core.submit(fresh("a", 12, 12), 0.0), core.submit(fresh("b", 12, 12), 0.0)

    run(core)

    assert (one.preemptions, two.preemptions) == (0, 1)
    assert (one.produced, two.produced) == (12, 12)
    assert one.ended < two.ended
    assert core.telemetry.preemptions == 1


def test_by_priority_the_worst_is_preempted_and_the_best_admitted_first() -> None:
    core = engine(num_blocks=9, keep_blocks=0, by_priority=True)
    low = core.submit(fresh("a", 12, 12, priority=5), 0.0)
    high = core.submit(fresh("b", 12, 12, priority=1), 0.0)

    run(core)

    assert (low.preemptions, high.preemptions) == (1, 0)

    core = engine(max_num_seqs=1, by_priority=True)
    seqs = [core.submit(fresh(f"p{p}", 4, 2, priority=p), 0.0) for p in (3, 1, 2)]
    run(core)
    assert sorted(seqs, key=lambda s: s.ended) == [seqs[1], seqs[2], seqs[0]]


# Oracle 3: who leaves


def test_a_running_one_that_leaves_gives_its_blocks_back_within_the_step() -> None:
    core = engine(max_num_seqs=1)
    one, two = core.submit(fresh("a", 8, 50), 0.0), core.submit(fresh("b", 8, 50), 0.0)
    now = run(core, steps=3)
    end = core.begin(now)
    assert end is not None

    core.abort(two, now)
    assert core.waiting == 0
    core.abort(one, now)
    core.abort(one, now)
    assert core.pool.used > 0
    assert core.end(end) == []

    assert (core.running, core.pool.used, core.idle) == (0, 0, True)
    assert core.telemetry.finished["abort"] == 2


# Oracle 4 and 5: the prefix cache


def test_a_second_identical_prompt_hits_all_but_its_last_block() -> None:
    core = engine()
    run_one = core.submit(job("a", 24), 0.0)
    now = run(core)
    assert now == pytest.approx(0.024)
    again = core.submit(job("b", 24), now)
    end = run(core, now)

    assert (run_one.cached, again.cached) == (0, 20)
    assert end - now == pytest.approx(0.004)  # cached / prefill rate less
    assert (core.telemetry.prefix_queries, core.telemetry.prefix_hits) == (48, 20)
    assert core.pool.used == 0


@pytest.mark.parametrize("more", [{"salt": "x"}, {"lora": "a"}, {"media": ((0, 4, "img"),)}, {"reuse": False}])
def test_salt_adapter_and_media_keep_prompts_apart(more: dict[str, Any]) -> None:
    core = engine()
    core.submit(job("a", 24), 0.0)
    now = run(core)
    seq = core.submit(job("b", 24, **more), now)
    now = run(core, now)
    twin = core.submit(job("c", 24, **more), now)
    run(core, now)

    assert seq.cached == 0
    assert twin.cached == (0 if more == {"reuse": False} else 20)


def test_media_later_in_the_prompt_leave_the_start_shared() -> None:
    core = engine()
    core.submit(job("a", 24), 0.0)
    now = run(core)
    seq = core.submit(job("b", 24, media=((9, 2, "img"),)), now)
    run(core, now)

    assert seq.cached == 8


def test_an_answer_that_comes_back_as_history_is_found() -> None:
    core = engine()
    first = job("a", 10, 9)
    core.submit(first, 0.0)
    now = run(core)
    history = [*first.prompt, *first.output, 1, 2, 3]
    seq = core.submit(job("b", history), now)
    run(core, now)

    assert seq.cached == 16  # 10 + 9 - 1 tokens were computed: four full blocks


def test_the_longest_unused_goes_first_and_a_tail_before_its_head() -> None:
    core = engine(num_blocks=9)
    core.submit(job("a", range(16)), 0.0)
    now = run(core)
    core.submit(job("b", range(100, 116)), now)
    now = run(core, now)
    core.submit(job("c", range(200, 208)), now)  # takes two blocks: the tail of a
    run(core, now)

    assert core.cached_tokens(job("x", [*range(16), 1])) == 8
    assert core.cached_tokens(job("x", [*range(100, 116), 1])) == 16


def test_a_bound_on_kept_blocks() -> None:
    core = engine(keep_blocks=3)
    core.submit(job("a", 24), 0.0)
    run(core)

    assert core.cached_tokens(job("x", 25)) == 12
    assert core.pool.findable == 3


def test_changing_the_first_token_loses_all_and_the_last_only_its_block() -> None:
    core = engine()
    core.submit(job("a", 24), 0.0)
    run(core)
    prompt = list(range(1000, 1024))

    assert core.cached_tokens(job("x", [1, *prompt[1:], 7])) == 0
    assert core.cached_tokens(job("x", [*prompt[:-1], 1, 7])) == 20


# Oracle 6: latency


def test_steps_lengthen_with_the_batch() -> None:
    core = engine(Knobs(1000.0, 10.0, 0.1), max_num_seqs=64)
    gaps = []
    for batch in (1, 2, 8, 32):
        core = engine(Knobs(1000.0, 10.0, 0.1), max_num_seqs=64)
        seqs = [core.submit(fresh(f"n{i}", 4, 10), 0.0) for i in range(batch)]
        run(core)
        gaps.append((seqs[0].last - seqs[0].first) / 9)

    assert gaps == pytest.approx([0.1, 0.11, 0.17, 0.41])


def test_a_long_prompt_delays_who_decodes_and_chunks_bound_by_how_much() -> None:
    def worst(budget: int) -> float:
        core = engine(max_batched_tokens=budget, num_blocks=5001)
        core.submit(fresh("a", 4, 40), 0.0)
        now = run(core, steps=3)
        core.submit(fresh("b", 2000, 1), now)
        gaps = []
        while (end := core.begin(now)) is not None:
            core.end(end)
            gaps.append(end - now)
            now = end
        return max(gaps)

    assert worst(8192) == pytest.approx((0.1**2 + 2.0**2) ** 0.5)
    assert worst(101) == pytest.approx((0.1**2 + 0.1**2) ** 0.5)


def test_past_capacity_gaps_freeze_and_the_wait_grows() -> None:
    def at(clients: int) -> tuple[float, float]:
        core = engine(Knobs(100_000.0, 100.0, 0.05), num_blocks=16 * 25 + 1, block_size=16, max_num_seqs=256)
        waits, gaps, now = [], [], 0.0
        for number in range(clients):
            core.submit(fresh(f"{number}", 200, 100), 0.0)
        for number in range(3 * clients):
            while (end := core.begin(now)) is not None:
                now = end
                if done := [s for s in core.end(now) if s.state is State.DONE]:
                    break
            waits += [s.first - s.arrival for s in done]
            gaps += [(s.last - s.first) / 99 for s in done]
            for seq in done:
                core.submit(fresh(f"{number}.{seq.number}", 200, 100), now)
        half = len(gaps) // 2
        return sum(waits[half:]) / half, sum(gaps[half:]) / half

    (wait20, gap20), (wait40, gap40), (wait80, gap80) = at(20), at(40), at(80)

    assert gap80 == pytest.approx(gap40, rel=0.1)
    assert gap20 < gap40
    assert wait20 < 0.1 < wait40
    assert wait80 - wait40 == pytest.approx((80 - 40) * (gap40 * 100) / 20, rel=0.35)


# Transfers


def test_remote_kv_takes_its_time_and_only_the_last_token_is_computed() -> None:
    core = engine()
    seq = core.submit(fresh("a", 20, 2, transfer=(0.5, 0.01)), 0.0)
    other = core.submit(fresh("b", 8, 1), 0.0)
    end = core.begin(0.0)
    assert (seq.state, other.state, core.gauges().deferred) == (State.TRANSFER, State.RUNNING, 1)
    assert end is not None
    core.end(end)

    run(core, end)

    assert seq.external == 20
    assert seq.first == pytest.approx(0.5 + 20 * 0.01 + 0.001)
    assert (core.telemetry.external_queries, core.telemetry.external_hits) == (20, 20)


def test_pinned_blocks_stay_until_they_are_released() -> None:
    core = engine()
    core.submit(fresh("a", 20, 1, pin=True), 0.0)
    run(core)
    assert (core.pool.used, core.pinned, core.idle) == (5, 5, True)

    assert core.release("a")
    assert not core.release("a")
    assert core.pool.used == 0


def test_an_id_that_comes_twice_pins_once() -> None:
    core = engine()
    for _ in range(2):
        core.submit(fresh("a", 20, 1, pin=True), 0.0)
        run(core)

    assert core.pool.used == core.pinned == 5
    core.release("a")
    assert core.pool.used == 0


# Oracle 10: time


def test_overhead_comes_before_the_queue_and_counts_as_waiting_for_the_first_token() -> None:
    core = engine(overhead=0.25)
    seq = core.submit(fresh("a", 100, 2), 1.0)
    assert core.begin(1.0) is None
    assert core.wake == 1.25

    run(core, 1.0)

    assert (seq.admitted, seq.first, seq.last) == pytest.approx((1.25, 1.35, 1.45))


def test_times_are_sums_of_steps_without_rounding() -> None:
    core = engine(Knobs(1000.0, 1000.0, 0.0))
    seq = core.submit(fresh("a", 4, 2001), 0.0)

    run(core)

    expected = 0.0 + 4 / 1000.0
    for _ in range(2000):
        expected += 1 / 1000.0
    assert seq.last == expected
    assert ceil(seq.total / 4) == 502
