"""One client connection and its current upstream, as a state machine without I/O.

The exchange is told what happened (`client_bytes`, `client_gone`, `upstream_bytes`, `upstream_gone`, `granted`, `dialled`,
`tick`) and acts through two channels (write, pause, resume, close), its `Host` (pool, dial, timers) and the brain. Framing,
retries, mid-stream failure, usage, limits and the outcome live here once; pump and tasks drivers only perform it.

    state      waits for                      ends it
    IDLE       the next request's first byte  bytes → HEAD · keep-alive over, FIN → CLOSED
    HEAD       the rest of the head           whole → BODY · too large, too slow, malformed → answer, CLOSED
    BODY       the rest of the body           whole → the brain → WAITING, DIALLING, SENT, or an answer
    WAITING    the brain's grant              lease → DIALLING or SENT · refusal → answer
    DIALLING   a connection                   connected → SENT · failed → the brain (retry)
    SENT       the engine's head              head → RELAYING · 503/429, closed → the brain (retry)
    RELAYING   the engine's body              end → settled, IDLE or FLUSHING · broken → cut
    FLUSHING   the client to take the rest    taken → IDLE or CLOSED
    LINGERING  the client to stop sending     FIN, 2 s, 1 MiB → CLOSED (else a RST could eat our answer)
    CLOSED     nothing

Invariants
- A request that has begun (`_open`) is settled exactly once, synchronously, on every path; `_settle` is the only place.
- Before anything has gone to the client (`_sent_any`), a failure becomes an answer with a status; after it, a cut.
- The upstream is closed before the outcome is settled whenever the engine may still be at work.
- An answer is held back only until its first body byte (streams) or its end (others, up to HELD): nothing waits for
  more tokens, and an engine that dies before it has said anything is an error with a status, not a broken stream.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Protocol

from llmgw import reasons
from llmgw.kvcache import blocks
from llmgw.net import http1, internal
from llmgw.net.channel import SIZE, Channel
from llmgw.net.proxied import Proxies
from llmgw.net.secure import HANDSHAKE_SECONDS
from llmgw.openai import errors, multipart, peek, routes
from llmgw.openai.coding import CODINGS, coding_of, decoded
from llmgw.openai.responses import IdFinder
from llmgw.openai.rewrite import rewrite, rewrite_form
from llmgw.openai.sse import JsonMeter, Meter
from llmgw.openai.usage import UsageFilter
from llmgw.request import (
    Brain,
    Failure,
    Head,
    InferenceRequest,
    Lease,
    Outcome,
    Page,
    Refusal,
    Several,
    Target,
    Wait,
)

if TYPE_CHECKING:
    import random

    from llmgw.config import ClientLimits

HELD = SIZE
"""Most bytes of a non-streaming answer that are held until it is whole, so that a broken one can still be a 502."""

PENDING = SIZE
"""Most bytes of further (pipelined) requests that are read while one is served."""

ONE_BUFFER = 1 << 20
"""A body longer than this is received into one buffer of its length; a shorter one is joined from its pieces."""

PIPELINED = 16
"""Requests answered in one visit: a client that pipelines thousands of pages must not hold up the others."""

LINGER_SECONDS, LINGER_BYTES = 2.0, 1 << 20
"""How long and how much is read of a client that was refused and goes on sending."""

FLUSH_SECONDS = 60.0
"""Without a byte taken for so long, a client that does not read is gone."""

BULK = 512
"""Bytes of a read from which on it is worth asking whether they are all alike."""

OTHERS = 4
"""Events of another form that may come before the many alike: the rest of a cut one, the role, a comment."""

PROGRESS_SECONDS = 1.0
"""Between two calls of `progress`."""

USAGE_ASKED = frozenset(("chat", "completions", "generate"))
"""Shapes that know `stream_options.include_usage`; the others' streams always say their usage."""

RETRIED = frozenset((429, 503))
"""What an engine says when it did not start the work: another one may."""

DIGESTED = 256 << 10
"""Bytes at each end of a body that go into its digest: a digest of 64 MiB would stall the others."""

NEVER = float("inf")

_OK_100 = b"HTTP/1.1 100 Continue\r\n\r\n"


class State(enum.IntEnum):
    """See the table above."""

    IDLE = 0
    HEAD = 1
    BODY = 2
    WAITING = 3
    DIALLING = 4
    SENT = 5
    RELAYING = 6
    FLUSHING = 7
    LINGERING = 8
    CLOSED = 9


IDLE, HEAD, BODY, WAITING, DIALLING, SENT, RELAYING, FLUSHING, LINGERING, CLOSED = State

STATUS_TEXT = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    408: "Request Timeout", 413: "Content Too Large", 415: "Unsupported Media Type", 429: "Too Many Requests",
    431: "Request Header Fields Too Large", 500: "Internal Server Error", 502: "Bad Gateway",
    503: "Service Unavailable", 504: "Gateway Timeout",
}  # fmt: skip


class Clock(Protocol):
    """*now*: seconds of the event loop, one reading a batch."""

    now: float


class Host(Protocol):
    """What surrounds an exchange: made once a listener, shared by its connections."""

    brain: Brain
    limits: ClientLimits
    rng: random.Random
    read_request: http1.RequestReader
    allow: peek.Allow
    internal: bool  # pipelines send their legs here
    bands: tuple[str, ...]  # that clients may claim; empty = all
    strips: bool  # what aims an engine is let in, since all requests go through pipelines that take it out
    half_close: bool
    draining: bool
    proxies: Proxies | None

    @property
    def clock(self) -> Clock: ...

    def take(self, target: Target) -> Channel | None:
        """An idle pooled connection to *target*, or None: dial one."""
        ...

    def give(self, target: Target, channel: Channel) -> None:
        """*channel* has finished an answer and can carry another."""
        ...

    def dial(self, exchange: Exchange, lease: Lease) -> None:
        """Connect in the background; `exchange.dialled` follows, unless `undial` comes first."""
        ...

    def undial(self, exchange: Exchange) -> None: ...

    def waiting(self, ticket: int, exchange: Exchange) -> None:
        """The brain will answer *ticket*."""
        ...

    def forget(self, ticket: int) -> None: ...

    def several(self, ticket: int, request: InferenceRequest, head: http1.RequestHead, body: bytes | bytearray) -> None:
        """A pipeline of legs serves *request*; the last one, or a refusal, comes as the answer to *ticket*."""
        ...

    def schedule(self, exchange: Exchange) -> None:
        """`exchange.deadline` has moved to an earlier time."""
        ...

    def soon(self, call: Callable[[], None]) -> None: ...

    def gaps(self, model: str) -> Callable[[float], None]:
        """Where the seconds between two reads of one stream go (inter-token latency)."""
        ...

    def ended(self, exchange: Exchange) -> None:
        """The connection is over: its task may end."""
        ...

    def bug(self, request_id: str, error: BaseException) -> None:
        """Log a traceback. Never raises."""
        ...


class Exchange:
    """See the module's text. *peer*: the client's address, for fairness and logs."""

    __slots__ = (
        "_advancing", "_answer_head", "_body", "_body_from", "_body_have", "_buffer", "_carry", "_chunked", "_client", "_close_after",
        "_decoder", "_decoding", "_filter", "_gap", "_head", "_held", "_ids", "_inbuf", "_known", "_last", "_lease", "_left", "_meter", "_next_progress",
        "_open", "_opened", "_outcome", "_peek", "_peer", "_raw", "_reading", "_request_id", "_reused", "_route", "_scanned", "_sent_any",
        "_sse", "_state", "_ticket", "_unsent", "_upbuf", "_upstream", "_want_head", "deadline", "host", "job", "task",
        "timer",
    )  # fmt: skip

    def __init__(self, host: Host, client: Channel, peer: str) -> None:
        self.host = host
        self._client = client
        self._peer = peer
        self._state = IDLE
        self._inbuf: bytes | bytearray = b""
        self._scanned = 0
        self._known: http1.RequestHead | None = None  # this client's last head
        self._close_after = False
        self._opened = client.opening  # with a handshake; its deadline comes before that of the first head
        self._advancing = False
        self._upstream: Channel | None = None
        self.deadline = NEVER  # when `tick` is due; the host keeps it in its heap
        self.timer = NEVER  # when the host will look
        self.task: object = None  # of the host
        self.job: object = None  # of the host
        self._reset()
        client.bind(self.client_bytes, self.client_gone, self.client_writable, self.crashed)
        self._until(host.clock.now + (HANDSHAKE_SECONDS if client.opening else host.limits.head_timeout))

    def _reset(self) -> None:
        self._open = False
        self._head: http1.RequestHead | None = None
        self._route: routes.Route | None = None
        self._body: bytes | bytearray = b""
        self._buffer: bytearray | None = None
        self._body_have = 0
        self._body_from = 0.0
        self._chunked: http1.Chunked | None = None
        self._peek: peek.Peek | None = None
        self._reading: Generator[None, None, peek.Peek | Refusal] | None = None
        self._decoding: Generator[None, None, bytes | Refusal] | None = None
        self._request_id = ""
        self._lease: Lease | None = None
        self._ticket = 0
        self._outcome: Outcome | None = None
        self._reused = False
        self._upbuf = b""
        self._answer_head: http1.ResponseHead | None = None
        self._want_head = b""  # the client's head, until the first byte of the body goes with it
        self._held: list[bytes] = []
        self._sent_any = False
        self._sse = False
        self._raw = False  # a stream whose bytes go on as they come, so that its payload is for the meter only
        self._decoder: http1.Chunked | None = None
        self._carry = b""  # the beginning of a chunk, which the client has but the meter does not
        self._left = 0
        self._meter: Meter | JsonMeter | None = None
        self._filter: UsageFilter | None = None
        self._gap: Callable[[float], None] | None = None
        self._ids: IdFinder | None = None
        self._last = 0.0
        self._next_progress = NEVER
        self._unsent = 0

    @property
    def state(self) -> State:
        return self._state

    @property
    def request_id(self) -> str:
        return self._request_id

    @property
    def lease(self) -> Lease | None:
        return self._lease

    def _until(self, deadline: float) -> None:
        self.deadline = deadline
        if deadline < self.timer:
            self.host.schedule(self)

    def read_afresh(self) -> None:
        """The listener's options have changed: the next head is not taken for the last one."""
        self._known = None

    # -- the client's side ---------------------------------------------------------------------------------------------

    def client_bytes(self, data: bytes) -> None:
        """The client sent *data*, of any length."""
        state = self._state
        if state == BODY:
            self._more_body(data)
            if self._state <= HEAD:
                self._advance()
        elif state <= HEAD:
            if self._inbuf:
                self._inbuf += data
            else:
                self._inbuf = data
            self._advance()
        elif state == LINGERING:
            self._left -= len(data)
            if self._left < 0:
                self._end()
        elif state != CLOSED:
            self._inbuf += data
            if len(self._inbuf) > PENDING:
                self._client.pause()

    def client_gone(self, error: OSError | None) -> None:
        """The client has closed (None) or its connection broke: whatever it asked for is cancelled."""
        state = self._state
        if state == CLOSED:
            return
        if error is None and self.host.half_close and WAITING <= state <= FLUSHING:
            self._close_after = True  # it only stopped sending; a write that fails will tell if it is gone
            return
        if state == FLUSHING and error is None:
            self._end()  # it has all of the answer's bytes that it will ever take
            return
        if self._open or (state == HEAD and self._inbuf):
            self._begin()
            self._settle(499, "client_gone", "" if error is None else str(error))
        self._end()

    def client_writable(self) -> None:
        """All that was held for the client has gone."""
        if self._state == FLUSHING:
            self._answered()
        elif self._upstream is not None and self._state == RELAYING:
            self._upstream.resume()
            self._quiet_until()

    def _advance(self) -> None:
        """Serve what lies in the buffer, request after request, until one needs something."""
        if self._advancing:
            return
        self._advancing = True
        try:
            for _ in range(PIPELINED):
                if self._state > HEAD or not self._inbuf:
                    return
                if not self._read_head():
                    return
            self.host.soon(self._advance)
        finally:
            self._advancing = False

    def _read_head(self) -> bool:
        """Take one head off the buffer and act on it; False if it is not whole yet."""
        data = self._inbuf
        if data[:1] in b"\r\n" and (stripped := data.lstrip(b"\r\n")) is not data:
            data = self._inbuf = stripped  # an empty line before a request is tolerated (RFC 9112, 2.2)
            if not data:
                return False
        limits = self.host.limits
        end = data.find(b"\r\n\r\n", self._scanned)
        if end < 0 or end > limits.headers:
            if len(data) > limits.headers:
                self._begin()
                self._refuse(
                    Refusal(
                        reason="headers_too_large", message=f"the header section is larger than {limits.headers} bytes"
                    ),
                    close=True,
                )
            elif problem := http1.incomplete_head_problem(data):
                self._begin()
                self._refuse(Refusal(reason="bad_http", message=problem), close=True)
            else:
                if self._state == IDLE:
                    self._state = HEAD
                    self._until(self.host.clock.now + limits.head_timeout)
                    self._inbuf = bytearray(data)  # a head in one-byte pieces must not cost its square
                self._scanned = max(0, len(data) - 3)
            return False
        self._scanned = 0
        end += 4
        raw = bytes(data[:end])
        self._inbuf = bytes(data[end:])
        self._begin()
        host = self.host
        known = self._known
        if known is not None and known.again(raw):
            head = known
        else:
            try:
                head = self._known = host.read_request(raw)
            except http1.Malformed as error:
                self._refuse(Refusal(reason=error.reason, message=error.message), close=True)
                return True
        self._head = head
        if not head.keep_alive or host.draining:
            self._close_after = True
        values = head.values
        given = http1.request_id(values.get(b"x-request-id"))
        self._request_id = given or f"{host.rng.getrandbits(96):024x}"
        outcome = self._outcome
        assert outcome is not None
        outcome.request_id = self._request_id
        route = routes.find(head.path)
        if route is None:
            outcome.route = "other"  # the label stays bounded, whatever paths are tried
            self._refuse(Refusal(reason="unknown_path", message=f"no route {head.method} {head.path} on this port"))
            return True
        self._route = route
        outcome.route = route.path
        if head.method not in route.methods and not (head.method == "HEAD" and "GET" in route.methods):
            self._refuse(
                Refusal(
                    reason="method_not_allowed",
                    message=f"{head.path} takes {', '.join(route.methods)}, not {head.method}",
                )
            )
            return True
        if coding_of(values.get(b"content-encoding")) == "?":
            self._refuse(
                Refusal(
                    reason="unsupported_media",
                    message=f"Content-Encoding {head.text(b'content-encoding')!r} is not read here: send the body as it is,"
                    f" or one of {', '.join(CODINGS)}",
                )
            )
            return True
        return self._start_body(head)

    def _start_body(self, head: http1.RequestHead) -> bool:
        length = head.length
        limits = self.host.limits
        if length == 0:
            self._ask(b"")
            return True
        if length > limits.body:
            self._refuse(
                Refusal(
                    reason="too_large",
                    message=f"the body has {length} bytes; `limits.body` allows {limits.body}",
                )
            )
            return True
        data = self._inbuf
        if 0 < length <= len(data):  # the common case: head and body in one read
            if length == len(data):
                self._inbuf = b""
                self._ask(data)
            else:
                self._inbuf = data[length:]
                self._ask(data[:length])
            return True
        if not data and head.values.get(b"expect", b"").lower() == b"100-continue" and not head.http10:
            try:
                self._client.write(_OK_100)
            except OSError as error:
                self.client_gone(error)
                return True
        self._state = BODY
        self._body_from = self.host.clock.now
        self._body_have = 0
        self._until(self._body_from + limits.body_grace)
        if length < 0:
            self._chunked = http1.Chunked()
            self._buffer = bytearray()
        else:
            self._buffer = bytearray(length) if length > ONE_BUFFER else bytearray()
        self._inbuf = b""
        if data:
            self._more_body(data if isinstance(data, bytes) else bytes(data))
        return self._state <= HEAD

    def _more_body(self, data: bytes) -> None:
        head, buffer = self._head, self._buffer
        assert head is not None
        assert buffer is not None
        if self._chunked is not None:
            try:
                payload = self._chunked.feed(data)
            except http1.Malformed as error:
                self._refuse(Refusal(reason="bad_http", message=error.message), close=True)
                return
            self._body_have += len(payload)
            limit = self.host.limits.body
            if self._body_have > limit:
                self._refuse(
                    Refusal(reason="too_large", message=f"the body is larger than `limits.body` ({limit} bytes)"),
                    close=True,
                )
                return
            buffer += payload
            if not self._chunked.done:
                return
            rest = data[self._chunked.end :]
        else:
            missing = head.length - self._body_have
            piece = data[:missing] if len(data) > missing else data
            if head.length > ONE_BUFFER:
                buffer[self._body_have : self._body_have + len(piece)] = piece
            else:
                buffer += piece
            self._body_have += len(piece)
            if self._body_have < head.length:
                return
            rest = data[missing:]
        self._buffer = None
        self._inbuf = rest
        self._ask(buffer if len(buffer) > ONE_BUFFER else bytes(buffer))

    # -- the brain ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """A request has begun: from here on it will be settled."""
        if self._open:
            return
        self._open = True
        now = self.host.clock.now
        self._outcome = Outcome(request_id=self._request_id, route="", status=0, accepted=now)

    def _ask(self, body: bytes | bytearray) -> None:
        """Head and body are here; the body may be in need of decoding, which takes steps."""
        head = self._head
        assert head is not None
        coding = head.values.get(b"content-encoding")
        if coding is None or not body or not (name := coding_of(coding)):
            self._understand(body)
            return
        self._state = WAITING
        self.deadline = NEVER
        self._decoding = decoded(body, name, self.host.limits.body)
        self._decode_on()

    def _decode_on(self) -> None:
        if self._decoding is None:
            return
        try:
            next(self._decoding)
        except StopIteration as stop:
            self._decoding = None
            if isinstance(stop.value, Refusal):
                self._refuse(stop.value)
            else:
                self._understand(stop.value)
        else:
            self.host.soon(self._decode_on)

    def _whose(self, head: http1.RequestHead) -> str:
        """The client's address."""
        proxies = self.host.proxies
        return self._peer if proxies is None else proxies.client(self._peer, head.fields)

    def _understand(self, body: bytes | bytearray) -> None:
        """Head and body are here: what is asked for, and what does the brain say?"""
        head, route, host, outcome = self._head, self._route, self.host, self._outcome
        assert head is not None
        assert route is not None
        assert outcome is not None
        values = head.values
        self._state = WAITING
        self.deadline = NEVER
        if route.kind == "kept":
            self._body = body
            self._peeked(peek.Peek(model="", max_tokens=0, previous=routes.id_of(route, head.path)))
            return
        if route.kind != "inference":
            request = InferenceRequest(
                id=self._request_id,
                head=Head(
                    head.path, self._whose(head), values.get(b"authorization") or values.get(b"x-api-key") or b""
                ),
                model="",
                accepted=outcome.accepted,
            )
            page = host.brain.admit(request)
            assert not isinstance(page, Several), "a page has no legs"
            self._take_answer(page)
            return
        content_type = values.get(b"content-type", b"application/json").lower()
        form = route.shape == "media" and content_type.startswith(b"multipart/form-data")
        if not form and b"json" not in content_type:
            wanted = "application/json" + (" or multipart/form-data" if route.shape == "media" else "")
            self._refuse(
                Refusal(
                    reason="unsupported_media",
                    message=f"Content-Type {head.text(b'content-type')!r} is not read here: send {wanted}",
                )
            )
            return
        self._body = body
        allow = host.allow
        if allow.transfer and not route.pipelined:
            allow = peek.Allow(priority=allow.priority)
        if form:
            boundary = multipart.boundary_of(values[b"content-type"])
            if boundary is None:
                self._refuse(Refusal(reason="bad_form", message="Content-Type names no boundary for the form's parts"))
                return
            self._reading = peek.peek_form(body, boundary, allow=allow)
            self._read_on()
        elif isinstance(body, bytes) and len(body) <= peek.AT_ONCE:
            self._peeked(peek.peek(route, body, allow=allow))
        else:
            self._reading = peek.peek_steps(route, body, allow=allow)
            host.soon(self._read_on)

    def _read_on(self) -> None:
        """A long body is read in steps, between which others are served."""
        if self._reading is None:
            return
        try:
            next(self._reading)
        except StopIteration as stop:
            self._reading = None
            self._peeked(stop.value)
        else:
            self.host.soon(self._read_on)

    def _peeked(self, asked: peek.Peek | Refusal) -> None:
        if isinstance(asked, Refusal):
            self._refuse(asked)
            return
        head, host, outcome = self._head, self.host, self._outcome
        assert head is not None
        assert outcome is not None
        values = head.values
        self._peek = asked
        outcome.model = asked.model
        outcome.stream = asked.stream
        outcome.bytes_in = len(self._body)
        prompt: tuple[int, ...] = ()
        if self._route is None or not self._route.generates:
            pass  # what it computes is not kept
        elif asked.layout is not None:
            spans = ((field.key, field.value, field.end) for field in asked.layout.fields)
            prompt = blocks.of_spans(self._body, spans, asked.model)
        else:
            prompt = blocks.of_body(bytes(self._body), asked.model)
        request = InferenceRequest(
            id=self._request_id,
            head=Head(head.path, self._whose(head), values.get(b"authorization") or values.get(b"x-api-key") or b""),
            model=asked.model,
            stream=asked.stream,
            n=asked.n,
            max_tokens=asked.max_tokens,
            prompt_tokens=asked.prompt_tokens,
            body_bytes=len(self._body),
            band=head.text(b"x-llmgw-band"),
            bands=host.bands,
            profile=head.text(b"x-llmgw-profile"),
            session=head.text(b"x-session-id"),
            blocks=prompt,
            ids=blocks.ids_of_body(bytes(self._body)) if asked.token_ids else (),
            explain=head.text(b"x-llmgw-explain") == "1",
            media=asked.media,
            fetches=asked.fetches,
            continues=asked.previous,
            accepted=outcome.accepted,
        )
        if host.internal:
            leg = internal.read(request, head)
            if isinstance(leg, Refusal):
                self._refuse(leg)
                return
            request = leg
        answer = host.brain.admit(request)
        if isinstance(answer, Several):
            self._take_answer(Wait(answer.ticket))
            host.several(answer.ticket, request, head, self._body)
        elif isinstance(answer, Lease) and host.strips and self._route is not None and self._route.pipelined:
            self._lease = answer  # what may aim an engine was let in for a pipeline to take out, and there is none
            self._refuse(Refusal(reason="internal", message="a request that must go through a pipeline does not"))
        else:
            self._take_answer(answer)

    def granted(self, answer: Lease | Refusal | Page) -> None:
        """What a `Wait` was waiting for."""
        if self._state == WAITING:
            self._ticket = 0
            self._take_answer(answer)

    def _take_answer(self, answer: Lease | Wait | Refusal | Page) -> None:
        if isinstance(answer, Lease):
            self._lease = answer
            outcome = self._outcome
            assert outcome is not None
            outcome.admitted = self.host.clock.now
            self._send(answer)
        elif isinstance(answer, Wait):
            self._state = WAITING
            self._ticket = answer.ticket
            self.deadline = NEVER  # the brain owns this wait
            self.host.waiting(answer.ticket, self)
        elif isinstance(answer, Refusal):
            self._refuse(answer)
        else:
            self._show(answer)

    def recall(self, failure: Failure) -> bool:
        """The attempt is of no use any more: another one, unless the client has got something of it."""
        if self._state not in (DIALLING, SENT, RELAYING) or self._sent_any:
            return False
        self._failed(failure, failure.reason)
        return True

    def abandon(self, refusal: Refusal) -> None:
        """The brain or the drain ends this request, wherever it stands."""
        if self._state in (IDLE, LINGERING, CLOSED):
            if self._state == IDLE:
                self._end()
            return
        if self._state == FLUSHING:
            self._end()
            return
        self._close_after = True
        self._fail(refusal)

    # -- the engine's side ----------------------------------------------------------------------------------------------

    def _send(self, lease: Lease) -> None:
        outcome = self._outcome
        assert outcome is not None
        if lease.poison and self._digest() in lease.poison:
            self._failed(Failure(reason="poison", started=False), "this body made two engines close")
            return
        outcome.attempts = lease.attempt
        for phase in lease.phases:
            outcome.endpoints[phase] = lease.target.endpoint
        channel = self.host.take(lease.target)
        if channel is None:
            self._state = DIALLING
            self.deadline = NEVER  # the dial has its own
            self.host.dial(self, lease)
        else:
            self._transmit(lease, channel, reused=True)

    def dialled(self, answer: Channel | str) -> None:
        """The connection asked for, or why there is none."""
        lease = self._lease
        if self._state != DIALLING or lease is None:
            if isinstance(answer, Channel):
                answer.close()
            return
        if isinstance(answer, Channel):
            self._transmit(lease, answer, reused=False)
        else:
            self._failed(Failure(reason="connect_failed", started=False), answer)

    def _transmit(self, lease: Lease, channel: Channel, *, reused: bool) -> None:
        head, asked, outcome, host = self._head, self._peek, self._outcome, self.host
        assert head is not None
        assert asked is not None
        assert outcome is not None
        target = lease.target
        shape = self._route.shape if self._route is not None else ""
        ask_usage = lease.usage == "ask" and asked.stream and not asked.include_usage and shape in USAGE_ASKED
        leg = lease.leg
        body: bytes | bytearray = self._body if leg is None else b""
        if leg is None and (target.model or ask_usage):
            if asked.model_at is not None:
                body = rewrite_form(body, asked.model_at, target.model)
            elif body:
                body = rewrite(body, model=target.model or None, ask_usage=ask_usage, found=asked.layout)
        length = len(body) if leg is None else sum(map(len, leg.body))
        self._filter = UsageFilter() if ask_usage else None
        outcome.served = target.model or asked.model
        name = "" if leg is None else f"{leg.name}-"
        upstream_id = f"{self._request_id}-{name}{host.rng.getrandbits(32):08x}"
        outcome.upstream_request_id = upstream_id
        own = "".join(f"{name}: {value}\r\n" for name, value in target.headers) if target.headers else ""
        path = head.path
        if head.query is not None and self._route is not None and self._route.kind == "kept":
            path += (
                "?" + head.query
            )  # elsewhere it says nothing that an engine reads, and may hold what is not its business
        lines = (
            f"{head.method} {target.path}{path} HTTP/1.1\r\nhost: {target.host}\r\ncontent-length: {length}\r\n"
            f"x-request-id: {upstream_id}\r\n{own}"
        ).encode("latin-1") + (head.forward if leg is None or leg.client_headers else b"")
        self._state = SENT
        self._upstream = channel
        self._reused = reused
        self._upbuf = b""
        channel.bind(self.upstream_bytes, self.upstream_gone, None, self.crashed)
        now = host.clock.now
        outcome.sent = now
        self._last = now
        self._quiet_until()
        try:
            if length <= SIZE:
                channel.write(lines + b"\r\n" + (body if leg is None else b"".join(leg.body)))
            else:
                channel.write(lines + b"\r\n")
                for piece in (body,) if leg is None else leg.body:
                    channel.write(piece)
        except OSError as error:
            self.upstream_gone(error)

    def _quiet_until(self) -> None:
        """No byte may come for so long. The generation budget, where there is one, ends earlier."""
        lease, outcome = self._lease, self._outcome
        if lease is None or outcome is None:
            return
        deadline = self.host.clock.now + lease.limits.idle
        budget = lease.limits.generation
        if budget is not None and outcome.sent is not None:
            deadline = min(deadline, outcome.sent + budget)
        self._until(deadline)

    def upstream_bytes(self, data: bytes) -> None:
        """The engine sent *data*, of any length."""
        if self._state == RELAYING:
            self._relay(data)
        elif self._state == SENT:
            self._read_answer_head(data)

    def upstream_gone(self, error: OSError | None) -> None:
        """The engine has closed (None), or its connection broke."""
        if self._state == RELAYING:
            head = self._answer_head
            if head is not None and head.length == -2 and error is None:
                self._answer_done(b"", reusable=False)
                return
            why = "the engine closed the connection in the middle of its answer"
            self._fail(Refusal(reason="upstream_closed", message=why), detail=str(error or "FIN"))
        elif self._state == SENT:
            fresh_start = not (self._reused and not self._upbuf)
            self._failed(
                Failure(
                    reason="upstream_closed",
                    reused=self._reused and not self._upbuf,
                    started=fresh_start,
                    body_digest=self._digest(),
                ),
                f"closed without an answer: {error or 'FIN'}",
            )

    def _digest(self) -> int:
        body = bytes(self._body[:DIGESTED]) + bytes(self._body[-DIGESTED:])
        mixed = hashlib.blake2b(body, digest_size=8, key=len(self._body).to_bytes(8, "big"))
        return int.from_bytes(mixed.digest(), "big")

    def _read_answer_head(self, data: bytes) -> None:
        if self._upbuf:
            data = self._upbuf + data
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0 or end > self.host.limits.headers:
                if len(data) > self.host.limits.headers:
                    self._broken("the engine's header section is too large")
                    return
                self._upbuf = data
                return
            end += 4
            try:
                head = http1.parse_response(data[:end])
            except http1.Malformed as error:
                self._broken(error.message)
                return
            data = data[end:]
            if head.status >= 200:
                break
            # 100 and 103 are interim; 101 was refused by the parser
        self._upbuf = b""
        outcome, route = self._outcome, self._route
        assert outcome is not None
        assert route is not None
        outcome.upstream_status = head.status
        leg = self._lease.leg if self._lease is not None else None
        if head.status in (RETRIED if leg is None else leg.fails):
            said = errors.upstream_message(data)
            self._failed(
                Failure(
                    reason="no_endpoint",
                    status=head.status,
                    retry_after=head.retry_after,
                    started=head.status not in RETRIED,
                ),
                f"the engine said {head.status}" + (f": {said}" if said else ""),
            )
            return
        self._answer_head = head
        self._state = RELAYING
        self._sse = head.content_type.startswith(b"text/event-stream")
        self._meter = Meter(route.shape) if self._sse else JsonMeter()
        if not self._sse:
            self._filter = None
        self._decoder = http1.Chunked() if head.length == -1 else None
        self._raw = self._sse and self._filter is None and not self._http10() and route.shape != "responses"
        self._left = head.length
        self._gap = self.host.gaps(outcome.model)
        self._ids = IdFinder() if route.shape == "responses" else None
        self._want_head = self._client_head(head)
        if data or head.length == 0:
            self._relay(data)

    def _client_head(self, head: http1.ResponseHead) -> bytes:
        """The answer's head as this client gets it. Decides how the body is framed towards it."""
        request = self._head
        assert request is not None
        lines = head.lines
        length = head.length
        if self._filter is not None and self._sse:
            length = -1  # events are taken out: its length is no longer known
        if length >= 0:
            lines += b"content-length: %d\r\n" % length
        elif length == -1 and not request.http10:
            lines += b"transfer-encoding: chunked\r\n"
        else:
            self._close_after = True
        if self._close_after:
            lines += b"connection: close\r\n"
        lease = self._lease
        if lease is not None and lease.decision:
            lines += b"x-llmgw-explain: " + lease.decision.encode("latin-1", "replace") + b"\r\n"
        return lines + b"x-request-id: " + self._request_id.encode("ascii") + b"\r\n\r\n"

    def _relay(self, data: bytes) -> None:
        """Bytes of the answer's body. Per read, not per event: one time, one scan, one write."""
        host, outcome, head, meter, upstream = self.host, self._outcome, self._answer_head, self._meter, self._upstream
        assert outcome is not None
        assert head is not None
        assert meter is not None
        assert upstream is not None
        now = host.clock.now
        done = False
        surplus = False
        decoder = self._decoder
        raw = data
        events = meter.events
        read = 0  # bytes of the body that were metered in bulk, or are kept to be
        if decoder is not None:
            carried = len(self._carry)
            rest = self._carry + data if carried else data
            self._carry = b""
            try:
                if self._raw:
                    if len(rest) > BULK:
                        read = self._bulk(decoder, meter, rest)
                        rest = rest[read:]
                    if rest and decoder.begins(rest):
                        self._carry, rest = rest, b""
                payload = decoder.feed(rest) if rest else b""
            except http1.Malformed as error:
                self._broken(error.message)
                return
            if decoder.in_trailer:
                done = decoder.done
                raw = data[: read + decoder.last - carried] if decoder.last >= 0 else b""
                if done:
                    surplus = decoder.end < len(rest)
                    raw += b"\r\n"  # an engine's trailer fields end here
        elif head.length >= 0:
            if len(data) > self._left:
                surplus = True
                raw = data = data[: self._left]
            self._left -= len(data)
            done = self._left == 0
            payload = data
        else:
            payload = data
        if payload:
            meter.feed(payload)
            if self._ids is not None and (found := self._ids.feed(payload)) is not None:
                self._ids = None
                if found and self._lease is not None:
                    host.brain.made(self._lease.id, found)
        if self._filter is not None or (decoder is not None and self._http10()):
            raw = self._reframe(payload, done)
        self._quiet_until()
        if meter.events != events:
            self._count(now, meter)
        if done:
            self._answer_done(raw, reusable=head.keep_alive and not surplus)
            return
        if not raw:
            return
        if not self._sent_any:
            if not self._sse or not (payload or read or self._carry):
                self._held.append(raw)
                if self._sse or sum(map(len, self._held)) <= HELD:
                    return
                raw = b"".join(self._held)
            elif self._held:
                self._held.append(raw)
                raw = b"".join(self._held)
            self._held = []
            raw = self._want_head + raw
            self._started(now)
        if not self._to_client(raw):
            return
        if self._client.out is not None:
            upstream.pause()

    def _bulk(self, decoder: http1.Chunked, meter: Meter | JsonMeter, data: bytes) -> int:
        """Meter as much of *data* as is one known event again and again, without taking it apart; how far that went."""
        assert isinstance(meter, Meter)
        at = 0
        for _ in range(OTHERS):
            if not decoder.boundary:
                step = decoder.missing
            else:
                end, count = decoder.skim(data, at, meter.alike_until(data, at))
                if count and meter.feed_bulk(data, at, end, count):
                    return end
                step = data.find(b"\n\n\r\n", at) + 4 - at
            if step < 4 or at + step > len(data):
                break
            meter.feed(decoder.feed(data[at : at + step]))
            at += step
            if decoder.in_trailer:
                break
        return at

    def _http10(self) -> bool:
        return self._head is not None and self._head.http10

    def _reframe(self, payload: bytes, done: bool) -> bytes:
        """The body in our own framing: where an event was taken out, or an HTTP/1.0 client cannot read chunks."""
        if self._filter is not None:
            payload = self._filter.feed(payload)
            if done:
                payload += self._filter.finish()
        if self._http10():
            return payload
        framed = b"%x\r\n%b\r\n" % (len(payload), payload) if payload else b""
        return framed + b"0\r\n\r\n" if done else framed

    def _started(self, now: float) -> None:
        """The first byte of the body goes to the client: no retry from here on."""
        outcome = self._outcome
        assert outcome is not None
        self._sent_any = True
        outcome.first = now
        self._body = b""
        self._want_head = b""

    def _count(self, now: float, meter: Meter | JsonMeter) -> None:
        """Events have come: a gap for the histogram, and now and then progress for the brain."""
        if self._next_progress == NEVER:  # the first token has no gap before it
            if meter.tokens:
                self._next_progress = now
        elif self._gap is not None:
            self._gap(now - self._last)
        self._last = now
        if now >= self._next_progress and self._lease is not None:
            self._next_progress = now + PROGRESS_SECONDS
            self.host.brain.progress(self._lease.id, meter.tokens)

    def _to_client(self, data: bytes) -> bool:
        """Write; False if the client turned out to be gone (everything has ended then)."""
        outcome = self._outcome
        if outcome is not None:
            outcome.bytes_out += len(data)
        try:
            self._client.write(data)
        except OSError as error:
            self.client_gone(error)
            return False
        return True

    def _answer_done(self, raw: bytes, *, reusable: bool) -> None:
        """The engine's answer is complete."""
        outcome, upstream, lease, head = self._outcome, self._upstream, self._lease, self._answer_head
        assert outcome is not None
        assert upstream is not None
        assert lease is not None
        assert head is not None
        if not self._sent_any:
            raw = self._want_head + b"".join(self._held) + raw
            self._started(self.host.clock.now)
        self._upstream = None
        if reusable and upstream.out is None and not upstream.closed:
            self.host.give(lease.target, upstream)
        else:
            upstream.close()
        outcome.last = self.host.clock.now
        if raw and not self._to_client(raw):
            return
        self._settle(head.status)
        self._answered()

    def _answered(self) -> None:
        """The answer has been written; is it with the client, and what is next?"""
        if self._client.out is not None:
            self._state = FLUSHING
            self._stalled_until()
            return
        if self._close_after:
            self._linger()
            return
        self._reset()
        self._state = IDLE
        if self.host.draining:
            self._end()
            return
        self._until(self.host.clock.now + self.host.limits.keep_alive)
        if self._client.paused:
            self._client.resume()
        if self._inbuf:
            self._advance()

    def _linger(self) -> None:
        """Close so that the client can read what it was sent: FIN first, then read on for a bounded while."""
        if self._state == LINGERING:
            return
        self._client.shutdown()
        if self._client.finished:
            self._end()
            return
        self._state = LINGERING
        self._left = LINGER_BYTES
        self._inbuf = b""
        self._client.resume()
        self._until(self.host.clock.now + LINGER_SECONDS)

    def _end(self) -> None:
        """The connection is over. Everything is released here, once."""
        if self._state == CLOSED:
            return
        self._drop_upstream()
        self._state = CLOSED
        self.deadline = NEVER
        self._inbuf = b""
        self._body = b""
        self._buffer = None
        self._client.close()
        self.host.ended(self)

    def _drop_upstream(self) -> bool:
        """Close the upstream, cancel a dial. True if an engine may have been at work."""
        upstream = self._upstream
        self._upstream = None
        if self._state == DIALLING:
            self.host.undial(self)
        if upstream is None:
            return False
        upstream.close()
        return True

    # -- failure --------------------------------------------------------------------------------------------------------

    def _broken(self, why: str) -> None:
        """The engine does not speak HTTP as it should."""
        refusal = Refusal(reason="upstream_protocol", message="the engine's answer is not valid HTTP")
        if self._sent_any:
            self._fail(refusal, detail=why)
        else:
            self._failed(Failure(reason="upstream_protocol"), why)

    def _failed(self, failure: Failure, detail: str) -> None:
        """An attempt failed and the client has seen nothing: the brain says what follows."""
        lease, outcome = self._lease, self._outcome
        assert lease is not None
        assert outcome is not None
        self._drop_upstream()
        self._answer_head = None
        self._held = []
        self._want_head = b""
        outcome.detail = detail
        self._state = WAITING
        self._take_answer(self.host.brain.retry(lease.id, failure))

    def _fail(self, refusal: Refusal, *, detail: str = "") -> None:
        """End the request with *refusal*: as an answer if nothing was sent, else by cutting the stream."""
        if not self._sent_any:
            self._refuse(refusal, detail=detail)
            return
        reason = reasons.get(refusal.reason)
        head, meter = self._answer_head, self._meter
        aborted = self._drop_upstream()
        outcome = self._outcome
        assert outcome is not None
        outcome.aborted = aborted and reason.code != "upstream_closed"
        clean = False
        if self._sse and meter is not None and meter.at_boundary and head is not None:
            event = errors.error_event(refusal, anthropic=self._anthropic())
            if self._filter is not None or (self._decoder is not None and not self._http10()):
                if self._filter is not None or (
                    self._decoder is not None and self._decoder.boundary and not self._carry
                ):
                    clean = self._to_client(b"%x\r\n%b\r\n" % (len(event), event))
            elif head.length == -2 or self._http10():
                clean = self._to_client(event)
        if self._state == CLOSED:
            return
        self._settle(outcome.upstream_status or 200, refusal.reason, detail or refusal.message)
        if not clean and head is not None and head.length == -2:
            self._state = CLOSED  # only a reset tells this client that its answer is not whole
            self.deadline = NEVER
            self._client.close(reset=True)
            self.host.ended(self)
            return
        self._close_after = True
        self._answered()

    def _anthropic(self) -> bool:
        """Whose shape errors have. Below an Anthropic route everything is Anthropic's, paths that do not exist too."""
        if self._route is not None:
            return self._route.dialect == "anthropic"
        return self._head is not None and self._head.path.startswith("/v1/messages")

    def _refuse(self, refusal: Refusal, *, close: bool = False, detail: str = "") -> None:
        """Answer with an error. *close*: where the next request would begin is in doubt."""
        reason = reasons.get(refusal.reason)
        head = self._head
        aborted = self._drop_upstream()
        if self._outcome is not None:
            self._outcome.aborted = aborted
        unread = self._state == BODY or (self._state <= HEAD and head is not None and head.length != 0)
        if close or unread or head is None:
            self._close_after = True
        lines = [("content-type", "application/json")]
        if reason.status == 405 and self._route is not None:
            lines.append(("allow", ", ".join(self._route.methods)))
        if reason.retry:
            after = refusal.retry_after
            if after is None and reason.retry_after:
                after = reasons.FIXED_RETRY_AFTER
            if after is not None:
                lines.append(("retry-after", str(max(1, round(after)))))
        if reason.status == 401:
            lines.append(("www-authenticate", "Bearer"))
        body = errors.error_body(refusal, anthropic=self._anthropic())
        status = refusal.status or reason.status
        if self._answer(status, lines, body):
            before = self._outcome.detail if self._outcome is not None else ""  # of the attempt that failed
            self._settle(status, refusal.reason, detail or before or refusal.message)
            self._answered()

    def _show(self, page: Page) -> None:
        if self._answer(page.status, [("content-type", page.content_type), *page.headers], page.body):
            self._settle(page.status)
            self._answered()

    def _answer(self, status: int, lines: list[tuple[str, str]], body: bytes) -> bool:
        """Write an answer of our own; False if the client turned out to be gone."""
        head = self._head
        text = [f"HTTP/1.1 {status} {STATUS_TEXT.get(status, 'Error')}"]
        text += [f"{name}: {value}" for name, value in lines if body or name != "content-type"]
        text.append(f"content-length: {len(body)}")
        if self._close_after:
            text.append("connection: close")
        if self._request_id:
            text.append(f"x-request-id: {self._request_id}")
        data = ("\r\n".join(text) + "\r\n\r\n").encode("latin-1", "replace")
        if head is None or head.method != "HEAD":
            data += body
        return self._to_client(data)

    def crashed(self, error: Exception) -> None:
        """A bug of ours, met while this exchange was served: it ends, nothing else does."""
        self.host.bug(self._request_id, error)
        try:
            if self._open and self._state not in (FLUSHING, LINGERING, CLOSED):
                self._close_after = True
                self._fail(Refusal(reason="internal", message="a bug in llmgw; the log has it under this request's id"))
            else:
                self._end()
        except Exception as second:  # the bug is in the way out, too
            self.host.bug(self._request_id, second)
            self._abort_quietly()

    def _abort_quietly(self) -> None:
        try:
            self._settle(500, "internal", "see the traceback")
        except Exception as third:
            self.host.bug(self._request_id, third)
        self._end()

    # -- the end --------------------------------------------------------------------------------------------------------

    def _settle(self, status: int, reason: str = "", detail: str = "") -> None:
        """Tell the brain how it ended. The only place, once a request."""
        outcome = self._outcome
        if not self._open or outcome is None:
            return
        self._open = False
        self._reading = self._decoding = None
        if self._upstream is not None or self._state == DIALLING:
            outcome.aborted = self._drop_upstream()
        outcome.status = status
        outcome.reason = reason
        if detail:
            outcome.detail = detail
        if not outcome.request_id:
            outcome.request_id = self._request_id
        meter = self._meter
        if meter is not None:
            self._usage(outcome, meter)
        brain = self.host.brain
        if self._ticket:
            self.host.forget(self._ticket)
            ticket, self._ticket = self._ticket, 0
            brain.withdraw(ticket, outcome)
            return
        brain.settle(self._lease.id if self._lease is not None else None, outcome)

    def _usage(self, outcome: Outcome, meter: Meter | JsonMeter) -> None:
        if self._carry and self._decoder is not None:
            meter.feed(self._decoder.feed(self._carry))
            self._carry = b""
        meter.finish()
        usage = meter.usage
        generates = self._route is None or self._route.generates
        if usage is not None and (usage.completion is not None or not generates):
            outcome.prompt_tokens = usage.prompt
            outcome.cached_tokens = usage.cached
            outcome.completion_tokens = usage.completion
            outcome.computed_tokens = usage.computed
            outcome.usage = "engine"
        elif self._sse and generates:
            outcome.completion_tokens = meter.tokens
            outcome.prompt_tokens = self._peek.prompt_tokens if self._peek is not None else None
            outcome.usage = "counted"

    def hang_up(self) -> None:
        """The connection's task is being cancelled: end now, with the outcome settled."""
        if self._state == CLOSED:
            return
        self._settle(499, "client_gone", "the connection was ended by force")
        self._end()

    # -- time -----------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """The deadline has passed, if it has not moved meanwhile."""
        self.host.clock.now = now
        if now < self.deadline:
            self.host.schedule(self)
            return
        state, limits = self._state, self.host.limits
        if state in (IDLE, LINGERING):
            if self._opened and not self._client.opening:
                self._opened = False
                self._until(now + limits.head_timeout)
            else:
                self._end()
        elif state == HEAD:
            self._begin()
            self._refuse(
                Refusal(reason="slow_request", message=f"the head took longer than {limits.head_timeout:g} s"),
                close=True,
            )
        elif state == BODY:
            rate = limits.body_min_rate
            allowed = self._body_from + limits.body_grace + (self._body_have / rate if rate else NEVER)
            if now < allowed:
                self._until(allowed)
                return
            self._refuse(
                Refusal(reason="slow_request", message=f"the body came slower than {rate} bytes a second"), close=True
            )
        elif state == FLUSHING:
            if self._client_moves():
                self._stalled_until()
            else:
                self._end()
        elif state in (SENT, RELAYING):
            self._overdue(now)

    def _stalled_until(self) -> None:
        self._until(self.host.clock.now + FLUSH_SECONDS)

    def _client_moves(self) -> bool:
        """Whether a client for which bytes are held has taken any since the last look."""
        before, self._unsent = self._unsent, self._client.unsent()
        return before != self._unsent

    def _overdue(self, now: float) -> None:
        lease, outcome = self._lease, self._outcome
        assert lease is not None
        assert outcome is not None
        budget = lease.limits.generation
        if budget is not None and outcome.sent is not None and now >= outcome.sent + budget:
            self._close_after = True
            message = f"the answer took longer than the generation budget of {budget:g} s"
            self._fail(Refusal(reason="generation_timeout", message=message))
        elif self._upstream is not None and self._upstream.paused:
            if self._client_moves():
                self._quiet_until()
            else:
                self._settle(499, "client_gone", "it takes no more bytes")
                self._end()
        else:
            refusal = self.host.brain.quiet(lease.id, lease.limits.idle)
            if refusal is None:
                self._quiet_until()
            else:
                self._close_after = True
                self._fail(refusal)
