"""The ledger: what a leg adds is taken away by the same leg, and speeds are learned from first tokens."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.endpoint import Endpoint, EndpointView, Report
from llmgw.routing.ledger import DRIFT, Ledger


def endpoints(*names: str) -> tuple[Endpoint, ...]:
    return tuple(Endpoint(id=n, name=n, url=f"http://{n}") for n in names)


def ledger(*names: str) -> Ledger:
    found = Ledger(0.0)
    found.replace(endpoints(*names), 0.0)
    return found


def view(book: Ledger, name: str, now: float) -> EndpointView:
    snapshot = book.snapshot(now)
    return next(v for e, v in zip(snapshot.endpoints, snapshot.views, strict=True) if e.id == name)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "first", "progress", "close", "report", "health", "replace", "forget"]),
        st.integers(0, 9),
        st.sampled_from("abc"),
    ),
    max_size=80,
)


@given(STEPS)
def test_counters_are_the_sum_of_what_is_open(steps: list[tuple[str, int, str]]) -> None:
    book = ledger("a", "b", "c")
    model: dict[int, list[float]] = {}  # leg → prefill left, decode left, tokens
    where: dict[int, str] = {}
    present = {"a", "b", "c"}
    now = 0.0
    for what, leg, name in steps:
        now += 0.25
        if what == "open" and leg not in model:
            book.open(leg, name, prefill=100 + leg, decode=50, now=now)
            model[leg], where[leg] = [100 + leg, 50, 0], name
        elif what == "first":
            book.first(leg, now)
            if leg in model and not model[leg][2]:
                model[leg] = [0, model[leg][1] - 1, 1]
        elif what == "progress":
            book.progress(leg, 10 * leg, now)
            if leg in model:
                if not model[leg][2]:
                    model[leg] = [0, model[leg][1] - 1, 1]
                had = model[leg][2]
                model[leg] = [0, max(0, model[leg][1] - max(0, 10 * leg - had)), max(had, 10 * leg)]
        elif what == "close":
            assert book.close(leg) == (model.pop(leg, None) is not None)
            assert not book.close(leg)
        elif what == "report":
            book.report(name, Report(at=now, running=0.0, waiting=0.0))
        elif what == "health":
            book.health(name, "quarantined", now)
        elif what in ("replace", "forget"):
            present = present ^ {name}
            book.replace(endpoints(*sorted(present)), now)
        snapshot = book.snapshot(now)
        assert [e.id for e in snapshot.endpoints] == sorted(present)
        for endpoint, found in zip(snapshot.endpoints, snapshot.views, strict=True):
            mine = [model[leg] for leg in model if where[leg] == endpoint.id]
            assert found.inflight == len(mine)
            assert found.queued == sum(m[2] == 0 for m in mine)
            assert found.prefill_tokens == sum(m[0] for m in mine)
            assert found.decode_tokens == sum(m[1] for m in mine)
    for leg in model:
        book.close(leg)
    book.replace(endpoints("a", "b", "c"), now)
    assert all((v.inflight, v.prefill_tokens, v.decode_tokens) == (0, 0, 0) for v in book.snapshot(now).views)


def test_a_leg_is_opened_once() -> None:
    book = ledger("a")
    book.open(1, "a", prefill=1, decode=1, now=0.0)
    with pytest.raises(ValueError, match="open already"):
        book.open(1, "a", prefill=1, decode=1, now=0.0)


def serve(book: Ledger, name: str, start: float, count: int, tokens: int, rate: float, overhead: float = 0.02) -> float:
    """*count* requests one after the other on an engine of that speed; returns when the last has ended."""
    now = start
    for leg in range(count):
        key = (name, start, leg)
        book.open(key, name, prefill=tokens, decode=10, now=now)
        now += overhead + tokens / rate
        book.first(key, now)
        book.close(key)
        now += 0.1
    return now


def test_prefill_rate_and_overhead_are_learned() -> None:
    book = ledger("a")
    now = serve(book, "a", 0.0, 40, 2000, 10_000.0)
    found = view(book, "a", now)

    assert found.prefill_rate == pytest.approx(10_000, rel=0.15)
    assert found.overhead is not None
    assert found.overhead < 0.03


def test_requests_behind_each_other_are_not_taken_for_slow() -> None:
    book = ledger("a")
    for leg in range(20):
        book.open(leg, "a", prefill=1000, decode=10, now=0.0)
    for leg in range(20):
        book.first(leg, (leg + 1) * 0.1)
    rate = view(book, "a", 2.0).prefill_rate

    assert rate == pytest.approx(10_000, rel=0.05)


def test_prompts_of_one_step_are_one_sample() -> None:
    book = ledger("a")
    for step in range(10):
        for leg in range(4):
            book.open((step, leg), "a", prefill=500, decode=10, now=float(step))
        for leg in range(4):
            book.first((step, leg), step + 0.2)
            book.close((step, leg))

    assert view(book, "a", 10.0).prefill_rate == pytest.approx(10_000, rel=0.05)


def test_a_slower_engine_is_found_out_within_some_requests() -> None:
    book = ledger("a")
    now = serve(book, "a", 0.0, 40, 2000, 10_000.0)
    now = serve(book, "a", now, 40, 2000, 2_500.0)

    assert view(book, "a", now).prefill_rate == pytest.approx(2_500, rel=0.25)


def test_what_was_learned_long_ago_drifts_to_the_median() -> None:
    book = ledger("a", "b", "c")
    for name in "bc":
        serve(book, name, 0.0, 40, 2000, 10_000.0)
    now = serve(book, "a", 0.0, 40, 2000, 1_000.0)
    slow = view(book, "a", now).prefill_rate
    for _ in range(int(4 * DRIFT)):
        now += 1.0
        book.snapshot(now)
    later = view(book, "a", now).prefill_rate

    assert slow is not None
    assert later is not None
    assert slow < 1_500
    assert later > 7_000


def test_decode_speed_is_known_for_one_more_sequence() -> None:
    """15 ms a token alone, 0.3 ms more for every other sequence; then five leave at once."""
    book = ledger("a")
    now = 0.0
    tokens = dict.fromkeys(range(20), 1)
    for leg in tokens:
        book.open(leg, "a", prefill=10, decode=10_000, now=now)
        book.first(leg, now)
        for _ in range(3):
            now += 1.0
            for one in range(leg + 1):
                tokens[one] += round(1.0 / (0.015 + 0.0003 * leg))
                book.progress(one, tokens[one], now)
    full = view(book, "a", now).decode_rate
    for leg in range(5):
        book.close(leg)
    fewer = view(book, "a", now).decode_rate

    assert full == pytest.approx(1 / (0.015 + 0.0003 * 20), rel=0.05)
    assert fewer == pytest.approx(1 / (0.015 + 0.0003 * 15), rel=0.05)


def test_an_engine_that_says_nothing_although_it_should_is_behind() -> None:
    book = ledger("a", "b")
    now = max(serve(book, name, 0.0, 20, 2000, 10_000.0) for name in "ab")
    for leg in range(3):
        book.open(leg, "a", prefill=2000, decode=10, now=now)
    before = view(book, "a", now).ahead
    later = view(book, "a", now + 8.0).ahead

    assert before == pytest.approx(0.6, rel=0.3)
    assert later is not None
    assert later > 8.0


def test_foreign_load_is_what_the_report_has_above_ours_while_it_is_fresh() -> None:
    book = ledger("a")
    book.open(1, "a", prefill=10, decode=10, now=0.0)
    for at in range(6):
        book.report("a", Report(at=float(at), running=7.0, waiting=2.0))
    assert view(book, "a", 5.0).foreign == pytest.approx(8.0, rel=0.05)
    assert view(book, "a", 60.0).foreign == 0.0


def test_a_report_never_makes_an_endpoint_look_idle() -> None:
    book = ledger("a")
    for leg in range(5):
        book.open(leg, "a", prefill=100, decode=10, now=0.0)
    book.report("a", Report(at=1.0, running=0.0, waiting=0.0, kv_usage=0.0))
    book.report("a", Report(at=2.0))
    found = view(book, "a", 2.0)

    assert (found.inflight, found.prefill_tokens) == (5, 500)


def test_an_endpoint_that_comes_back_keeps_its_account() -> None:
    book = ledger("a", "b")
    book.open(1, "a", prefill=70, decode=10, now=0.0)
    book.replace(endpoints("b"), 1.0)
    book.replace(endpoints("b", "a"), 2.0)

    assert view(book, "a", 2.0).prefill_tokens == 70
    book.close(1)
    assert view(book, "a", 2.0).prefill_tokens == 0


def test_unknown_is_none() -> None:
    found = view(ledger("a"), "a", 5.0)

    assert (found.prefill_rate, found.decode_rate, found.overhead, found.ahead, found.report) == (None,) * 5
    assert not math.isnan(found.foreign)
