"""Checkers find what they are for: each of these rehearsals is good but for one thing."""

from __future__ import annotations

from typing import Any

import pytest

from sim.checkers import Evidence, check
from sim.records import Record, Result
from sim.scenario import Scenario


def good() -> tuple[Result, Evidence]:
    record = Record(
        "r1", "s1", 0.0, status=200, tokens=3, wanted=3, first=1.0, last=1.2, end=1.3, digest="d", endpoint="e0"
    )
    entry = {
        "id": "chatcmpl-r1-x",
        "tokens": 3,
        "finish": "length",
        "digest": "d",
        "cached_tokens": 0,
        "external_tokens": 0,
        "preemptions": 0,
    }
    line = {"request_id": "r1", "endpoint": "e0", "upstream_request_id": "r1-x", "completion_tokens": 3, "attempts": 1}
    return Result([record]), Evidence({"e0": [entry]}, log=[line])


def told(change: dict[str, Any], **scenario: Any) -> list[str]:
    """Problems after changing one of ``record.x``, ``entry.x``, ``line.x`` or ``evidence.x``."""
    result, evidence = good()
    for where, value in change.items():
        what, _, field = where.partition(".")
        if what == "record":
            setattr(result.records[0], field, value)
        elif what == "evidence":
            setattr(evidence, field, value)
        else:
            (evidence.journals["e0"] if what == "entry" else evidence.log)[0][field] = value
    check(Scenario(**scenario), result, evidence)
    return result.problems


def test_a_good_rehearsal_has_no_problems() -> None:
    assert told({}) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"record.tokens": 2, "line.completion_tokens": 2}, "read 2 tokens, e0 produced 3"),
        ({"record.tokens": 4, "line.completion_tokens": 4}, "read 4 tokens, e0 produced 3"),
        ({"record.digest": "other"}, "read other words"),
        ({"line.completion_tokens": 5}, "the log says 5 tokens"),
        ({"line.endpoint": "e1"}, "the log says e1, but e0 served it"),
        ({"line.reason": "idle_timeout"}, "saw '', the log says 'idle_timeout'"),
        ({"record.reason": "because", "line.reason": "because"}, "no reason of the closed set"),
        ({"record.reason": "truncated"}, "no reason of the closed set"),
        ({"entry.finish": "abort"}, "served, but e0 says it ended by 'abort'"),
        ({"entry.id": "chatcmpl-other"}, "no engine knows it"),
        ({"line.request_id": "r2"}, "r1: 0 lines"),
        ({"record.end": -1.0}, "no end"),
        ({"evidence.left": ["e0: 3 used blocks at the end"]}, "3 used blocks"),
        ({"evidence.bugs": [{"message": "boom"}]}, "reports a bug: boom"),
        ({"record.reason": "engine_error"}, "an error of the engine, but"),
    ],
)
def test_one_thing_wrong_is_found(change: dict[str, Any], problem: str) -> None:
    assert any(problem in text for text in told(change)), told(change)


def test_a_line_that_no_client_asked_for() -> None:
    result, evidence = good()
    evidence.log.append({"request_id": "ghost"})
    check(Scenario(), result, evidence)

    assert result.problems == ["ghost: in the gateway's log, but no client asked"]


def test_what_died_with_its_engine_is_no_problem() -> None:
    change = {"entry.id": "other", "record.reason": "upstream_closed", "line.reason": "upstream_closed"}

    assert told({**change, "evidence.killed": {"e0"}}) == []
    assert told(change) != []


def test_a_promise_that_was_not_kept() -> None:
    assert "promises 'preempted'" in told({}, expect=("preempted",))[0]
    assert told({"entry.preemptions": 1}, expect=("preempted",)) == []


def test_many_problems_of_a_kind_are_counted() -> None:
    result, evidence = good()
    evidence.log += [{"request_id": f"g{i}"} for i in range(50)]
    check(Scenario(), result, evidence)

    assert len(result.problems) == 21
    assert result.problems[-1] == "… and 30 more of kind 'log'"
