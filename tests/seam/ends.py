"""The two ends of the seam in two processes.

`RemoteBrain` is what the mover's process has in the place of a brain: `admit` and `retry` answer `Wait`, and what the
brain decides comes later. `MoverEnd` is what the brain's process has in the place of a mover.

A request as the brain's end knows it:

    Admit(t) ─► brain ─┬─ Lease ──────────────► LEASED ── Settle ──► settle(lease)
                       ├─ Wait ──► WAITING ─────┤ ▲ └─ Retry(t') ─► brain ─► LEASED, WAITING, or refused: still LEASED
                       └─ Refusal, Page: gone   │ └ granted
                                                ├─ Withdraw(t) ──► WAITING: withdraw(ticket) · LEASED: settle(lease)
                                                └─ the link ends ► the same, with an outcome made here

Invariants
- A lease that the mover never took (its client left while the answer was under way) is settled by the Withdraw that
  crossed it. A Withdraw of a ticket that is gone crossed a refusal or a page: only its outcome is accounted.
- When the link ends, every request is settled once: a lease ends with its mover.
- The times of outcomes are the brain's: the mover's are shifted by the difference that Hello showed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import attrs
import msgspec

from llmgw.request import (
    Brain,
    Failure,
    InferenceRequest,
    Lease,
    Mover,
    Outcome,
    Page,
    Refusal,
    Several,
    Wait,
)
from tests.seam import messages
from tests.seam.link import Link, TooLong

LOST = Refusal(reason="draining", message="The deciding process has ended; ask again shortly.")
BUSY = Refusal(reason="queue_full", message="The deciding process is too far behind; ask again shortly.")


class RemoteBrain:
    """Implements `llmgw.request.Brain` for movers in a process of their own."""

    def __init__(self, link: Link, clock: Callable[[], float]) -> None:
        self._link = link
        self._clock = clock
        self._ids = itertools.count(1)
        self._asked: set[int] = set()  # tickets without an answer

    async def run(self, mover: Mover) -> None:
        """Until the brain's process ends: whoever waits then is refused, streams under way go on."""
        self._link.post(messages.encode(messages.Hello(self._clock())))

        def handle(data: bytes) -> None:
            self._handle(data, mover)

        await self._link.run(handle)
        for ticket in tuple(self._asked):
            self._asked.discard(ticket)
            mover.granted(ticket, LOST)

    def _handle(self, data: bytes, mover: Mover) -> None:
        message = messages.decode_answered(data)
        if isinstance(message, messages.Abandon):
            mover.abandon(message.lease, message.refusal)
        elif message.ticket in self._asked:  # else it was withdrawn, and the brain's end is being told
            self._asked.discard(message.ticket)
            if isinstance(message, messages.Leased):
                mover.granted(message.ticket, message.lease)
            elif isinstance(message, messages.Refused):
                mover.granted(message.ticket, message.refusal)
            else:
                mover.granted(message.ticket, message.page)

    def admit(self, request: InferenceRequest) -> Wait | Refusal:
        return self._ask(lambda ticket: messages.Admit(ticket, request))

    def retry(self, lease: int, failure: Failure) -> Wait | Refusal:
        return self._ask(lambda ticket: messages.Retry(ticket, lease, failure))

    def _ask(self, question: Callable[[int], messages.Message]) -> Wait | Refusal:
        if self._link.closed:
            return LOST
        if self._link.full:
            return BUSY
        ticket = next(self._ids)
        try:
            self._link.post(messages.encode(question(ticket)))
        except TooLong as error:
            return Refusal(reason="too_large", message=f"What routing must know of this request is {error}.")
        self._asked.add(ticket)
        return Wait(ticket)

    def withdraw(self, ticket: int, outcome: Outcome) -> None:
        self._asked.discard(ticket)
        self._link.post(messages.encode(messages.Withdraw(ticket, outcome)))

    def progress(self, lease: int, tokens: int) -> None:
        if not self._link.full:  # the next one says it as well
            self._link.post(messages.encode(messages.Progress(lease, tokens)))

    def made(self, lease: int, answer: str) -> None:
        self._link.post(messages.encode(messages.Made(lease, answer)))

    def quiet(self, lease: int, seconds: float) -> None:
        """Go on; if that is wrong, `abandon` follows."""
        if not self._link.full:
            self._link.post(messages.encode(messages.Quiet(lease, seconds)))

    def settle(self, lease: int | None, outcome: Outcome) -> None:
        self._link.post(messages.encode(messages.Settle(lease, outcome)))


@attrs.define(eq=False)
class _Open:
    """One request: it has a lease, or waits in the brain, or (a retry that waits) both."""

    request: InferenceRequest
    ticket: int  # the mover's latest
    lease: int | None = None
    inner: int | None = None  # the brain's ticket


class MoverEnd:
    """Implements `llmgw.request.Mover` for a brain whose mover is in another process."""

    def __init__(self, link: Link, brain: Brain, clock: Callable[[], float]) -> None:
        self._link = link
        self._brain = brain
        self._clock = clock
        self._shift = 0.0  # seconds that the brain's clock is ahead of the mover's
        self._open: dict[int, _Open] = {}  # by the mover's ticket
        self._waiting: dict[int, _Open] = {}  # by the brain's
        self._leases: dict[int, _Open] = {}

    @property
    def open(self) -> int:
        """Requests that are not settled."""
        return len(self._open)

    async def run(self) -> None:
        """Until the mover's process ends. Then nothing of it is open."""
        await self._link.run(self._handle)
        while self._open:  # settling one may grant another
            _, one = self._open.popitem()
            request = one.request
            self._end(
                one,
                Outcome(
                    request_id=request.id,
                    route=request.head.route,
                    status=500,
                    reason="internal",
                    detail="its mover has ended",
                    stream=request.stream,
                    model=request.model,
                    bytes_in=request.body_bytes,
                    accepted=request.accepted,
                ),
            )

    # what the brain calls

    def granted(self, ticket: int, answer: Lease | Refusal | Page) -> None:
        one = self._waiting.pop(ticket, None)
        if one is not None:
            one.inner = None
            self._answer(one, answer)

    def abandon(self, lease: int, refusal: Refusal) -> None:
        if lease in self._leases:
            self._link.post(messages.encode(messages.Abandon(lease, refusal)))

    # what the mover says

    def _handle(self, data: bytes) -> None:
        brain = self._brain
        match messages.decode_asked(data):
            case messages.Hello(now):
                self._shift = self._clock() - now
            case messages.Admit(ticket, request):
                request = msgspec.structs.replace(request, accepted=request.accepted + self._shift)
                one = self._open[ticket] = _Open(request, ticket)
                self._answer(one, brain.admit(request))
            case messages.Retry(ticket, lease, failure):
                one = self._open[ticket] = self._open.pop(self._leases[lease].ticket)
                one.ticket = ticket
                self._answer(one, brain.retry(lease, failure))
            case messages.Withdraw(ticket, outcome):
                found = self._open.pop(ticket, None)
                outcome = self._ours(outcome)
                if found is None:
                    brain.settle(None, outcome)
                else:
                    self._end(found, outcome)
            case messages.Progress(lease, tokens):
                brain.progress(lease, tokens)
            case messages.Made(lease, answer):
                brain.made(lease, answer)
            case messages.Quiet(lease, seconds):
                refusal = brain.quiet(lease, seconds)
                if refusal is not None:
                    self.abandon(lease, refusal)
            case messages.Settle(None, outcome):
                brain.settle(None, self._ours(outcome))
            case messages.Settle(lease, outcome):
                assert lease is not None
                self._end(self._open.pop(self._leases[lease].ticket), self._ours(outcome))

    def _answer(self, one: _Open, answer: Lease | Wait | Several | Refusal | Page) -> None:
        message: messages.Message
        if isinstance(answer, Wait):
            one.inner = answer.ticket
            self._waiting[answer.ticket] = one
            return
        if isinstance(answer, Lease):
            if one.lease is not None:
                del self._leases[one.lease]
            one.lease = answer.id
            self._leases[answer.id] = one
            message = messages.Leased(one.ticket, answer)
        else:
            if one.lease is None:
                del self._open[one.ticket]
            if isinstance(answer, Refusal):
                message = messages.Refused(one.ticket, answer)
            else:
                assert isinstance(answer, Page), "pipelines live with their mover"
                message = messages.Shown(one.ticket, answer)
        self._link.post(messages.encode(message))

    def _end(self, one: _Open, outcome: Outcome) -> None:
        if one.lease is not None:
            del self._leases[one.lease]
        if one.inner is not None:
            del self._waiting[one.inner]
            self._brain.withdraw(one.inner, outcome)
        else:
            self._brain.settle(one.lease, outcome)

    def _ours(self, outcome: Outcome) -> Outcome:
        for name in ("accepted", "admitted", "sent", "first", "last"):
            at = getattr(outcome, name)
            if at is not None:
                setattr(outcome, name, at + self._shift)
        return outcome
