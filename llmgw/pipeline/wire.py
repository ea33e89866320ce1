"""The bodies of legs: which format goes where, and where each field stands in it.

Three formats. *chat* and *completions* are OpenAI's, with transfer parameters at the top level. *generate* is the
engine's own: tokens in, sampling parameters nested. Engines of different age read transfer parameters of generate in
different places (older ones only in ``sampling_params.extra_args``, newer ones at the top level), so they stand in both.

A body is a plain dict. Integers of any size survive it; strings that hold megabytes of media are carried as `Blob`
(JSON text as it was received), so that neither reading nor writing a body copies them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from llmgw.errors import Refused
from llmgw.pipeline.commands import Body
from llmgw.pipeline.context import CHAT, COMPLETIONS, GENERATE, Context, Entry
from llmgw.request import Refusal

Format = Literal["chat", "completions", "generate"]

PATHS: dict[Format, str] = {"chat": CHAT, "completions": COMPLETIONS, "generate": GENERATE}

BLOB = 64 << 10
"""Bytes from which a data URI is kept out of the parser: below it, a copy costs less than the bookkeeping."""

TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")
_AIMING = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_NESTED = ("extra_args", "vllm_xargs")


def refuse(reason: str, message: str, param: str | None = None) -> Refused:
    """The exception that ends a request as the client's fault."""
    return Refused(Refusal(reason=reason, message=message, param=param))


def leg_format(path: str, use_openai_format: bool) -> Format:
    """How the encode and prefill legs of a request on *path* are written."""
    if path == COMPLETIONS:
        return "completions"
    return "chat" if path == CHAT and use_openai_format else "generate"


def client_format(path: str) -> Format:
    """How the legs that go to the client's own path are written: by that path, whatever the other legs use."""
    return {CHAT: "chat", COMPLETIONS: "completions"}.get(path, "generate")  # type: ignore[return-value]


# Reading and writing


def parse(raw: bytes | bytearray) -> Body:
    """The JSON object in *raw*, with long data URIs as `Blob`. Raises Refused(bad_json)."""
    blobs: list[memoryview] = []
    text: bytes | bytearray = raw
    mark = b"data:,blob-"
    if len(raw) > BLOB:
        text, blobs, mark = _take_blobs(raw)
    try:
        body = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise refuse("bad_json", f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise refuse("bad_json", "the body is not a JSON object")
    if blobs:
        _put_blobs(body, mark.decode(), blobs)
    return body


class Blob:
    """A long string as JSON text, quotes included. A view: whoever holds it keeps the bytes that it came in."""

    __slots__ = ("literal",)

    def __init__(self, literal: memoryview | bytes) -> None:
        self.literal = literal


Parts = tuple[bytes | memoryview, ...]
"""A body in pieces, to be sent one after the other."""


def encode_parts(body: Body) -> Parts:
    """*body* as JSON in pieces, of which blobs are not copied."""
    attempt = 0
    while True:
        mark = b"blob-%d-" % attempt
        blobs: list[Blob] = []

        def hook(value: object, mark: bytes = mark, blobs: list[Blob] = blobs) -> object:
            if not isinstance(value, Blob):
                raise NotImplementedError(f"{type(value).__name__} has no JSON form")
            blobs.append(value)
            return msgspec.Raw(b'"' + mark + b'"')

        text = msgspec.json.encode(body, enc_hook=hook)
        if not blobs:
            return (text,)
        pieces = text.split(b'"' + mark + b'"')
        if len(pieces) == len(blobs) + 1:  # else a string of the client's is the very mark: take another
            found: list[bytes | memoryview] = [pieces[0]]
            for blob, piece in zip(blobs, pieces[1:], strict=True):
                found += (blob.literal, piece)
            return tuple(found)
        attempt += 1


def encode(body: Body) -> bytes:
    """*body* as JSON in one piece."""
    return b"".join(encode_parts(body))


def _take_blobs(raw: bytes | bytearray) -> tuple[bytes | bytearray, list[memoryview], bytes]:
    """*raw* with every long data URI replaced by a short one, and the literals taken out.

    A quote that no backslash precedes begins or ends a string, and `data:` cannot follow the end of one, so what is
    found is a string's beginning. Literals with an escape or outside ASCII stay where they are.
    """
    view = memoryview(raw)
    ascii_only = raw.isascii()
    found: list[tuple[int, int]] = []
    at = raw.find(b'"data:')
    while at >= 0:
        end = raw.find(b'"', at + 6)
        if end < 0:
            break
        if (
            end - at >= BLOB
            and raw[at - 1 : at] != b"\\"
            and raw.find(b"\\", at, end) < 0
            and (ascii_only or bytes(view[at:end]).isascii())
        ):
            found.append((at, end + 1))
        at = raw.find(b'"data:', end)
    attempt = 0
    while True:
        mark = b"data:,blob-%d-" % attempt
        short = bytearray()
        last = 0
        for index, (start, stop) in enumerate(found):
            short += view[last:start]
            short += b'"%s%d"' % (mark, index)
            last = stop
        short += view[last:]
        if short.count(mark) == len(found):  # else the client wrote the very mark: take another
            return short, [view[start:stop] for start, stop in found], mark
        attempt += 1


def _put_blobs(body: Body, mark: str, blobs: list[memoryview]) -> None:
    """Put the literals back, as raw JSON."""
    todo: list[Any] = [body]
    while todo:
        node = todo.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            if isinstance(value, str):
                if value.startswith(mark):
                    node[key] = Blob(blobs[int(value[len(mark) :])])
            elif isinstance(value, (dict, list)):
                todo.append(value)


def text_head(value: object, most: int = 256) -> str | None:
    """The first *most* characters of a string, whether parsed or raw; None for anything else."""
    if isinstance(value, str):
        return value[:most]
    if isinstance(value, Blob):
        head = bytes(value.literal[: most + 1])
        return head[1:].split(b'"', 1)[0].decode("ascii", "replace") if head[:1] == b'"' else None
    return None


# Fields of a client that aim a worker


def strip_transfer_fields(body: Body) -> tuple[str, ...]:
    """Remove from *body*, in place, what only llmgw may say to an engine. Returns what was there, as dotted paths.

    Fields that name hosts, ports and ranks: an outside client could make a worker pull from, or push to, any host.
    Other keys of ``extra_args`` are the client's own and stay.
    """
    removed = _strip(body, "")
    sampling = body.get("sampling_params")
    places = [("", body)]
    if isinstance(sampling, dict):
        removed += _strip(sampling, "sampling_params.")
        places.append(("sampling_params.", sampling))
    for prefix, place in places:
        for nested in _NESTED:
            inner = place.get(nested)
            if isinstance(inner, dict):
                removed += _strip(inner, f"{prefix}{nested}.")
    return tuple(removed)


def _strip(place: Body, prefix: str) -> list[str]:
    found = [key for key in place if key in TRANSFER_FIELDS or key in _AIMING or key.endswith("dp_rank")]
    found += [key for key in place if key == "data_parallel_rank"]
    for key in found:
        del place[key]
    return [prefix + key for key in found]


# Pieces of a leg


def cap_to_one_token(body: Body, fmt: Format) -> None:
    """Make *body* (a leg's own copy) generate one token, at once, whatever the client asked for.

    ``min_tokens`` would contradict it, ``stream_options`` without a stream is refused by engines, and each of *n*
    choices would prefill and pin the same blocks again.
    """
    if fmt == "generate":
        target = body["sampling_params"] = dict(body.get("sampling_params") or {})
    else:
        target = body
    target["max_tokens"] = 1
    target.pop("min_tokens", None)
    for key in ("n", "best_of"):
        if key in target:
            target[key] = 1
    target.pop("use_beam_search", None)
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    body["stream"] = False
    body.pop("stream_options", None)


def features(entries: list[Entry], *, kwargs: bool) -> dict[str, Any]:
    """Hashes and placeholders of the images; with *kwargs* also the tensors (null = the engine's cache has it)."""
    made: dict[str, Any] = {
        "mm_hashes": {"image": [entry.hash for entry in entries]},
        "mm_placeholders": {"image": [{"offset": entry.offset, "length": entry.length} for entry in entries]},
    }
    if kwargs:
        made["kwargs_data"] = {"image": [entry.kwargs for entry in entries]}
    return made


def tokens_object(token_ids: list[int] | None, entries: list[Entry]) -> dict[str, Any]:
    """``tokens`` of a chat leg: what the picker and the engine would otherwise have to tokenise again."""
    made: dict[str, Any] = {"token_ids": token_ids}
    if entries:
        made["features"] = features(entries, kwargs=False)
    return made


def put_params(body: Body, fmt: Format, name: str, params: Any) -> None:
    """Write transfer parameters *name* where engines read them in *fmt*. *body* is a leg's own copy."""
    body[name] = params
    if fmt == "generate":
        sampling = body["sampling_params"] = dict(body.get("sampling_params") or {})
        sampling["extra_args"] = {**(sampling.get("extra_args") or {}), name: params}


def image_parts(body: Body) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every ``image_url`` part of the messages with its index, well-formed or not, in order."""
    index = 0
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == "image_url":
                yield index, part
                index += 1


def with_image_parts(body: Body, change: dict[int, dict[str, Any]]) -> Body:
    """A copy of *body* in which the ``image_url`` parts of these indexes are replaced; the rest is shared."""
    if not change:
        return dict(body)
    index = -1
    messages = []
    for message in body["messages"]:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            messages.append(message)
            continue
        parts = []
        for part in content:
            if isinstance(part, dict) and part.get("type") == "image_url":
                index += 1
                parts.append(change.get(index, part))
            else:
                parts.append(part)
        messages.append({**message, "content": parts})
    return {**body, "messages": messages}


def token_list(value: object, param: str, most: int = 0) -> list[int]:
    """*value* as token ids. Raises Refused: not a list of non-negative integers, or longer than *most* (0 = any)."""
    if not isinstance(value, list):
        raise refuse("bad_field", f"{param} is not an array of token ids", param)
    if most and len(value) > most:
        raise refuse("bad_field", f"{param} holds {len(value)} tokens; at most {most} are allowed", param)
    for token in value:
        if type(token) is not int or not 0 <= token < 1 << 63:
            raise refuse("bad_field", f"{param} holds {token!r}, which is not a token id", param)
    return value


def carried(body: Body) -> Body:
    """What a leg that is written anew must take over from the client: it changes which blocks the prompt hashes to."""
    return {key: body[key] for key in ("cache_salt", "priority", "lora_request") if key in body}


def prompt_needs_one_engine(ctx: Context) -> str:
    """Why this request must not be split over two engines; "" = it may.

    Log probabilities of the prompt exist only where it was prefilled, and asking a decode engine for them has crashed
    engines that pulled the blocks.
    """
    place = ctx.body.get("sampling_params") if ctx.path == GENERATE else ctx.body
    if not isinstance(place, dict):
        return ""
    if place.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    return "echo" if place.get("echo") else ""
