from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmgw.openai.layout import layout
from llmgw.openai.rewrite import rewrite
from tests.openai.test_layout import values

bodies = st.fixed_dictionaries(
    {"messages": values},
    optional={
        "model": st.text(max_size=5),
        "stream_options": st.none() | st.dictionaries(st.sampled_from(["include_usage", "x"]), st.booleans()),
        "seed": st.integers(2**53, 2**80),
        "metadata": st.fixed_dictionaries({"model": st.just("inner"), "stream_options": st.just({})}),
    },
)


@given(bodies, st.none() | st.text(max_size=8), st.booleans(), st.sampled_from([None, 1]), st.permutations(range(5)))
def test_changes_what_was_asked_and_nothing_else(
    body: dict[str, Any], model: str | None, ask: bool, indent: int | None, order: list[int]
) -> None:
    items = list(body.items())
    body = dict(items[i] for i in order if i < len(items))
    text = json.dumps(body, indent=indent).encode()
    got = rewrite(text, model=model, ask_usage=ask)
    expected = dict(body)
    if model is not None:
        expected["model"] = model
    if ask:
        expected["stream_options"] = (body.get("stream_options") or {}) | {"include_usage": True}
    assert json.loads(got) == expected
    before, after = layout(text), layout(got)
    kept = [f.key for f in after.fields][: len(before.fields)]
    assert kept == [f.key for f in before.fields]
    for old, new in zip(before.fields, after.fields, strict=False):
        if old.key not in ("model", "stream_options"):
            assert text[old.start : old.end] == got[new.start : new.end]
    if model is None and not ask:
        assert got == text


def test_bytes() -> None:
    body = b' { "seed" : 9007199254740993 , "model":"a" ,\n"x":[1.0, 1e2] } \n'
    assert rewrite(body, model="b/\u00e9") == body.replace(b'"a"', '"b/é"'.encode())
    assert rewrite(b"{}", model="m", ask_usage=True) == b'{"model":"m","stream_options":{"include_usage":true}}'
    assert rewrite(b'{"stream_options":{}}', ask_usage=True) == b'{"stream_options":{"include_usage":true}}'
    assert rewrite(b'{"stream_options":null}', ask_usage=True) == b'{"stream_options":{"include_usage":true}}'
    assert rewrite(b'{"mod\\u0065l":"a"}', model="b") == b'{"mod\\u0065l":"b"}'


def test_a_known_layout_is_used() -> None:
    body = b'{"model":"a"}'
    assert rewrite(body, model="b", found=layout(body)) == b'{"model":"b"}'
