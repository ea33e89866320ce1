"""The table of states, row by row, and what must hold whatever happens."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.endpoint import Health as State
from llmgw.routing.health import SERVING, Event, Health, may_eject, overlooks, pause, slow, step

LIMIT = 3


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ("", "joining"),
        ("probe_ok", "ready"),
        ("probe_failed probe_failed probe_failed probe_failed", "joining"),
        ("connect_failed", "joining"),
        ("served", "joining"),
        ("probe_ok connect_failed", "quarantined"),
        ("probe_ok probe_failed", "degraded"),
        ("probe_ok probe_failed connect_failed", "quarantined"),
        ("probe_ok probe_failed broke", "degraded"),
        ("probe_ok probe_failed broke probe_failed", "quarantined"),
        ("probe_ok probe_failed broke served probe_failed broke", "degraded"),
        ("probe_ok probe_failed probe_ok", "ready"),
        ("probe_ok connect_failed served", "quarantined"),
        ("probe_ok connect_failed probe_failed probe_failed probe_ok", "ready"),
        ("probe_ok drain", "draining"),
        ("probe_ok drain probe_ok connect_failed served", "draining"),
        ("probe_ok drain undrain", "joining"),
        ("probe_ok undrain", "ready"),
    ],
)
def test_the_table(events: str, state: State) -> None:
    health = Health(0.0)
    for now, event in enumerate(events.split(), 1):
        health = step(health, event, float(now), LIMIT, "why")  # type: ignore[arg-type]
    assert health.state == state


@given(st.lists(st.sampled_from(get_args(Event)), max_size=40), st.integers(1, 5))
def test_invariants(events: list[Event], limit: int) -> None:
    health = Health(0.0)
    for now, event in enumerate(events, 1):
        before, health = health, step(health, event, float(now), limit, "why")
        assert (health.since == now) == (health.state != before.state)
        if health.state == "ready":
            assert health.failures == 0
            assert health.why == ""
        if health.state == "degraded":
            assert 0 < health.failures < limit
        if event == "probe_ok" and before.state != "draining":
            assert health.state == "ready"  # it always comes back
        assert health.serving == (health.state in SERVING)


@given(st.integers(0, 10_000), st.floats(0, 0.999))
def test_pauses_are_bounded(failures: int, jitter: float) -> None:
    for state in get_args(State):
        assert 0.9 <= pause(Health(0.0, state, failures), 5.0, 30.0, jitter) <= 33.0


def test_pauses_double() -> None:
    found = [pause(Health(0.0, "quarantined", n), 5.0, 30.0, 0.5) for n in range(7)]
    assert found == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert pause(Health(0.0, "joining", 9), 5.0, 30.0, 0.5) == 5.0  # an engine that loads is looked at often
    assert pause(Health(0.0, "ready"), 5.0, 30.0, 0.0) == 4.5


def test_an_engine_that_gives_tokens_may_be_late_with_its_probe() -> None:
    assert overlooks(96.0, 100.0, 5.0)
    assert not overlooks(94.0, 100.0, 5.0)
    assert not overlooks(None, 100.0, 5.0)


@pytest.mark.parametrize(
    ("size", "gone", "may"), [(1, 0, True), (1, 1, False), (2, 1, False), (8, 3, True), (8, 4, False)]
)
def test_at_most_half_a_pool_is_ejected_on_suspicion(size: int, gone: int, may: bool) -> None:
    assert may_eject(size, gone) is may


def test_who_may_not_be_ejected_stays_degraded_until_it_is_well_or_refuses() -> None:
    health = step(Health(0.0), "probe_ok", 1.0, LIMIT)
    for _ in range(9):
        health = step(health, "broke", 2.0, LIMIT, "cut", eject=False)
    assert health.state == "degraded"
    assert step(health, "connect_failed", 3.0, LIMIT, "refused", eject=False).state == "quarantined"
    assert step(health, "broke", 3.0, LIMIT, "cut").state == "quarantined"


def test_a_slow_engine_is_named_in_a_pool_that_has_a_median() -> None:
    assert slow(2_500.0, [10_000.0, 9_000.0, 2_500.0, None]) == pytest.approx(2_500 / 9_000)
    assert slow(6_000.0, [10_000.0, 9_000.0, 6_000.0]) is None
    assert slow(None, [1.0, 2.0, 3.0]) is None
    assert slow(1.0, [1.0, 100.0]) is None
