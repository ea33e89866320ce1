"""The registry refuses what would be ambiguous, and says what is known."""

from __future__ import annotations

import attrs
import pytest

from llmgw.errors import ConfigError
from llmgw.plugins import Registry


@attrs.frozen
class Fast:
    """Takes the fast one."""

    api = 1
    name = "fast"
    weight: float = 1.0


class Slow:
    api = 1
    name = "slow"


def registry() -> Registry[object]:
    found: Registry[object] = Registry("scorer")
    found.add(Fast)
    found.add(Slow)
    return found


def test_makes_an_instance_with_its_parameters() -> None:
    assert registry().make("fast", {"weight": 2.0}) == Fast(2.0)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown scorer 'fsat'; known: fast, slow"):
        registry().make("fsat", {})


def test_every_unknown_key_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        registry().make("fast", {"wieght": 1, "x": 2}, "profiles.chat[0]")

    assert [p.where for p in caught.value.problems] == ["profiles.chat[0]"] * 2
    assert "unknown key 'wieght'" in str(caught.value)


def test_taken_name_names_both() -> None:
    class Other:
        api = 1
        name = "fast"

    with pytest.raises(ConfigError, match=r"declared twice: by .*Fast and by .*Other"):
        registry().add(Other)


def test_other_api_is_refused() -> None:
    class Future:
        api = 2
        name = "future"

    with pytest.raises(ConfigError, match="declares api 2; this llmgw speaks 1"):
        registry().add(Future)


def test_missing_name_is_refused() -> None:
    class Nameless:
        api = 1

    with pytest.raises(ConfigError, match="declares no name"):
        registry().add(Nameless)
