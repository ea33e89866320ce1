"""Meters: exact counts on real answers, and the same result however an answer is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmgw.openai.cut import CAP
from llmgw.openai.sse import AnswerShape, JsonMeter, Meter
from llmgw.openai.usage import Usage
from tests.openai.captures import body


def state(meter: Meter | JsonMeter) -> tuple[object, ...]:
    return (
        meter.events, meter.tokens, meter.at_boundary, meter.done, meter.error, meter.error_detail, meter.usage,
    )  # fmt: skip


def fed(*slices: bytes, shape: AnswerShape = "chat", cap: int = CAP, finish: bool = False) -> Meter:
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
def test_real_streams(name: str, shape: AnswerShape, events: int, tokens: int, usage: Usage, done: bool) -> None:
    text = body(name)
    meter = fed(text, shape=shape)
    assert (meter.events, meter.tokens, meter.usage, meter.done, meter.error) == (events, tokens, usage, done, False)
    expected = state(meter)
    for size in (1, 7, 100):
        assert state(fed(*(text[i : i + size] for i in range(0, len(text), size)), shape=shape)) == expected
    for at in range(0, len(text), 3):
        assert state(fed(text[:at], text[at:], shape=shape)) == expected
