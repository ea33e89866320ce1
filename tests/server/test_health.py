"""The table of states, row by row, and what must hold whatever happens."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.endpoint import Health as State
from llmgw.server.health import SERVING, Event, Health, overlooks, pause, step

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
