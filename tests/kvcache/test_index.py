"""The estimated index against a brute-force LRU."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.kvcache.index import GENERATIONS, PrefixIndex

PROMPTS = [
    tuple(range(group * 100, group * 100 + head)) + tuple(range(group * 100 + 50 + tail, group * 100 + 60))
    for group in range(6)
    for head in (3, 7, 12)
    for tail in range(0, 8, 3)
]
"""Prompts in groups: a common head of some length, then a tail of their own."""

STEP = st.one_of(
    st.tuples(st.just("record"), st.sampled_from("abc"), st.sampled_from(PROMPTS)),
    st.tuples(st.just("fill"), st.sampled_from("abc"), st.integers(0, 9)),
    st.tuples(st.just("clear"), st.sampled_from("abc"), st.none()),
    st.tuples(st.just("forget"), st.sampled_from("abc"), st.none()),
    st.tuples(st.just("correct"), st.sampled_from("abc"), st.sampled_from(PROMPTS)),
    st.tuples(st.just("resize"), st.sampled_from("abc"), st.integers(1, 90)),
)


def depth(held: set[int], blocks: tuple[int, ...]) -> int:
    found = 0
    while found < len(blocks) and blocks[found] in held:
        found += 1
    return found


@given(st.lists(STEP, max_size=60))
def test_match_is_what_the_lru_holds(steps: list[tuple[str, str, object]]) -> None:
    index = PrefixIndex()
    for step in steps:
        match step:
            case ("record", endpoint, tuple(blocks)):
                index.record(endpoint, blocks)
            case ("fill", endpoint, int(count)):
                index.fill(endpoint, count)
            case ("resize", endpoint, int(count)):
                index.resize(endpoint, count)
            case ("correct", endpoint, tuple(blocks)):
                index.correct(endpoint, blocks, 2)
                assert index.match(blocks).get(endpoint, 0) <= 2
            case ("clear", endpoint, _):
                index.clear(endpoint)
                assert index.held(endpoint) == 0
            case ("forget", endpoint, _):
                index.forget(endpoint)
        held = {name: {block for block in lru.where if block >= 0} for name, lru in index._lrus.items()}
        for blocks in PROMPTS:
            assert index.match(blocks) == {name: depth(h, blocks) for name, h in held.items() if depth(h, blocks)}
        assert set(index._holders._masks) == set().union(*held.values())
        for lru in index._lrus.values():
            assert len(lru.where) <= max(lru.capacity, len(lru.generations[-1]))


@given(st.lists(st.sampled_from(PROMPTS), max_size=80), st.integers(40, 120))
def test_what_was_used_lately_is_kept(prompts: list[tuple[int, ...]], capacity: int) -> None:
    index = PrefixIndex()
    index.resize("a", capacity)
    order: OrderedDict[int, None] = OrderedDict()
    longest = max(map(len, PROMPTS))
    for blocks in prompts:
        index.record("a", blocks)
        for block in blocks:
            order.pop(block, None)
            order[block] = None
        certain = capacity - capacity // GENERATIONS - 2 * longest
        recent = list(order)[-certain:] if certain > 0 else []
        assert all(index._holders.holds("a", block) for block in recent)


def test_all_endpoints_share_one_bound() -> None:
    index = PrefixIndex(entries=400)
    for number in range(4):
        index.resize(f"e{number}", 300)
    for number in range(4):
        for start in range(0, 600, 10):
            index.record(f"e{number}", tuple(range(start, start + 10)))

    assert 300 <= len(index) <= 400


def test_an_unknown_endpoint_learns_from_its_first_prompt() -> None:
    index = PrefixIndex()
    index.record("new", (1, 2, 3))

    assert index.match((1, 2, 9)) == {"new": 2}


def test_generated_text_pushes_prompts_out() -> None:
    index = PrefixIndex()
    index.resize("a", 160)
    index.record("a", tuple(range(1, 11)))
    index.fill("a", 100)
    assert index.match((1, 2)) == {"a": 2}
    assert not index.full("a")
    for _ in range(7):
        index.fill("a", 10)

    assert index.match((1, 2)) == {}
    assert index.full("a")


def test_a_freed_bit_is_not_mistaken_for_its_first_owner() -> None:
    index = PrefixIndex()
    index.record("a", (1, 2))
    index.forget("a")
    index.record("b", (3,))

    assert index.match((1, 2)) == {}
    assert index.match((3, 4)) == {"b": 1}


@pytest.mark.parametrize("blocks", [(), (1,)])
def test_an_empty_index_matches_nothing(blocks: tuple[int, ...]) -> None:
    assert PrefixIndex().match(blocks) == {}
