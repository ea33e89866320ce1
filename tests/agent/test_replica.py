"""The replica's machine: its paths, its schedule, and its invariants under any order of events."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent import replica as r
from llmgw.agent.replica import Replica, advance, backoff, failure_of
from llmgw.engines.deaths import Retry

DEADLINE = 600.0


class Middle(random.Random):
    """No jitter."""

    def random(self) -> float:
        return 0.5


def ended(retry: Retry = "backoff", cause: str = "exit-0") -> r.Ended:
    return r.Ended(failure_of(cause, "it ended", at=0.0, code=0, log=("last line",)), retry)


def walk(replica: Replica, *events: tuple[float, r.Event]) -> tuple[Replica, list[r.Effect]]:
    effects: list[r.Effect] = []
    for now, event in events:
        replica, more = advance(replica, event, now, Middle(), DEADLINE)
        effects += more
    return replica, effects


UP: list[tuple[float, r.Event]] = [
    (0.0, r.Tick()),
    (5.0, r.Progress("weights")),
    (20.0, r.Answers()),
    (21.0, r.CanaryPassed()),
]


def test_a_good_start() -> None:
    replica, effects = walk(Replica(), *UP)
    assert (replica.state, replica.since) == ("ready", 21.0)
    assert effects == [r.Start(), r.AskCanary()]


def test_a_stop_drains_and_clears_away() -> None:
    replica, effects = walk(Replica(), *UP, (30.0, r.Stop(15.0)), (31.0, ended()), (32.0, r.Released()))
    assert replica.state == "gone"
    assert effects[2:] == [r.End(15.0), r.Clear()]
    assert replica.failure is None


def test_exit_0_after_ready_is_a_failure_with_backoff() -> None:
    replica, effects = walk(Replica(), *UP, (30.0, ended()), (31.0, r.Released()))
    assert (replica.state, replica.next_try, replica.failures) == ("failed", 41.0, 1)
    assert replica.failure is not None
    assert (replica.failure.cause, replica.failure.log) == ("exit-0", ("last line",))
    assert effects[-1] == r.Clear()
    again, effects = walk(replica, (40.9, r.Tick()), (41.0, r.Tick()))
    assert (again.state, effects) == ("starting", [r.Start()])
    assert again.failure == replica.failure  # it is still told why the last life ended


def test_the_schedule_of_a_crash_loop() -> None:
    assert [backoff(n, Middle()) for n in range(1, 9)] == [10, 20, 40, 80, 160, 300, 300, 300]
    assert all(8 <= backoff(1, random.Random(n)) <= 12 for n in range(50))


def test_ten_minutes_of_service_are_forgiven() -> None:
    replica = Replica(state="ready", since=0.0, failures=5)
    assert walk(replica, (599.0, ended()), (600.0, r.Released()))[0].failures == 6
    assert walk(replica, (600.0, ended()), (601.0, r.Released()))[0].failures == 1


def test_what_would_repeat_itself_waits_for_another_node() -> None:
    replica, _ = walk(Replica(), (0.0, r.Tick()), (1.0, ended("never", "missing-library")), (2.0, r.Released()))
    assert (replica.state, replica.next_try) == ("failed", None)
    assert replica.failure is not None
    assert replica.failure.deterministic
    assert walk(replica, (10_000.0, r.Tick()))[1] == []
    again, effects = walk(replica, (50.0, r.InputsChanged()), (50.0, r.Tick()))
    assert (again.state, effects) == ("starting", [r.Start()])


def test_want_of_gpu_memory_is_tried_once_more() -> None:
    replica, _ = walk(Replica(), (0.0, r.Tick()), (1.0, ended("gpu-free")), (2.0, r.Released()))
    assert replica.next_try == 12.0
    replica, _ = walk(replica, (12.0, r.Tick()), (13.0, ended("gpu-free")), (14.0, r.Released()))
    assert replica.next_try is None


def test_the_start_deadline_goes_by_progress() -> None:
    replica, effects = walk(
        Replica(), (0.0, r.Tick()), (599.0, r.Tick()), (599.0, r.Progress("compile")), (1198.0, r.Tick())
    )
    assert (replica.state, effects) == ("starting", [r.Start()])
    replica, effects = walk(replica, (1199.0, r.Tick()))
    assert (replica.state, effects) == ("stopping", [r.End(0.0)])
    replica, _ = walk(replica, (1200.0, ended()), (1201.0, r.Released()))
    assert replica.state == "failed"
    assert replica.failure is not None
    assert replica.failure.message == "no progress for 600 s; last phase: compile"
    assert replica.failure.log == ("last line",)


def test_a_canary_that_keeps_failing() -> None:
    up = UP[:3]
    replica, effects = walk(Replica(), *up, *[(22.0 + n, r.CanaryFailed("500 boom")) for n in range(4)])
    assert replica.state == "canary"
    assert effects[1:] == [r.AskCanary(), *[r.AskCanary(r.CANARY_PAUSE)] * 4]
    replica, effects = walk(replica, (30.0, r.CanaryFailed("500 boom")))
    assert (replica.state, effects) == ("stopping", [r.End(0.0)])
    assert replica.failure is not None
    assert replica.failure.message == "healthy, but it cannot serve: 500 boom"


def test_a_hung_engine_is_ended_and_told() -> None:
    replica, effects = walk(Replica(), *UP, (200.0, r.Hung("no progress")))
    assert effects[-1] == r.End(0.0)
    replica, _ = walk(
        replica, (201.0, ended(cause="signal-9")), (202.0, r.Released("GPU 2: 71 GiB still held by pid 9912"))
    )
    assert replica.failure is not None
    assert (replica.failure.cause, replica.failure.exit_code) == ("hung", 0)
    assert replica.failure.message.endswith("; GPU 2: 71 GiB still held by pid 9912")


def test_an_engine_that_the_kernel_holds_is_told() -> None:
    replica, effects = walk(Replica(), *UP, (30.0, r.Stop(0.0)), (99.0, r.Stuck("pid 7 does not end")))
    assert (replica.state, replica.detail, effects[-1]) == ("stopping", "pid 7 does not end", r.End(0.0))


@pytest.mark.parametrize(("ready", "state"), [(True, "ready"), (False, "starting")])
def test_an_adopted_replica_does_not_start(ready: bool, state: str) -> None:
    replica, effects = walk(Replica(), (0.0, r.Adopted(ready)), (1.0, r.Tick()))
    assert (replica.state, effects) == (state, [])


def test_stop_while_it_waits_or_is_cleared_away() -> None:
    failed = Replica(state="failed", next_try=100.0)
    assert walk(failed, (1.0, r.Stop(30.0)))[0].state == "gone"
    clearing, _ = walk(Replica(), *UP, (30.0, ended()))
    replica, effects = walk(clearing, (31.0, r.Stop(30.0)), (32.0, r.Released()))
    assert (replica.state, effects) == ("gone", [])


EVENTS = st.one_of(
    st.just(r.Tick()),
    st.just(r.Progress("weights")),
    st.just(r.Answers()),
    st.just(r.CanaryPassed()),
    st.just(r.CanaryFailed("x")),
    st.builds(ended, st.sampled_from(["backoff", "gpu-free", "never"])),
    st.just(r.Hung("x")),
    st.just(r.Stop(1.0)),
    st.just(r.Released()),
    st.just(r.Stuck("x")),
    st.just(r.InputsChanged()),
    st.builds(r.Adopted, st.booleans()),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 1000)), max_size=60), st.randoms(use_true_random=False))
def test_two_lives_never_overlap(story: list[tuple[r.Event, float]], rng: random.Random) -> None:
    """Whatever is said, in whatever order: Start only after the last life's Released, End and Clear only in stopping."""
    replica, now, lives = Replica(), 0.0, 0
    for event, wait in story:
        now += wait
        before = replica
        replica, effects = advance(replica, event, now, rng, DEADLINE)
        for effect in effects:
            if isinstance(effect, r.Start):
                assert lives == 0
                assert before.state in ("waiting", "failed")
                lives += 1
            elif isinstance(effect, r.End | r.Clear):
                assert replica.state == "stopping"
        if isinstance(event, r.Adopted) and before.state == "waiting":
            lives += 1
        if before.state == "stopping" and isinstance(event, r.Released):
            lives = 0
        if before.state == "gone":
            assert (replica, effects) == (before, ())
        if replica.state == "failed":
            assert replica.failure is not None
        if replica.state in r.ALIVE:
            assert lives == 1
