"""The nouns of one request, shared by every capability and by both ends of the brain/mover seam.

A *mover* (listener, exchange, pump) turns bytes into an `InferenceRequest`, asks the *brain* to `admit` it and
gets a `Lease` (serve it there), a `Wait` (a lease or a refusal follows under the same ticket) or a `Refusal`.
When the exchange has ended, however it ended, the mover says so once: `settle(lease id, Outcome)`.
All of these are plain data (msgspec structs), so the two ends may live in two processes.

Times are seconds of the event loop's clock (`trio.current_time()`), never wall time, unless a name says `wall`.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import msgspec

Phase = Literal["encode", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("encode", "prefill", "decode")

Prefer = Literal["", "if-available", "reserve-endpoint"]
"""What a leg on an internal listener asks for besides: serve it only from a warm cache; only say who would serve it."""

UsageSource = Literal["engine", "counted", "estimated"]
"""How token counts are known: the engine said so, content deltas were counted, or guessed from bytes."""


class Head(msgspec.Struct, frozen=True, gc=False):
    """What `identify` sees of a request: who asks, before anything else is known."""

    route: str  # path without query, e.g. "/v1/chat/completions"
    client: str  # address as told by the socket, or by a trusted proxy; "" on AF_UNIX
    credential: bytes = b""  # value of Authorization or x-api-key as received; never logged


class Principal(msgspec.Struct, frozen=True, gc=False):
    """Who a request belongs to. *flow* is the unit of fairness inside a band."""

    name: str
    flow: str
    bands: tuple[str, ...] = ()  # bands that it may claim; empty = all


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One client request, as far as routing and admission need to know it. The body stays with the mover."""

    id: str  # the client's x-request-id if well-formed, else made here
    head: Head
    model: str  # as asked; "" where the route needs none
    stream: bool = False
    n: int = 1
    max_tokens: int | None = None
    prompt_tokens: int = 0  # estimate (bytes / 4) unless `blocks` or token ids say better
    body_bytes: int = 0
    band: str = ""  # x-llmgw-band; "" = the default
    bands: tuple[str, ...] = ()  # that its listener lets clients claim; empty = all
    profile: str = ""  # x-llmgw-profile; "" = the model's
    session: str = ""  # x-session-id
    blocks: tuple[int, ...] = ()  # chained hashes of the prompt's blocks, oldest first (llmgw.kvcache)
    ids: tuple[int, ...] = ()  # the prompt's token ids, where it came as such
    media: int = 0  # number of images, videos, sounds in the prompt
    fetches: bool = False  # some of them are URLs that somebody must fetch
    lora: str = ""
    phases: tuple[Phase, ...] = ("prefill", "decode")  # what is asked for: less than all on an internal listener only
    internal: bool = False  # it is a leg that another pipeline sent, never to be split again
    prefer: Prefer = ""
    pin: str = ""  # HOST:PORT of the endpoint that an earlier `reserve-endpoint` named
    explain: bool = False  # x-llmgw-explain: 1
    continues: str = ""  # id of an earlier answer: only the endpoint that made it can serve this
    only: str = ""  # id of the one endpoint that may serve it; the brain's own mark
    accepted: float = 0.0  # when its first byte came


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where one leg goes: everything that the mover must know to send it, and nothing else."""

    endpoint: str  # Endpoint.id
    name: str  # for logs and metrics
    address: str  # "tcp:HOST:PORT" or "unix:PATH" (net.world parses it)
    host: str  # value of the Host header
    path: str = ""  # prefix before the route's path ("" or "/prefix")
    tls: bool = False
    headers: tuple[
        tuple[str, str], ...
    ] = ()  # added to what the allow-list lets through; holds the engine's key: secret
    model: str = ""  # name that the engine knows the model by, where it differs from what the client asked; else ""

    def __repr__(self) -> str:  # a key must not get into a log through a traceback
        return f"Target({self.endpoint!r}, {self.address!r})"


class Limits(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Time limits of one leg, seconds. Three different things, never one 'timeout'."""

    connect: float = 5.0
    idle: float = 120.0  # no byte for so long, and no other sign of life from the engine
    generation: float | None = None  # budget for the whole answer; None = no limit


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Permission to serve one request on *target*. Ends with exactly one `settle`, or with its mover."""

    id: int
    request_id: str
    target: Target
    phases: tuple[Phase, ...] = ("prefill", "decode")  # what this leg does
    limits: Limits = Limits()
    usage: Literal["count", "ask"] = "count"
    attempt: int = 1  # 1 for the first; a retry is a new lease with the next number
    decision: str = ""  # the decision in one line, where the client asked for it and may see it
    poison: tuple[int, ...] = ()  # digests of bodies of this length that kill engines: a match is a Failure "poison"
    leg: Leg | None = None  # where it is the last of several: what it says instead of the client's own request


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """The leg of a pipeline that answers the client: what its mover needs beside the lease's target."""

    name: str  # suffix of its request id
    body: tuple[memoryview, ...]  # in pieces: media of many megabytes are not copied into one
    fails: frozenset[int] = frozenset((429, 503))  # statuses that are a `Failure` and not the client's answer
    client_headers: bool = (
        True  # the listener's allow-list of the client's headers goes with it; else all are the target's
    )


class Several(msgspec.Struct, frozen=True, gc=False):
    """Several legs: who runs pipelines beside the mover gets the request; an answer follows under *ticket* as for `Wait`."""

    ticket: int


class Wait(msgspec.Struct, frozen=True, gc=False):
    """Not yet: a `Lease` or a `Refusal` comes to the mover under *ticket*, unless it withdraws first."""

    ticket: int


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The request ends here. *reason* is a code of `llmgw.reasons`; *message* names the thing and the remedy."""

    reason: str
    message: str
    param: str | None = None
    retry_after: float | None = None  # seconds; None = the reason's own default
    filter: str = ""  # for no_endpoint: which filter emptied the set
    status: int | None = None  # an engine's own 4xx in place of the reason's: the request is at fault, not the engine


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that the brain has at hand (models, health): no engine takes part."""

    status: int = 200
    content_type: str = "application/json"
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


class Failure(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Why an attempt ended before the first byte went to the client. The brain decides whether another follows."""

    reason: str  # connect_failed, upstream_closed, upstream_protocol, idle_timeout, poison, or no_endpoint for a 503/429 said by the engine
    status: int | None = None  # what the engine said, if it said anything
    retry_after: float | None = None  # seconds, the engine's own
    reused: bool = False  # it happened on a pooled connection, before any byte of an answer
    started: bool = True  # the engine may have begun the work
    body_digest: int = 0  # for `poison`: the same body killed two engines


class Outcome(msgspec.Struct, kw_only=True):
    """How it ended. Goes to metrics, the log line, the ledger, the index, health: once, from `settle`."""

    request_id: str
    route: str
    status: int  # as the client saw it; 499 = it left before it saw one
    reason: str = ""  # code of llmgw.reasons; "" = served
    detail: str = ""  # for the log; never prompt, completion or key
    stream: bool = False
    model: str = ""  # asked
    served: str = ""  # model name used towards the engine
    principal: str = ""
    flow: str = ""
    band: str = ""
    profile: str = ""
    endpoints: dict[Phase, str] = {}  # endpoint id by phase, of the attempt that answered (or of the last one)
    upstream_request_id: str = ""
    attempts: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    computed_tokens: int | None = None  # prompt tokens whose KV the answering engine computed itself, where it says so
    usage: UsageSource | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    accepted: float = 0.0
    admitted: float | None = None
    sent: float | None = None  # request wholly written to the engine
    first: float | None = None  # first byte of the answer's body went to the client
    last: float | None = None
    upstream_status: int | None = None
    aborted: bool = False  # an upstream connection was closed while the engine was still at work


class Brain(Protocol):
    """The deciding end. Every call is synchronous and quick; it never awaits and never raises for a bad request."""

    def admit(self, request: InferenceRequest) -> Lease | Wait | Several | Refusal | Page:
        """identify → model → reserve → gate → decide. A `Wait` is answered later through `Mover.granted`.

        A `Page` for the routes that no engine serves.
        """
        ...

    def withdraw(self, ticket: int, outcome: Outcome) -> None:
        """The client of a waiting request is gone. Its outcome is accounted; no lease follows."""
        ...

    def retry(self, lease: int, failure: Failure) -> Lease | Wait | Refusal:
        """Nothing has reached the client and the attempt failed: another endpoint, or the refusal to answer with.

        The old lease stays open until `settle` of the new one's (same ledger entry, next attempt).
        """
        ...

    def progress(self, lease: int, tokens: int) -> None:
        """First token, and then at most once a second: *tokens* so far. Keeps ledgers and liveness honest."""
        ...

    def made(self, lease: int, answer: str) -> None:
        """The engine has named the answer that it makes under *lease* (`/v1/responses`): others may refer to it."""
        ...

    def quiet(self, lease: int, seconds: float) -> Refusal | None:
        """No byte came for *seconds*. None = go on (the engine shows other signs of life), else the end: idle_timeout.

        A brain that must ask first answers None and calls `Mover.abandon` later.
        """
        ...

    def settle(self, lease: int | None, outcome: Outcome) -> None:
        """It has ended. Called exactly once a request; *lease* is None where none was ever given."""
        ...


class Mover(Protocol):
    """The moving end, as far as the brain calls it."""

    def granted(self, ticket: int, answer: Lease | Refusal | Page) -> None:
        """What a `Wait` was waiting for. Unknown tickets (withdrawn meanwhile) are given back by the mover."""
        ...

    def abandon(self, lease: int, refusal: Refusal) -> None:
        """End what runs under *lease* with this answer (hung engine, preemption). Unknown leases have ended already."""
        ...


@runtime_checkable
class LegMover(Mover, Protocol):
    """A mover in this process: it also serves the last leg of pipelines, and lets go of an attempt when asked."""

    def recall(self, lease: int, failure: Failure) -> bool:
        """The attempt of *lease* is of no use any more. Unless a byte has gone to the client, it ends as if its engine had
        failed so: `retry` follows before this returns. False: nothing can be undone."""
        ...
