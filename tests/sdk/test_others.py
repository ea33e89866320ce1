"""Anthropic's SDK, curl, and a page's JavaScript (fetch on Node) against the gateway."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from pathlib import Path

import anthropic
import pytest

from tests.sdk.place import MODEL, Place

MESSAGES: list[anthropic.types.MessageParam] = [{"role": "user", "content": "Tell me about routers."}]
CHAT = json.dumps({"model": MODEL, "max_tokens": 6, "messages": MESSAGES, "stream": True})


@pytest.fixture(name="client")
def _client(there: Place) -> anthropic.Anthropic:
    there.needs("messages")
    return anthropic.Anthropic(base_url=there.gateway, api_key="none", max_retries=0, timeout=120)


def test_messages(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model=MODEL, max_tokens=8, messages=MESSAGES)
    assert answer.usage.output_tokens == 8
    assert answer.stop_reason == "max_tokens"


def test_messages_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=8, messages=MESSAGES) as stream:
        text = "".join(stream.text_stream)
        assert text
        assert stream.get_final_message().usage.output_tokens == 8


def test_count_tokens(client: anthropic.Anthropic) -> None:
    assert client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 3


def test_error_classes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="model_not_found"):
        client.messages.create(model="nobody", max_tokens=8, messages=MESSAGES)
    with pytest.raises(anthropic.BadRequestError, match="bad_field"):
        client.messages.create(model=MODEL, max_tokens="many", messages=MESSAGES)  # type: ignore[call-overload]


def run(*command: str, data: bytes = b"") -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} on this machine")
    done = subprocess.run(command, input=data, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def curl(there: Place, path: str, *flags: str, data: bytes = b"") -> str:
    return run("curl", "-sS", "--max-time", "100", there.gateway + path, *flags, data=data)


JSON = ("-H", "content-type: application/json")


def test_curl(there: Place) -> None:
    chat = "/v1/chat/completions"
    assert curl(there, chat, "-N", *JSON, "-d", CHAT).rstrip().endswith("data: [DONE]")
    assert curl(there, chat, "-N", "--http1.0", *JSON, "-d", CHAT).rstrip().endswith("data: [DONE]")
    packed = gzip.compress(CHAT.encode())
    answer = curl(there, chat, *JSON, "-H", "content-encoding: gzip", "--data-binary", "@-", data=packed)
    assert answer.rstrip().endswith("data: [DONE]")
    large = json.dumps({"model": "nobody", "messages": [], "user": "x" * 2_000_000}).encode()
    refused = curl(there, chat, *JSON, "-w", "%{http_code}", "--data-binary", "@-", data=large)  # Expect: 100-continue
    assert refused.endswith("404")
    assert "200 OK" in curl(there, "/v1/models", "-I")
    assert curl(there, "/nope", "-o", "/dev/null", "-w", "%{http_code}") == "404"


def test_curl_tokenize(there: Place) -> None:
    there.needs("tokenize")
    body = json.dumps({"model": MODEL, "prompt": "one two three"})
    tokens = json.loads(curl(there, "/tokenize", *JSON, "-d", body))["tokens"]
    text = json.loads(curl(there, "/detokenize", *JSON, "-d", json.dumps({"model": MODEL, "tokens": tokens})))["prompt"]
    assert "two" in text


def test_node(there: Place) -> None:
    script = Path(__file__).parent / "page.mjs"
    said = json.loads(run("node", str(script), there.gateway, MODEL))
    assert said["whole"]["done"]
    assert said["whole"]["words"] > 0
    assert said["aborted"] == "AbortError"
    assert said["missing"] == [404, "model_not_found"]
    there.wait_running(0, 10)
