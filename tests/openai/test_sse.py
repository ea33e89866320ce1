"""Meters: exact counts on real answers, and the same result however an answer is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmgw.openai.cut import CAP
from llmgw.openai.routes import Shape
from llmgw.openai.sse import HELD, JsonMeter, Meter
from llmgw.openai.usage import Usage
from tests.openai.captures import body


def state(meter: Meter | JsonMeter) -> tuple[object, ...]:
    return (
        meter.events, meter.tokens, meter.at_boundary, meter.done, meter.error, meter.error_detail, meter.usage,
    )  # fmt: skip


def fed(*slices: bytes, shape: Shape = "chat", cap: int = CAP, finish: bool = False) -> Meter:
    meter = Meter(shape, cap)
    for piece in slices:
        meter.feed(piece)
    if finish:
        meter.finish()
    return meter


def chunk(delta: dict[str, Any], **more: Any) -> bytes:
    event = {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": None}], **more}
    return b"data: " + json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("name", "shape", "events", "tokens", "usage", "done"),
    [
        ("vllm/chat-stream", "chat", 5, 4, None, True),
        ("vllm/chat-stream-usage", "chat", 6, 4, Usage(17, None, 4), True),
        ("vllm/chat-stream-continuous-usage", "chat", 5, 3, Usage(17, None, 3), True),
        ("vllm/chat-tool-forced-stream", "chat", 8, 5, None, True),
        ("vllm/chat-n2", "chat", 6, 4, None, True),
        ("vllm/completions-stream", "completions", 4, 3, Usage(2, None, 3), True),
        ("vllm/responses-stream", "responses", 10, 2, Usage(17, 0, 3), True),
        ("vllm/messages-stream", "messages", 6, 1, Usage(17, None, 3), True),
        ("llama-server/chat-stream-usage", "chat", 7, 4, Usage(17, 16, 4), True),
        ("llama-server/completions-stream", "completions", 4, 3, Usage(2, 1, 3), True),
        ("llama-server/responses-stream", "responses", 11, 3, Usage(17, 16, 3), True),
        ("llama-server/messages-stream", "messages", 8, 3, Usage(17, 16, 3), True),
        ("transformers/chat-stream", "chat", 6, 4, Usage(16, None, 4), False),
        ("transformers/completions-stream", "completions", 4, 3, Usage(2, None, 3), False),
        ("transformers/responses-stream", "responses", 11, 3, Usage(16, 0, 3), True),
    ],
)
def test_real_streams(name: str, shape: Shape, events: int, tokens: int, usage: Usage, done: bool) -> None:
    text = body(name)
    meter = fed(text, shape=shape)
    assert (meter.events, meter.tokens, meter.usage, meter.done, meter.error) == (events, tokens, usage, done, False)
    expected = state(meter)
    for size in (1, 7, 100):
        assert state(fed(*(text[i : i + size] for i in range(0, len(text), size)), shape=shape)) == expected
    for at in range(0, len(text), 3):
        assert state(fed(text[:at], text[at:], shape=shape)) == expected


# Pieces of streams, each with what it adds: events, tokens.
word = st.text(max_size=6) | st.sampled_from(['"', "\\", '"content":"x', "\u00e9\U0001f600", "\n\n", "data: x"])
contents = word.map(lambda w: (chunk({"content": w}), 1, bool(w)))
pieces = st.one_of(
    contents,
    contents,
    word.map(lambda w: (chunk({"reasoning": w, "reasoning_content": w}), 1, bool(w))),
    word.map(lambda w: (chunk({"tool_calls": [{"index": 0, "function": {"arguments": w}}]}), 1, bool(w))),
    word.map(lambda w: (json_spaced({"content": w}), 1, bool(w))),
    st.just((chunk({"role": "assistant", "content": ""}), 1, 0)),
    st.just((chunk({"content": "multi"}).replace(b',"choices"', b',\ndata:"choices"'), 1, 1)),
    st.just((chunk({"content": "x"}).replace(b"data: ", b"event: e\nid: 7\ndata:"), 1, 1)),
    st.just((b": keep-alive\n\n", 0, 0)),
    st.just((b":\n\n", 0, 0)),
    st.just((b"\n", 0, 0)),
    st.integers(1, 60).map(lambda n: (chunk({}, usage={"prompt_tokens": n, "completion_tokens": n}), 1, 0)),
    st.just((b'data: {"error":{"type":"T","code":500,"message":"secret"}}\n\n', 1, 0)),
    st.just((b"data: not json\n\n", 1, 0)),
    st.just((b"data: [DONE]\n\n", 0, 0)),
    st.just((chunk({"content": "y" * 300}), None, None)),
)


def json_spaced(delta: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"


@example([(b"\n", 0, 0), (b": keep-alive\n\n", 0, 0)], b"\n", [1], "whole")
@given(
    st.lists(pieces, max_size=8),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 3000), max_size=6),
    st.sampled_from(["whole", "no blank line", "cut"]),
)
def test_any_cut_gives_the_same(
    parts: list[tuple[bytes, int | None, int | None]], end_of_line: bytes, cuts: list[int], end: str
) -> None:
    cap = 250  # below the longest event
    text = b"".join(part for part, _, _ in parts)
    if end == "no blank line":
        text = text[:-2]
    elif end == "cut":
        text = text[: len(text) * 2 // 3]
    text = text.replace(b"\n", end_of_line)
    whole = fed(text, cap=cap, finish=True)
    places = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    assert state(fed(*(text[a:b] for a, b in itertools.pairwise(places)), cap=cap, finish=True)) == state(whole)
    assert state(fed(*(text[i : i + 1] for i in range(len(text))), cap=cap, finish=True)) == state(whole)
    if end == "whole":
        exact = fed(text, finish=True)
        assert exact.at_boundary
        assert exact.events == sum(1 if events is None else events for _, events, _ in parts)
        assert exact.tokens == sum(1 if tokens is None else tokens for _, _, tokens in parts)
        assert exact.done == any(b"[DONE]" in part for part, _, _ in parts)
        assert exact.error == any(b'"error"' in part for part, _, _ in parts)


def test_boundaries() -> None:
    text = chunk({"content": "a"})
    for end_of_line in (b"\n", b"\r\n", b"\r"):
        stream = text.replace(b"\n", end_of_line) * 3
        meter = Meter("chat")
        boundaries = []
        for i in range(len(stream)):
            meter.feed(stream[i : i + 1])
            if meter.at_boundary:
                boundaries.append(i + 1)
        size = len(stream) // 3
        # after the CR of a CRLF the event is over already; the LF changes nothing
        expected = [size * n - k for n in (1, 2, 3) for k in ((1, 0) if end_of_line == b"\r\n" else (0,))]
        assert boundaries == expected
        assert meter.events == 3


def test_in_band_errors_are_seen_without_their_text() -> None:
    secret = "my private prompt"
    for error, detail in (
        ({"error": {"message": secret, "type": "InternalServerError", "code": 500}}, "InternalServerError 500"),
        ({"object": "error", "message": secret, "type": "BadRequestError", "code": 400}, "BadRequestError 400"),
        ({"type": "error", "error": {"type": "overloaded_error", "message": secret}}, "overloaded_error"),
        ({"error": secret}, ""),
    ):
        meter = fed(b"data: " + json.dumps(error).encode() + b"\n\n")
        assert (meter.error, meter.error_detail, meter.tokens) == (True, detail, 0)
    assert not fed(chunk({"content": '"error"'}, error=None)).error
    assert not fed(chunk({"content": '{"error":{}}'})).error


def test_a_large_event_is_read_up_to_the_cap() -> None:
    large = chunk({"content": "x" * (CAP - 400)}, usage={"prompt_tokens": 1, "completion_tokens": 2})
    assert (fed(large).tokens, fed(large).usage) == (1, Usage(1, None, 2))
    larger = chunk({"content": "x" * CAP}) + chunk({"content": "y"})
    for size in (len(larger), 1448, 65_536):
        meter = fed(*(larger[i : i + size] for i in range(0, len(larger), size)))
        assert (meter.events, meter.tokens, meter.at_boundary) == (2, 1, True)


def test_usage_that_makes_no_sense_is_no_usage() -> None:
    for usage in (b"null", b"[]", b'{"prompt_tokens":-1}', b'{"prompt_tokens":"x"}', b'{"prompt_tokens":1e999}', b"{}"):
        assert fed(b'data: {"choices":[],"usage":' + usage + b"}\n\n").usage is None


def json_fed(text: bytes, size: int) -> JsonMeter:
    meter = JsonMeter()
    assert meter.at_boundary
    for i in range(0, len(text), size):
        meter.feed(text[i : i + size])
        assert len(meter._held) <= HELD + 1
    meter.finish()
    return meter


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("vllm/chat", Usage(17, None, 8)),
        ("vllm/completions", Usage(2, None, 6)),
        ("vllm/messages", Usage(17, None, 4)),
        ("llama-server/chat", Usage(17, 16, 8)),
        ("llama-server/completions", Usage(2, 0, 6)),
        ("llama-server/messages", Usage(17, 16, 4)),
        ("transformers/chat", Usage(16, None, 8)),
    ],
)
def test_real_answers(name: str, usage: Usage) -> None:
    text = body(name)
    for size in (len(text), 1, 3, 64):
        meter = json_fed(text, size)
        assert (meter.usage, meter.done, meter.error, meter.at_boundary) == (usage, True, False, False)


@pytest.mark.parametrize("size", [1, 7, 1000, 10**9])
def test_usage_stands_anywhere_and_text_does_not_fool(size: int) -> None:
    trap = '"usage":{"prompt_tokens":9,"completion_tokens":9}'
    answer = {
        "choices": [{"message": {"content": trap + "x" * 5000, "tool": {"usage": "none", "x": trap}}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}},
        "prompt_logprobs": ["y" * 9_000, trap, "\\"],
    }
    for indent in (None, 2):
        text = json.dumps(answer, indent=indent).encode()
        assert json_fed(text, size).usage == Usage(3, 2, 4)
    assert json_fed(b'{"usage"' + b" " * 9000 + b':{"prompt_tokens":1}}', size).usage is None
    assert json_fed(b'{"usage":{"x":"' + b"z" * 9000 + b'","prompt_tokens":1}}', size).usage is None


@pytest.mark.parametrize("size", [1, 5, 10**9])
def test_an_error_answer(size: int) -> None:
    meter = json_fed(b'{"error": {"message": "prompt", "type": "server_error", "code": 500}}', size)
    assert (meter.error, meter.error_detail) == (True, "server_error 500")
    assert json_fed(b'{"err', size).done is False
    assert not json_fed(b'{"id":"x"}', size).error


def framed(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)


def test_bulk_takes_what_is_certain_and_nothing_else() -> None:
    same = [chunk({"content": word}) for word in ("a", "bc", " d")]
    others = [
        chunk({"content": ""}),
        chunk({"content": '"'}),
        chunk({"content": "\\"}),
        chunk({"reasoning": "x"}),
        chunk({}, usage={"prompt_tokens": 1}),
        b'data: {"error":{}}\n\n',
        b"data: [DONE]\n\n",
        b": keep-alive\n\n",
    ]
    data = framed(*same)
    untaught = Meter("chat")
    assert not untaught.feed_bulk(data, 0, len(data), 3)
    assert untaught.alike_until(data, 0) == 0
    meter = fed(same[0])
    assert meter.feed_bulk(data, 0, len(data), 3)
    assert (meter.events, meter.tokens) == (4, 4)
    for other in others:
        mixed = framed(*same, other)
        before = state(meter)
        assert not meter.feed_bulk(mixed, 0, len(mixed), 4)
        assert state(meter) == before
        assert meter.alike_until(mixed, 0) >= len(data) - 2
    meter.feed(b"data: ")
    assert not meter.feed_bulk(data, 0, len(data), 3)
