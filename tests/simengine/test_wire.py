"""The bytes of a simulated engine beside those of a real one: same status, headers, keys, order of keys, events."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
from trio.testing import MockClock

from tests.simengine.conftest import Bench

CAPTURES = Path(__file__).parents[2].parent / "shared" / "captures" / "vllm"

needs_captures = pytest.mark.skipif(not CAPTURES.is_dir(), reason="no captures of real engines beside this checkout")


@attrs.frozen
class Capture:
    """One recorded exchange."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes | None
    status: int
    answer_headers: list[str]
    answer: str


def read(name: str) -> Capture:
    command, _, rest = (CAPTURES / f"{name}.txt").read_bytes().decode(errors="replace").partition("\n\n")
    words = shlex.split(command.removeprefix("$ "))
    url = next(word for word in words if word.startswith("http://"))
    headers, body = {}, None
    for flag, value in pairwise(words):
        if flag == "-H":
            key, _, text = value.partition(": ")
            headers[key.lower()] = text
        if flag == "-d":
            body = None if value.startswith("@") else value.encode()
    rest = rest.replace("\r\n", "\n")
    head, _, answer = rest.partition("\n\n")
    lines = head.split("\n")
    names = [line.split(":")[0] for line in lines[1:]]
    method = "POST" if "-d" in words else "GET"
    return Capture(method, re.sub(r"^http://[^/]+", "", url), headers, body, int(lines[0].split()[1]), names, answer)


def shape(value: Any) -> Any:
    """Keys in order and kinds of values; of a list its first element, numbers are alike."""
    if isinstance(value, dict):
        return [(key, shape(inner)) for key, inner in value.items()]
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def events(text: str) -> Iterator[tuple[str, Any]]:
    """(event name, shape of the data) of a stream, runs of alike ones once."""
    last: tuple[str, Any] | None = None
    for block in text.split("\n\n"):
        name, data = "", ""
        for line in block.strip().split("\n"):
            if line.startswith("event: "):
                name = line[7:]
            if line.startswith("data: "):
                data = line[6:]
        if not data:
            continue
        found = (name, data if data == "[DONE]" else shape(json.loads(data)))
        if found != last:
            yield found
        last = found


PLAIN = [
    "chat", "chat-token-ids", "chat-logprobs", "chat-json-schema", "completions", "completions-batch", "messages",
    "messages-count-tokens", "responses", "models", "version", "load", "tokenize", "tokenize-chat", "detokenize",
]  # fmt: skip
STREAMS = [
    "chat-stream", "chat-stream-usage", "chat-stream-continuous-usage", "chat-n2", "completions-stream",
    "messages-stream", "responses-stream", "chat-tool-forced-stream",
]  # fmt: skip
EXACT = [
    "error-bad-json", "error-bad-model", "error-bad-model-stream", "error-empty-messages",
    "error-max-tokens-too-large", "error-missing-messages", "error-no-content-type", "error-range",
    "error-tools-not-enabled", "error-unknown-path", "error-wrong-method", "error-wrong-type", "health", "ping",
]  # fmt: skip


@needs_captures
@pytest.mark.parametrize("name", PLAIN + EXACT)
async def test_plain_answers(name: str, bench: Bench, autojump_clock: MockClock) -> None:
    capture = read(name)
    client = bench.client(await bench.engine(max_model_len=2048, scale_out=False))

    await client.request(capture.method, capture.path, capture.body, capture.headers)
    got = await client.answer()

    assert got.status == capture.status
    assert list(got.headers) == capture.answer_headers
    if name in EXACT:
        assert got.body.decode() == capture.answer.rstrip("\n")
    else:
        assert shape(got.json()) == shape(json.loads(capture.answer))


@needs_captures
@pytest.mark.parametrize("name", STREAMS)
async def test_streams(name: str, bench: Bench, autojump_clock: MockClock) -> None:
    capture = read(name)
    keyed = "authorization" in capture.headers
    client = bench.client(await bench.engine(max_model_len=2048, request_id_headers=keyed, decode_tps=1000.0))

    await client.request(capture.method, capture.path, capture.body, capture.headers)
    got = await client.answer()

    assert got.status == capture.status
    assert list(got.headers) == capture.answer_headers
    assert list(events(got.body.decode())) == list(events(capture.answer))


@needs_captures
@pytest.mark.parametrize("name", ["generate", "render-chat", "render-completions", "chat-request-id-headers"])
async def test_with_the_flags_of_the_second_server(name: str, bench: Bench, autojump_clock: MockClock) -> None:
    capture = read(name)
    options = {"request_id_headers": True, "prompt_tokens_details": True, "block_size": 32, "api_key": "sk-zoo"}
    client = bench.client(await bench.engine(max_model_len=2048, **options))

    await client.request(capture.method, capture.path, capture.body, capture.headers)
    got = await client.answer()

    assert list(got.headers) == capture.answer_headers
    expected = json.loads(capture.answer)
    if isinstance(expected, dict) and expected.get("metrics"):
        expected["metrics"] = None  # timings inside the answer are not simulated
    assert shape(got.json()) == shape(expected)


@needs_captures
async def test_generate_streams_token_ids(bench: Bench, autojump_clock: MockClock) -> None:
    capture = read("generate-stream")
    client = bench.client(await bench.engine(max_model_len=2048))

    await client.request(capture.method, capture.path, capture.body)
    got = await client.answer()

    assert list(events(got.body.decode())) == list(events(capture.answer))


@needs_captures
async def test_no_key(bench: Bench, autojump_clock: MockClock) -> None:
    capture = read("error-no-key")
    client = bench.client(await bench.engine(api_key="sk-zoo", request_id_headers=True))

    await client.request(capture.method, capture.path, capture.body, capture.headers)
    got = await client.answer()

    assert (got.status, got.body.decode(), list(got.headers)) == (
        401,
        capture.answer.strip(),
        capture.answer_headers,
    )


@needs_captures
async def test_a_prompt_beyond_the_context(bench: Bench, autojump_clock: MockClock) -> None:
    capture = read("error-context-too-long")
    client = bench.client(await bench.engine(max_model_len=2048))

    got = await client.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 3000}]})

    assert (got.status, got.body.decode()) == (400, capture.answer.strip())


@needs_captures
async def test_the_metrics_page(bench: Bench, autojump_clock: MockClock) -> None:
    """Every family that is simulated: help, type, label names and bucket bounds, in the same order."""
    engine = await bench.engine(max_model_len=2048, block_size=128, num_gpu_blocks=16384)
    client = bench.client(engine)
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        ("/v1/nope", {}),
    ):
        await client.ask(path, body)

    def families(page: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        name = ""
        for line in page.splitlines():
            if line.startswith("# HELP"):
                name = line.split(" ")[2]
                found[name] = []
            if line.startswith("#"):
                found[name].append(line)
            elif not name.startswith(("http_", "vllm:cache_config")):
                found[name].append(re.sub(r" [^ ]+$", "", line))
            elif 'handler="/v1/chat/completions"' in line or "{le=" in line:
                found[name].append(re.sub(r' [^ ]+$|status="...",?', "", line))
        return {name: list(dict.fromkeys(lines)) for name, lines in found.items()}

    theirs = families(read("metrics").answer)
    ours = families((await client.get("/metrics")).body.decode())

    assert set(ours) <= set(theirs)
    assert {name for name in theirs if name.startswith(("vllm:", "http_"))} == set(ours)
    assert [name for name in theirs if name in ours] == list(ours)
    for name, lines in ours.items():
        assert lines == theirs[name], name


async def test_echo_puts_the_prompt_first(bench: Bench, autojump_clock: MockClock) -> None:
    client = bench.client(await bench.engine())

    got = await client.ask("/v1/completions", {"prompt": "The gateway", "max_tokens": 2, "echo": True, "logprobs": 1})

    choice = got.json()["choices"][0]
    assert choice["text"].startswith("The gateway ")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == 5


async def test_embeddings_are_unit_vectors_and_the_same_for_the_same_text(
    bench: Bench, autojump_clock: MockClock
) -> None:
    one, two = bench.client(await bench.engine(seed=3)), bench.client(await bench.engine(seed=3))
    body = {"input": ["a b c", "d e f"], "dimensions": 16}

    first, second = (await one.ask("/v1/embeddings", body)).json(), (await two.ask("/v1/embeddings", body)).json()

    vectors = [item["embedding"] for item in first["data"]]
    assert vectors == [item["embedding"] for item in second["data"]]
    assert vectors[0] != vectors[1]
    assert sum(value * value for value in vectors[0]) == pytest.approx(1.0)
    assert first["usage"] == {
        "prompt_tokens": 6,
        "total_tokens": 6,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


async def test_a_stop_string_ends_the_answer(bench: Bench, autojump_clock: MockClock) -> None:
    engine = await bench.engine()
    client = bench.client(engine)
    body = {"prompt": "x", "max_tokens": 50}
    whole = (await client.ask("/v1/completions", body)).json()["choices"][0]["text"]
    word = whole.split()[4]
    engine._seen.clear()

    got = (await client.ask("/v1/completions", {**body, "stop": [word]})).json()["choices"][0]

    assert (got["finish_reason"], got["stop_reason"]) == ("stop", word)
    assert word not in got["text"]
    assert whole.startswith(got["text"])


async def test_tokens_come_back_as_text(bench: Bench, autojump_clock: MockClock) -> None:
    client = bench.client(await bench.engine())
    text = "The gateway routes 12 requests.\n  ¡Así!"

    tokens = (await client.ask("/tokenize", {"prompt": text})).json()["tokens"]
    back = (await client.ask("/detokenize", {"tokens": tokens})).json()["prompt"]

    assert back == text
