"""Error bodies, ours in the shapes that clients expect and engines' in the shapes that they send.

Ours: ``{"error":{"message","type","param","code"}}``, where ``code`` is the reason's code and the message ends with
``(stage: code)``; Anthropic's ``{"type":"error","error":{"type","message"}}`` under its routes.

Engines': nested, flat, ``{"detail":…}`` and ``{"error":"text"}``. Of these only types, codes and parameter names are
ever repeated, since a message may quote the prompt.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from llmgw import reasons
from llmgw.request import Refusal

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""`error.type` by status, from Anthropic's API reference; other 4xx are invalid_request_error, other 5xx api_error."""

PHRASES = frozenset({"Unauthorized", "Forbidden", "Not Found", "Method Not Allowed", "Internal Server Error"})
"""Whole messages that are a status's name, and so cannot hold a prompt."""

LOOK_AT = 64 << 10
"""Bytes of an engine's error body that are read; the largest (a schema error listing each part) has some 20 KiB."""

_NAME = re.compile(r"[A-Za-z][\w. \[\]-]{0,63}")


def error_body(refusal: Refusal, *, anthropic: bool = False) -> bytes:
    """The JSON body of an error answer."""
    reason = reasons.get(refusal.reason)
    filtered = f", filter {refusal.filter}" if refusal.filter else ""
    message = f"{refusal.message} ({reason.stage}: {reason.code}{filtered})"
    status = refusal.status or reason.status
    if anthropic:
        kind = ANTHROPIC_TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
        return _encode({"type": "error", "error": {"type": kind, "message": message}})
    kind = reasons.BAD if refusal.status is not None and status < 500 else reason.type
    return _encode({"error": {"message": message, "type": kind, "param": refusal.param, "code": reason.code}})


def error_event(refusal: Refusal, *, anthropic: bool = False) -> bytes:
    """The same as one server-sent event, to be put where a stream is at an event boundary."""
    name = b"event: error\n" if anthropic else b""
    return name + b"data: " + error_body(refusal, anthropic=anthropic) + b"\n\n"


def _encode(body: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:  # half a surrogate pair that came with a header or a name
        text = repr(body["error"]["message"]).encode("ascii", "backslashreplace").decode()
        return msgspec.json.encode(body | {"error": body["error"] | {"message": text, "param": None}})


def upstream_message(body: bytes) -> str | None:
    """What an engine's error body says, fit for a log: type, code and parameter, never its message. None = nothing."""
    try:
        answer = msgspec.json.decode(body[:LOOK_AT])
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict):
        return None
    error = answer.get("error")
    if isinstance(error, dict):
        return _labels(error)
    if isinstance(error, str):
        return _phrase(error) or _labels({"type": answer.get("error_type")})
    if "detail" in answer:
        return _phrase(answer["detail"])
    return _labels(answer)


def _phrase(text: object) -> str | None:
    return text if isinstance(text, str) and text in PHRASES else None


def _labels(error: dict[str, Any]) -> str | None:
    found = [_label(error.get(key)) for key in ("type", "code")]
    if param := _label(error.get("param")):
        found.append(f"param={param}")
    return " ".join(filter(None, found)) or None


def _label(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if 0 <= value < 10**6 else ""
    return value if isinstance(value, str) and _NAME.fullmatch(value) else ""
