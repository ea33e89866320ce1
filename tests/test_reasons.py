"""The table of reasons is complete, consistent, and the same as its reference page."""

from __future__ import annotations

from pathlib import Path

from llmgw import reasons

STAGES_BY_STATUS = {429: {"admission"}, 499: {"client"}, 502: {"upstream"}, 504: {"upstream"}}


def test_codes_are_unique() -> None:
    assert len(reasons.BY_CODE) == len(reasons.TABLE)


def test_waiting_helps_exactly_where_the_status_says_so() -> None:
    for r in reasons.TABLE:
        if r.status == 429:
            assert r.retry, r.code
            assert r.retry_after, r.code
        if r.status in (400, 401, 403, 404, 405, 413, 415, 431):
            assert not r.retry, r.code
        assert r.stage in STAGES_BY_STATUS.get(r.status, {r.stage}), r.code


def test_every_row_says_what_to_do() -> None:
    for r in reasons.TABLE:
        assert r.meaning.endswith("."), r.code
        assert r.remedy.endswith("."), r.code


def test_reference_page_is_current() -> None:
    page = Path(__file__).parent.parent / "docs" / "reasons.md"
    assert page.read_text() == reasons.reference(), "run: python -m llmgw.reasons > docs/reasons.md"
