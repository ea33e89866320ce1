"""Busy engines live, hung ones are found in under two minutes."""

from __future__ import annotations

from collections.abc import Callable

from llmgw.agent.liveness import CANARY, PATIENCE, PROBE_EVERY, Liveness, Sample


def run(
    seconds: float,
    progress: Callable[[float], float | None],
    *,
    effort: Callable[[float], float | None] = lambda _now: None,
    canary: Callable[[float], bool] = lambda _now: False,
    refused: Callable[[float], bool] = lambda _now: False,
) -> tuple[str, float, int]:
    """(why it was given up, when, how many canaries)."""
    liveness, now, asked, sent = Liveness(moved_at=0.0), 0.0, 0, 0.0
    while now < seconds:
        now += PROBE_EVERY
        verdict = liveness.verdict(Sample(now, progress(now), effort(now), refused(now)))
        if verdict == "canary":
            asked, sent = asked + 1, now
        elif verdict:
            return verdict, now, asked
        answers = liveness.asked_at is not None and (canary(now) or now - sent >= CANARY)
        if answers and (verdict := liveness.answered(canary(now), "timed out", now)):
            return verdict, now, asked
    return "", now, asked


def test_a_working_engine_is_never_asked() -> None:
    assert run(3600, lambda now: now) == ("", 3600, 0)


def test_an_idle_engine_passes_its_canary() -> None:
    why, _, asked = run(3600, lambda _now: 7.0, canary=lambda _now: True)
    assert why == ""
    assert 40 <= asked <= 50


def test_a_hung_engine_is_found_in_two_minutes() -> None:
    why, when, _ = run(3600, lambda now: min(now, 600.0))
    assert 600 < when < 720
    assert why.startswith("no progress for ")
    assert why.endswith("one token was not served: timed out")


def test_an_engine_without_metrics_is_judged_by_canary_alone() -> None:
    assert run(3600, lambda _now: None, canary=lambda _now: True)[0] == ""
    assert run(3600, lambda _now: None)[1] < 120


def test_a_saturated_engine_misses_canaries_and_lives() -> None:
    """Steps of 100 s each: it stalls longer than STALL, but something rises while the canary waits."""
    assert run(7200, lambda now: now // 100)[0] == ""


def test_a_long_prefill_shows_by_its_power() -> None:
    busy = lambda now: 600.0 if 300 < now <= 800 or now <= 100 else 90.0  # noqa: E731
    rises = lambda now: now if now <= 100 or now > 800 else 100.0  # noqa: E731
    assert run(700, rises, effort=busy, canary=lambda now: now <= 300)[0] == ""


def test_a_spinning_kernel_does_not_look_like_work_for_ever() -> None:
    why, when, _ = run(7200, lambda now: min(now, 100.0), effort=lambda now: 600.0 if now > 5 else 90.0)
    assert why
    assert when <= 100 + PATIENCE + CANARY + 3 * PROBE_EVERY


def test_power_that_never_varied_says_nothing() -> None:
    assert run(3600, lambda now: min(now, 600.0), effort=lambda _now: 90.0)[1] < 720


def test_refused_connections_of_a_living_process() -> None:
    why, when, _ = run(600, lambda now: now, refused=lambda now: now > 100)
    assert why == "its port refused 3 connections in a row"
    assert when == 115
