"""A gate with engines that a test drives by hand: it takes all effects, places grants, and notes who ended how."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from llmgw.admission.bands import DEFAULTS, Band, Bands
from llmgw.admission.gate import Gate, Grant, Preempt, Refuse, State, Ticket
from llmgw.endpoint import Endpoint, EndpointView, Model, Report, Snapshot
from llmgw.request import Refusal


@attrs.define
class Engine:
    """What the gate is told of one engine."""

    cap: int | None = 4
    rate: float | None = 1e6
    health: bool = True
    report: Report | None = None
    blocks: int | None = None
    model: str = "m"


class Driver:
    """*engines* by name. Grants are placed by *rng* among those allowed."""

    def __init__(
        self, bands: Iterable[Band] = DEFAULTS, engines: dict[str, Engine] | None = None, seed: int = 0
    ) -> None:
        self.gate = Gate(Bands(bands))
        self.engines = {"a": Engine()} if engines is None else engines
        self.rng = random.Random(seed)
        self.now = 0.0
        self.tickets: list[Ticket] = []
        self.ended: Counter[int] = Counter()  # by ticket id
        self.granted: list[Ticket] = []
        self.refused: list[Refusal] = []
        self.preempted: list[Ticket] = []
        self.tell()

    def tell(self) -> None:
        """The gate sees the engines as they are now."""
        endpoints = tuple(
            Endpoint(
                id=name,
                name=name,
                url=f"http://{name}",
                models=(Model(name=e.model),),
                max_concurrency=e.cap,
                blocks=e.blocks,
                block_size=16 if e.blocks else None,
            )
            for name, e in self.engines.items()
        )
        views = tuple(
            EndpointView(health="ready" if e.health else "quarantined", prefill_rate=e.rate, report=e.report)
            for e in self.engines.values()
        )
        self.gate.replace(Snapshot(0, endpoints, views), self.now)
        self.pump()

    def offer(
        self, band: str = "standard", flow: str = "f", prompt: int = 100, decode: int = 100, *, model: str = "m",
        size: int = 0, stream: bool = False,
    ) -> Ticket | Refusal:  # fmt: skip
        rank = self.gate.bands.rank(band, "")
        assert isinstance(rank, int)
        ticket = self.gate.offer(model, rank, flow, prompt, decode, self.now, size=size, stream=stream)
        if isinstance(ticket, Refusal):
            self.refused.append(ticket)
            return ticket
        self.tickets.append(ticket)
        if ticket.state is State.GRANTED:
            self.place(ticket, ticket.allowed)
        self.pump()
        return ticket

    def take(self, band: str = "standard", flow: str = "f", prompt: int = 100, decode: int = 100) -> Ticket:
        """`offer` of what must not be refused."""
        ticket = self.offer(band, flow, prompt, decode)
        assert isinstance(ticket, Ticket)
        return ticket

    def place(self, ticket: Ticket, allowed: frozenset[str] | None) -> None:
        self.granted.append(ticket)
        healthy = [n for n, e in self.engines.items() if e.health and e.model == ticket.pool.name]
        names: Sequence[str] = sorted(allowed) if allowed is not None else healthy
        if not names:  # routing would refuse
            self.gate.cancel(ticket)
            self.ended[ticket.id] += 1
            return
        self.gate.place(ticket, self.rng.choice(names), self.now)

    def pump(self) -> None:
        while (effect := self.gate.next(self.now)) is not None:
            if isinstance(effect, Grant):
                self.place(effect.ticket, effect.allowed)
            elif isinstance(effect, Refuse):
                self.refused.append(effect.refusal)
                self.ended[effect.ticket.id] += 1
            else:
                assert isinstance(effect, Preempt)
                self.preempted.append(effect.ticket)
                self.gate.requeue(effect.ticket, self.now)

    def first(self, ticket: Ticket) -> None:
        self.gate.first(ticket, self.now)
        self.pump()

    def release(self, ticket: Ticket) -> None:
        self.gate.release(ticket, self.now)
        self.ended[ticket.id] += 1
        self.pump()

    def cancel(self, ticket: Ticket) -> None:
        self.gate.cancel(ticket)
        self.ended[ticket.id] += 1
        self.pump()

    def run(self, seconds: float) -> None:
        """Time passes; the gate is woken as it asks to be."""
        end = self.now + seconds
        while self.gate.wake_at(self.now) <= end:
            at = max(self.gate.wake_at(self.now), self.now)
            assert at > self.now or self.gate.wake_at(self.now) <= self.now
            self.now = at
            self.gate.wake(self.now)
            self.pump()
            assert self.gate.wake_at(self.now) > self.now, "a wake that changes nothing and comes again"
        self.now = end

    def those(self, state: State) -> list[Ticket]:
        return [t for t in self.tickets if t.state is state]
