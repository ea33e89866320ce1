"""What clients ask a simulated engine, parsed and checked as vLLM does: same order of checks, same error bodies.

`parse` turns route and body into an `Ask`, or raises `ApiError`, which knows its status and bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from llmgw.simengine import text
from llmgw.simengine.text import MEDIA_MARK, MEDIA_TOKENS, Tokenizer

if TYPE_CHECKING:
    from llmgw.simengine.options import Options

Body = dict[str, Any]

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MESSAGES, RESPONSES, EMBEDDINGS = "/v1/messages", "/v1/responses", "/v1/embeddings"
COUNT_TOKENS, TOKENIZE, DETOKENIZE = "/v1/messages/count_tokens", "/tokenize", "/detokenize"
RENDER_CHAT, RENDER_COMPLETIONS = "/v1/chat/completions/render", "/v1/completions/render"

REQUIRED = {
    CHAT: "messages",
    RENDER_CHAT: "messages",
    COMPLETIONS: "prompt",
    RENDER_COMPLETIONS: "prompt",
    GENERATE: "token_ids",
    MESSAGES: "messages",
    COUNT_TOKENS: "messages",
    RESPONSES: "input",
    EMBEDDINGS: "input",
    DETOKENIZE: "tokens",
}

MAX_CHOICES = 16384
"""vLLM's own limit of `n`."""


class ApiError(Exception):
    """The request is answered with an error. *param* None is written as null."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, "BadRequestError", message, param)


def with_value(message: str, param: str, value: object) -> ApiError:
    return bad_request(f"{message} (parameter={param}, value={value})", param)


def schema_error(body: Body, kind: str, field: str, message: str, value: object = None) -> ApiError:
    shown = f"<dict of {len(body)} items>" if kind == "missing" else value
    problem = {"type": kind, "loc": f"body.{field}", "msg": message, "input": shown}
    return ApiError(400, "Bad Request", f"1 validation error:\n  {problem}", f"body.{field}")


@attrs.define(kw_only=True)
class Ask:
    """One request to generate, embed or render."""

    route: str
    body: Body
    model: str  # name to answer with
    prompts: list[list[int]]
    media: tuple[tuple[int, int, str], ...] = ()
    n: int = 1
    max_tokens: int | None = None  # as asked
    room: int = 0  # most tokens that an answer may have
    stream: bool = False
    usage: bool = False
    continuous: bool = False
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None  # number of alternatives; None = not asked
    prompt_logprobs: bool = False
    echo: bool = False
    tool: Body | None = None  # function that must be called
    schema: Body | None = None  # JSON schema of the answer; {} = any object
    salt: str = ""
    priority: int = 0
    lora: str = ""
    token_ids: bool = False
    kv: Body | None = None  # kv_transfer_params
    ec: Body | None = None  # ec_transfer_params
    bootstrap: tuple[str, int, str] | None = None  # SGLang: host, port, room
    request_id: str = ""


_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_INTS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "seed", "top_k", "min_tokens", "priority")
_BOOLS = ("stream", "ignore_eos", "echo", "return_token_ids")


def decode(raw: bytes, content_type: str) -> Body:
    """The body as an object."""
    if content_type.split(";", maxsplit=1)[0].strip().lower() != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise ApiError(400, "Bad Request", message)
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        try:
            body = json.loads(raw)  # for its words; it also takes what msgspec refuses (NaN, lone surrogates)
        except json.JSONDecodeError as error:
            problem = {
                "type": "json_invalid",
                "loc": f"body.{error.pos}",
                "msg": "JSON decode error",
                "input": "<dict of 0 items>",
                "ctx": {"error": error.msg},
            }
            message = f"1 validation error:\n  {problem}"
            raise ApiError(400, "Bad Request", message, f"body.{error.pos}") from None
        except (UnicodeDecodeError, RecursionError):
            raise ApiError(400, "Bad Request", "There was an error parsing the body") from None
    if not isinstance(body, dict):
        problem = {"type": "dict_type", "loc": "body", "msg": "Input should be a valid dictionary", "input": body}
        raise ApiError(400, "Bad Request", f"1 validation error:\n  {problem}", "body")
    return body


def check_fields(route: str, body: Body) -> None:
    required = REQUIRED.get(route)
    if required and body.get(required) is None:
        raise schema_error(body, "missing", required, "Field required")
    for names, kinds, kind, what in (
        (_FLOATS, (int, float), "float", "number"),
        (_INTS, (int,), "int", "integer"),
    ):
        for name in names:
            value = body.get(name)
            if value is None or (isinstance(value, kinds) and not isinstance(value, bool)):
                continue
            if isinstance(value, str):
                try:
                    body[name] = int(value) if kind == "int" else float(value)
                    continue
                except ValueError:
                    message = f"Input should be a valid {what}, unable to parse string as a{'n' if kind == 'int' else ''} {what if kind == 'int' else 'number'}"
                    raise schema_error(body, f"{kind}_parsing", name, message, value) from None
            raise schema_error(body, f"{kind}_type", name, f"Input should be a valid {what}", value)
    for name in _BOOLS:
        value = body.get(name)
        if value is not None and not isinstance(value, bool):
            message = "Input should be a valid boolean, unable to interpret input"
            raise schema_error(body, "bool_parsing", name, message, value)
    messages = body.get("messages")
    if messages is not None:
        if not isinstance(messages, list):
            raise schema_error(body, "list_type", "messages", "Input should be a valid list", messages)
        for index, message in enumerate(messages):
            if not isinstance(message, dict):
                where = f"messages.{index}"
                raise schema_error(body, "dict_type", where, "Input should be a valid dictionary", message)


def model_of(body: Body, options: Options) -> tuple[str, str]:
    """(name to answer with, LoRA or ""). A body without a model is served."""
    asked = body.get("model")
    names = options.names
    if asked is None or asked == "":
        return names[0], ""
    if asked in names:
        return str(asked), ""
    if asked in options.loras:
        return str(asked), str(asked)
    known = ", ".join((*names, *options.loras))
    raise ApiError(404, "NotFoundError", f"The model `{asked}` does not exist. Valid aliases: {known}.", "model")


def check_ranges(body: Body, options: Options) -> None:
    temperature = body.get("temperature")
    if temperature is not None and temperature < 0:
        value = float(temperature)
        raise with_value(f"temperature must be non-negative, got {value}.", "temperature", value)
    top_p = body.get("top_p")
    if top_p is not None and not 0 < top_p <= 1:
        raise with_value(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    n = body.get("n")
    if n is not None and not 1 <= n <= MAX_CHOICES:
        raise with_value(f"n must be at least 1 and at most {MAX_CHOICES}, got {n}.", "n", n)
    if body.get("priority") and not options.priority:
        raise bad_request("Got priority, but the engine does not use priority scheduling: start it with --priority")
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise bad_request("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")


def check_length(size: int, limit: int | None, options: Options) -> int:
    """Tokens left for the answer."""
    top = options.max_model_len
    if limit is not None and limit > top:
        message = f"max_tokens={limit} cannot be greater than max_model_len={top}. Please request fewer output tokens."
        raise with_value(message, "max_tokens", limit)
    if limit is not None and limit < 1:
        raise with_value(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    start = f"This model's maximum context length is {top} tokens. However, "
    if size > top:
        message = (
            f"{start}your prompt contains at least {top + 1} input tokens, which exceeds this limit even without "
            "any output tokens. Please reduce the length of the input prompt."
        )
        raise with_value(message, "input_tokens", top + 1)
    if size + (limit or 1) > top:
        message = (
            f"{start}you requested {limit or 1} output tokens and your prompt contains {size} input tokens, for a "
            f"total of {size + (limit or 1)} tokens. Please reduce the length of the input prompt or the number of "
            "requested output tokens."
        )
        raise with_value(message, "input_tokens", size)
    return limit if limit is not None else top - size


def parse(route: str, raw: bytes, content_type: str, options: Options, tokenizer: Tokenizer) -> Ask:
    """The request as it will be served. Raises ApiError."""
    body = decode(raw, content_type)
    check_fields(route, body)
    model, lora = model_of(body, options)
    sampling = body.get("sampling_params") or {} if route == GENERATE else body
    if not isinstance(sampling, dict):
        raise schema_error(body, "dict_type", "sampling_params", "Input should be a valid dictionary", sampling)
    check_ranges(sampling, options)
    if route == GENERATE:
        check_fields(route, {**sampling, "token_ids": body["token_ids"]})
    prompts, media = _prompts(route, body, tokenizer)
    limit = next(
        (sampling[k] for k in ("max_completion_tokens", "max_tokens", "max_output_tokens") if sampling.get(k) is not None),
        16 if route in (COMPLETIONS, GENERATE) else None,
    )  # fmt: skip
    room = 0
    if route not in (EMBEDDINGS, COUNT_TOKENS):
        room = min(check_length(len(prompt), limit, options) for prompt in prompts)
    streams = body.get("stream_options")
    stream = bool(body.get("stream"))
    extra = sampling.get("extra_args") or {}
    stop = sampling.get("stop") or ()
    logprobs = body.get("top_logprobs") or 0 if body.get("logprobs") is True else body.get("logprobs")
    room_ = body.get("bootstrap_room")
    return Ask(
        route=route,
        body=body,
        model=model,
        prompts=prompts,
        media=media,
        n=sampling.get("n") or 1,
        max_tokens=limit,
        room=room,
        stream=stream,
        usage=stream and isinstance(streams, dict) and streams.get("include_usage", True) is not False,
        continuous=stream and isinstance(streams, dict) and bool(streams.get("continuous_usage_stats")),
        stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)),
        ignore_eos=bool(sampling.get("ignore_eos")),
        min_tokens=sampling.get("min_tokens") or 0,
        logprobs=logprobs if isinstance(logprobs, int) and not isinstance(logprobs, bool) else None,
        prompt_logprobs=body.get("prompt_logprobs") is not None or bool(body.get("echo") and logprobs is not None),
        echo=bool(body.get("echo")),
        tool=_tool(route, body, options),
        schema=_schema(body),
        salt=body.get("cache_salt") or "",
        priority=body.get("priority") or 0,
        lora=lora,
        token_ids=bool(body.get("return_token_ids")),
        kv=_object(body.get("kv_transfer_params")) or _object(extra.get("kv_transfer_params")),
        ec=_object(body.get("ec_transfer_params")) or _object(extra.get("ec_transfer_params")),
        bootstrap=None
        if room_ is None
        else (str(body.get("bootstrap_host") or ""), int(body.get("bootstrap_port") or 8998), str(room_)),
        request_id=str(body.get("request_id") or ""),
    )


def _object(value: Any) -> Body | None:
    return value if isinstance(value, dict) else None


def _prompts(route: str, body: Body, tokenizer: Tokenizer) -> tuple[list[list[int]], tuple[tuple[int, int, str], ...]]:
    if route in (CHAT, RENDER_CHAT, MESSAGES, COUNT_TOKENS):
        messages = list(body["messages"])
        if not messages:
            message = "Cannot apply chat template to an empty conversation. Provide at least one message."
            raise bad_request(message)
        if body.get("system") is not None:  # Anthropic's
            messages.insert(0, {"role": "system", "content": body["system"]})
        return chat_tokens(messages, body.get("tools") or (), tokenizer)
    if route == RESPONSES:
        given = body["input"]
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else _items(given)
        if body.get("instructions"):
            messages.insert(0, {"role": "system", "content": body["instructions"]})
        return chat_tokens(messages, body.get("tools") or (), tokenizer)
    if route == GENERATE:
        return [_ids(body, "token_ids", body["token_ids"])], _features(body)
    field = "input" if route == EMBEDDINGS else "prompt"
    given = body[field]
    if isinstance(given, str):
        return [tokenizer.encode(given)], _features(body)
    if isinstance(given, list) and given:
        if all(isinstance(item, str) for item in given):
            return [tokenizer.encode(item) for item in given], ()
        if all(isinstance(item, list) for item in given):
            return [_ids(body, field, item) for item in given], ()
        return [_ids(body, field, given)], _features(body)
    raise bad_request(f"Either {field} must be a non-empty string or a list of strings or token ids", field)


def _ids(body: Body, field: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(i, int) and 0 <= i < 2**32 for i in value):
        raise schema_error(body, "list_type", field, "Input should be a valid list of token ids", "...")
    if not value:
        raise bad_request(f"{field} must hold at least one token id", field)
    return value


def _items(given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise bad_request("input must be a string or a list of items", "input")
    return [
        {"role": item.get("role", "user"), "content": item.get("content")} for item in given if isinstance(item, dict)
    ]


def chat_tokens(
    messages: Sequence[Any], tools: Sequence[Any], tokenizer: Tokenizer
) -> tuple[list[list[int]], tuple[tuple[int, int, str], ...]]:
    """Tokens of a templated chat, with each medium's place in them."""
    whole = text.template(messages, tools=tools)
    if MEDIA_MARK not in whole:
        return [tokenizer.encode(whole)], ()
    hashes = iter(text.media_of(messages))
    tokens: list[int] = []
    media: list[tuple[int, int, str]] = []
    for index, part in enumerate(whole.split(MEDIA_MARK)):
        if index:
            media.append((len(tokens), MEDIA_TOKENS, next(hashes, "")))
            tokens += [3] * MEDIA_TOKENS
        tokens += tokenizer.encode(part)
    return [tokens], tuple(media)


def _features(body: Body) -> tuple[tuple[int, int, str], ...]:
    """Media of a token-level request: `features` as /render made them."""
    features = _object(body.get("features")) or {}
    found = []
    for kind, hashes in (_object(features.get("mm_hashes")) or {}).items():
        places = (_object(features.get("mm_placeholders")) or {}).get(kind) or []
        found += [(p["offset"], p["length"], str(h)) for p, h in zip(places, hashes, strict=False)]
    return tuple(found)


def _tool(route: str, body: Body, options: Options) -> Body | None:
    tools = body.get("tools")
    if not tools or route != CHAT:
        return None
    choice = body.get("tool_choice", "auto")
    if choice == "none":
        return None
    if choice == "auto":
        if not options.auto_tool_choice:
            message = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            raise bad_request(message)
        return None
    functions = [tool.get("function") or {} for tool in tools if isinstance(tool, dict)]
    if choice == "required":
        return dict(functions[0])
    name = (choice.get("function") or {}).get("name") if isinstance(choice, dict) else None
    found = next((f for f in functions if f.get("name") == name), None)
    if found is None:
        raise bad_request(f"The tool {name!r} of tool_choice is not among `tools`.", "tool_choice")
    return dict(found)


def _schema(body: Body) -> Body | None:
    wanted = body.get("response_format")
    if isinstance(wanted, dict):
        if wanted.get("type") == "json_object":
            return {}
        if wanted.get("type") == "json_schema":
            return _object((wanted.get("json_schema") or {}).get("schema")) or {}
    structured = body.get("structured_outputs")
    if isinstance(structured, dict) and "json" in structured:
        return _object(structured["json"]) or {}
    return None


def instance(schema: Body, pick: Any, depth: int = 0) -> Any:
    """A value that *schema* allows. *pick(low, high)* draws an integer; deeper than eight levels is cut."""
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][pick(0, len(schema["enum"]) - 1)]
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0]
    if kind is None:
        kind = "object" if "properties" in schema or not depth else "string"
    if kind == "object":
        properties = schema.get("properties") or {}
        wanted = schema.get("required") or list(properties)
        return {} if depth > 8 else {k: instance(properties.get(k) or {}, pick, depth + 1) for k in wanted}
    if kind == "array":
        count = max(1, int(schema.get("minItems") or 1))
        return (
            [] if depth > 8 else [instance(schema.get("items") or {}, pick, depth + 1) for _ in range(min(count, 16))]
        )
    if kind in ("integer", "number"):
        low = int(schema.get("minimum", 0))
        return pick(low, int(schema.get("maximum", low + 100)))
    if kind == "boolean":
        return bool(pick(0, 1))
    return None if kind == "null" else text.WORDS[pick(0, len(text.WORDS) - 1)].strip()


VOLATILE = frozenset(
    ("model", "stream", "stream_options", "request_id", "kv_transfer_params", "ec_transfer_params", "user", "metadata",
     "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "priority", "bootstrap_host",
     "bootstrap_port", "bootstrap_room", "tokens", "cache_salt", "ignore_eos", "extra_args", "stop")
)  # fmt: skip
"""Fields that do not change what is said, only how, to whom or how long: the two legs of one request say the same."""


def canonical(body: Body) -> bytes:
    """What decides on the answer, in one spelling."""
    kept = {key: value for key, value in body.items() if key not in VOLATILE}
    sampling = kept.get("sampling_params")
    if isinstance(sampling, dict):
        kept["sampling_params"] = {key: value for key, value in sampling.items() if key not in VOLATILE}
    return blake2b(msgspec.json.encode(kept, order="sorted"), digest_size=16).digest()
