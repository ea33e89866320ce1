"""What the filter takes out, and that it takes out nothing else, however the stream is cut."""

from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from llmgw.openai.sse import Meter
from llmgw.openai.usage import UsageFilter
from tests.openai.captures import body
from tests.openai.test_sse import chunk

USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n'
KEPT = [
    chunk({"content": "a"}),
    chunk({"content": '"usage"'}),
    chunk({"content": "b"}, usage=None),
    chunk({}, usage={"prompt_tokens": 1, "completion_tokens": 1}),
    b'data: {"choices":[],"usage":null}\n\n',
    b'data: {"choices":[],"prompt_filter_results":[]}\n\n',
    b": keep-alive\n\n",
    b"\n",
    b"data: [DONE]\n\n",
    chunk({"content": "usage" * 100}),
]


@example([USAGE, KEPT[-1]], b"\n", [], 1)
@given(
    st.lists(st.sampled_from([*KEPT, USAGE, USAGE.replace(b",", b" ,\ndata:")])),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 3000), max_size=6),
    st.integers(0, 2),
)
def test_drops_the_usage_event_and_nothing_else(
    parts: list[bytes], end_of_line: bytes, cuts: list[int], missing: int
) -> None:
    text = b"".join(parts)
    missing = min(missing, len(parts[-1]) if parts else 0)
    text = text[: len(text) - missing].replace(b"\n", end_of_line)
    kept = b"".join(part for part in parts if part in KEPT)
    if parts and parts[-1] in KEPT:
        kept = kept[: len(kept) - missing]
    kept = kept.replace(b"\n", end_of_line)
    places = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    filter_ = UsageFilter(cap=400)
    meter = Meter("chat")
    out = b""
    for a, b in itertools.pairwise(places):
        passed = filter_.feed(text[a:b])
        out += passed
        meter.feed(passed)
        assert filter_.at_boundary == meter.at_boundary
    out += filter_.finish()
    assert out == kept


def test_a_real_stream() -> None:
    asked, plain = body("vllm/chat-stream-usage"), body("vllm/chat-stream")
    got = UsageFilter().feed(asked)
    assert got.count(b"data:") == plain.count(b"data:")
    assert b'"usage"' not in got
