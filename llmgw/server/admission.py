"""The gate at work in the server: what it is told, when it is woken, and what comes of its effects.

    brain ──offer, place, first, release──► gate ──next──► Grant ──► brain.granted ─► mover.granted
    a task: once a second how engines do; `wake` when the gate asks        Refuse ─► brain.refused
                                                                           Preempt ► brain.preempt

Effects are taken at once, inside the call that caused them, and one after another: what a grant leads to (a send that
fails, an end) may cause further ones, which wait for the loop that is already running.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, Protocol

import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from llmgw.admission.bands import Bands
from llmgw.admission.gate import Gate, Grant, Refuse, Ticket
from llmgw.endpoint import Snapshot
from llmgw.request import InferenceRequest, Refusal

LOOK = 1.0
"""Seconds between two looks at the engines: how old a plan may be after one has died."""

REMEMBERED = 1000
"""Requests whose admission can still be explained: what an operator has in mind when the question comes up."""


class Taker(Protocol):
    """Whom effects go to."""

    def granted(self, ticket: Ticket) -> None: ...

    def refused(self, ticket: Ticket, refusal: Refusal) -> None: ...

    def preempt(self, ticket: Ticket) -> bool:
        """False: its client has got something already, so it runs on."""
        ...


class Admission:
    """The gate, its clock, and a ring of what was admitted lately."""

    def __init__(
        self, bands: Bands, taker: Taker, snapshot: Callable[[float], Snapshot], clock: Callable[[], float]
    ) -> None:
        self.gate = Gate(bands)
        self.refusals: dict[tuple[str, str], int] = {}  # band, reason
        self._taker = taker
        self._snapshot = snapshot
        self._clock = clock
        self._pumping = False
        self._recent: OrderedDict[str, Ticket] = OrderedDict()
        self._nudge: trio.Event | None = None
        self._look_at = -inf

    def look(self) -> None:
        """Endpoints, or how they do, have changed."""
        now = self._clock()
        self.gate.replace(self._snapshot(now), now)
        self.pump()

    def offer(self, request: InferenceRequest, model: str, rank: int, flow: str, expected: int) -> Ticket | Refusal:
        """See `Gate.offer`."""
        ticket = self.gate.offer(
            model,
            rank,
            flow,
            request.prompt_tokens,
            expected,
            self._clock(),
            size=request.body_bytes,
            stream=request.stream,
            bound=bool(request.only) or request.internal,
        )
        if isinstance(ticket, Refusal):
            self._count(rank, ticket)
        else:
            recent = self._recent
            recent[request.id] = ticket
            if len(recent) > REMEMBERED:
                recent.popitem(last=False)
        return ticket

    def pump(self) -> None:
        """Take all effects there are."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while (effect := self.gate.next(self._clock())) is not None:
                ticket = effect.ticket
                if isinstance(effect, Grant):
                    self._taker.granted(ticket)
                elif isinstance(effect, Refuse):
                    self._count(ticket.rank, effect.refusal)
                    self._taker.refused(ticket, effect.refusal)
                elif not self._taker.preempt(ticket):
                    ticket.stream = ticket.started = True  # shown to be of no use: not again
        finally:
            self._pumping = False
        if self._nudge is not None:
            self._nudge.set()

    def _count(self, rank: int, refusal: Refusal) -> None:
        key = (self.gate.bands.order[rank].name, refusal.reason)
        self.refusals[key] = self.refusals.get(key, 0) + 1

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wake the gate when it asks, and look once a second. Ends by cancellation."""
        task_status.started()
        while True:
            self._nudge = trio.Event()
            with trio.move_on_at(self.tick()):
                await self._nudge.wait()
            self._nudge = None

    def tick(self) -> float:
        """Time has passed. When to call it again, unless something happens before."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK
            self.look()
        if now >= self.gate.wake_at(now):
            self.gate.wake(now)
            self.pump()
        return min(self._look_at, self.gate.wake_at(now))

    # -- what people ask -----------------------------------------------------------------------------------------

    def queue(self) -> list[dict[str, object]]:
        return self.gate.queue(self._clock())

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """How the admission of a request came, or stands. None: unknown, or too long ago."""
        ticket = self._recent.get(request_id)
        if ticket is None:
            return None
        found: dict[str, Any] = {"kind": "admission", "request": request_id}
        return {**found, **self.gate.explain(ticket, self._clock())}

    def collect(self) -> Iterator[Metric]:
        """Families for `/metrics`."""
        gate = self.gate
        depth = GaugeMetricFamily("llmgw_queue_requests", "Requests that wait for admission.", labels=["band"])
        size = GaugeMetricFamily("llmgw_queue_bytes", "Bytes of bodies that wait for admission.", labels=["band"])
        for band, count, held in gate.depth:
            depth.add_metric([band], count)
            size.add_metric([band], held)
        refused = CounterMetricFamily(
            "llmgw_admission_refused", "Requests refused by admission.", labels=["band", "reason"]
        )
        for (band, reason), count in self.refusals.items():
            refused.add_metric([band, reason], count)
        preempted = CounterMetricFamily("llmgw_preemptions", "Attempts ended to make way for a higher band.")
        preempted.add_metric([], gate.preemptions)
        limit = GaugeMetricFamily(
            "llmgw_endpoint_limit", "Requests that an endpoint may have in hand, as learned.", labels=["endpoint"]
        )
        slowdown = GaugeMetricFamily(
            "llmgw_endpoint_slowdown",
            "Time of a bounded band's requests against their unloaded time, where an endpoint is kept for it.",
            labels=["endpoint"],
        )
        scale = GaugeMetricFamily(
            "llmgw_endpoint_interference",
            "How much longer lower bands pause on an endpoint than the model of interference says.",
            labels=["endpoint"],
        )
        for room in gate.rooms.values():
            limit.add_metric([room.name], room.limit.seqs)
            scale.add_metric([room.name], room.estimate.scale)
            if room.estimate.slowdown is not None:
                slowdown.add_metric([room.name], room.estimate.slowdown)
        yield from (depth, size, refused, preempted, limit, slowdown, scale)
