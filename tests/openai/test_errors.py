from __future__ import annotations

import json

import pytest

from llmgw import reasons
from llmgw.openai.errors import error_body, error_event, upstream_message
from llmgw.openai.sse import Meter
from llmgw.request import Refusal
from tests.openai.captures import body


@pytest.mark.parametrize("reason", reasons.TABLE, ids=lambda r: r.code)
def test_every_reason_has_a_body_in_both_dialects(reason: reasons.Reason) -> None:
    refusal = Refusal(reason=reason.code, message='Say "why".', param="model")
    error = json.loads(error_body(refusal))["error"]
    assert error == {
        "message": f'Say "why". ({reason.stage}: {reason.code})', "type": reason.type, "param": "model",
        "code": reason.code,
    }  # fmt: skip
    other = json.loads(error_body(refusal, anthropic=True))
    assert other["type"] == "error"
    assert set(other["error"]) == {"type", "message"}
    assert other["error"]["message"] == error["message"]


def test_the_filter_is_named() -> None:
    text = error_body(Refusal(reason="no_endpoint", message="None left.", filter="fabric"))
    assert json.loads(text)["error"]["message"] == "None left. (routing: no_endpoint, filter fabric)"


def test_half_a_surrogate_pair_breaks_no_error() -> None:
    error = json.loads(error_body(Refusal(reason="bad_field", message="no \ud800", param="\ud800")))["error"]
    assert "bad_field" in error["message"]
    assert error["code"] == "bad_field"


@pytest.mark.parametrize("anthropic", [False, True])
def test_an_event_is_seen_as_an_error_at_a_boundary(anthropic: bool) -> None:
    meter = Meter()
    meter.feed(error_event(Refusal(reason="upstream_closed", message="Gone."), anthropic=anthropic))
    assert (meter.events, meter.error, meter.at_boundary, meter.done) == (1, True, True, False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"error":{"message":"secret","type":"BadRequestError","param":"temperature","code":400}}', "BadRequestError 400 param=temperature"),
        (b'{"object":"error","message":"secret","type":"BadRequestError","param":null,"code":400}', "BadRequestError 400"),
        (b'{"error":"Unauthorized"}', "Unauthorized"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"detail":[{"loc":["body"],"input":"secret"}]}', None),
        (b'{"error":"secret","error_type":"validation"}', "validation"),
        (b'{"error":"secret"}', None),
        (b'{"error":{"type":"secret\\n","code":true,"param":{"x":"secret"}}}', None),
        (b"secret", None),
        (b"[]", None),
        (b"[" * 100_000, None),
        (b"", None),
    ],
)  # fmt: skip
def test_engines_errors_are_labelled_and_never_quoted(text: bytes, said: str | None) -> None:
    assert upstream_message(text) == said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vllm/error-bad-model", "NotFoundError 404 param=model"),
        ("vllm/error-unknown-path", "Not Found"),
        ("vllm/error-no-key", "Unauthorized"),
        ("vllm/error-bad-json", "Bad Request 400 param=body.17"),
        ("llama-server/error-context-too-long", "exceed_context_size_error 400"),
    ],
)
def test_real_errors(name: str, said: str) -> None:
    assert upstream_message(body(name)) == said
