"""The official OpenAI SDK, unchanged, against the gateway."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from tests.sdk.place import MODEL, Place

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me about routers."}]
TOOL: openai.types.chat.ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 8}},
            "required": ["word"],
        },
    },
}
SECONDS = 120.0


@pytest.fixture(name="client")
def _client(there: Place) -> openai.OpenAI:
    return openai.OpenAI(base_url=there.gateway + "/v1", api_key="none", max_retries=0, timeout=SECONDS)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_raw_response(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.status_code == 200
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().id


@pytest.mark.parametrize("usage", [False, True])
def test_stream(client: openai.OpenAI, usage: bool) -> None:
    options: openai.types.chat.ChatCompletionStreamOptionsParam = {"include_usage": usage}
    text, last = "", None
    for chunk in client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=12, stream=True, stream_options=options
    ):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        last = chunk
    assert text
    assert last is not None
    assert (last.usage is not None) == usage
    if last.usage is not None:
        assert last.usage.completion_tokens == 12


def test_async_many_streams(there: Place) -> None:
    asyncio.run(_many_streams(there))  # its SDK leaves generators to be collected, which trio reports


async def _many_streams(there: Place) -> None:
    async with openai.AsyncOpenAI(base_url=there.gateway + "/v1", api_key="none", timeout=SECONDS) as client:

        async def one() -> list[openai.types.chat.ChatCompletionChunk]:
            stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6, stream=True)
            return [chunk async for chunk in stream]

        done = await asyncio.gather(*(one() for _ in range(12)))
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6)
        assert answer.choices
    assert all(any(c.choices and c.choices[0].finish_reason for c in chunks) for chunks in done)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool(there: Place, client: openai.OpenAI, stream: bool) -> None:
    there.needs("tools")
    known = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "max_tokens": 40}
    choice = {"type": "function", "function": {"name": "lookup"}}
    if stream:
        name, arguments = "", ""
        for chunk in client.chat.completions.create(**known, tool_choice=choice, stream=True):  # type: ignore[call-overload]
            for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    else:
        (call,) = client.chat.completions.create(**known, tool_choice=choice).choices[0].message.tool_calls  # type: ignore[call-overload]
        name, arguments = call.function.name, call.function.arguments
    assert name == "lookup"
    assert arguments


def test_models_and_completions(there: Place, client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL
    there.needs("completions")
    assert client.completions.create(model=MODEL, prompt="Once", max_tokens=3).usage is not None


def test_embeddings(there: Place, client: openai.OpenAI) -> None:
    there.needs("embeddings")
    answer = client.embeddings.create(model=MODEL, input=["a", "b"])
    assert len(answer.data) == 2
    assert answer.data[0].embedding


def test_responses(there: Place, client: openai.OpenAI) -> None:
    there.needs("responses")
    answer = client.responses.create(model=MODEL, input="Hello", max_output_tokens=16)
    assert answer.id.startswith("resp")
    kinds = [e.type for e in client.responses.create(model=MODEL, input="Hi", max_output_tokens=16, stream=True)]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_stored_responses(there: Place, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.retrieve("resp_unknown")
    assert unknown.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as lost:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_unknown")
    assert lost.value.param == "previous_response_id"
    there.needs("stored")
    answer = client.responses.create(model=MODEL, input="Hello", max_output_tokens=16)
    assert client.responses.retrieve(answer.id).id == answer.id
    again = client.responses.create(model=MODEL, input="More", previous_response_id=answer.id, max_output_tokens=16)
    assert again.previous_response_id == answer.id


def test_error_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, n="x")  # type: ignore[call-overload]
    assert bad.value.code == "bad_field"
    with pytest.raises(openai.BadRequestError) as forbidden:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"kv_transfer_params": {}})
    assert forbidden.value.code == "forbidden_field"
    with pytest.raises(openai.NotFoundError):
        client.files.list()
    with pytest.raises(openai.BadRequestError):  # the engine's own refusal, passed on
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=-5)


def test_hanging_up_stops_the_engine(there: Place, client: openai.OpenAI) -> None:
    there.wait_running(0, 60)
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1500, stream=True)
    chunks = iter(stream)
    for _ in range(3):
        next(chunks)
    assert there.running() == 1
    stream.close()
    there.wait_running(0, 10)
    lines = [json.loads(line) for line in there.log.read_text().splitlines() if '"client_gone"' in line]
    assert lines[-1]["status"] == 499
