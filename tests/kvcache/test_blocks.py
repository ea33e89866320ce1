"""Equal prompts have equal blocks; what an engine would cache apart has different ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.kvcache.blocks import BLOCK, LIMIT, blocks, chain, seed, token_blocks

LONG = "The quick brown fox jumps over the lazy dog. " * 60


def fields(**values: Any) -> dict[str, bytes]:
    return {name: json.dumps(value).encode() for name, value in values.items()}


def user(text: object) -> dict[str, object]:
    return {"role": "user", "content": text}


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    depth = 0
    while depth < min(len(a), len(b)) and a[depth] == b[depth]:
        depth += 1
    return depth


def test_a_turn_more_keeps_every_block_before_it() -> None:
    first = blocks(fields(messages=[user(LONG)]))
    second = blocks(fields(messages=[user(LONG), {"role": "assistant", "content": "ok"}, user("and now? " * 200)]))

    assert len(second) > len(first) > 0
    assert common(first, second) == len(first)


def test_text_as_string_or_as_parts_spaced_or_not_is_the_same_prompt() -> None:
    plain = blocks({"messages": json.dumps([user(LONG)], separators=(",", ":")).encode()})

    assert blocks({"messages": json.dumps([user(LONG)], indent=2).encode()}) == plain
    assert blocks(fields(messages=[user([{"type": "text", "text": LONG}])])) == plain


def test_cache_control_that_moves_from_turn_to_turn_changes_nothing() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    tool = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": LONG}]}
    use = {"type": "tool_use", "id": "t1", "name": "ls", "input": {"text": LONG}}

    marked = blocks(
        fields(system=[{"type": "text", "text": LONG, **mark}], messages=[user([{**use, **mark}, {**tool, **mark}])])
    )

    assert blocks(fields(system=LONG, messages=[user([use, tool])])) == marked


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tools": [{"name": "a"}]}, {"tools": [{"name": "b"}]}),
        ({"system": "be brief"}, {"system": "be long"}),
        ({"instructions": "be brief"}, {}),
        ({"cache_salt": "x"}, {"cache_salt": "y"}),
        ({"chat_template_kwargs": {"thinking": True}}, {}),
        ({"documents": [{"text": "a"}]}, {"documents": [{"text": "b"}]}),
    ],
)
def test_what_stands_in_front_changes_every_block(one: dict[str, object], other: dict[str, object]) -> None:
    messages = [user(LONG)]

    assert common(blocks(fields(messages=messages, **one)), blocks(fields(messages=messages, **other))) == 0


def test_names_separate_models_and_adapters() -> None:
    body = fields(messages=[user(LONG)])

    assert common(blocks(body, "m"), blocks(body, "m/lora")) == 0


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "input_image"])
def test_equal_text_with_another_picture_is_another_prompt(kind: str) -> None:
    def ask(url: str) -> tuple[int, ...]:
        return blocks(fields(messages=[user([{"type": kind, kind: {"url": url}}, {"type": "text", "text": LONG}])]))

    assert ask("http://h/a.png") == ask("http://h/a.png")
    assert common(ask("http://h/a.png"), ask("http://h/b.png")) == 0


def test_a_picture_weighs_the_same_whatever_its_size() -> None:
    small, large = (
        blocks(fields(messages=[user([{"type": "image_url", "image_url": {"url": "data:," + "A" * size}}])]))
        for size in (10, 3_000_000)
    )

    assert len(small) == len(large) == 2


def test_equally_long_token_prompts_are_different_prompts() -> None:
    ids = list(range(1000, 1400))

    assert common(blocks(fields(prompt=ids)), blocks(fields(prompt=[9, *ids[1:]]))) == 0


def test_a_field_inside_a_text_is_text() -> None:
    inside = LONG + '","cache_salt":"x","tools":[{"name":"a"}],"messages":[]'

    assert common(blocks(fields(messages=[user(inside)])), blocks(fields(messages=[user(LONG)], cache_salt="x"))) == 0
    assert common(blocks(fields(messages=[user(inside)])), blocks(fields(messages=[user(LONG)]))) > 0


def test_a_text_about_cache_control_keeps_it() -> None:
    text = 'x, "cache_control": {"a": 1}' * 40
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": text}}]}

    assert len(blocks(fields(messages=[call]))) == len(blocks(fields(messages=[user(text + "x" * 80)])))


@given(st.binary(max_size=300), st.sampled_from(["messages", "prompt", "input", "system", "tools"]))
def test_any_bytes_are_hashed_and_never_raise(raw: bytes, field: str) -> None:
    blocks({field: raw})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
        max_leaves=8,
    )
)
def test_any_json_is_hashed_and_never_raises(value: object) -> None:
    assert blocks(fields(messages=value)) == blocks(fields(messages=value))


@given(st.binary(max_size=400), st.integers(1, 40), st.integers(0, 20))
def test_a_chain_goes_on_from_any_of_its_blocks(data: bytes, size: int, cut: int) -> None:
    whole = chain(data, size, seed(""))
    cut = min(cut, len(whole))
    start = whole[cut - 1] if cut else seed("")

    assert whole == whole[:cut] + chain(data[cut * size :], size, start)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=60), st.integers(1, 16), st.data())
def test_token_blocks_cover_all_before_them(ids: list[int], size: int, data: st.DataObject) -> None:
    whole = token_blocks(ids, size, 1)
    assert len(whole) == len(ids) // size
    if ids:
        at = data.draw(st.integers(0, len(ids) - 1))
        other = token_blocks([*ids[:at], ids[at] ^ 1, *ids[at + 1 :]], size, 1)
        assert common(whole, other) == min(at // size, len(whole))


def test_blocks_are_the_same_in_every_process() -> None:
    code = "from llmgw.kvcache.blocks import blocks; print(blocks({'prompt': b'[' + b'1, 2, ' * 300 + b']'}, 'm'))"
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }

    assert len(said) == 1


def test_a_long_prompt_is_bounded_in_blocks_and_time() -> None:
    body = fields(messages=[user("hello wörld \n" * (1 << 17))])
    assert len(body["messages"]) > 1 << 20
    took = []
    for _ in range(3):
        start = time.process_time()
        found = blocks(body)
        took.append(time.process_time() - start)

    assert len(found) == LIMIT
    assert len(found) * BLOCK == 1 << 20
    assert min(took) < 0.02
