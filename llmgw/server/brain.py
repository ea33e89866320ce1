"""The deciding end of the server: admits requests, decides on retries, settles outcomes. Synchronous, no sockets.

    admit ─► page │ refusal │ lease ──retry──► lease │ refusal          (the same entry, the next attempt)
                              └─────────────settle, once────────────► hooks, metrics, log, health

Invariants
- An entry exists from the lease until its settlement, under the ids of all its attempts; what it holds (the endpoint's
  ledger, the reservation) is released by `settle` and nowhere else.
- A reservation without a lease is settled at once: the mover cannot know of it.
- Settling what is not open is a fault of ours: logged and counted, never raised.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
from msgspec import structs

from llmgw import reasons
from llmgw.admission.bands import Bands
from llmgw.admission.gate import State, Ticket
from llmgw.config import ModelPolicy, Server
from llmgw.hooks import Anonymous, Hooks
from llmgw.kvcache import blocks
from llmgw.logs import Log
from llmgw.metrics import Metrics
from llmgw.openai.models import Merged, merge
from llmgw.openai.routes import TABLE
from llmgw.request import (
    Failure,
    Head,
    InferenceRequest,
    Lease,
    LegMover,
    Limits,
    Mover,
    Outcome,
    Page,
    Phase,
    Principal,
    Refusal,
    Several,
    Wait,
)
from llmgw.routing import explain
from llmgw.routing.decision import Decision
from llmgw.routing.health import Event
from llmgw.routing.policy import canary
from llmgw.server import legs
from llmgw.server.admission import Admission
from llmgw.server.fleet import Fleet, Place
from llmgw.server.kept import Kept
from llmgw.server.retries import Poison, RetryBudget

if TYPE_CHECKING:
    from llmgw.server.pipeline import Job, Pipelines

HUNG = 60.0
"""Seconds without any sign of life (a token of any request, a probe that was answered) after which an engine is given
up: longer than its longest step, and with the probes' own time well below two minutes."""

PIPELINED = frozenset(route.path for route in TABLE if route.pipelined)
HEALTH = frozenset(("/health", "/healthz", "/readyz"))
HEALTHY, UNHEALTHY = Page(), Page(status=503)


@attrs.define(eq=False, slots=True)
class _Entry:
    """One admitted request."""

    request: InferenceRequest
    principal: Principal
    reservation: int
    model: str  # that its name means
    lease: Lease
    place: Place
    phases: tuple[Phase, ...]
    tried: list[str]  # endpoint ids
    ids: list[int]  # of its leases
    last: float  # when it was sent, or last gave a token
    ticket: Ticket
    reused: bool = False  # the one retry after a dead pooled connection is spent


@attrs.define(eq=False, slots=True)
class _Waiting:
    """One request that admission keeps waiting."""

    number: int  # what the mover knows it by
    request: InferenceRequest
    principal: Principal
    reservation: int
    model: str
    ticket: Ticket
    entry: _Entry | None = None  # it was sent before, and waits for another attempt
    answer: Lease | Refusal | Page | None = None
    inside: bool = True  # the call that made it wait has not returned: the answer goes back with it


@attrs.frozen
class _Model:
    """What is the same for all requests of a model."""

    limits: Limits
    policy: ModelPolicy


class Brain:
    """Implements `llmgw.request.Brain`."""

    def __init__(
        self,
        config: Server,
        fleet: Fleet,
        metrics: Metrics,
        log: Log,
        clock: Callable[[], float],
        *,
        created: float = 0.0,
        hooks: Hooks | None = None,
    ) -> None:
        """*created*: Unix seconds, what `/v1/models` says of every model."""
        self.fleet = fleet
        self.hooks: Hooks = hooks or Anonymous()
        self.draining = False
        self.movers: Sequence[Mover] = ()
        self.pipelines: Pipelines | None = None
        self._config = config
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._created = int(created)
        self._ids = itertools.count(1)
        self._entries: dict[int, _Entry] = {}
        self._models: dict[str, _Model] = {}
        self._merged = Merged(b"", {})
        self._budget = RetryBudget()
        self._poison = Poison()
        self._kept = Kept()
        self._waiting: dict[int, _Waiting] = {}
        self._router = fleet.router
        self.admission = Admission(Bands(config.bands), self, self._router.snapshot, clock)
        metrics.more.append(self.admission.collect)
        fleet.on_state = self.admission.look
        fleet.listeners.append(self._renew)
        fleet.on_failed_probe = self._given_up
        self._renew()

    def configure(self, config: Server) -> None:
        """Another configuration; the fleet's `replace` follows. Requests under way keep their limits."""
        self._config = config

    def _renew(self) -> None:
        """The set of endpoints or models has changed."""
        fleet = self.fleet
        self._merged = merge((p.endpoint for p in fleet.places.values()), created=self._created)
        names = dict.fromkeys((*self._config.models, *fleet.models.values()))
        self._metrics.keep_models(names)
        self._models = {
            name: _Model(self._config.limits_of(name), self._config.models.get(name) or ModelPolicy()) for name in names
        }
        self.admission.look()

    @property
    def inflight(self) -> int:
        """Requests that have a lease."""
        return len({id(e) for e in self._entries.values()})

    # -- in ------------------------------------------------------------------------------------------------------

    def admit(self, request: InferenceRequest) -> Lease | Wait | Several | Refusal | Page:
        """identify → band → model → reserve → gate → decide."""
        route = request.head.route
        if route in HEALTH:
            return self._health_page(route)
        principal = self.hooks.identify(request.head)
        if isinstance(principal, Refusal):
            return principal
        if route == "/v1/models" or route.startswith("/v1/models/"):
            return self._models_page(route.removeprefix("/v1/models")[1:])
        if self.draining:
            return Refusal(reason="draining", message="This server is shutting down; ask another, or again shortly.")
        if request.continues:
            found = self._continued(request, principal)
            if isinstance(found, Refusal):
                return found
            request = found
        rank = self.admission.gate.bands.rank(request.band, principal.name, principal.bands, request.bands)
        if isinstance(rank, Refusal):
            return rank
        model = self._model(request.model)
        if isinstance(model, Refusal):
            return model
        if (wrong := self._router.unknown_profile(request.profile)) is not None:
            return wrong
        if not request.only:
            model = self._policy(model, request)
        if request.fetches and (shared := self._models.get(model)) is not None and shared.policy.media_urls == "refuse":
            return Refusal(
                reason="forbidden_field",
                param="messages",
                message=f"Model {_short(model)!r} takes media as data: URLs only: send the bytes, base64-encoded.",
            )
        expected = self._router.expected(request, model)
        reservation = self.hooks.reserve(principal, request, request.prompt_tokens + expected)
        if isinstance(reservation, Refusal):
            return reservation
        self._budget.request(self._clock())
        if self.pipelines is not None and route in PIPELINED and not request.only and not request.internal:
            several = self.pipelines.admit(request, model, principal, reservation)
            if several is not None:
                return several
        ticket = self.admission.offer(request, model, rank, principal.flow, expected)
        if isinstance(ticket, Refusal):
            self._give_back(reservation, request, principal, ticket)
            return ticket
        if ticket.state is State.GRANTED:
            return self._send(request, principal, reservation, model, ticket)
        return self._wait(_Waiting(next(self._ids), request, principal, reservation, model, ticket))

    def _wait(self, waiting: _Waiting) -> Lease | Wait | Refusal | Page:
        """Its ticket is queued; the gate may turn to it at once."""
        waiting.ticket.owner = waiting
        self._waiting[waiting.number] = waiting
        self.admission.pump()
        if waiting.answer is not None:
            return waiting.answer
        waiting.inside = False
        return Wait(waiting.number)

    def _send(
        self, request: InferenceRequest, principal: Principal, reservation: int, model: str, ticket: Ticket
    ) -> Lease | Refusal | Page:
        """*ticket* is granted: where it goes, and its lease."""
        tried = legs.others(self._router.snapshot(self._clock()).endpoints, request.pin) if request.pin else ()
        decision = self._decide(request, model, tried, ticket.allowed)
        if isinstance(decision, Refusal):
            self.admission.gate.cancel(ticket)
            self._give_back(reservation, request, principal, decision)
            return decision
        place = self.fleet.places[decision.endpoint.id]
        if request.prefer and (page := legs.instead(request, decision)) is not None:
            self.admission.gate.cancel(ticket)
            self._give_back(reservation, request, principal, legs.NOT_SERVED)
            return page
        lease = self._lease(request, decision, place, 1)
        now = self._clock()
        entry = _Entry(
            request,
            principal,
            reservation,
            decision.model,
            lease,
            place,
            decision.phases,
            [place.endpoint.id],
            [lease.id],
            now,
            ticket,
        )
        self._entries[lease.id] = entry
        self._permit(ticket, decision, now)
        self.fleet.sent(place, lease.id, request, decision)
        return lease

    def _permit(self, ticket: Ticket, decision: Decision, now: float) -> None:
        due = None if ticket.stream else now + decision.ttft
        self.admission.gate.place(ticket, decision.endpoint.id, now, prefill=decision.uncached, due=due)

    # -- what admission decides later ----------------------------------------------------------------------------

    def granted(self, ticket: Ticket) -> None:
        """*ticket*, which waited, may go."""
        waiting = ticket.owner
        assert isinstance(waiting, _Waiting)
        entry = waiting.entry
        answer: Lease | Refusal | Page
        if entry is None:
            answer = self._send(waiting.request, waiting.principal, waiting.reservation, waiting.model, ticket)
        else:
            decision = self._decide(entry.request, entry.model, (), ticket.allowed)
            if isinstance(decision, Refusal):
                self.admission.gate.cancel(ticket)
                answer = decision
            else:
                answer = self._next(entry, decision)
        self._tell(waiting, answer)

    def refused(self, ticket: Ticket, refusal: Refusal) -> None:
        """*ticket* has waited in vain."""
        waiting = ticket.owner
        assert isinstance(waiting, _Waiting)
        if waiting.entry is None:
            self._give_back(waiting.reservation, waiting.request, waiting.principal, refusal)
        self._tell(waiting, refusal)

    def preempt(self, ticket: Ticket) -> bool:
        """*ticket* has to make way, and waits again, if nothing of it has reached its client."""
        entry = next((e for e in self._entries.values() if e.ticket is ticket), None)
        if entry is None:
            return False
        endpoint = entry.place.endpoint.name
        failure = Failure(reason="preempted")
        here = (mover for mover in self.movers if isinstance(mover, LegMover))
        if not any(mover.recall(entry.lease.id, failure) for mover in here):
            return False
        band = self.admission.gate.bands.order[ticket.rank].name
        self._log.event("preempted", request_id=entry.request.id, band=band, endpoint=endpoint)
        return True

    def _tell(self, waiting: _Waiting, answer: Lease | Refusal | Page) -> None:
        del self._waiting[waiting.number]
        if waiting.inside:
            waiting.answer = answer
            return
        for mover in self.movers:
            mover.granted(waiting.number, answer)

    def _continued(self, request: InferenceRequest, principal: Principal) -> InferenceRequest | Refusal:
        """*request* bound to the endpoint that made the answer it refers to. Another principal's is as good as none."""
        kept = self._kept.find(principal.name, request.continues)
        if kept is not None and kept.endpoint in self.fleet.places:
            return structs.replace(request, only=kept.endpoint, model=request.model or kept.model)
        shown = repr(_short(request.continues))
        why = "it was made elsewhere, or is forgotten" if kept is None else "the engine that made it is gone"
        if request.model:
            return Refusal(
                reason="bad_field",
                param="previous_response_id",
                message=f"Response {shown} cannot be continued: {why}. Send the whole conversation instead.",
            )
        return Refusal(reason="response_not_found", message=f"There is no response {shown}: {why}.")

    def _model(self, asked: str) -> str | Refusal:
        """The model that *asked* means."""
        models = self.fleet.models
        found = models.get(asked)
        if found is not None or (self.pipelines is not None and self.pipelines.gateway_only()):
            return found or asked  # a gateway knows its models itself
        if not asked:
            known = set(models.values())
            if len(known) == 1:
                return known.pop()
            return Refusal(reason="bad_field", param="model", message=f"Name a model: {_some(sorted(known))}.")
        for name, policy in self._config.models.items():
            if asked == name or asked in policy.aliases:
                return name  # configured, and nobody serves it: routing says so
        if any(not p.endpoint.models for p in self.fleet.places.values()):
            return Refusal(
                reason="none_healthy",
                message=f"Not every endpoint has said yet which models it serves; {asked!r} may be among them.",
            )
        return Refusal(
            reason="model_not_found",
            param="model",
            message=f"No endpoint serves {_short(asked)!r}; there are: {_some(sorted(models))}.",
        )

    def _policy(self, model: str, request: InferenceRequest) -> str:
        """The model that serves in the place of *model*: its canary, for the share of sessions that it gets."""
        shared = self._models.get(model)
        if shared is None or not shared.policy.canary:
            return model
        return canary(model, shared.policy.canary, request.session or request.id)

    def _decide(
        self, request: InferenceRequest, model: str, tried: tuple[str, ...], allowed: frozenset[str] | None = None
    ) -> Decision | Refusal:
        """Who serves it as *model*, or as the first of its fallbacks that somebody can serve. *allowed*: who of those
        that serve *model* has room for it."""
        policy = self._models[model].policy if model in self._models else ModelPolicy()
        first: Refusal | None = None
        for name in (model, *policy.fallback):
            found = self._router.choose(
                request,
                name,
                self._clock(),
                profile=policy.profile or self._config.routing.profile,
                phases=request.phases,
                tried=tried,
                allowed=allowed if name == model else None,
            )
            if not isinstance(found, Refusal):
                return found
            first = first or found
        assert first is not None
        return first

    def explain(self, model: str, body: bytes, session: str, profile: str) -> Decision | Refusal:
        """What would be decided for *body*, asked for as *model*. Nothing is sent, nothing counted."""
        found = self._model(model)
        if isinstance(found, Refusal):
            return found
        if (wrong := self._router.unknown_profile(profile)) is not None:
            return wrong
        prompt = blocks.of_body(body, model)
        request = InferenceRequest(
            id="explain",
            head=Head("/v1/chat/completions", ""),
            model=model,
            prompt_tokens=len(body) // 4,
            session=session,
            profile=profile,
            blocks=prompt,
            explain=True,
        )
        return self._decide(request, self._policy(found, request), ())

    def _lease(self, request: InferenceRequest, decision: Decision, place: Place, attempt: int) -> Lease:
        model = decision.model
        shared = self._models[model]
        shown = request.explain and self._config.routing.explain_header
        return Lease(
            id=next(self._ids),
            request_id=request.id,
            target=self.fleet.target(place, request.model, model),
            phases=decision.phases,
            limits=shared.limits,
            usage=shared.policy.usage,
            attempt=attempt,
            poison=self._poison.of_length(request.body_bytes, self._clock()),
            decision=explain.header(decision) if shown else "",
        )

    def _give_back(self, reservation: int, request: InferenceRequest, principal: Principal, refusal: Refusal) -> None:
        if reservation:
            self.hooks.settle(
                reservation,
                Outcome(
                    request_id=request.id,
                    route=request.head.route,
                    status=reasons.get(refusal.reason).status,
                    reason=refusal.reason,
                    model=request.model,
                    principal=principal.name,
                    flow=principal.flow,
                ),
            )

    # -- pages ---------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether an endpoint can serve, and requests are let in."""
        if self.draining:
            return False
        if self.pipelines is not None and self.pipelines.gateway_only():
            return self.pipelines.gateway_alive
        return any(True for _ in self.fleet.serving())

    def _health_page(self, route: str) -> Page:
        """`/health`, `/healthz`: this process lives. `/readyz`: send it requests."""
        if route != "/readyz":
            return HEALTHY
        return HEALTHY if self.ready else UNHEALTHY

    def _models_page(self, model: str) -> Page | Refusal:
        if not model:
            return Page(body=self._merged.list)
        body = self._merged.by_id.get(model)
        if body is None:
            return Refusal(reason="model_not_found", param="model", message=f"There is no model {_short(model)!r}.")
        return Page(body=body)

    # -- meanwhile -----------------------------------------------------------------------------------------------

    def retry(self, lease: int, failure: Failure) -> Lease | Wait | Refusal:
        """The attempt of *lease* failed before the client saw anything."""
        if self.pipelines is not None and self.pipelines.owns(lease):
            return Wait(self.pipelines.retry(lease, failure))
        entry = self._entries.get(lease)
        now = self._clock()
        if entry is None or entry.lease.id != lease:
            return self._bug(f"retry of lease {lease}, which is not open")
        place = entry.place
        if failure.reason == "preempted":
            return self._later(entry, now)
        refusal = self._account(entry, failure, now)
        if refusal is not None:
            return refusal
        again = ""
        if failure.reason == "upstream_closed" and failure.reused and not entry.reused:
            entry.reused = True
            again = place.endpoint.id  # nothing says that the endpoint is bad: its idle connection was old
        elif not (failure.reason == "connect_failed" or failure.status in (429, 503) or not failure.started):
            return self._last(entry, failure)
        tried = tuple(t for t in entry.tried if t != again)
        allowed = self.admission.gate.again(entry.ticket) | {place.endpoint.id}
        decision = self._decide(entry.request, entry.model, tried, None if entry.ticket.bound else allowed)
        if isinstance(decision, Refusal) or not self._budget.take(now):
            return self._last(entry, failure)
        self.fleet.ended(place, entry.lease.id)
        self._metrics.retried(failure.reason)
        return self._next(entry, decision)

    def _next(self, entry: _Entry, decision: Decision) -> Lease:
        """Another attempt of *entry*; the one before has ended."""
        now = self._clock()
        entry.place, entry.phases = self.fleet.places[decision.endpoint.id], decision.phases
        entry.model = decision.model
        if entry.place.endpoint.id not in entry.tried:
            entry.tried.append(entry.place.endpoint.id)
        entry.lease = self._lease(entry.request, decision, entry.place, entry.lease.attempt + 1)
        self._permit(entry.ticket, decision, now)
        self.fleet.sent(entry.place, entry.lease.id, entry.request, decision, again=True)
        entry.ids.append(entry.lease.id)
        entry.last = now
        self._entries[entry.lease.id] = entry
        return entry.lease

    def _later(self, entry: _Entry, now: float) -> Lease | Wait | Refusal:
        """*entry* makes way for a higher band, and waits for another attempt."""
        self.fleet.ended(entry.place, entry.lease.id)
        self._metrics.retried("preempted")
        self.admission.gate.requeue(entry.ticket, now)
        number = next(self._ids)
        answer = self._wait(
            _Waiting(number, entry.request, entry.principal, entry.reservation, entry.model, entry.ticket, entry)
        )
        assert not isinstance(answer, Page)
        return answer

    def _account(self, entry: _Entry, failure: Failure, now: float) -> Refusal | None:
        """What the failure says about the endpoint and about the body."""
        place = entry.place
        if failure.reason == "poison":
            return _poisoned()
        if failure.status is None and not failure.reused:
            place.slot.failures += 1
            event: Event = "connect_failed" if failure.reason == "connect_failed" else "broke"
            self.fleet.happened(place, event, failure.reason)
        if failure.reason == "upstream_closed" and failure.started and not failure.reused and failure.body_digest:
            length = entry.request.body_bytes
            if self._poison.closed(failure.body_digest, length, place.endpoint.id, now):
                self._log.event(
                    "body_poisoned",
                    "error",
                    digest=f"{failure.body_digest:016x}",
                    request_id=entry.request.id,
                    endpoint=place.endpoint.name,
                )
                return _poisoned()
        return None

    def _last(self, entry: _Entry, failure: Failure) -> Refusal:
        """No further attempt: what the client is told."""
        name = entry.place.endpoint.name
        said = {
            "connect_failed": f"Endpoint {name} cannot be connected to",
            "upstream_closed": f"Endpoint {name} closed the connection before it answered",
            "upstream_protocol": f"Endpoint {name} did not answer in HTTP",
            "idle_timeout": f"Endpoint {name} sent nothing for {entry.lease.limits.idle:g} s",
            "no_endpoint": f"Endpoint {name} said {failure.status}",
        }.get(failure.reason, f"Endpoint {name} failed ({failure.reason})")
        attempts = entry.lease.attempt
        tail = f", the last of {attempts} attempts" if attempts > 1 else ""
        return Refusal(
            reason=failure.reason,
            message=said + tail + ".",
            retry_after=failure.retry_after,
            filter="engine" if failure.reason == "no_endpoint" else "",
        )

    def progress(self, lease: int, tokens: int) -> None:
        """The engine gave tokens: its prompt is done, and it lives."""
        if self.pipelines is not None and self.pipelines.owns(lease):
            self.hooks.progress(self.pipelines.progress(lease, tokens).reservation, tokens)
            return
        entry = self._entries.get(lease)
        if entry is None:
            return
        now = entry.last = entry.place.alive = self._clock()
        self._router.progress(entry.lease.id, tokens, now)
        if not entry.ticket.started:
            self.admission.gate.first(entry.ticket, now)
            self.admission.pump()
        self.hooks.progress(entry.reservation, tokens)

    def made(self, lease: int, answer: str) -> None:
        """Who refers to *answer* goes to the endpoint that makes it."""
        entry = self._entries.get(lease)
        if entry is not None:
            self._kept.keep(entry.principal.name, answer, entry.place.endpoint.id, entry.request.model)

    def quiet(self, lease: int, seconds: float) -> Refusal | None:
        """No byte for *seconds*: a long generation on a living engine, or the end."""
        entry = self._entries.get(lease)
        if entry is None:
            return None
        return None if self._lives(entry.place) else _silent(entry, seconds)

    def _lives(self, place: Place) -> bool:
        return place.alive is not None and self._clock() - place.alive < HUNG

    def _given_up(self, place: Place) -> None:
        """A probe of *place* failed: if it has been dead to the world for long, so are the requests it has."""
        if self._lives(place):
            return
        now = self._clock()
        for entry in {id(e): e for e in self._entries.values() if e.place is place}.values():
            if now - entry.last >= HUNG:
                for mover in self.movers:
                    mover.abandon(entry.lease.id, _silent(entry, now - entry.last))

    # -- out -----------------------------------------------------------------------------------------------------

    def withdraw(self, ticket: int, outcome: Outcome) -> None:
        """The client of a waiting request is gone."""
        waiting = self._waiting.pop(ticket, None)
        if waiting is None:  # pipelines wait, too
            self.settle(ticket if self.pipelines is not None and self.pipelines.owns(ticket) else None, outcome)
            return
        self.admission.gate.cancel(waiting.ticket)
        if waiting.entry is not None:
            self.settle(waiting.entry.lease.id, outcome)
            return
        outcome.principal, outcome.flow = waiting.principal.name, waiting.principal.flow
        outcome.band, outcome.profile = waiting.request.band, waiting.request.profile
        self.admission.pump()
        try:
            self.hooks.settle(waiting.reservation, outcome)
        finally:
            self._finish(outcome, waiting.model, "")

    def settle(self, lease: int | None, outcome: Outcome) -> None:
        """It has ended."""
        if lease is None:
            self._finish(outcome, outcome.model, "")
            return
        if self.pipelines is not None and self.pipelines.owns(lease):
            self._ended(self.pipelines.ended(lease, outcome), outcome)
            return
        entry = self._entries.get(lease)
        if entry is None:
            self._bug(f"settlement of lease {lease}, which is not open", outcome.request_id)
            return
        for each in entry.ids:
            del self._entries[each]
        place = entry.place
        self.fleet.ended(place, entry.lease.id, outcome)
        self._free(entry, outcome)
        outcome.principal, outcome.flow = entry.principal.name, entry.principal.flow
        outcome.band, outcome.profile = entry.request.band, entry.request.profile
        outcome.served = entry.lease.target.model or entry.request.model
        outcome.attempts = entry.lease.attempt
        outcome.endpoints = dict.fromkeys(entry.phases, place.endpoint.id)
        self._judge(place, outcome)
        try:
            self.hooks.settle(entry.reservation, outcome)
        finally:
            self._finish(outcome, entry.model, place.endpoint.name)

    def _free(self, entry: _Entry, outcome: Outcome) -> None:
        """Give its permit back."""
        if entry.ticket.state is State.RUNNING:  # else it ended while it waited for another attempt
            last = outcome.last if not outcome.reason else None
            first = outcome.first if entry.request.stream else None
            tokens = outcome.completion_tokens or 0
            self.admission.gate.release(entry.ticket, self._clock(), first=first, last=last, tokens=tokens)
        self.admission.pump()

    def _ended(self, job: Job, outcome: Outcome) -> None:
        """A pipeline's request has ended."""
        outcome.principal, outcome.flow = job.principal.name, job.principal.flow
        outcome.band, outcome.profile = job.request.band, job.request.profile
        outcome.served = job.model
        if job.place is not None:
            self._judge(job.place, outcome)
        try:
            self.hooks.settle(job.reservation, outcome)
        finally:
            self._finish(outcome, job.model, job.place.endpoint.name if job.place is not None else "")

    def give_back(self, job: Job, refusal: Refusal) -> None:
        """A pipeline's request ends without any lease."""
        self._give_back(job.reservation, job.request, job.principal, refusal)

    def next_id(self) -> int:
        """A number for a ticket or a lease."""
        return next(self._ids)

    def limits(self, model: str) -> Limits:
        """Time limits of a leg that serves *model*."""
        shared = self._models.get(model)
        return shared.limits if shared is not None else self._config.limits_of(model)

    def _judge(self, place: Place, outcome: Outcome) -> None:
        """What the end says about the endpoint. Failures before the first byte were judged by `retry`."""
        if outcome.first is None:
            return
        status = outcome.upstream_status or 200
        if not outcome.reason:
            if status < 500:
                self.fleet.happened(place, "served")
            elif status not in (501, 503):  # what it cannot do, or not now
                place.slot.failures += 1
                self.fleet.happened(place, "broke", f"it answered {status}")
        elif outcome.reason in ("upstream_closed", "upstream_protocol", "idle_timeout"):
            place.slot.failures += 1
            self.fleet.happened(place, "broke", outcome.reason)

    def _finish(self, outcome: Outcome, model: str, endpoint: str) -> None:
        self._metrics.settled(outcome, self.fleet.models.get(model, model))
        if outcome.route not in HEALTH or outcome.reason:  # health checks would drown everything else
            self._log.request(outcome, endpoint)

    def _bug(self, what: str, request_id: str = "") -> Refusal:
        self._metrics.bugs += 1
        self._log.event("bug", "error", message=what, request_id=request_id)
        return Refusal(reason="internal", message="A fault of the gateway; its log says more.")


def _silent(entry: _Entry, seconds: float) -> Refusal:
    name = entry.place.endpoint.name
    return Refusal(
        reason="idle_timeout",
        message=f"Endpoint {name} sent nothing for {seconds:.0f} s, and gives no other sign of life.",
    )


def _poisoned() -> Refusal:
    return Refusal(
        reason="poison",
        message="This very body made two engines close without an answer; it is refused for 10 minutes.",
    )


def _short(name: str) -> str:
    return name if len(name) <= 100 else name[:99] + "…"


def _some(names: list[str]) -> str:
    """At most ten of them: an answer is no catalogue."""
    text = ", ".join(map(_short, names[:10])) or "none"
    return text + (f" and {len(names) - 10} more" if len(names) > 10 else "")
