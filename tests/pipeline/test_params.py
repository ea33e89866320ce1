"""Parameters of steps: strictly typed, as the reference does."""

from __future__ import annotations

from typing import Any

import pytest

from llmgw.errors import ConfigError
from llmgw.pipeline import params
from llmgw.pipeline.step import STEPS


@pytest.mark.parametrize("value", [8192, 8192.0])
def test_integers(value: Any) -> None:
    assert params.integer(0)(value) == 8192


@pytest.mark.parametrize("value", [8192.5, "8192", True, None, 1e300, -1])
def test_no_integers(value: Any) -> None:
    with pytest.raises(ValueError, match=str(value)[:3]):
        params.integer(0)(value)


def test_durations() -> None:
    assert params.duration("1m30s") == 90.0
    wrong: tuple[Any, ...] = ("30", 30, True, None, [], "1 parsec")
    for bad in wrong:
        with pytest.raises(ValueError, match="duration"):
            params.duration(bad)


@pytest.mark.parametrize("value", ["true", 1, None])
def test_no_booleans(value: Any) -> None:
    with pytest.raises(ValueError, match="neither true nor false"):
        params.boolean(value)


@pytest.mark.parametrize("value", ["a", [1], {"a": 1}, None])
def test_no_lists_of_strings(value: Any) -> None:
    with pytest.raises(ValueError, match="not a list"):
        params.strings(value)


@pytest.mark.parametrize("value", ["render:8000", "ftp://render", "http://", "", 3, "http://a/?q"])
def test_no_addresses(value: Any) -> None:
    with pytest.raises(ValueError, match="not a"):
        params.http_address(value)


def test_a_wrong_parameter_names_the_step() -> None:
    with pytest.raises(ConfigError, match=r"step 'encode': 0 is not between"):
        STEPS.make("encode", {"max_parallel": 0})
    with pytest.raises(ConfigError, match=r"unknown kv_connector 'kv-x'; known: kv-mooncake, kv-nixl"):
        STEPS.make("prefill", {"kv_connector": "kv-x"})
    with pytest.raises(ConfigError, match="address"):
        STEPS.make("render", {})
    with pytest.raises(ConfigError, match="unknown step"):
        STEPS.make("nonsense", {})
