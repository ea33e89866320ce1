"""What is printed is read back to the same value, and what is no value is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.units import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0),
        ("1m30s", 90.0),
        ("100ms", 0.1),
        ("1.5h", 5400.0),
        ("2us", 2e-6),
        ("2µs", 2e-6),
        ("0", 0.0),
        ("1h0m1s", 3601.0),
        (".5s", 0.5),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1 s", "1s x", "1d", "1e3s", "nan", "infs"])
def test_bad_durations_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@given(st.integers(0, 10**18))
def test_durations_survive_printing(ns: int) -> None:
    assert parse_duration(format_duration(ns / 1e9)) == pytest.approx(ns / 1e9, abs=1e-9, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 << 20), ("1.5GiB", 3 << 29), ("64KB", 64_000), ("4096", 4096), ("7B", 7), ("1 KiB", 1024), ("0", 0)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5x", "MiB", "-1", "1.5B", "0x10", "1_000"])
def test_bad_sizes_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_size(text)


@given(st.integers(0, 1 << 60))
def test_sizes_survive_printing(size: int) -> None:
    assert parse_size(format_size(size)) == size
