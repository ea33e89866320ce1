"""The estimate: what lower bands may have of an engine, and how measurement corrects it."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.admission.interference import CONTENTION, SCALES, WINDOW, Interference, Unloaded, crowding, engines_needed


@given(st.floats(0.02, 5), st.floats(0.05, 20), st.floats(0.001, 1), st.floats(0.05, 60))
def test_what_is_let_in_stays_within_the_allowance(
    allowance: float, duration: float, stall: float, life: float
) -> None:
    pause = Interference().pause(allowance, duration, stall, life)
    if stall >= allowance * duration:
        assert pause == inf
        return
    taken = duration * (1 + allowance)
    stalls = min(int(taken / pause + 1e-9) if taken > pause else 1, 8)
    extra = stalls * stall + life / pause * CONTENTION * duration
    assert extra <= allowance * duration * (1 + 1e-6)


def test_a_missed_bound_makes_pauses_longer_and_later_ones_shorter() -> None:
    estimate = Interference()
    first = estimate.pause(0.2, 0.25, 0.02, 2.0)
    for _ in range(2):
        estimate.measured(1.3, 0.2)
    assert estimate.epoch == 1
    assert estimate.pause(0.2, 0.25, 0.02, 2.0) > first
    longer = estimate.scale
    for _ in range(WINDOW):
        estimate.measured(1.01, 0.2)
    assert estimate.scale < longer
    for _ in range(WINDOW):
        estimate.measured(1.19, 0.2)
    kept = estimate.scale
    for _ in range(WINDOW):
        estimate.measured(1.19, 0.2)
    assert estimate.scale == kept, "close to the bound is where it belongs"
    for _ in range(10_000):
        estimate.measured(9.0, 0.2)
    assert estimate.scale == SCALES[1]


def test_one_slow_request_of_a_window_is_no_reason() -> None:
    estimate = Interference()
    estimate.measured(3.0, 0.2)
    for _ in range(WINDOW - 1):
        estimate.measured(1.0, 0.2)
    assert estimate.scale == 1.0


def test_unloaded_is_learned_from_the_undisturbed() -> None:
    unloaded = Unloaded()
    assert unloaded.seconds(0.1, 10) is None
    unloaded.learn(0.5, 0.02, clean=False)
    unloaded.learn(0.2, 0.03, clean=False)
    assert unloaded.seconds(0.1, 11) == 0.2 + 0.1 + 10 * 0.02, "others show at most that it is faster"
    unloaded.learn(0.05, 0.01, clean=True)
    assert unloaded.first == pytest.approx(0.05)
    unloaded.learn(0.01, 0.001, clean=False)
    assert unloaded.first == pytest.approx(0.05)


def test_a_few_are_put_together_many_are_spread() -> None:
    assert engines_needed(8, [64, 64], 1.2) == 1
    assert engines_needed(8, [64, 64], 1.02) == 2, "they would crowd each other"
    assert engines_needed(200, [64] * 4, 1.5) == 4, "half of an engine is kept free"
    assert engines_needed(1, [64] * 10, 1.1) == 1
    assert crowding(8, 2, 2) == 1.0
