"""What routing must know of a request's body, read once; the body itself is never changed or decoded here.

msgspec reads the few routed fields into a struct. It takes the last of two equal keys silently and understands
escaped keys (``"mod\\u0065l"``), and an engine's parser may take the first: so where the bytes outside the prompt
leave any doubt that a routed key occurs exactly once, the top level is scanned exactly (`llmgw.openai.layout`), and a
duplicate is refused.

A body longer than `WHOLE` is laid out in steps from the start, and only its short fields are decoded; the prompt of
64 MiB stays where it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from llmgw.openai import multipart
from llmgw.openai.layout import STEP, Layout, Malformed, drain, layout, steps
from llmgw.openai.routes import GENERATING, Route, Shape
from llmgw.request import Refusal

AT_ONCE = 128 << 10
"""Bytes of a body that `peek` may be given: 10 ms if every byte is a bracket and the keys are in doubt, else below 1."""

WHOLE = 1 << 20
"""Bytes that msgspec gets in one piece: 5 ms if every byte is a bracket, usually below 2 [measured]."""

SHORT = 64 << 10
"""Bytes that the value of a routed field may have where the layout is needed; the prompt is not one of them."""

BULK = 256
"""Bytes of a prompt above which taking it out is cheaper than searching it."""

MODEL_LENGTH = 512
"""Characters of a model's name; the longest in use (LoRA paths) have some 200."""

MEDIA_TOKENS = 576
"""Prompt tokens that one image, video or sound is taken for: a 336-pixel image of the LLaVA family. An estimate."""

NAME = 64
"""Bytes behind a window in which a name with its value's beginning may end."""

BYTES_A_TOKEN = 4
"""English prose in today's vocabularies; code and other languages are denser, so estimates are corrected by usage."""


class Peek(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What routing and admission know of the body."""

    model: str
    stream: bool = False
    n: int = 1
    max_tokens: int | None = None  # max_completion_tokens wins; None = not said, or "no limit" (negative)
    include_usage: bool = False  # the client asked for a usage event itself
    prompt_tokens: int = 0  # an estimate, unless `token_ids`
    token_ids: bool = False  # the prompt came as token ids and was counted
    media: int = 0  # images, videos, sounds
    fetches: bool = False  # some of these are URLs that somebody must fetch, or cannot be told from such
    layout: Layout | None = None  # of a long body, so that `rewrite` need not look again
    previous: str = ""  # id of the earlier answer that this one continues
    model_at: tuple[int, int] | None = None  # of a form: where the model's name stands


_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)] | None | UnsetType
_Limit = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None | UnsetType


class _StreamOptions(msgspec.Struct, gc=False):
    include_usage: bool | UnsetType | None = UNSET


class _Body(msgspec.Struct, gc=False):
    """Fields of every shape. UNSET = the key does not occur, so nothing needs to be proven about it."""

    model: str | UnsetType = UNSET
    stream: bool | UnsetType | None = UNSET
    n: _Count = UNSET
    max_tokens: _Limit = UNSET
    max_completion_tokens: _Limit = UNSET
    stream_options: _StreamOptions | UnsetType | None = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET
    ec_transfer_params: Raw | UnsetType = UNSET
    data_parallel_rank: Raw | UnsetType = UNSET
    priority: Raw | UnsetType = UNSET
    sampling_params: Raw | UnsetType = UNSET
    vllm_xargs: Raw | UnsetType = UNSET


class _Chat(_Body, gc=False):
    messages: Raw | UnsetType = UNSET


class _Completions(_Body, gc=False):
    prompt: Raw | UnsetType = UNSET


class _Generate(_Body, gc=False):
    token_ids: Raw | UnsetType = UNSET


class _Responses(_Body, gc=False):
    input: Raw | UnsetType = UNSET
    max_output_tokens: _Limit = UNSET
    previous_response_id: str | UnsetType | None = UNSET


class _Input(_Body, gc=False):
    input: Raw | UnsetType = UNSET


class _Rerank(_Body, gc=False):
    documents: Raw | UnsetType = UNSET


class _Score(_Body, gc=False):
    text_2: Raw | UnsetType = UNSET


class _Detokenize(_Body, gc=False):
    tokens: Raw | UnsetType = UNSET


class _Row(msgspec.Struct, frozen=True):
    """How one shape is read. *prompt* is the field with the bulk, whose text is never searched for keys."""

    decode: Callable[[bytes], Any]
    prompt: str
    quoted: bytes
    routed: frozenset[str]
    own: tuple[tuple[str, bytes], ...]  # short fields that this shape alone has, with their quotes
    generates: bool  # its answer is made token by token
    names: bool  # it must name a model; else the gateway takes the only one that there is


def _row(body: type[_Body], prompt: str, *, generates: bool = False, names: bool = True) -> _Row:
    own = set(body.__struct_fields__) - set(_Body.__struct_fields__) - {prompt}
    return _Row(
        msgspec.json.Decoder(body).decode,
        prompt,
        _quoted(prompt),
        frozenset(body.__struct_fields__),
        tuple((name, _quoted(name)) for name in sorted(own)),
        generates,
        names,
    )


def _quoted(name: str) -> bytes:
    return b'"' + name.encode() + b'"'


SHAPES: dict[Shape, _Row] = {
    "chat": _row(_Chat, "messages", generates=True),
    "completions": _row(_Completions, "prompt", generates=True),
    "generate": _row(_Generate, "token_ids", generates=True),
    "responses": _row(_Responses, "input", generates=True),
    "messages": _row(_Chat, "messages", generates=True),
    "count": _row(_Chat, "messages"),
    "input": _row(_Input, "input"),
    "speech": _row(_Input, "input"),
    "rerank": _row(_Rerank, "documents"),
    "score": _row(_Score, "text_2"),
    "tokenize": _row(_Completions, "prompt", names=False),
    "detokenize": _row(_Detokenize, "tokens", names=False),
    "media": _row(_Completions, "prompt"),
}
assert {shape for shape, row in SHAPES.items() if row.generates} == GENERATING

FORBIDDEN = ("kv_transfer_params", "ec_transfer_params", "data_parallel_rank", "priority")
FORBIDDEN_INSIDE = {
    "sampling_params": ("extra_args",),
    "vllm_xargs": ("kv_transfer_params", "ec_transfer_params"),  # vLLM merges it into the engine's extra_args
}

_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_FETCHED = re.compile(rb'"(?:image_|video_|audio_|file_)?url"[ \t\r\n]{0,8}:[ \t\r\n]{0,8}"(?!data:)')
_SPELLED = re.compile(rb'\\u[0-9a-fA-F]{4}[^"\\]{0,16}"[ \t\r\n]{0,8}:')
_MEDIA = (b'"image_url":', b'"video_url":', b'"audio_url":', b'"input_audio":')
_DATA = re.compile(rb'"data(?::|"[ \t\r\n]*:[ \t\r\n]*")')
_TOKEN_IDS = re.compile(rb"\[[ \t\r\n]*(?:\[[ \t\r\n]*)?[0-9]")
_ID_BYTES = b"0123456789,[] \t\r\n"
_WHERE = re.compile(r" - at `\$\.?(.*)`$")


class Allow(msgspec.Struct, frozen=True, gc=False):
    """What passes that is refused otherwise. *transfer*: fields that aim an engine, since a pipeline takes them out
    (and sends what names no model where its gateway decides)."""

    priority: bool = False
    transfer: bool = False


NOTHING = Allow()


def peek(route: Route, body: bytes, *, allow: Allow = NOTHING) -> Peek | Refusal:
    """Read *body* in one go: for bodies of up to `AT_ONCE` bytes; longer ones belong to `peek_steps`."""
    answer = _quick(SHAPES[route.shape], body, allow) if len(body) <= WHOLE else None
    if answer is not None:
        return answer
    return drain(_exact(SHAPES[route.shape], body, allow))


def peek_steps(
    route: Route, body: bytes | bytearray, *, allow: Allow = NOTHING
) -> Generator[None, None, Peek | Refusal]:
    """The same for a body of any length, yielding every few hundred microseconds (10 ms at worst).

    What is inside the prompt of a body longer than `WHOLE` is not validated here; the engine does that.
    """
    answer = _quick(SHAPES[route.shape], bytes(body), allow) if len(body) <= WHOLE else None
    if answer is None:
        answer = yield from _exact(SHAPES[route.shape], body, allow)
    return answer


_ROUTED_PARTS = frozenset(("model", "stream", "n"))
_TRUE = frozenset((b"true", b"1", b"on", b"yes", b"t", b"y"))  # as pydantic reads a form


def peek_form(
    body: bytes | bytearray, boundary: bytes, *, allow: Allow = NOTHING
) -> Generator[None, None, Peek | Refusal]:
    """The same for a ``multipart/form-data`` body with *boundary*: its model is a part, and so is all else."""
    try:
        found = yield from multipart.parts(body, boundary)
    except multipart.Malformed as error:
        return Refusal(reason="bad_form", message=f"The form cannot be read: {error}.")
    values: dict[str, multipart.Part] = {}
    files = 0
    for part in found:
        name = part.name
        forbidden = name in FORBIDDEN and not allow.transfer and not (name == "priority" and allow.priority)
        if forbidden or _aims(name, allow):
            return _forbidden(name)
        if name not in _ROUTED_PARTS:
            files += not part.plain
            continue
        if name in values:
            return _duplicate(name)
        if not part.plain or part.end - part.start > MODEL_LENGTH * 4:
            return _bad_field(name, "must be a short plain part: no file, no transfer encoding")
        values[name] = part
    model, at = "", None
    if (part_ := values.get("model")) is not None:
        at = (part_.start, part_.end)
        model = bytes(body[part_.start : part_.end]).decode("utf-8", "replace")
        if not model.isprintable() or "\ufffd" in model or len(model) > MODEL_LENGTH:
            return _bad_field("model", f"is not text of at most {MODEL_LENGTH} characters")
    if not model and not allow.transfer:
        return _bad_field("model", "is missing: send it as a part of the form; GET /v1/models lists the models")
    stream, n = (bytes(body[p.start : p.end]) if p else b"" for p in map(values.get, ("stream", "n")))
    if n and not (n.isdigit() and 1 <= int(n[:10]) <= 2**31 - 1):
        return _bad_field("n", "must be a whole number from 1")
    return Peek(
        model=model,
        stream=stream.lower() in _TRUE,
        n=int(n or 1),
        max_tokens=0,
        prompt_tokens=files * MEDIA_TOKENS,
        media=files,
        model_at=at,
    )


def _aims(key: str, allow: Allow) -> bool:
    """Names of a family that aims an engine."""
    return not allow.transfer and (key.startswith("bootstrap_") or key.endswith("dp_rank"))


def _quick(row: _Row, body: bytes, allow: Allow) -> Peek | Refusal | None:
    """What msgspec alone can tell; None = a routed key may occur twice, or a forbidden one at all."""
    try:
        fields = row.decode(body)
    except (ValueError, RecursionError) as error:
        return _unreadable(error, body)
    prompt = getattr(fields, row.prompt)
    raw, rest = b"", body
    if prompt is not UNSET:
        raw = bytes(prompt)
        if len(raw) > BULK:
            rest = _without(body, row.quoted, raw)
    if (b"\\" in rest and b"\\u" in rest) or _doubtful(fields, rest, row.quoted, body is rest):
        return None
    for name, quoted in row.own:
        if getattr(fields, name) is not UNSET and rest.count(quoted) > 1:
            return None
    if (refusal := _not_allowed(fields, allow)) is not None:
        return refusal
    if raw[1:2] not in b'{"' and _TOKEN_IDS.match(raw) and not raw.translate(None, _ID_BYTES):
        return _peek(row, fields, allow, raw.count(b",") + 1, True, 0, None)
    text, media = len(raw), 0
    if b'"type"' in raw:
        _, text, media = _window(raw, 0, len(raw))
    fetches = _fetches(raw, 0, len(raw))
    return _peek(row, fields, allow, _tokens(text, media), False, media, None, fetches)


def _exact(row: _Row, body: bytes | bytearray, allow: Allow) -> Generator[None, None, Peek | Refusal]:
    """By the layout: every key is seen, and only the short fields are decoded."""
    try:
        found = yield from steps(body)
    except Malformed as error:
        return Refusal(reason="bad_json", message=f"The body cannot be read: {error}.")
    if (refusal := _proven(body, found, row, allow)) is not None:
        return refusal
    short = []
    at = end = 0
    for field in found.fields:
        if field.key == row.prompt:
            at, end = field.value, field.end
        elif field.key in row.routed:
            short.append(body[field.start : field.end])
    try:
        fields = row.decode(b"{" + b",".join(short) + b"}")
    except (ValueError, RecursionError) as error:
        return _unreadable(error, b"")
    if (refusal := _not_allowed(fields, allow)) is not None:
        return refusal
    text = media = commas = 0
    fetches = False
    ids = _TOKEN_IDS.match(body, at, end) is not None
    while at < end:
        yield
        stop = min(at + STEP, end)
        if ids:
            window = body[at:stop]
            ids = not window.translate(None, _ID_BYTES)
            commas += window.count(b",")
        fetches = fetches or _fetches(body, at, min(stop + NAME, end))
        at, more, items = _window(body, at, stop)
        text, media = text + more, media + items
    return _peek(row, fields, allow, commas + 1 if ids else _tokens(text, media), ids, media, found, fetches)


def _peek(
    row: _Row,
    fields: Any,
    allow: Allow,
    tokens: int,
    counted: bool,
    media: int,
    found: Layout | None,
    fetches: bool = False,
) -> Peek | Refusal:
    model = fields.model
    if model is UNSET and (allow.transfer or not row.names):
        model = ""
    elif model is UNSET or not model:
        return _bad_field("model", "is missing: say which model; GET /v1/models lists them")
    if len(model) > MODEL_LENGTH:
        return _bad_field("model", f"is longer than {MODEL_LENGTH} characters")
    limit = fields.max_completion_tokens
    if limit is UNSET or limit is None:
        limit = fields.max_tokens
    previous = ""
    if row.own:
        if fields.max_output_tokens is not UNSET:
            limit = fields.max_output_tokens
        previous = fields.previous_response_id or ""
    if not row.generates:
        limit = 0
    options = fields.stream_options
    return Peek(
        model=model,
        stream=fields.stream is True,
        n=fields.n or 1,
        max_tokens=None if limit is UNSET or limit is None or limit < 0 else limit,
        include_usage=options is not UNSET and options is not None and options.include_usage is True,
        prompt_tokens=tokens,
        token_ids=counted,
        media=media,
        layout=found,
        previous=previous,
        fetches=fetches,
    )


def _without(body: bytes, key: bytes, raw: bytes) -> bytes:
    """*body* less one member ``key: raw``; all of it if the bytes are not just so (a duplicate, an odd spelling).

    Sound, since what is taken out begins with a key's own quote and is one whole member: it hides no other key.
    """
    at = body.find(key)
    if at <= 0 or body[at - 1] == 0x5C:
        return body
    colon = _COLON.match(body, at + len(key))
    if colon is None or not body.startswith(raw, colon.end()):
        return body
    return body[:at] + body[colon.end() + len(raw) :]


def _doubtful(fields: Any, rest: bytes, prompt: bytes, whole: bool) -> bool:
    """May a routed key occur twice, or a forbidden one at all? Never False where it does; True costs a scan.

    *whole*: the prompt is in *rest*, too, so its key may occur once.
    """
    count = rest.count
    return (
        b"bootstrap_" in rest
        or b"dp_rank" in rest
        or count(prompt) > whole
        or (fields.model is not UNSET and count(b'"model"') > 1)
        or (fields.stream is not UNSET and count(b'"stream"') > 1)
        or (fields.max_tokens is not UNSET and count(b'"max_tokens"') > 1)
        or (fields.max_completion_tokens is not UNSET and count(b'"max_completion_tokens"') > 1)
        or (fields.n is not UNSET and count(b'"n"') > 1)
        or (fields.stream_options is not UNSET and (count(b'"stream_options"') > 1 or count(b'"include_usage"') > 1))
    )


def _proven(body: bytes | bytearray, found: Layout, row: _Row, allow: Allow) -> Refusal | None:
    """What only the layout tells: duplicates, and forbidden names that are a family."""
    seen = set()
    for field in found.fields:
        key = field.key
        if _aims(key, allow):
            return _forbidden(key)
        if key not in row.routed:
            continue
        if key in seen:
            return _duplicate(key)
        seen.add(key)
        if key == row.prompt:
            continue
        if field.end - field.value > SHORT:
            return _bad_field(key, f"is longer than {SHORT} bytes")
        if key == "stream_options" and body[field.value] == 0x7B:
            try:
                inside = layout(body[field.value : field.end])
            except Malformed as error:
                return _bad_field(key, f"cannot be read: {error}")
            if len(inside.all("include_usage")) > 1:
                return _duplicate("stream_options.include_usage")
    return None


def _not_allowed(fields: Any, allow: Allow) -> Refusal | None:
    if allow.transfer or (
        fields.kv_transfer_params is UNSET
        and fields.ec_transfer_params is UNSET
        and fields.data_parallel_rank is UNSET
        and fields.sampling_params is UNSET
        and fields.vllm_xargs is UNSET
        and (fields.priority is UNSET or allow.priority)
    ):
        return None
    for key in FORBIDDEN:
        if getattr(fields, key) is not UNSET and not (key == "priority" and allow.priority):
            return _forbidden(key)
    for key, names in FORBIDDEN_INSIDE.items():
        raw = getattr(fields, key)
        if raw is not UNSET:
            try:
                inside = _OBJECT.decode(raw)
            except (ValueError, RecursionError):
                continue  # not an object, so nothing stands in it
            for name in names:
                if name in inside:
                    return _forbidden(f"{key}.{name}")
    return None


def _fetches(body: bytes | bytearray, at: int, stop: int) -> bool:
    """Whether a URL other than ``data:`` stands where media do, or a name that is spelled so that it could be one."""
    if body.find(b'url"', at, stop) >= 0 and _FETCHED.search(body, at, stop) is not None:
        return True
    return body.find(b"\\u", at, stop) >= 0 and _SPELLED.search(body, at, stop) is not None


def _window(body: bytes | bytearray, at: int, stop: int) -> tuple[int, int, int]:
    """Bytes of text and media items that begin in ``body[at:stop]``, and where the next window begins.

    Data (a ``data:`` URL, the value of a ``data`` key) is no text; it may reach far beyond *stop*.
    """
    media = sum(body.count(key, at, stop + len(key) - 1) for key in _MEDIA)
    text = 0
    while (found := body.find(b'"data', at, stop)) >= 0:
        text += found - at
        data = _DATA.match(body, found)
        if data is None:
            at = found + 5
            text += 5
        else:
            close = body.find(b'"', data.end())
            at = close + 1 if close >= 0 else len(body)
    return max(at, stop), text + max(0, stop - at), media


def _tokens(text: int, media: int) -> int:
    return text // BYTES_A_TOKEN + media * MEDIA_TOKENS


def _unreadable(error: Exception, body: bytes) -> Refusal:
    if isinstance(error, RecursionError):
        return Refusal(reason="bad_json", message="The body is nested too deeply.")
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        where = _WHERE.search(text)
        if where is not None:
            return _bad_field(where.group(1), "cannot be used: " + text[: where.start()])
        text = text.replace("`", "")
    if "truncated" in text and b"\\u" in body:
        text += ", or half of a surrogate pair stands alone"
    return Refusal(reason="bad_json", message=f"The body cannot be read: {text}.")


def _bad_field(key: str, what: str) -> Refusal:
    return Refusal(reason="bad_field", message=f"`{key}` {what}.", param=key)


def _duplicate(key: str) -> Refusal:
    return Refusal(reason="duplicate_field", message=f"`{key}` occurs more than once: send it once.", param=key)


def _forbidden(key: str) -> Refusal:
    return Refusal(
        reason="forbidden_field", message=f"`{key}` may only be set by the gateway: leave it out.", param=key
    )
