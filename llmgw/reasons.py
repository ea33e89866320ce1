"""The closed set of reasons why a request was not served, or not wholly.

One table: what the client gets, whether trying again helps, and what the operator does about it. Status codes, metric
labels, log fields and docs/reasons.md are all made from it; a reason that is not here cannot happen.

Which status: 4xx the request is at fault · 429 contended, waiting helps · 499 the client left · 500 our bug ·
502 the upstream broke · 503 nothing can serve · 504 the upstream was too slow.
"""

from __future__ import annotations

from typing import Literal

import attrs

Stage = Literal["http", "parse", "identify", "model", "admission", "routing", "upstream", "client", "gateway"]
RetryAfter = Literal["", "drain_rate", "window", "fixed", "engine"]


@attrs.frozen
class Reason:
    """A row of the table. *retry*: the same request may succeed later. *retry_after*: what the header is made from."""

    code: str
    stage: Stage
    status: int
    type: str  # OpenAI's `error.type`
    retry: bool
    retry_after: RetryAfter
    meaning: str
    remedy: str


BAD, AUTH, DENIED, MISSING, LIMIT, SERVER = (
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "rate_limit_error",
    "server_error",
)


def _r(code: str, stage: Stage, status: int, type_: str, retry: RetryAfter | None, meaning: str, remedy: str) -> Reason:
    """*retry* None: asking again does not help; "": it may, but nobody can say when."""
    return Reason(code, stage, status, type_, retry is not None, retry or "", meaning, remedy)


TABLE: tuple[Reason, ...] = (
    _r(
        "bad_http",
        "http",
        400,
        BAD,
        None,
        "The bytes are not an HTTP/1.x request that this gateway accepts.",
        "Fix the client: the message names the offending part. The connection is closed, since its framing is in doubt.",
    ),
    _r("bad_json", "parse", 400, BAD, None, "The body is not a JSON object.", "Send one JSON object as the body."),
    _r(
        "bad_form",
        "parse",
        400,
        BAD,
        None,
        "The body is not the multipart form that its Content-Type announces, or one that two parsers could read differently.",
        "Send each part with one name, and the boundary that Content-Type names.",
    ),
    _r(
        "bad_encoding",
        "parse",
        400,
        BAD,
        None,
        "The body is not encoded as Content-Encoding says.",
        "Send the header that fits the body, or the body as it is.",
    ),
    _r(
        "bad_field",
        "parse",
        400,
        BAD,
        None,
        "A field that routing reads has the wrong type or an impossible value.",
        "Fix the field that `param` names.",
    ),
    _r(
        "duplicate_field",
        "parse",
        400,
        BAD,
        None,
        "A field that routing reads occurs twice, so that two parsers could see two requests.",
        "Send the field that `param` names once.",
    ),
    _r(
        "unknown_band",
        "parse",
        400,
        BAD,
        None,
        "x-llmgw-band names no configured band.",
        "Use a band that the message lists.",
    ),
    _r(
        "unknown_profile",
        "parse",
        400,
        BAD,
        None,
        "x-llmgw-profile names no configured profile.",
        "Use a profile that the message lists.",
    ),
    _r(
        "forbidden_field",
        "parse",
        400,
        BAD,
        None,
        "A field that only the gateway may set: it could aim an engine at another host or rank, or jump a queue.",
        "Leave the field out; `priority` can be allowed in the configuration.",
    ),
    _r("no_key", "identify", 401, AUTH, None, "No API key came with the request.", "Send `Authorization: Bearer KEY`."),
    _r(
        "bad_key",
        "identify",
        401,
        AUTH,
        None,
        "The API key is unknown, revoked or expired.",
        "Use a current key; `llmgw ctl keys` lists them.",
    ),
    _r(
        "model_not_allowed",
        "model",
        403,
        DENIED,
        None,
        "The key may not use this model.",
        "Use a model that the key allows, or extend the key.",
    ),
    _r(
        "admin_forbidden",
        "http",
        403,
        DENIED,
        None,
        "The admin port was asked under a name that is not its own, or by a web page.",
        "Use 127.0.0.1, localhost or the Unix socket, or add the name to `admin.hosts`.",
    ),
    _r(
        "conflict",
        "http",
        409,
        BAD,
        "",
        "On the admin port: what was asked does not fit what is, or somebody else has changed it meanwhile.",
        "Look again, as the message says, then ask anew.",
    ),
    _r(
        "control_unavailable",
        "gateway",
        503,
        SERVER,
        "",
        "On the admin and cluster ports: this server has no control plane, does not lead it, or its store does not answer.",
        "The message says which; requests of clients do not depend on it.",
    ),
    _r(
        "unknown_path",
        "http",
        404,
        MISSING,
        None,
        "No such route on this port.",
        "See the list of routes in the README.",
    ),
    _r(
        "model_not_found",
        "model",
        404,
        MISSING,
        None,
        "No endpoint is configured with this model.",
        "GET /v1/models lists the models; check spelling and aliases.",
    ),
    _r(
        "response_not_found",
        "routing",
        404,
        MISSING,
        None,
        "No endpoint is known to have this answer: never made here, another key's, forgotten, or gone with its engine.",
        "Send the whole conversation instead of its id. The table keeps the newest 65536 ids, and a restart empties it.",
    ),
    _r(
        "method_not_allowed",
        "http",
        405,
        BAD,
        None,
        "The route exists with another method.",
        "Use a method of the Allow header.",
    ),
    _r(
        "slow_request",
        "http",
        408,
        BAD,
        "",
        "Head or body of the request came too slowly.",
        "Send it faster; the limits are `limits.head_timeout` and `limits.body_min_rate`.",
    ),
    _r("too_large", "http", 413, BAD, None, "The body is larger than `limits.body`.", "Send less, or raise the limit."),
    _r(
        "unsupported_media",
        "http",
        415,
        BAD,
        None,
        "Content-Type or Content-Encoding is one that this gateway does not read.",
        "Send application/json (or a form where the route takes one), plain or with gzip or zstd.",
    ),
    _r(
        "headers_too_large",
        "http",
        431,
        BAD,
        None,
        "The header section is larger than `limits.headers`, or has too many fields.",
        "Send fewer or shorter headers (cookies, most often).",
    ),
    _r(
        "queue_full",
        "admission",
        429,
        LIMIT,
        "drain_rate",
        "The band's queue is full.",
        "Wait for Retry-After; more engines, or a higher `max_queue`.",
    ),
    _r(
        "queue_timeout",
        "admission",
        429,
        LIMIT,
        "drain_rate",
        "The request waited as long as its band allows.",
        "Wait for Retry-After; more engines, or a longer deadline.",
    ),
    _r(
        "deadline_unmeetable",
        "admission",
        429,
        LIMIT,
        "drain_rate",
        "The predicted time to first token is later than the deadline.",
        "Wait for Retry-After, or allow a longer deadline.",
    ),
    _r(
        "rate_limited",
        "admission",
        429,
        LIMIT,
        "window",
        "The key's requests or tokens a minute are used up.",
        "Wait for Retry-After, or raise the limit.",
    ),
    _r(
        "budget_exhausted",
        "admission",
        429,
        LIMIT,
        "window",
        "The key's budget is used up.",
        "Wait for the next period, or raise the budget.",
    ),
    _r(
        "concurrency",
        "admission",
        429,
        LIMIT,
        "fixed",
        "The key has as many requests in flight as it may.",
        "Wait for one to end, or raise the limit.",
    ),
    _r(
        "client_gone",
        "client",
        499,
        BAD,
        None,
        "The client closed its connection before the answer was complete. Logged, never sent.",
        "Nothing to do here; many of them hint at a client timeout that is too short.",
    ),
    _r(
        "internal",
        "gateway",
        500,
        SERVER,
        "",
        "A bug in llmgw. The log has the traceback under the request id.",
        "Report it with that traceback.",
    ),
    _r(
        "connect_failed",
        "upstream",
        502,
        SERVER,
        "fixed",
        "No endpoint of the model could be connected to.",
        "Check that the engines run and listen; `llmgw ctl endpoints` shows each one's health.",
    ),
    _r(
        "upstream_closed",
        "upstream",
        502,
        SERVER,
        "fixed",
        "The engine closed the connection before its answer was complete.",
        "Look into the engine's log at that time: it crashed, was stopped, or was killed for memory.",
    ),
    _r(
        "upstream_protocol",
        "upstream",
        502,
        SERVER,
        "",
        "The engine's answer is not valid HTTP.",
        "Check that the endpoint's URL is an inference engine's; the log has the detail.",
    ),
    _r(
        "phase_failed",
        "upstream",
        502,
        SERVER,
        "fixed",
        "A phase of the pipeline (encode, prefill, decode) failed.",
        "The message names phase and endpoint; `llmgw ctl explain-route --request-id` shows all phases.",
    ),
    _r(
        "no_endpoint",
        "routing",
        503,
        SERVER,
        "fixed",
        "Endpoints have the model, but a filter refused each of them, or each said that it is full.",
        "The message names the filter that emptied the set; `llmgw ctl explain-route` shows every candidate.",
    ),
    _r(
        "none_healthy",
        "routing",
        503,
        SERVER,
        "fixed",
        "No endpoint of the model is healthy.",
        "`llmgw ctl endpoints` shows since when and why.",
    ),
    _r(
        "draining",
        "gateway",
        503,
        SERVER,
        "fixed",
        "This server is shutting down.",
        "Try again: the load balancer should have sent the request elsewhere (readiness is 503).",
    ),
    _r(
        "poison",
        "upstream",
        503,
        SERVER,
        "fixed",
        "This very body has made two engines close without an answer; it is refused for 10 minutes.",
        "Find out what in the request kills the engine; the log has the digest.",
    ),
    _r(
        "idle_timeout",
        "upstream",
        504,
        SERVER,
        "fixed",
        "The engine sent no byte for `idle_timeout` and gave no other sign of life.",
        "Look at the engine: hung, or far too loaded. A slow but living engine does not end here.",
    ),
    _r(
        "generation_timeout",
        "upstream",
        504,
        SERVER,
        "",
        "The answer took longer than the generation budget.",
        "Raise `generation_timeout` (off by default), or ask for fewer tokens.",
    ),
)

BY_CODE: dict[str, Reason] = {r.code: r for r in TABLE}

FIXED_RETRY_AFTER = 1.0
"""Seconds, for `fixed`: long enough not to hammer, short enough that a restarted engine is used at once."""


def get(code: str) -> Reason:
    """The row of *code*. Raises KeyError: an unknown reason is our bug."""
    return BY_CODE[code]


def reference() -> str:
    """The text of docs/reasons.md."""
    lines = [
        "# Reasons",
        "",
        "Every answer that is not a success names one of these as `error.code`, and so do the log (`reason`) and the",
        "metrics (label `reason`). Made from `llmgw/reasons.py` by `python -m llmgw.reasons`.",
        "",
        "| status | code | stage | `error.type` | try again? | meaning | remedy |",
        "|---|---|---|---|---|---|---|",
    ]
    sources = {
        "drain_rate": "yes, Retry-After from the drain rate",
        "window": "yes, Retry-After says when the window ends",
        "fixed": f"yes, Retry-After: {FIXED_RETRY_AFTER:.0f}",
        "engine": "yes, Retry-After as the engine said",
        "": "yes",
    }
    for r in sorted(TABLE, key=lambda r: (r.status, r.code)):
        again = sources[r.retry_after] if r.retry else "no"
        lines.append(f"| {r.status} | `{r.code}` | {r.stage} | `{r.type}` | {again} | {r.meaning} | {r.remedy} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201
