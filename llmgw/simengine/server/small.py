"""The routes that need no batch: tokens, rendering, embeddings' vectors, where KV events are published."""

from __future__ import annotations

import random
from base64 import b64encode
from math import sqrt
from struct import pack
from typing import TYPE_CHECKING, Any

import msgspec

from llmgw.simengine import wire
from llmgw.simengine.server.http import Connection, Request
from llmgw.simengine.wire import ApiError, Ask, Body

if TYPE_CHECKING:
    from llmgw.simengine.server.engine import Engine

DIMENSIONS = 384
"""Length of an embedding where the request does not say."""


def _body(engine: Engine, request: Request) -> Body:
    body = wire.decode(request.body, request.headers.get("content-type", "application/json"))
    wire.check_fields(request.path, body)
    wire.model_of(body, engine.options)
    return body


def tokenize(engine: Engine, request: Request, connection: Connection) -> None:
    body = _body(engine, request)
    if "messages" in body:
        prompts, _ = wire.chat_tokens(body["messages"], body.get("tools") or (), engine.tokenizer)
        tokens = prompts[0]
    elif isinstance(body.get("prompt"), str):
        tokens = engine.tokenizer.encode(body["prompt"])
    else:
        raise wire.schema_error(body, "missing", "prompt", "Field required")
    strings = None
    if body.get("return_token_strs"):
        strings = [
            engine.tokenizer.piece(token).replace(" ", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}") for token in tokens
        ]
    answer = {
        "count": len(tokens),
        "max_model_len": engine.options.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }
    engine.respond(connection, 200, msgspec.json.encode(answer))


def detokenize(engine: Engine, request: Request, connection: Connection) -> None:
    body = _body(engine, request)
    tokens = body["tokens"]
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise wire.schema_error(body, "list_type", "tokens", "Input should be a valid list", tokens)
    engine.respond(connection, 200, msgspec.json.encode({"prompt": engine.tokenizer.decode(tokens)}))


def count_tokens(engine: Engine, request: Request, connection: Connection) -> None:
    count = sum(map(len, engine.parse(request).prompts))
    answer = {"input_tokens": count, "context_management": {"original_input_tokens": count}}
    engine.respond(connection, 200, msgspec.json.encode(answer))


def kv_event_sources(engine: Engine, connection: Connection) -> None:
    sources: Body = {}
    if engine.options.kv_events:
        sources["0"] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": engine.options.kv_events,
            "replay_endpoint": None,
            "buffer_steps": 0,
            "hwm": 100000,
            "max_queue_size": 100000,
            "topic": "kv-events",
        }
    engine.respond(connection, 200, msgspec.json.encode(sources))


def render(engine: Engine, request: Request, connection: Connection) -> None:
    """What the engine would run, for a coordinator that plans with tokens."""
    if not engine.options.scale_out:
        raise ApiError(403, "PermissionDeniedError", "This endpoint needs --enable-scale-out.")
    ask = engine.parse(request)
    chat = request.path == wire.RENDER_CHAT
    prefix = "chatcmpl-" if chat else "cmpl-"
    name = request.headers.get("x-request-id") or ask.request_id or engine.unique()
    rendered = [
        {
            "request_id": prefix + name + (f"-{index}" if index else ""),
            "token_ids": prompt,
            "token_offsets": None,
            "features": _features(ask),
            "content_parts": None,
            "sampling_params": _sampling(ask),
            "model": ask.model,
            "reasoning_ended": None,
            "reasoning_parser_kwargs": None,
            "return_token_ids": None,
            "output_mode": "tokens",
            "stream": ask.stream,
            "stream_options": ask.body.get("stream_options"),
            "cache_salt": ask.body.get("cache_salt"),
            "priority": ask.priority,
            "kv_transfer_params": ask.kv,
            "ec_transfer_params": ask.ec,
        }
        for index, prompt in enumerate(ask.prompts)
    ]
    engine.respond(connection, 200, msgspec.json.encode(rendered[0] if chat else rendered))


def _features(ask: Ask) -> Body | None:
    if not ask.media:
        return None
    return {
        "mm_hashes": {"image": [content for _, _, content in ask.media]},
        "mm_placeholders": {"image": [{"offset": at, "length": size} for at, size, _ in ask.media]},
        "kwargs_data": {"image": [b64encode(content.encode()).decode() for _, _, content in ask.media]},
    }


def _sampling(ask: Ask) -> Body:
    body = ask.body
    given: Body = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
    }
    for name in given:
        if body.get(name) is not None:
            given[name] = float(body[name])
    given["stop"] = list(ask.stop)
    given["stop_token_ids"] = body.get("stop_token_ids") or []
    given["max_tokens"] = ask.room
    for name in ("min_tokens", "ignore_eos", "seed", "n"):
        if body.get(name):
            given[name] = body[name]
    return {**given, "output_kind": 2, "skip_clone": True, "bad_words": [], "skip_reading_prefix_cache": False}


def vectors(ask: Ask, rngs: list[random.Random]) -> list[Any]:
    """One unit vector a prompt, as floats or as base64 of little-endian 32-bit floats."""
    size = ask.body.get("dimensions") or DIMENSIONS
    found: list[Any] = []
    for rng in rngs:
        raw = [rng.gauss(0.0, 1.0) for _ in range(size)]
        length = sqrt(sum(value * value for value in raw))
        vector = [value / length for value in raw]
        if ask.body.get("encoding_format") == "base64":
            found.append(b64encode(pack(f"<{size}f", *vector)).decode())
        else:
            found.append(vector)
    return found
