"""Performs pipelines: the commands of `llmgw.pipeline` become calls by the data plane's client and leases to the exchange.

    brain.admit ─► Several(ticket) ─► begin ─► a task: run(steps) ◄──reply── perform(command)
                                                  │ Relay: granted(ticket, Lease with a Leg)
                          brain.retry  ─► retried │ ◄─ the attempt failed, nothing went to the client
                          brain.settle ─► ended   │ ◄─ the client has its answer, or is gone
                                                  ▼
                              refusal: granted(ticket, Refusal)

A job is one request. Invariants
- A job's task ends when its request is settled, and the other way round: whoever comes first ends the other.
- What a leg adds to the ledger, and to a link, it takes away in a `finally` of the call, or in `_close_last`.
- A job has a ticket that the exchange waits for, or a lease that it serves, never both.
- Calls that only free blocks (`releases`) belong to the service, not to the client that left; they are bounded in
  number and time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import msgspec
import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from llmgw import reasons
from llmgw.errors import Refused, Unavailable
from llmgw.metrics import E2E_BOUNDS, TTFT_BOUNDS, Buckets
from llmgw.net.client import Unreachable
from llmgw.pipeline import pair
from llmgw.pipeline.commands import (
    Answer,
    Call,
    Choose,
    Chosen,
    Command,
    Declined,
    Failed,
    Fetch,
    Gather,
    Note,
    Relay,
    Relayed,
    Reply,
)
from llmgw.pipeline.config import Pipeline, build
from llmgw.pipeline.context import Context
from llmgw.pipeline.headers import forwarded
from llmgw.pipeline.links import Change, Links
from llmgw.pipeline.run import Ending, releases, run
from llmgw.pipeline.wire import encode_parts, parse, strip_transfer_fields
from llmgw.request import (
    Failure,
    InferenceRequest,
    Lease,
    Leg,
    LegMover,
    Limits,
    Outcome,
    Phase,
    Principal,
    Refusal,
    Several,
    Target,
)
from llmgw.routing.decision import Decision
from llmgw.routing.field import Query
from llmgw.server.legs import has_prompt
from llmgw.server.targets import service_target

if TYPE_CHECKING:
    import random

    from llmgw.config import Server
    from llmgw.logs import Log
    from llmgw.net.client import Client
    from llmgw.net.http1 import RequestHead
    from llmgw.net.media import MediaClient
    from llmgw.server.fleet import Fleet, Place

PROFILE_HEADER = "epp-profile"
LEG_ANSWER = 64 << 20
"""Bytes of a leg's answer: render sends the tensors of images, about a megabyte each."""

RELEASES = 64
"""Release calls at once; further ones wait their turn. Each lasts as long as a transfer and one token."""

RELEASE_TIMEOUT = 30.0
"""Seconds. Prefill engines free blocks that nobody fetched by themselves after 30 to 480 s."""

TRACES = 1000
"""Requests whose phases can be asked for afterwards; some 2 KB each."""

SERVER_ERRORS = frozenset(range(500, 600)) | {429}


@attrs.define(eq=False, slots=False)
class Job:
    """One request on its way through its pipeline."""

    request: InferenceRequest
    model: str
    principal: Principal
    reservation: int
    name: str  # of the pipeline
    ticket: int
    mover: LegMover | None = None
    head: RequestHead | None = None
    ctx: Context | None = None
    scope: trio.CancelScope = attrs.Factory(trio.CancelScope)
    lease: Lease | None = None  # of the last leg, as long as the exchange serves it
    ids: list[int] = attrs.Factory(list)  # tickets and leases
    reply: Reply = None
    replied: trio.Event = attrs.Factory(trio.Event)
    place: Place | None = None  # of the last leg
    last: int = 0  # lease of the last leg, while it is in the ledger; 0 = none is
    first: bool = False  # its first token has come
    decision: pair.PairDecision | None = None
    endpoints: dict[Phase, str] = attrs.Factory(dict)
    attempts: int = 0
    granted: float = 0.0  # when the last leg was
    settled: bool = False
    trace: list[dict[str, Any]] = attrs.Factory(list)


class Giver(Protocol):
    """What pipelines ask of the brain."""

    def next_id(self) -> int: ...

    def limits(self, model: str) -> Limits: ...

    def give_back(self, job: Job, refusal: Refusal) -> None:
        """*job* ends without a lease: what `admit` was given for it is released."""
        ...


class Pipelines:
    """All pipelines of one server: `llmgw.net.relay.Legs`, and what the brain asks."""

    def __init__(
        self,
        config: Server,
        fleet: Fleet,
        client: Client,
        media: MediaClient,
        log: Log,
        clock: Callable[[], float],
        rng: random.Random,
        brain: Giver,
    ) -> None:
        """Raises ConfigError."""
        self._config = config
        self._fleet = fleet
        self._client = client
        self._media = media
        self._log = log
        self._clock = clock
        self._rng = rng
        self._brain = brain
        self._pipelines: dict[str, Pipeline] = {name: build(one) for name, one in config.pipelines.items()}
        self._links = {
            name: Links({k: float(v) for k, v in p.config.link_speed.items()}) for name, p in self._pipelines.items()
        }
        self._jobs: dict[int, Job] = {}  # by ticket and by lease id
        self._known: set[str] = set()  # ids of endpoints
        fleet.listeners.append(self._renew)
        self._nursery: trio.Nursery | None = None
        self.gateway_alive = False
        self._releasing = trio.CapacityLimiter(RELEASES)
        self.traces: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self.counts: dict[tuple[str, str], int] = {}  # (event, detail)
        self.seconds: dict[str, Buckets] = {}  # by step: encode, prefill, decode, render, …
        self.handover = Buckets(TTFT_BOUNDS)  # decode leg sent to its first token

    # -- the relay and the brain ask -------------------------------------------------------------------------------

    @property
    def strips(self) -> bool:
        """Whether every request goes through a pipeline that takes out what aims an engine."""
        names = {self._config.pipeline} | {m.pipeline for m in self._config.models.values() if m.pipeline}
        return "" not in names and all(self._pipelines[n].config.transfer_fields == "strip" for n in names)

    @property
    def all_headers(self) -> bool:
        return any(p.config.gateway for p in self._pipelines.values())

    def gateway_only(self) -> bool:
        """Whether models are the gateway's business: whatever is asked for goes there."""
        name = self._config.pipeline
        return bool(name) and bool(self._pipelines[name].config.gateway)

    def named(self, model: str) -> str:
        """Which pipeline serves *model*; "" = none."""
        policy = self._config.models.get(model)
        return (policy.pipeline if policy is not None else "") or self._config.pipeline

    def admit(self, request: InferenceRequest, model: str, principal: Principal, reservation: int) -> Several | None:
        """A job for *request*, if a pipeline serves it. `begin` follows."""
        name = self.named(model)
        if not name:
            return None
        ticket = self._brain.next_id()
        job = Job(request, model, principal, reservation, name, ticket, ids=[ticket])
        self._jobs[ticket] = job
        return Several(ticket)

    def begin(
        self,
        ticket: int,
        request: InferenceRequest,
        head: RequestHead,
        body: bytes | bytearray,
        mover: LegMover,
    ) -> None:
        """`llmgw.net.relay.Legs.begin`."""
        job = self._jobs[ticket]
        job.mover, job.head = mover, head
        assert self._nursery is not None, "Pipelines.run is not running"
        self._nursery.start_soon(self._run, job, body)

    def configure(self, config: Server) -> None:
        """Another configuration, with the same pipelines."""
        self._config = config

    def owns(self, number: int) -> bool:
        """Whether *number* is a ticket or lease of ours."""
        return number in self._jobs

    def retry(self, lease: int, failure: Failure) -> int:
        """The last leg failed before the client saw anything. The ticket under which an answer follows."""
        job = self._jobs[lease]
        place = job.place
        if place is not None and failure.status is None and not failure.reused and failure.reason != "phase_failed":
            self._fleet.happened(
                place, "connect_failed" if failure.reason == "connect_failed" else "broke", failure.reason
            )
        self._close_last(job)
        job.lease = None
        job.ticket = self._brain.next_id()
        job.ids.append(job.ticket)
        self._jobs[job.ticket] = job
        endpoint = place.endpoint.id if place is not None else ""
        step = "prefill" if failure.reason == "phase_failed" else "decode"
        if failure.status == 412:
            job.reply = Declined()
        else:
            reason = "phase_failed" if failure.reason == "no_endpoint" else failure.reason
            if not isinstance(job.reply, Failed):  # a leg beside it may have said why already
                job.reply = Failed(
                    reason=reason, status=failure.status, endpoint=endpoint, started=failure.started, step=step
                )
        job.replied.set()
        return job.ticket

    def progress(self, lease: int, tokens: int) -> Job:
        """The last leg gives tokens."""
        job = self._jobs[lease]
        now = self._clock()
        if job.place is not None:
            job.place.alive = now
        if job.last:
            self._fleet.router.progress(job.last, tokens, now)
            if not job.first:
                job.first = True
                if self._was_split(job):
                    self.handover.observe(now - job.granted)
                self._changed(job, self._links[job.name].done(job.last, now))
        return job

    def ended(self, number: int, outcome: Outcome) -> Job:
        """The request is settled: everything of it ends. Fills in what only its pipeline knows."""
        job = self._jobs[number]
        for each in job.ids:
            del self._jobs[each]
        job.settled = True
        job.attempts = max(job.attempts, 1)
        outcome.attempts = job.attempts
        outcome.endpoints = dict(job.endpoints)
        ctx = job.ctx
        if self._was_split(job) and (outcome.computed_tokens or 0) * 2 > (outcome.prompt_tokens or 0):
            # the decode engine should have fetched the blocks, and says how many it made itself
            self._count("recompute", "engine")
            self._log.event(
                "recomputed", "warning", request_id=job.request.id, decode=job.endpoints["decode"], tokens=outcome.computed_tokens
            )  # fmt: skip
        if ctx is not None:
            if ctx.cached_tokens is not None:
                outcome.cached_tokens = ctx.cached_tokens
            if outcome.prompt_tokens is None:
                outcome.prompt_tokens = ctx.prompt_tokens
        self._close_last(job, outcome)
        self._keep_trace(job, outcome)
        job.reply = Relayed(status=outcome.status)
        job.replied.set()
        if outcome.reason or outcome.status >= 500:
            job.scope.cancel("the request has ended")
        return job

    def _renew(self) -> None:
        """The set of endpoints has changed: links of those that are gone are forgotten."""
        now = set(self._fleet.places)
        for gone in self._known - now:
            for links in self._links.values():
                links.forget(gone)
        self._known = now

    def _was_split(self, job: Job) -> bool:
        """Whether prefill and decode of it ran on two endpoints."""
        return "prefill" in job.endpoints and job.endpoints["prefill"] != job.endpoints.get("decode")

    # -- the service -----------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own all jobs. Cancelled when the last request has ended."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._watch_links)
            nursery.start_soon(self._watch_gateways)
            task_status.started()

    async def _watch_gateways(self) -> None:
        """Readiness follows the address: anything that answers in HTTP without saying 5xx will do."""
        wanted = sorted({p.config.gateway for p in self._pipelines.values() if p.config.gateway})
        interval, timeout = self._config.probe.interval, self._config.probe.timeout
        while wanted:
            alive = True
            for address in wanted:
                said = ""
                with trio.move_on_after(timeout) as scope:
                    try:
                        answer = await self._client.request(service_target(address), "GET", "/health", limit=1 << 20)
                    except Unavailable as error:
                        said = str(error)
                    else:
                        said = "" if answer.status < 500 else f"HTTP {answer.status}"
                if scope.cancelled_caught:
                    said = f"no answer within {timeout:g} s"
                if said:
                    alive = False
                    if self.gateway_alive:
                        self._log.event("gateway_down", "warning", address=address, why=said)
            if alive and not self.gateway_alive:
                self._log.event("gateway_up", addresses=wanted)
            self.gateway_alive = alive
            await trio.sleep(interval)

    async def _watch_links(self) -> None:
        while True:
            await trio.sleep(1.0)
            for name, links in self._links.items():
                for change in links.tick(self._clock()):
                    self._link_event(name, change)

    async def _run(self, job: Job, body: bytes | bytearray) -> None:
        """One job, from its body to its end."""
        ending: Ending | None = None
        try:
            with job.scope:
                ctx = job.ctx = await self._context(job, body)
                ending = await self._drive(job, ctx)
        except Refused as error:
            ending = Ending(refusal=error.refusal)
        except Exception as error:
            self._log.event("bug", "error", message=f"pipeline {job.name}: {error!r}", request_id=job.request.id)
            ending = Ending(refusal=Refusal(reason="internal", message="a fault of the gateway; its log says more"))
        finally:
            if job.ctx is not None:
                self._release(job, job.ctx)
        if not job.settled and ending is not None:
            self._answer(job, ending)

    async def _context(self, job: Job, body: bytes | bytearray) -> Context:
        pipeline = self._pipelines[job.name].config
        parsed = parse(body)
        if pipeline.transfer_fields == "strip" and (removed := strip_transfer_fields(parsed)):
            self._count("stripped", "")
            self._log.event("fields_stripped", request_id=job.request.id, fields=list(removed))
        await trio.lowlevel.checkpoint()
        assert job.head is not None
        return Context(
            request_id=job.request.id,
            path=job.request.head.route,
            body=parsed,
            policy=pipeline.on_failure,
            rng=self._rng,
        )

    async def _drive(self, job: Job, ctx: Context) -> Ending:
        work = run(self._pipelines[job.name].steps, ctx)
        try:
            reply: Reply = None
            while True:
                try:
                    command = work.send(reply)
                except StopIteration as stop:
                    ending = stop.value
                    assert isinstance(ending, Ending)
                    return ending
                reply = await self._perform(job, ctx, command)
        finally:
            work.close()

    def _answer(self, job: Job, ending: Ending) -> None:
        """Nobody has answered the client: it gets the refusal."""
        refusal = ending.refusal or Refusal(reason="internal", message="the pipeline ended without an answer")
        if ending.status is not None and ending.refusal is not None:
            refusal = msgspec.structs.replace(refusal, status=ending.status)
        if ending.failure is not None and ending.failure.detail:
            self._log.event(
                "phase_failed", "warning", request_id=job.request.id, step=ending.step, why=ending.failure.detail
            )
        mover, lease = job.mover, job.lease
        assert mover is not None
        if lease is not None:  # the last leg is still served: its request ends as the refusal says
            mover.abandon(lease.id, refusal)
            return
        if not any(number != job.ids[0] and number != job.ticket for number in job.ids):
            # no lease was ever given, so the settlement will name none: what was reserved is given back here
            for each in job.ids:
                del self._jobs[each]
            job.settled = True
            self._brain.give_back(job, refusal)
            outcome = Outcome(
                request_id=job.request.id,
                route=job.request.head.route,
                status=refusal.status or reasons.get(refusal.reason).status,
                reason=refusal.reason,
            )
            self._keep_trace(job, outcome)
        mover.granted(job.ticket, refusal)

    # -- commands --------------------------------------------------------------------------------------------------

    async def _perform(self, job: Job, ctx: Context, command: Command) -> Reply:
        if isinstance(command, Call):
            return await self._call(job, ctx, command)
        if isinstance(command, Choose):
            return self._choose(job, ctx, command)
        if isinstance(command, Relay):
            return await self._relay(job, ctx, command)
        if isinstance(command, Gather):
            return await self._gather(job, ctx, command)
        if isinstance(command, Fetch):
            begun = self._clock()
            found = await self._media.fetch(command.urls, command.limits)
            self._step(job, "replace-media-urls", begun, count=len(command.urls))
            return found
        assert isinstance(command, Note)
        if command.event != "step":
            self._count(command.event, str(command.fields.get("why") or command.fields.get("result") or ""))
            job.trace.append({"note": command.event, **command.fields})
        return None

    async def _gather(self, job: Job, ctx: Context, command: Gather) -> tuple[Answer | Failed, ...]:
        replies: list[Answer | Failed] = [Failed(reason="cancelled")] * len(command.calls)
        limiter = trio.CapacityLimiter(command.at_once)
        async with trio.open_nursery() as nursery:

            async def one(index: int) -> None:
                async with limiter:
                    replies[index] = await self._call(job, ctx, command.calls[index])
                if isinstance(replies[index], Failed):
                    nursery.cancel_scope.cancel("another call failed")

            for index in range(len(command.calls)):
                nursery.start_soon(one, index)
        return tuple(replies)

    def _choose(self, job: Job, ctx: Context, command: Choose) -> Chosen | Failed:
        pipeline = self._pipelines[job.name].config
        if pipeline.gateway:
            return Chosen(disaggregate=command.disaggregate, why=command.why)
        now, router, links = self._clock(), self._fleet.router, self._links[job.name]
        for change in links.tick(now):
            self._link_event(job.name, change)
        request = self._counted(job, command.prompt_tokens)
        query = Query(request=request, model=job.model, decode=router.expected(request, job.model), tried=command.avoid)
        found = pair.choose(
            router.snapshot(now),
            query,
            pair.Policy(mode=pipeline.disaggregate, kv_bytes=pipeline.kv_bytes_per_token),
            router.affinity.matched(request, ctx.token_ids or ()),
            links,
            self._rng.random,
            now,
            split=command.disaggregate,
            why=command.why,
            keep_prefill=command.keep_prefill,
        )
        if isinstance(found, Refusal):
            return Failed(reason=found.reason, detail=found.message, started=False)
        job.decision = found
        self._count("pair", "split" if found.prefill is not None else "one endpoint")
        return Chosen(
            prefill=found.prefill,
            decode=found.decode,
            fabric=found.fabric,
            disaggregate=found.prefill is not None,
            why=found.why,
        )

    def _counted(self, job: Job, tokens: int) -> InferenceRequest:
        """The request, with the number of its prompt tokens where it is known exactly."""
        return msgspec.structs.replace(job.request, prompt_tokens=tokens) if tokens else job.request

    def _decide(self, job: Job, call: Call) -> Decision | Refusal:
        """Where a leg goes that no pair was chosen for."""
        assert call.phase is not None
        made = job.decision
        if made is not None and call.endpoint:
            for leg in (made.prefill_leg, made.decode_leg):
                if leg is not None and leg.endpoint.id == call.endpoint and call.phase in leg.phases:
                    return leg
        return self._fleet.router.choose(
            self._counted(job, call.prompt_tokens), job.model, self._clock(), phases=(call.phase,), tried=call.avoid
        )

    async def _call(self, job: Job, ctx: Context, call: Call) -> Answer | Failed:
        """One leg, sent and answered whole."""
        begun = self._clock()
        place: Place | None = None
        key = ""
        body = call.body
        if call.phase is None:
            target = service_target(call.address)
        elif gateway := self._pipelines[job.name].config.gateway:
            target = service_target(gateway)
        else:
            decision = self._decide(job, call)
            if isinstance(decision, Refusal):
                return Failed(reason=decision.reason, detail=decision.message, started=False)
            place = self._fleet.places.get(decision.endpoint.id)
            if place is None:
                return Failed(
                    reason="none_healthy", endpoint=decision.endpoint.id, started=False, detail="it has just gone"
                )
            target = self._fleet.target(place, job.request.model, job.model)
            if target.model:
                body = {**body, "model": target.model}
            key = self._open(job, place, call, decision)
        reply: Answer | Failed = Failed(reason="cancelled", endpoint=place.endpoint.id if place else "", step=call.step)
        try:
            reply = await self._send(job, call, target, body, place)
            if isinstance(reply, Answer) and key:
                self._fleet.router.ledger.first(key, self._clock())
        finally:
            if key and place is not None:
                self._fleet.router.ledger.close(key)
                place.slot.inflight = self._fleet.inflight(place)
            self._step(
                job, call.step, begun, leg=call.leg, endpoint=place.endpoint.name if place else "", failed=_why(reply)
            )
        if call.phase is not None and place is not None and call.phase != "decode":
            job.endpoints[call.phase] = place.endpoint.id
        return reply

    def _open(self, job: Job, place: Place, call: Call, decision: Decision) -> str:
        """The ledger's account of a leg whose answer is not relayed; its key."""
        key = f"{job.ids[0]}/{call.leg}"
        router, now = self._fleet.router, self._clock()
        router.ledger.open(key, place.endpoint.id, prefill=decision.uncached, decode=1, now=now)
        router.affinity.sent(place.endpoint.id, job.request, now)
        place.slot.requests += 1
        place.slot.inflight = self._fleet.inflight(place)
        return key

    async def _send(
        self, job: Job, call: Call, target: Target, body: dict[str, Any], place: Place | None
    ) -> Answer | Failed:
        endpoint = place.endpoint.id if place is not None else ""
        headers = self._headers(job, call)
        payload = encode_parts(body) if call.method == "POST" else ()
        timeout = call.timeout or self._pipelines[job.name].config.leg_timeout
        failure: Failed
        try:
            with trio.fail_after(timeout):
                answer = await self._client.request(
                    target, call.method, call.path, headers=headers, body=payload, limit=LEG_ANSWER
                )
        except Unreachable as error:
            failure = Failed(reason="connect_failed", endpoint=endpoint, started=False, detail=str(error))
        except Unavailable as error:
            failure = Failed(reason="upstream_closed", endpoint=endpoint, detail=str(error))
        except trio.TooSlowError:
            failure = Failed(
                reason="phase_failed", endpoint=endpoint, detail=f"{target.name}: no answer within {timeout:g} s"
            )
        else:
            if place is not None:
                place.alive = self._clock()
            if answer.status != 200:
                detail = answer.body[:8192].decode("utf-8", "replace")
                return Failed(
                    reason="phase_failed", status=answer.status, endpoint=endpoint, step=call.step, detail=detail,
                    started=answer.status not in (429, 503),
                )  # fmt: skip
            try:
                decoded = msgspec.json.decode(answer.body)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                return Failed(
                    reason="phase_failed", endpoint=endpoint, step=call.step, detail=f"its answer is no JSON: {error}"
                )
            if place is not None:
                self._fleet.happened(place, "served")
            return Answer(
                body=decoded,
                endpoint=endpoint,
                headers=tuple((k.encode(), v.encode("latin-1")) for k, v in answer.headers.items()),
            )
        if place is not None:
            place.slot.failures += 1
            self._fleet.happened(place, "connect_failed" if not failure.started else "broke", failure.reason)
        return msgspec.structs.replace(failure, step=call.step)

    def _headers(self, job: Job, call: Call) -> list[tuple[str, str]]:
        """What a leg's head says: what llmgw stamps, and what of the client's may go with it."""
        assert job.head is not None
        stamped = [
            ("content-type", "application/json"),
            ("x-request-id", f"{job.request.id}-{call.leg}-{self._rng.getrandbits(32):08x}"),
            *call.headers,
        ]
        if self._pipelines[job.name].config.gateway:
            own = forwarded((k.decode("latin-1"), v.decode("latin-1")) for k, v in job.head.fields)
            if call.phase is not None:
                stamped.append((PROFILE_HEADER, call.phase))
        else:
            lines = job.head.forward.decode("latin-1").split("\r\n")
            own = tuple((name, value) for name, _, value in (line.partition(": ") for line in lines) if name)
        taken = {name for name, _ in stamped} | {"accept", "content-type"}
        return stamped + [(name, value) for name, value in own if name not in taken]

    # -- the last leg ----------------------------------------------------------------------------------------------

    async def _relay(self, job: Job, ctx: Context, command: Relay) -> Relayed | Declined | Failed:
        """Grant the last leg to the exchange and wait for how it ends."""
        call = command.call
        if call.phase is None or job.mover is None or job.settled:
            return Failed(reason="cancelled")
        begun = self._clock()
        target, decision = self._last_target(job, command)
        if target is None:
            return decision if isinstance(decision, (Declined, Failed)) else Failed(reason="cancelled")
        body = call.body
        if target.model:
            body = {**body, "model": target.model}
            target = msgspec.structs.replace(target, model="")
        policy = self._config.models.get(job.model)
        ask = policy is not None and policy.usage == "ask"
        if ask and body.get("stream") is True:
            body = {**body, "stream_options": {**(body.get("stream_options") or {}), "include_usage": True}}
        gateway = bool(self._pipelines[job.name].config.gateway)
        fails: frozenset[int] = frozenset() if gateway else frozenset((429, 503))
        if command.conditional and gateway:
            fails = frozenset((412,))
        if command.hold_5xx:
            fails = SERVER_ERRORS
        whole = isinstance(decision, Decision) and "prefill" in decision.phases
        job.attempts += 1
        lease = Lease(
            id=self._brain.next_id(),
            request_id=job.request.id,
            target=target,
            phases=("prefill", "decode") if whole else ("decode",),
            limits=self._brain.limits(job.model),
            usage="ask" if ask else "count",
            attempt=job.attempts,
            leg=Leg(
                name=call.leg, body=tuple(map(memoryview, encode_parts(body))), fails=fails, client_headers=not gateway
            ),
        )
        self._jobs[lease.id] = job
        job.ids.append(lease.id)
        job.lease, job.reply, job.replied, job.first = lease, None, trio.Event(), False
        job.granted = begun
        if isinstance(decision, Decision):
            job.place = self._fleet.places.get(decision.endpoint.id)
            assert job.place is not None
            job.last = lease.id
            self._fleet.sent(job.place, lease.id, job.request, decision, again=job.attempts > 1)
            for phase in lease.phases:
                job.endpoints[phase] = decision.endpoint.id
            made = job.decision
            if made is not None and made.prefill is not None and made.decode.id == decision.endpoint.id:
                job.endpoints["prefill"] = made.prefill.id
                now = self._clock()
                self._links[job.name].start(job.last, (made.prefill.id, made.decode.id), made.fabric, made.size, now)
        async with trio.open_nursery() as nursery:
            if command.beside:
                nursery.start_soon(self._beside, job, ctx, command, lease, nursery)
            job.mover.granted(job.ticket, lease)
            await job.replied.wait()
            nursery.cancel_scope.cancel("the last leg has ended")
        reply = _last_reply(job)
        self._step(job, call.step, begun, leg=call.leg, endpoint=target.name, failed=_why(reply))
        return reply

    async def _beside(self, job: Job, ctx: Context, command: Relay, lease: Lease, nursery: trio.Nursery) -> None:
        """Legs in flight together with the last one. One that fails ends the last one, if nothing of it has been sent."""
        for call in command.beside:
            reply = await self._call(job, ctx, call)
            if isinstance(reply, Answer):
                ctx.note_usage(reply.body)  # now: the client's answer may outlast it, and its log line wants it
                continue
            self._log.event("leg_failed", "warning", request_id=job.request.id, leg=call.leg, why=_why(reply))
            if job.settled or job.lease is not lease or job.mover is None:
                return
            job.reply = reply
            failure = Failure(reason="phase_failed", status=reply.status, started=reply.started)
            if not job.mover.recall(lease.id, failure):
                job.reply = None  # the client has got something: the answer goes on
            return

    def _last_target(self, job: Job, command: Relay) -> tuple[Target | None, Decision | Declined | Failed | None]:
        """Where the last leg goes. None with a reply: nowhere."""
        call = command.call
        gateway = self._pipelines[job.name].config.gateway
        if gateway:
            target = service_target(gateway)
            stamped = tuple(one for one in self._headers(job, call) if one[0] != "x-request-id")  # the exchange's own
            return msgspec.structs.replace(target, headers=stamped), None
        decision = self._decide(job, call)
        if isinstance(decision, Refusal):
            if command.conditional:
                return None, Declined()
            return None, Failed(reason=decision.reason, detail=decision.message, started=False)
        if command.conditional:
            if not has_prompt(decision):
                return None, Declined()
            decision = msgspec.structs.replace(decision, phases=("prefill", "decode"))
        place = self._fleet.places.get(decision.endpoint.id)
        if place is None:
            return None, Failed(
                reason="none_healthy", endpoint=decision.endpoint.id, started=False, detail="it has just gone"
            )
        if job.decision is None and "decode" in decision.phases:
            decision = msgspec.structs.replace(decision, phases=("prefill", "decode"))
        return self._fleet.target(place, job.request.model, job.model), decision

    def _close_last(self, job: Job, outcome: Outcome | None = None) -> None:
        """The last leg's account ends."""
        if not job.last or job.place is None:
            return
        self._fleet.ended(job.place, job.last, outcome)
        self._links[job.name].drop(job.last)
        job.last = 0

    def _release(self, job: Job, ctx: Context) -> None:
        """What engines must still hear, said without the client."""
        calls = releases(ctx)
        if calls and self._nursery is not None and not self._nursery.cancel_scope.cancel_called:
            for call in calls:
                self._nursery.start_soon(self._send_release, job, ctx, call)

    async def _send_release(self, job: Job, ctx: Context, call: Call) -> None:
        async with self._releasing:
            with trio.move_on_after(RELEASE_TIMEOUT) as scope:
                reply = await self._call(job, ctx, call)
                self._count("released", "" if isinstance(reply, Answer) else "failed")
        if scope.cancelled_caught:
            self._count("released", "failed")

    # -- what is remembered ----------------------------------------------------------------------------------------

    def _count(self, event: str, detail: str) -> None:
        key = (event, detail if len(self.counts) < 256 else "")
        self.counts[key] = self.counts.get(key, 0) + 1

    def _step(self, job: Job, step: str, begun: float, **fields: object) -> None:
        seconds = self._clock() - begun
        name = step.partition("[")[0]
        if name not in self.seconds:
            self.seconds[name] = Buckets(E2E_BOUNDS if name == "decode" else TTFT_BOUNDS)
        self.seconds[name].observe(seconds)
        job.trace.append(
            {"step": step, "start": round(begun - job.request.accepted, 6), "seconds": round(seconds, 6)}
            | {key: value for key, value in fields.items() if value not in ("", None)}
        )

    def _changed(self, job: Job, change: Change | None) -> None:
        if change is not None:
            self._link_event(job.name, change)

    def _link_event(self, name: str, change: Change) -> None:
        self._count("link", "degraded" if change.degraded else "recovered")
        self._log.event(
            "link_degraded" if change.degraded else "link_recovered",
            "warning" if change.degraded else "info",
            pipeline=name,
            prefill=change.pair[0],
            decode=change.pair[1],
            seconds=round(change.seconds, 3),
            expected=round(change.expected, 3),
        )

    def _keep_trace(self, job: Job, outcome: Outcome) -> None:
        made = job.decision
        found: dict[str, Any] = {
            "kind": "pipeline",
            "request_id": job.request.id,
            "pipeline": job.name,
            "model": job.model,
            "status": outcome.status,
            "reason": outcome.reason,
            "endpoints": dict(job.endpoints),
            "phases": job.trace,
        }
        if made is not None:
            found["pair"] = {
                "why": made.why,
                "prefill": made.prefill.name if made.prefill is not None else None,
                "decode": made.decode.name,
                "fabric": made.fabric,
                "bytes": made.size,
                "transfer_seconds": round(made.transfer, 6),
                "pair_cost": made.pair_cost,
                "local_cost": made.local_cost,
                "cached_tokens": {"prefill": made.cached_prefill, "decode": made.cached_decode},
                "avoided": [list(one) for one in made.avoided],
            }
        self.traces[job.request.id] = found
        self.traces.move_to_end(job.request.id)
        if len(self.traces) > TRACES:
            self.traces.popitem(last=False)

    def families(self) -> Iterator[Metric]:
        """What `/metrics` shows of pipelines."""
        steps = HistogramMetricFamily(
            "llmgw_pipeline_step_seconds", "One leg or download, sent to its whole answer.", labels=["step"]
        )
        for name, buckets in self.seconds.items():
            steps.add_metric([name], buckets.cumulative(), buckets.sum)
        yield steps
        handover = HistogramMetricFamily(
            "llmgw_pipeline_handover_seconds", "Decode leg sent to its first token, where prefill ran elsewhere."
        )
        handover.add_metric([], self.handover.cumulative(), self.handover.sum)
        yield handover
        events = CounterMetricFamily(
            "llmgw_pipeline_events", "What happened in pipelines: pairs, retries, probes, links, releases.",
            labels=["event", "detail"],
        )  # fmt: skip
        for (event, detail), count in self.counts.items():
            events.add_metric([event, detail], count)
        yield events
        links = GaugeMetricFamily("llmgw_pipeline_links_degraded", "Prefill/decode pairs avoided for slow transfers.")
        now = self._clock()
        links.add_metric([], sum(len(one.all_degraded(now)) for one in self._links.values()))
        yield links

    def trace(self, request_id: str) -> Mapping[str, Any] | None:
        """The phases of a request that has ended."""
        return self.traces.get(request_id)


def _last_reply(job: Job) -> Relayed | Declined | Failed:
    reply = job.reply
    assert isinstance(reply, (Relayed, Declined, Failed))
    return reply


def _why(reply: object) -> str:
    if isinstance(reply, Failed):
        return reply.reason if reply.status is None else f"HTTP {reply.status}"
    return "declined" if isinstance(reply, Declined) else ""
