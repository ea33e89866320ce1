"""Bands: what is wrong with a list of them, and who gets which."""

from __future__ import annotations

import attrs
import pytest

from llmgw.admission.bands import DEFAULTS, Band, Bands, problems
from llmgw.request import Refusal


def test_the_defaults_are_in_order_and_right() -> None:
    assert problems(DEFAULTS) == []
    bands = Bands()
    assert [b.name for b in bands.order] == ["interactive", "standard", "batch"]
    assert bands.order[bands.default].name == "standard"


def test_everything_wrong_is_told_at_once() -> None:
    found = problems(
        [
            Band(name="a", share=0.7, max_slowdown=1.2, max_itl=attrs.evolve(DEFAULTS[0]).deadline),
            Band(name="a", share=0.7),
            Band(name=""),
        ]
    )
    assert [path for path, _ in found] == ["[0].max_itl", "[1].name", "[2].name", "", ""]
    assert "1.4" in found[3][1]
    assert "exactly one band" in found[4][1]
    with pytest.raises(ValueError, match="exactly one band"):
        Bands([Band(name="a")])
    assert problems([]) == [("", "must name at least one band")]


@pytest.mark.parametrize(
    ("asked", "lists", "expected"),
    [
        ("", (), "standard"),
        ("batch", (), "batch"),
        ("batch", (("batch",), ()), "batch"),
        ("", (("interactive", "batch"),), "batch"),  # the default is not open: the lowest that is
    ],
)
def test_which_band(asked: str, lists: tuple[tuple[str, ...], ...], expected: str) -> None:
    bands = Bands()
    rank = bands.rank(asked, "somebody", *lists)
    assert isinstance(rank, int)
    assert bands.order[rank].name == expected


def test_an_unknown_band_is_answered_with_the_known_ones() -> None:
    answer = Bands().rank("urgent", "p")
    assert isinstance(answer, Refusal)
    assert answer.reason == "unknown_band"
    assert all(name in answer.message for name in ("interactive", "standard", "batch"))


def test_bands_are_bounded_by_listener_key_and_their_own_list() -> None:
    bands = Bands((attrs.evolve(DEFAULTS[0], principals=("acme",)), *DEFAULTS[1:]))
    assert bands.rank("interactive", "acme") == 0
    for principal, lists in (("other", ()), ("acme", (("batch",),))):
        answer = bands.rank("interactive", principal, *lists)
        assert isinstance(answer, Refusal)
        assert answer.reason == "forbidden_field"
        assert answer.param == "x-llmgw-band"
