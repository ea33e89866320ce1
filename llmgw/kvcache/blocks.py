"""A prompt as chained block hashes: equal leading blocks mean equal leading prompt.

Engines keep the KV cache of a prompt in blocks whose identity depends on all that came before. The gateway does the same
with bytes: the *canonical prompt* (what the engine's template will see, in its order) is cut into blocks of `BLOCK`
bytes, and the value of block *i* covers everything up to its end. Two requests share a prefix as long as their values do.

Canonical means: names in front (model, LoRA, cache_salt), then template, tools and system prompt, then messages with role
and text; text given as a string or as parts is the same text; `cache_control` markers, which move from turn to turn, are
left out; a picture or a sound counts by its identity (the hash of its URL or data), never by its length. Token-id prompts go by their
ids. Fields are taken from the parsed body, so nothing that stands *inside* a text is mistaken for one.

The value of a block is (CRC-32, Adler-32) of the whole canonical prompt up to its end: 64 bits, the same in every process,
at memory speed. It is a hint, not a proof: an equal value for different prompts costs a prefill, nothing else.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from zlib import adler32, crc32

import msgspec

BLOCK = 512  # bytes; about 128 tokens of English, so a match is known to within half of that
LIMIT = 2048  # blocks a prompt: the first 1 MiB (some 260k tokens) decides, the rest cannot change where it goes
MEDIA = (
    2 * BLOCK
)  # what one picture or sound weighs in the prompt: 256 tokens, what small vision models spend on a tile
MEDIA_SEEN = 1 << 19  # bytes hashed at either end of inline media; with its length that is its identity

DECODED = 4 << 20  # bytes of a conversation that are decoded (some 10 ms); a longer one is taken by its bytes

FIRST = (
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "tools",
    "functions",
    "documents",
    "system",
    "instructions",
)
"""Fields that the template puts in front of the conversation, in this order."""
THEN = ("messages", "input", "prompt", "prompt_embeds", "token_ids")
"""Fields that hold the conversation, or the prompt."""
FIELDS = (*FIRST, *THEN)

_TEXT = frozenset({"text", "input_text", "output_text"})
_MEDIA = frozenset(
    {
        "image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "video", "input_file", "file",
        "document", "image_embeds",
    }
)  # fmt: skip
_CACHE_CONTROL = re.compile(
    rb',\s*"cache_control"\s*:\s*(?:\{[^{}]*\}|null)|"cache_control"\s*:\s*(?:\{[^{}]*\}|null)\s*,?'
)


class _Plain(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """What most messages are; anything more is decoded again as `_Message`."""

    role: str
    content: str


class _Message(msgspec.Struct, gc=False):
    role: str = ""
    content: str | list[msgspec.Raw] | None = None
    name: msgspec.Raw = msgspec.Raw()
    tool_calls: msgspec.Raw = msgspec.Raw()
    tool_call_id: msgspec.Raw = msgspec.Raw()
    reasoning_content: msgspec.Raw = msgspec.Raw()
    type: str = ""  # items of the Responses API: "function_call", …
    call_id: msgspec.Raw = msgspec.Raw()
    arguments: msgspec.Raw = msgspec.Raw()
    output: msgspec.Raw = msgspec.Raw()


class _Part(msgspec.Struct, gc=False):
    type: str = ""
    text: str = ""
    content: str | list[msgspec.Raw] | None = None  # of an Anthropic tool_result


_plain_messages = msgspec.json.Decoder(list[_Plain])
_messages = msgspec.json.Decoder(list[_Message])
_part = msgspec.json.Decoder(_Part)
_parts = msgspec.json.Decoder(list[msgspec.Raw])
_string = msgspec.json.Decoder(str)


def blocks(
    fields: Mapping[str, bytes | memoryview | msgspec.Raw], names: str = "", limit: int = LIMIT
) -> tuple[int, ...]:
    """Chained values of the full blocks of a prompt, oldest first; () for a prompt shorter than a block.

    *fields*: raw JSON of those of `FIELDS` that the body has. *names*: whatever else separates caches (model, LoRA).
    Never raises: a field that is not of the expected shape is taken by its bytes.
    """
    room = limit * BLOCK
    pieces: list[bytes] = []
    for field in FIRST:
        if raw := fields.get(field):
            pieces.append(b"\x1c" + field.encode() + b"\x1d")
            if field in ("system", "instructions"):
                _content(bytes(raw), pieces)
            else:
                pieces.append(_plain(bytes(raw)))
    for field in THEN:
        if raw := fields.get(field):
            if field in ("messages", "input"):
                _conversation(raw, pieces, room)
            else:
                pieces.append(b"\x1c" + bytes(raw))
    return chain(b"".join(pieces), BLOCK, seed(names), limit)


class _Body(msgspec.Struct, gc=False):
    cache_salt: msgspec.Raw = msgspec.Raw()
    chat_template: msgspec.Raw = msgspec.Raw()
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    functions: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    prompt_embeds: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()


_body = msgspec.json.Decoder(_Body)


def of_body(body: bytes, names: str = "", limit: int = LIMIT) -> tuple[int, ...]:
    """As `blocks`, from a whole body; () for what is no JSON object."""
    if len(body) < BLOCK:
        return ()
    try:
        found = _body.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return ()
    return blocks({field: raw for field in FIELDS if (raw := getattr(found, field))}, names, limit)


class _Ids(msgspec.Struct, gc=False):
    prompt: list[int] = []
    token_ids: list[int] = []


_ids = msgspec.json.Decoder(_Ids)


def ids_of_body(body: bytes) -> tuple[int, ...]:
    """The token ids of a prompt that came as one list of them; () for any other."""
    try:
        found = _ids.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return ()
    return tuple(found.token_ids or found.prompt)


def of_spans(
    body: bytes | bytearray, spans: Iterable[tuple[str, int, int]], names: str = "", limit: int = LIMIT
) -> tuple[int, ...]:
    """As `blocks`, from a long body whose top level is known: *spans* are (key, begin and end of its value)."""
    view = memoryview(body)
    fields = {key: bytes(view[at : min(end, at + DECODED + 1)]) for key, at, end in spans if key in FIELDS}
    view.release()
    return blocks(fields, names, limit)


def seed(names: str) -> int:
    """Where a chain starts that shares no block with the chains of other *names*."""
    start = names.encode()
    return crc32(start) << 32 | adler32(start)


def chain(data: bytes, size: int, start: int, limit: int = LIMIT) -> tuple[int, ...]:
    """Values of the full blocks of *size* bytes; *start* is `seed(…)` or the value of the block before *data*."""
    crc, adler = start >> 32, start & 0xFFFFFFFF
    found = []
    for at in range(0, min(len(data) // size, limit) * size, size):
        block = data[at : at + size]
        crc = crc32(block, crc)
        adler = adler32(block, adler)
        found.append(crc << 32 | adler)
    return tuple(found)


WORD = 4  # bytes a token id in `words`


def words(ids: Sequence[int]) -> bytes:
    """Token ids as bytes to chain over. Raises OverflowError or TypeError for ids that are not 0 … 2³²−1."""
    found = array("I", ids)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()


def token_blocks(ids: Sequence[int], size: int, start: int, limit: int = LIMIT) -> tuple[int, ...]:
    """Values of the full blocks of *size* tokens. Raises as `words` does."""
    return chain(words(ids[: size * limit]), size * WORD, start, limit)


def _conversation(raw: bytes | memoryview | msgspec.Raw, pieces: list[bytes], room: int) -> None:
    """Role and content of every message; stops once *room* bytes are full, since the rest has no block."""
    if len(raw) > DECODED:
        pieces.append(b"\x1c" + bytes(memoryview(raw)[:room]))
        return
    try:
        for plain in _plain_messages.decode(raw):
            pieces.append(f"\x1e{plain.role}\x1f{plain.content}".encode())
        return
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        messages = _messages.decode(raw)
    except (msgspec.MsgspecError, RecursionError):  # a string, token ids, or none of our shapes
        pieces.append(b"\x1c" + bytes(raw))
        return
    for message in messages:
        pieces.append(f"\x1e{message.role or message.type}\x1f".encode())
        content = message.content
        if isinstance(content, str):
            pieces.append(content.encode())
            room -= len(content)
        elif content:
            room -= _add_parts(content, pieces)
        for extra in (
            message.name,
            message.tool_calls,
            message.tool_call_id,
            message.reasoning_content,
            message.call_id,
            message.arguments,
            message.output,
        ):
            if extra:
                pieces.append(b"\x1f" + _plain(bytes(extra)))
                room -= len(pieces[-1])
        if room <= 0:
            return


def _content(raw: bytes, pieces: list[bytes]) -> None:
    """A system prompt: a string, or a list of parts."""
    try:
        if raw.startswith(b'"'):
            pieces.append(_string.decode(raw).encode())
        else:
            _add_parts(_parts.decode(raw), pieces)
    except (msgspec.MsgspecError, RecursionError):
        pieces.append(raw)


def _add_parts(parts: Iterable[msgspec.Raw], pieces: list[bytes]) -> int:
    """Append the parts of one content; returns the bytes added."""
    added = 0
    for raw in parts:
        try:
            part = _part.decode(raw)
        except (msgspec.MsgspecError, RecursionError):
            piece = bytes(raw)
        else:
            if part.type in _TEXT:
                piece = part.text.encode()
            elif part.type in _MEDIA:
                piece = _identity(raw)
            elif part.type == "tool_result" and isinstance(part.content, list):
                pieces.append(b"\x1ftool_result\x1f")
                added += _add_parts(part.content, pieces)
                continue
            else:
                piece = _plain(bytes(raw))
        pieces.append(piece)
        added += len(piece)
    return added


def _identity(raw: msgspec.Raw) -> bytes:
    """Stands for one picture, video, sound or file: equal if and only if its URL or data are, `MEDIA` bytes long."""
    data = bytes(raw)
    if len(data) > 2 * MEDIA_SEEN:
        data = data[:MEDIA_SEEN] + data[-MEDIA_SEEN:]
    data = _plain(data)
    mark = b"%016x%016x" % (crc32(data) << 32 | adler32(data), len(raw))
    return mark * (MEDIA // len(mark))


def _plain(raw: bytes) -> bytes:
    """JSON without its `cache_control` markers (inside a string the quotes are escaped and do not match)."""
    return _CACHE_CONTROL.sub(b"", raw) if b'"cache_control"' in raw else raw
