"""Answers and hang-ups that cross on their way, bounds, and ends of either side. What passes over a live seam is tested
by the relay's own tests, with the driver `seam`."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from llmgw.request import Failure, Head, InferenceRequest, Lease, Outcome, Page, Refusal, Target, Wait
from tests.net.brains import RoundRobin
from tests.seam import messages
from tests.seam.ends import LOST, MoverEnd, RemoteBrain
from tests.seam.link import BACKLOG, FRAME, Link, TooLong

TARGET = Target(endpoint="e", name="e", address="tcp:127.0.0.1:1", host="e")


def request(name: str = "r", route: str = "/v1/chat/completions", **fields: Any) -> InferenceRequest:
    return InferenceRequest(id=name, head=Head(route, ""), **{"model": "llama", **fields})


def outcome(name: str = "r", **fields: Any) -> Outcome:
    return Outcome(request_id=name, route="", status=499, reason="client_gone", **fields)


@attrs.define
class Raw:
    """A mover that says exactly what a test wants, to a real end and brain."""

    brain: RoundRobin
    end: MoverEnd
    sock: socket.socket

    async def say(self, *said: messages.Message) -> None:
        for each in said:
            data = messages.encode(each)
            self.sock.sendall(len(data).to_bytes(4, "big") + data)
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def raw(**options: Any) -> AsyncIterator[Raw]:
    ours, theirs = socket.socketpair()
    brain = RoundRobin([TARGET], **options)
    end = MoverEnd(Link(theirs), brain, trio.current_time)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end.run)
        with ours:
            yield Raw(brain, end, ours)
        with trio.fail_after(1):
            while end.open:  # noqa: ASYNC110 -- no bell
                await trio.sleep(0.01)
        assert (brain.open, brain.waiting) == ({}, {})


@pytest.mark.parametrize(
    ("asked", "hold"),
    [
        (request(), False),  # crosses a lease
        (request(model="nope"), False),  # a refusal
        (request(route="/health"), False),  # a page
        (request(), True),  # nothing: it waits
    ],
)
async def test_hang_up_that_crosses_the_answer_is_accounted_once(
    autojump_clock: MockClock, asked: InferenceRequest, hold: bool
) -> None:
    async with raw(hold=hold) as r:
        await r.say(messages.Admit(1, asked), messages.Withdraw(1, outcome()))
        assert [o.reason for o in r.brain.outcomes] == ["client_gone"]
        assert (r.brain.open, r.brain.waiting, r.end.open) == ({}, {}, 0)


@pytest.mark.parametrize("most_attempts", [1, 2])
async def test_hang_up_that_crosses_a_retry(autojump_clock: MockClock, most_attempts: int) -> None:
    """The retry is refused, or granted: what is open is settled."""
    async with raw(most_attempts=most_attempts) as r:
        await r.say(messages.Admit(1, request()))
        (lease,) = r.brain.open
        failure = Failure(reason="connect_failed", started=False)
        await r.say(messages.Retry(2, lease, failure), messages.Withdraw(2, outcome()))
        assert [o.reason for o in r.brain.outcomes] == ["client_gone"]
        assert (r.brain.open, r.end.open) == ({}, 0)


@pytest.mark.parametrize("hold", [False, True])
async def test_everything_open_ends_with_its_mover(autojump_clock: MockClock, hold: bool) -> None:
    async with raw(hold=hold) as r:
        await r.say(*(messages.Admit(i, request(f"r{i}")) for i in range(1, 6)))
        assert r.end.open == 5
    assert sorted(o.request_id for o in r.brain.outcomes) == [f"r{i}" for i in range(1, 6)]
    assert {(o.status, o.reason) for o in r.brain.outcomes} == {(500, "internal")}


async def test_granting_while_the_mover_is_gone_settles_too(autojump_clock: MockClock) -> None:
    """A brain that gives the place of one that ended to the next in the queue, of the same dead mover."""

    class Handing(RoundRobin):
        def withdraw(self, ticket: int, outcome: Outcome) -> None:
            super().withdraw(ticket, outcome)
            for other, lease in self.release():
                end.granted(other, lease)

    ours, theirs = socket.socketpair()
    brain = Handing([TARGET], hold=True)
    end = MoverEnd(Link(theirs), brain, trio.current_time)
    with ours:
        for i in (1, 2, 3):
            data = messages.encode(messages.Admit(i, request(f"r{i}")))
            ours.sendall(len(data).to_bytes(4, "big") + data)
    await end.run()
    assert sorted(o.request_id for o in brain.outcomes) == ["r1", "r2", "r3"]
    assert (brain.open, brain.waiting, end.open) == ({}, {}, 0)


async def test_times_are_shifted_by_the_difference_of_the_clocks(autojump_clock: MockClock) -> None:
    async with raw() as r:
        here = trio.current_time()
        await r.say(messages.Hello(here - 1000.0), messages.Admit(1, request(accepted=here - 990.0)))
        (lease,) = r.brain.open
        assert r.brain.open[lease][0].accepted == pytest.approx(here + 10.0)
        await r.say(messages.Settle(lease, outcome(accepted=here - 990.0, last=here - 980.0)))
        (got,) = r.brain.outcomes
        assert got.accepted == pytest.approx(here + 10.0)
        assert got.last == pytest.approx(here + 20.0)
        assert got.sent is None


@attrs.define
class Mover:
    """Keeps what it is told."""

    told: list[tuple[int, Lease | Refusal | Page]] = attrs.field(factory=list)

    def granted(self, ticket: int, answer: Lease | Refusal | Page) -> None:
        self.told.append((ticket, answer))

    def abandon(self, lease: int, refusal: Refusal) -> None:
        raise AssertionError


async def test_who_waits_when_the_brain_ends_is_refused(autojump_clock: MockClock) -> None:
    ours, theirs = socket.socketpair()
    brain, mover = RemoteBrain(Link(ours), trio.current_time), Mover()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(brain.run, mover)
        waits = brain.admit(request())
        assert isinstance(waits, Wait)
        await trio.testing.wait_all_tasks_blocked()
        theirs.close()
    assert mover.told == [(waits.ticket, LOST)]
    assert brain.admit(request()) == LOST
    brain.settle(None, outcome())  # goes nowhere, harms nobody


async def test_a_brain_that_does_not_read_gets_no_new_requests(autojump_clock: MockClock) -> None:
    """What waits for it is bounded; ends are still kept for it, and all arrives when it reads."""
    ours, theirs = socket.socketpair()
    brain, mover = RemoteBrain(Link(ours), trio.current_time), Mover()
    long = request(session="s" * 60_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(brain.run, mover)
        admitted = 0
        while isinstance(answer := brain.admit(long), Wait):
            admitted += 1
            assert admitted < 200
        assert isinstance(answer, Refusal)
        assert answer.reason == "queue_full"
        assert admitted * 60_000 >= BACKLOG
        brain.withdraw(1, outcome())
        there = RoundRobin([TARGET])
        end = MoverEnd(Link(theirs), there, trio.current_time)
        nursery.start_soon(end.run)
        with trio.fail_after(1):
            while len(mover.told) < admitted - 1:  # noqa: ASYNC110 -- no bell
                await trio.sleep(0.01)
        assert len(there.open) == admitted - 1
        assert isinstance(brain.admit(long), Wait)
        nursery.cancel_scope.cancel()


def test_message_that_is_too_long_is_refused_before_it_is_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        brain = RemoteBrain(Link(ours), lambda: 0.0)
        answer = brain.admit(request(session="s" * FRAME))
        assert isinstance(answer, Refusal)
        assert answer.reason == "too_large"
        with pytest.raises(TooLong):
            Link(ours).post(b"x" * (FRAME + 1))


async def test_peer_that_is_out_of_step_ends_the_link(autojump_clock: MockClock) -> None:
    ours, theirs = socket.socketpair()
    link, got = Link(theirs), list[bytes]()
    with ours:
        ours.sendall(b"\0\0\0\1a" + b"\0\0\0\0" + (FRAME + 1).to_bytes(4, "big") + b"x" * 100)
        with trio.fail_after(1):
            await link.run(got.append)
    assert got == [b"a", b""]
    assert link.closed
