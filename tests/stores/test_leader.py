"""Leading: one at a time, fenced, and stopped by its own clock before the lease can lapse."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
from trio.testing import MockClock

from llmgw.errors import Unavailable
from llmgw.stores import leader
from llmgw.stores.base import (
    BadOperation,
    Compare,
    Delete,
    Get,
    NotLeader,
    Op,
    OutcomeUnknown,
    Put,
    Txn,
    absent,
    put,
)
from llmgw.stores.leader import LEADER, Fenced, lead
from llmgw.stores.memory import MemoryStore


class Flaky(MemoryStore):
    """A store behind a network that can break."""

    cut = False
    lose_answer = False

    async def keepalive(self, lease: int) -> int:
        if self.cut:
            raise Unavailable("cut")
        return await super().keepalive(lease)

    async def revoke(self, lease: int) -> None:
        if self.cut:
            raise Unavailable("cut")
        await super().revoke(lease)

    async def txn(
        self, compares: Sequence[Compare] = (), success: Sequence[Op] = (), failure: Sequence[Op] = ()
    ) -> Txn:
        done = await super().txn(compares, success, failure)
        if self.lose_answer:
            self.lose_answer = False
            raise OutcomeUnknown("the answer was lost")
        return done


async def test_one_leads_and_the_next_follows_at_once(autojump_clock: MockClock) -> None:
    store = MemoryStore()
    log: list[tuple[str, int, float]] = []
    start = trio.current_time()

    async def run(name: str) -> None:
        async def work(fenced: Fenced) -> None:
            log.append((name, fenced.term, trio.current_time() - start))
            await trio.sleep(100)

        await lead(store, name, work)

    async with trio.open_nursery() as nursery:
        for name in ("a", "b", "c"):
            nursery.start_soon(run, name)
    names, terms, times = zip(*log, strict=True)
    assert sorted(names) == ["a", "b", "c"]
    assert list(terms) == sorted(set(terms))
    assert times == pytest.approx((0, 100, 200))
    assert await store.get(LEADER) is None


async def test_a_cut_off_leader_stops_before_the_next_one_starts(autojump_clock: MockClock) -> None:
    store = MemoryStore()
    behind_cut = Flaky()
    behind_cut._core = store._core
    stopped = started = 0.0
    zombie: list[Fenced] = []

    async def old() -> None:
        nonlocal stopped

        async def work(fenced: Fenced) -> None:
            nonlocal stopped
            zombie.append(fenced)
            try:
                await trio.sleep_forever()
            finally:
                stopped = trio.current_time()

        with pytest.raises(NotLeader, match="not renewed in time"):
            await lead(behind_cut, "old", work)

    async def new() -> None:
        async def work(fenced: Fenced) -> None:
            nonlocal started
            started = trio.current_time()
            assert fenced.term > zombie[0].term
            with pytest.raises(NotLeader, match="is over; nothing was written"):
                await zombie[0].txn(success=[Put("/a", b"late")])
            assert await store.get("/a") is None

        await lead(store, "new", work)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(old)
        await trio.sleep(12)
        nursery.start_soon(new)
        await trio.sleep(0.5)
        behind_cut.cut = True
    assert stopped < started
    assert started - stopped == pytest.approx(leader.MARGIN)


async def test_a_short_cut_does_not_cost_the_lead(autojump_clock: MockClock) -> None:
    store = Flaky()

    async def work(fenced: Fenced) -> None:
        await trio.sleep(4)
        store.cut = True
        await trio.sleep(5)
        store.cut = False
        await trio.sleep(60)
        await put(fenced, "/a", b"1")

    await lead(store, "a", work)
    assert await store.get("/a") is not None


async def test_a_revoked_lease_ends_the_lead(autojump_clock: MockClock) -> None:
    store = MemoryStore()

    async def work(fenced: Fenced) -> None:
        entry = await store.get(LEADER)
        assert entry is not None
        await store.revoke(entry.lease)
        await trio.sleep_forever()

    with pytest.raises(NotLeader, match="lost"):
        await lead(store, "a", work)


async def test_an_election_whose_answer_was_lost(autojump_clock: MockClock) -> None:
    store = Flaky()
    store.lose_answer = True
    terms: list[int] = []

    async def work(fenced: Fenced) -> None:
        terms.append(fenced.term)
        await put(fenced, "/a", b"1")

    await lead(store, "a", work)
    assert len(terms) == 1


async def test_what_the_fence_lets_through(autojump_clock: MockClock) -> None:
    store = MemoryStore()

    async def work(fenced: Fenced) -> None:
        await put(fenced, "/a", b"1")
        lost = await fenced.txn([absent("/a")], [Put("/a", b"2")], [Get("/a")])
        assert not lost.succeeded
        assert len(lost.entries) == 1
        assert lost.entries[0] == await fenced.get("/a")
        assert [e.key for e in (await fenced.range("/a")).entries] == ["/a"]
        with pytest.raises(BadOperation, match="success branch only"):
            await fenced.txn([absent("/a")], [], [Delete("/a")])

    await lead(store, "a", work)


async def test_work_that_fails_gives_up_the_lead(autojump_clock: MockClock) -> None:
    store = MemoryStore()

    async def work(fenced: Fenced) -> None:
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError

    with pytest.RaisesGroup(ZeroDivisionError):
        await lead(store, "a", work)
    assert await store.get(LEADER) is None
