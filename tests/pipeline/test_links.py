"""Links: slow ones are found, avoided, tried again; chance disturbances are not taken for slow links."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmgw.pipeline import links as module
from llmgw.pipeline.links import OVERHEAD, RETRY, SPEED, Links

GB = 10**9
PAIR, OTHER = ("p1", "d1"), ("p2", "d1")


def transfer(links: Links, name: str, pair: tuple[str, str], at: float, took: float, size: int = GB) -> object:
    links.start(name, pair, "ib", size, at)
    links.tick(at + took)
    return links.done(name, at + took)


def warmed() -> Links:
    links = Links()
    for i in range(40):
        for pair in (PAIR, OTHER):
            transfer(links, f"{pair}{i}", pair, i, OVERHEAD + GB / 40e9)
    return links


def test_before_anything_is_known() -> None:
    assert Links().seconds(PAIR, "ib", GB, 0.0) == pytest.approx(OVERHEAD + GB / SPEED)
    assert Links({"ib": 50e9}).seconds(PAIR, "ib", GB, 0.0) == pytest.approx(OVERHEAD + GB / 50e9)


def test_the_speed_is_learned() -> None:
    assert warmed().seconds(PAIR, "ib", 40 * GB, 40.0) == pytest.approx(1.05, rel=0.35)


def test_a_silent_fall_back_is_found_within_5_seconds() -> None:
    links = warmed()
    found = None
    for i in range(100):  # one transfer every 200 ms, each takes 8 s
        now = 50 + i * 0.2
        links.start(i, PAIR, "ib", GB, now)
        changes = links.tick(now)
        if changes:
            found = now
            assert changes[0].pair == PAIR
            assert changes[0].degraded
            break
    assert found is not None
    assert found - 50 < 5.0
    assert links.degraded(PAIR, found)
    assert links.seconds(PAIR, "ib", GB, found) > 4 * links.seconds(OTHER, "ib", GB, found)
    assert links.all_degraded(found) == [(PAIR, found)]


def test_one_late_hand_over_is_no_slow_link() -> None:
    links = warmed()
    assert transfer(links, "late", PAIR, 50.0, 0.6) is None
    assert not links.degraded(PAIR, 51.0)
    assert transfer(links, "fine", PAIR, 51.0, 0.07) is None
    assert transfer(links, "late again", PAIR, 52.0, 0.6) is None
    assert not links.degraded(PAIR, 53.0)


def test_a_degraded_link_is_tried_again_by_one_transfer() -> None:
    links = warmed()
    links.start("slow", PAIR, "ib", GB, 50.0)
    (change,) = links.tick(52.0)
    marked = 52.0
    assert change.degraded
    links.drop("slow")
    normal = links.seconds(OTHER, "ib", GB, marked)
    assert links.seconds(PAIR, "ib", GB, marked + RETRY - 1) > 2 * normal
    again = marked + RETRY + 1
    assert links.seconds(PAIR, "ib", GB, again) == pytest.approx(normal, rel=0.5)
    links.start("trial", PAIR, "ib", GB, again)
    assert links.degraded(PAIR, again), "while the trial is under way, nobody else tries"
    recovered = links.done("trial", again + 0.07)
    assert recovered is not None
    assert not recovered.degraded
    assert not links.degraded(PAIR, again + 1)


def test_a_failed_trial_doubles_the_wait() -> None:
    links = warmed()
    links.start("slow", PAIR, "ib", GB, 50.0)
    links.tick(52.0)
    links.drop("slow")
    again = 52.0 + RETRY
    links.start("trial", PAIR, "ib", GB, again)
    links.tick(again + 3)
    links.done("trial", again + 8)
    assert links.degraded(PAIR, again + 3 + 2 * RETRY - 1)
    assert not links.degraded(PAIR, again + 8 + 2 * RETRY + 1)


def test_what_a_client_cut_says_nothing() -> None:
    links = warmed()
    links.start("cut", PAIR, "ib", GB, 50.0)
    links.drop("cut")
    assert links.tick(99.0) == []
    assert links.done("cut", 99.0) is None


def test_a_restarted_endpoint_is_unknown_again() -> None:
    links = warmed()
    links.start("slow", PAIR, "ib", GB, 50.0)
    links.tick(52.0)
    links.forget("p1")
    assert not links.degraded(PAIR, 52.0)
    assert links.done("slow", 60.0) is None


class Life(RuleBasedStateMachine):
    """Any order of calls keeps the invariants of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.links = Links()
        self.now = 0.0
        self.open: list[int] = []
        self.count = 0

    @rule(pair=st.sampled_from([PAIR, OTHER, ("p1", "d2")]), size=st.integers(0, 40 * GB), late=st.floats(0, 5))
    def start(self, pair: tuple[str, str], size: int, late: float) -> None:
        self.now += late
        self.count += 1
        self.links.start(self.count, pair, "ib", size, self.now)
        self.open.append(self.count)

    @precondition(lambda self: bool(self.open))
    @rule(which=st.integers(0), took=st.floats(0, 60), drop=st.booleans())
    def end(self, which: int, took: float, drop: bool) -> None:
        self.now += took
        transfer = self.open.pop(which % len(self.open))
        if drop:
            self.links.drop(transfer)
        else:
            self.links.done(transfer, self.now)
        self.links.drop(transfer)

    @rule()
    def tick(self) -> None:
        self.links.tick(self.now)

    @rule(name=st.sampled_from(["p1", "d1"]))
    def forget(self, name: str) -> None:
        self.links.forget(name)

    @invariant()
    def prices_are_finite_and_grow_with_size(self) -> None:
        for pair in (PAIR, OTHER):
            small, large = (self.links.seconds(pair, "ib", size, self.now) for size in (0, GB))
            assert 0 < small < large < 1e10

    @invariant()
    def nothing_is_kept_of_what_ended(self) -> None:
        assert set(self.links._transfers) <= set(self.open)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=15, stateful_step_count=20)


def test_pairs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAIRS", 10)
    links, rng = Links(), random.Random(1)
    for i in range(500):
        pair = (f"p{rng.randrange(30)}", "d")
        transfer(links, str(i), pair, i, 0.1)
        assert len(links._links) <= 10
