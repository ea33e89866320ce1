"""The bodies of the three kinds of leg, made from what is known of the request."""

from __future__ import annotations

from typing import Any

from llmgw.pipeline.commands import Body, Call
from llmgw.pipeline.context import GENERATE, Context, Entry
from llmgw.pipeline.step import KvConnector
from llmgw.pipeline.wire import (
    Format,
    cap_to_one_token,
    carried,
    client_format,
    features,
    image_parts,
    put_params,
    tokens_object,
    with_image_parts,
)

BEGIN_OF_SEQUENCE = 1
"""Stands for the first token where nothing was rendered; an encoder only needs a prompt of the right length."""


def encode_body(ctx: Context, entry: Entry, fmt: Format) -> Body:
    """One image alone: its placeholder tokens behind the prompt's first token."""
    ids = ctx.token_ids or []
    filler = ids[entry.offset] if entry.offset < len(ids) else 0
    alone = Entry(entry.part, hash=entry.hash, kwargs=entry.kwargs, offset=1, length=entry.length)
    tokens = [ids[0] if ids else BEGIN_OF_SEQUENCE, *[filler] * entry.length]
    if fmt == "generate":
        body: Body = {"model": ctx.model, "token_ids": tokens, "features": features([alone], kwargs=True)}
    else:
        part = next((part for index, part in image_parts(ctx.body) if index == entry.part), {})
        image = part.get("image_url")
        content: dict[str, Any] = {"type": "image_url", "image_url": image if isinstance(image, dict) else {"url": ""}}
        if part.get("uuid") == entry.hash:  # the tokeniser keys this image by the client's name: so must the encoder
            content["uuid"] = entry.hash
        body = {
            "model": ctx.model,
            "messages": [{"role": "user", "content": [content]}],
            "tokens": tokens_object(tokens, [alone]),
        }
    cap_to_one_token(body, fmt)
    return body


def prefill_body(ctx: Context, fmt: Format, kv: KvConnector, ec_params: dict[str, Any]) -> Body:
    """The whole prompt, for one token."""
    if fmt == "chat":
        body = {**ctx.body, "tokens": tokens_object(ctx.token_ids, ctx.entries)}
    else:
        body = {"request_id": ctx.request_id, "model": ctx.model, **carried(ctx.body)}
        if fmt == "completions":
            body["prompt"] = ctx.body.get("prompt") if ctx.token_ids is None else ctx.token_ids
        else:
            body["token_ids"] = ctx.body.get("token_ids") if ctx.token_ids is None else ctx.token_ids
        if ctx.entries:
            body["features"] = _prefill_features(ctx)
        elif ctx.token_ids is None and ctx.path == GENERATE and "features" in ctx.body:
            body["features"] = ctx.body["features"]  # nothing was checked: as the client says
    kv.prefill(ctx, body, fmt)
    if ec_params:
        put_params(body, fmt, "ec_transfer_params", ec_params)
    cap_to_one_token(body, fmt)
    return body


def _prefill_features(ctx: Context) -> dict[str, Any]:
    """The images as entries; on the tokens-in route beside whatever else the client gave (sounds, metadata)."""
    made = features(ctx.entries, kwargs=True)
    told = ctx.body.get("features") if ctx.path == GENERATE else None
    if isinstance(told, dict):
        for key, value in told.items():
            mine = made.get(key)
            made[key] = {**value, **mine} if isinstance(mine, dict) and isinstance(value, dict) else mine or value
    return made


def tokens_into(ctx: Context, body: Body) -> None:
    """What a leg on the client's own path gets instead of having to tokenise: `tokens`, or the prompt as ids."""
    fmt = client_format(ctx.path)
    if fmt == "chat":
        body["tokens"] = tokens_object(ctx.token_ids, ctx.entries)
    elif fmt == "completions" and ctx.token_ids:
        body["prompt"] = ctx.token_ids


def decode_body(ctx: Context, kv: KvConnector | None) -> Body:
    """The client's own request, its limits and sampling intact; with *kv*, told where the blocks are."""
    by_part = {entry.part: entry.hash for entry in ctx.entries if entry.part >= 0 and entry.hash}
    body = with_image_parts(
        ctx.body,
        {index: {**part, "uuid": by_part[index]} for index, part in image_parts(ctx.body) if index in by_part},
    )
    if ctx.token_ids is not None or kv is not None:
        tokens_into(ctx, body)
    if kv is not None:
        kv.decode(ctx, body, client_format(ctx.path))
    return body


def release_call(ctx: Context, kv: KvConnector) -> Call:
    """A decode leg for one token: fetching the blocks is what makes the prefill engine let go of them."""
    body = decode_body(ctx, kv)
    cap_to_one_token(body, client_format(ctx.path))
    decode = ctx.chosen.decode if ctx.chosen is not None else None
    return Call(
        leg=ctx.leg("release"),
        step="release",
        phase="decode",
        path=ctx.path,
        endpoint=decode.id if decode is not None else "",
        body=body,
    )
