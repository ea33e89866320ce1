"""The exact top-level scanner against json.loads, windows against brackets, and its bounds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.openai import layout as module
from llmgw.openai.layout import DEPTH, FIELDS, STEP, Malformed, layout, steps

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=6), v, max_size=4))
objects = st.dictionaries(st.text(max_size=8), values, max_size=6)


def check(body: bytes, expected: dict[str, Any]) -> None:
    found = layout(body)
    assert [f.key for f in found.fields] == list(expected)
    for field in found.fields:
        assert json.loads(body[field.value : field.end]) == expected[field.key]
        assert json.loads(b"{" + body[field.start : field.end] + b"}") == {field.key: expected[field.key]}
    assert body[found.close : found.close + 1] == b"}"


@given(objects, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_agrees_with_json(value: dict[str, Any], ascii_: bool, indent: Any) -> None:
    body = json.dumps(value, ensure_ascii=ascii_, indent=indent).encode("utf-8", "surrogatepass")
    check(body, value)


@given(objects, st.integers(2, 9))
@settings(max_examples=60)
def test_windows_agree_with_json(value: dict[str, Any], step: int) -> None:
    """The same with windows so small that every border falls everywhere."""
    saved = module.STEP, module.NEAR, module.RUN
    module.STEP, module.NEAR, module.RUN = step, 1, 2
    try:
        check(json.dumps(value).encode(), value)
    finally:
        module.STEP, module.NEAR, module.RUN = saved


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b'"x"', b"{", b'{"a"', b'{"a":', b'{"a":1', b'{"a":1,', b'{"a":1,}', b'{"a":"x}', b'{"a":[1}',
        b'{"a" 1}', b"{a:1}", b'{"a":1} x', b'{"a":1}{', b'{"a":,"b":1}', b'{"\\ud800":1}', b'{"a\xff":1}', b'{,}',
        b'{"a":"' + b"\\" * 99 + b'"}', b'{"a":' + b"[" * 200_000, b'{"a":"' + b'\\"' * 200_000,
    ],
    ids=lambda b: b[:20].decode("latin-1"),
)  # fmt: skip
def test_malformed(body: bytes) -> None:
    with pytest.raises(Malformed):
        layout(body)


def test_long_things_are_found_exactly() -> None:
    value = {
        "a": "\\" * 100_000,
        "b": '"' * 100_000,
        "c": [[], {}, "]"] * 20_000,
        "d": "x" * 1_000_000,
        "e": {"f": ["y" * 300_000, {"g": "[" * 50_000}]},
        "model": "m",
    }
    check(json.dumps(value).encode(), value)


def test_bounds() -> None:
    many = b"{" + b",".join(b'"k%d":0' % i for i in range(FIELDS)) + b"}"
    assert len(layout(many).fields) == FIELDS
    with pytest.raises(Malformed, match="more than"):
        layout(many.replace(b"}", b',"x":0}'))
    deep = b"[" * (DEPTH + 1) + b"]" * (DEPTH + 1)
    with pytest.raises(Malformed, match="deeper"):
        layout(b'{"a":' + deep + b"}")


def test_a_long_body_is_read_in_steps() -> None:
    body = b'{"a":' + b"[1]," * 0 + b"[" + b",".join([b"[1]"] * 100_000) + b"]}"
    assert sum(1 for _ in steps(body)) >= len(body) // STEP
