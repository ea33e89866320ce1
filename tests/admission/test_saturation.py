"""What an engine may have in hand is learned, and never more than it is allowed."""

from __future__ import annotations

from llmgw.admission.saturation import BACK_OFF, OVERDUE, START, Limit, late


def test_an_unknown_engine_gets_more_with_every_first_token() -> None:
    limit = Limit()
    assert limit.seqs == START
    for _ in range(START):
        limit.in_time(limit.seqs, 0.0)
    assert limit.seqs == 2 * START
    assert not limit.in_time(limit.seqs - 1, 0.0), "there is room: nothing to learn"


def test_a_cap_is_never_exceeded() -> None:
    limit = Limit(cap=20)
    for _ in range(100):
        limit.in_time(limit.seqs, 0.0)
    assert limit.seqs == 20
    limit.overdue(500, 900.0, 1.0)
    assert limit.seqs == 20
    limit.configure(7, None)
    assert limit.seqs == 7


def test_a_full_engine_is_left_alone_for_a_while() -> None:
    limit = Limit()
    limit.overdue(running=11, reported=13.0, now=5.0)
    assert limit.seqs == 13
    assert limit.known
    assert not limit.in_time(13, 5.0 + BACK_OFF - 0.1)
    assert limit.in_time(13, 5.0 + BACK_OFF)
    limit.overdue(running=0, reported=None, now=50.0)
    assert limit.seqs == 1, "an engine that answers nobody still gets one, to be seen again"


def test_one_report_of_a_queue_only_stops_the_growth_two_say_that_it_is_full() -> None:
    limit = Limit()
    limit.reported(16, 14.0, 2.0, 1.0)
    assert not limit.in_time(16, 1.0)
    assert limit.seqs == 16
    limit.reported(10, 10.0, 0.0, 2.0)
    assert limit.in_time(16, 2.0)
    limit.reported(17, 12.0, 5.0, 3.0)
    limit.reported(17, 12.0, 5.0, 4.0)
    assert limit.seqs == 12


def test_late_is_later_than_the_prompts_before_it_take() -> None:
    assert not late(OVERDUE, 0, 1000.0)
    assert late(OVERDUE + 0.01, 0, 1000.0)
    assert not late(4.4, 2000, 1000.0)
    assert late(4.6, 2000, 1000.0)
