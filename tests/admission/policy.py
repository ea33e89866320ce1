"""The gate, the ledger and routing's decision as a policy for `sim.decisions`: what the server does, without the server."""

from __future__ import annotations

import random
from collections.abc import Iterable

from llmgw.admission.bands import DEFAULTS, Band, Bands
from llmgw.admission.gate import Gate, Grant, Preempt, State, Ticket
from llmgw.endpoint import Report, Snapshot
from llmgw.request import InferenceRequest, Refusal
from llmgw.routing.decide import decide
from llmgw.routing.field import Query
from llmgw.routing.ledger import Ledger
from llmgw.routing.profiles import profiles
from sim.records import Record


class Routed:
    """Routing alone: what admission is compared with."""

    def __init__(self, seed: int = 0) -> None:
        self.ledger = Ledger()
        self.profile = profiles()["auto"]
        self.random = random.Random(seed).random
        self._known: object = None

    def learn(self, snapshot: Snapshot, now: float) -> None:
        """Endpoints and health of the rehearsal go to the ledger."""
        if self._known is not snapshot.endpoints:
            self._known = snapshot.endpoints
            self.ledger.replace(snapshot.endpoints, now)
        for endpoint, view in zip(snapshot.endpoints, snapshot.views, strict=True):
            self.ledger.health(endpoint.id, view.health, 0.0)

    def route(self, request: InferenceRequest, allowed: frozenset[str] | None, now: float) -> str | Refusal:
        query = Query(request=request, model=request.model, decode=request.max_tokens or 256, allowed=allowed)
        decision = decide(self.ledger.snapshot(now), query, self.profile, {}, self.random, now)
        return decision if isinstance(decision, Refusal) else decision.endpoint.id

    def __call__(self, snapshot: Snapshot, request: InferenceRequest) -> str | Refusal | None:
        self.learn(snapshot, request.accepted)
        return self.route(request, None, request.accepted)

    def sent(self, endpoint: str, request: InferenceRequest, now: float) -> None:
        self.ledger.open(request.id, endpoint, prefill=request.prompt_tokens, decode=request.max_tokens or 256, now=now)

    def first(self, endpoint: str, request: InferenceRequest, now: float) -> None:
        self.ledger.first(request.id, now)

    def progress(self, endpoint: str, request: InferenceRequest, tokens: int, now: float) -> None:
        self.ledger.progress(request.id, tokens, now)

    def settled(self, endpoint: str, request: InferenceRequest, record: Record, now: float) -> None:
        self.ledger.progress(request.id, record.tokens, now)
        self.ledger.close(request.id)

    def reported(self, endpoint: str, report: Report, now: float) -> None:
        self.ledger.report(endpoint, report)


class Gated(Routed):
    """With the gate before it. Preemption is left to `Gate`'s own tests: the rehearsal cannot abort."""

    def __init__(self, bands: Iterable[Band] = DEFAULTS, seed: int = 0) -> None:
        super().__init__(seed)
        self.gate = Gate(Bands(bands))
        self.tickets: dict[str, Ticket] = {}
        self.waits: dict[str, list[float]] = {band.name: [] for band in self.gate.bands.order}
        self.answers: list[tuple[str, str | Refusal]] = []  # given while another request was offered
        self._looked = -1.0

    def look(self, now: float) -> None:
        """Once a second the gate is told how engines do."""
        if now - self._looked >= 1.0:
            self._looked = now
            self.gate.replace(self.ledger.snapshot(now), now)

    def __call__(self, snapshot: Snapshot, request: InferenceRequest) -> str | Refusal | None:
        now = request.accepted
        self.learn(snapshot, now)
        self.look(now)
        gate = self.gate
        rank = gate.bands.rank(request.band, "")
        if isinstance(rank, Refusal):
            return rank
        ticket = gate.offer(
            request.model,
            rank,
            request.session,
            request.prompt_tokens,
            request.max_tokens or 256,
            now,
            size=request.body_bytes,
            stream=request.stream,
        )
        if isinstance(ticket, Refusal):
            return ticket
        ticket.owner = request
        self.tickets[request.id] = ticket
        if ticket.state is State.GRANTED:
            return self.go(ticket, ticket.allowed, now)
        mine: str | Refusal | None = None
        for name, answer in self.effects(now):
            if name == request.id:
                mine = answer
            else:
                self.answers.append((name, answer))
        return mine

    def go(self, ticket: Ticket, allowed: frozenset[str] | None, now: float) -> str | Refusal:
        request = ticket.owner
        assert isinstance(request, InferenceRequest)
        chosen = self.route(request, allowed, now)
        if isinstance(chosen, Refusal):
            self.gate.cancel(ticket)
            del self.tickets[request.id]
        else:
            self.gate.place(ticket, chosen, now)
            self.waits[self.gate.bands.order[ticket.rank].name].append(now - ticket.at)
        return chosen

    def first(self, endpoint: str, request: InferenceRequest, now: float) -> None:
        super().first(endpoint, request, now)
        self.gate.first(self.tickets[request.id], now)

    def settled(self, endpoint: str, request: InferenceRequest, record: Record, now: float) -> None:
        super().settled(endpoint, request, record, now)
        ticket = self.tickets.pop(request.id, None)
        if ticket is not None and ticket.state is State.RUNNING:
            self.gate.release(ticket, now, first=record.first, last=record.last, tokens=record.tokens)
        elif ticket is not None and ticket.state is State.QUEUED:
            self.gate.cancel(ticket)

    def release(self, now: float) -> Iterable[tuple[str, str | Refusal]]:
        self.look(now)
        if now >= self.gate.wake_at(now):
            self.gate.wake(now)
        answers, self.answers = self.answers, []
        return [*answers, *self.effects(now)]

    def effects(self, now: float) -> list[tuple[str, str | Refusal]]:
        found: list[tuple[str, str | Refusal]] = []
        while (effect := self.gate.next(now)) is not None:
            request = effect.ticket.owner
            assert isinstance(request, InferenceRequest)
            if isinstance(effect, Grant):
                found.append((request.id, self.go(effect.ticket, effect.allowed, now)))
            elif not isinstance(effect, Preempt):
                del self.tickets[request.id]
                found.append((request.id, effect.refusal))
        return found
