"""Who leads: one key, written under a lease by whoever finds it absent.

The *term* is the revision that created the key. It only grows, so agents refuse a smaller one; and every write of a
leader compares it (`Fenced`), so that a leader that slept through its lease writes nothing.

    waiting ──key absent, put under a lease──▶ leading ──lease renewed──▶ leading
       ▲                                          │ work done: lease revoked, the next one need not wait
       └──────────────(the caller tries again)────┴ not renewed in time, or lease gone: work cancelled, NotLeader

A leader stops acting by its own clock *before* the lease can lapse: `TTL - MARGIN` after it began the last renewal that
succeeded. On the embedded store, which one process owns, it is trivially elected.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

import attrs
import trio

from llmgw.errors import Unavailable
from llmgw.stores.base import (
    BadOperation,
    Changes,
    Compacted,
    Compare,
    Entry,
    Get,
    LeaseLost,
    NotLeader,
    Op,
    OutcomeUnknown,
    Put,
    Range,
    Store,
    Txn,
    absent,
)

LEADER = "/leader"
TTL = 15  # seconds; a dead leader is replaced after at most this
RENEW = 5.0  # seconds between renewals: two may fail
MARGIN = 3.0  # seconds; what a clock may run wrong in TTL, and what a last write may take
RETRY = 1.0  # seconds between renewals while they fail
REVOKE_SECONDS = 2.0


@attrs.frozen
class Fenced:
    """The store of a leader: its transactions write only while its term lasts, else they raise NotLeader.

    Leases and compaction are not fenced: they put no value anywhere.

    A transaction may write in its success branch only: the other one is taken when the fence does not hold, too.
    """

    store: Store
    term: int

    async def get(self, key: str) -> Entry | None:
        return await self.store.get(key)

    async def range(self, prefix: str, revision: int = 0) -> Range:
        return await self.store.range(prefix, revision)

    async def txn(
        self, compares: Sequence[Compare] = (), success: Sequence[Op] = (), failure: Sequence[Op] = ()
    ) -> Txn:
        if any(not isinstance(op, Get) for op in failure):
            raise BadOperation("a leader's transaction writes in its success branch only")
        fence = Compare(LEADER, "create", "==", self.term)
        done = await self.store.txn([fence, *compares], success, [*failure, Get(LEADER)])
        if done.succeeded:
            return done
        *entries, leader = done.entries
        if leader is None or leader.create_revision != self.term:
            raise NotLeader(f"term {self.term} is over; nothing was written")
        return Txn(False, done.revision, tuple(entries))

    async def grant(self, ttl: int) -> int:
        return await self.store.grant(ttl)

    async def keepalive(self, lease: int) -> int:
        return await self.store.keepalive(lease)

    async def revoke(self, lease: int) -> None:
        await self.store.revoke(lease)

    def watch(self, prefix: str, from_revision: int = 0) -> AbstractAsyncContextManager[AsyncIterator[Changes]]:
        return self.store.watch(prefix, from_revision)

    async def compact(self, revision: int) -> None:
        await self.store.compact(revision)


async def lead(store: Store, name: str, work: Callable[[Fenced], Awaitable[None]]) -> None:
    """Wait until *name* leads, then run *work* with the fenced store, until it returns.

    *name*: what standbys tell clients, for instance this server's URL. Raises NotLeader when the lead is lost (work was
    cancelled by then), Unavailable if the store cannot be reached while waiting; the caller decides whether to try again.
    """
    lease, term, until = await _elected(store, name)
    done = lost = False
    try:
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = until

            async def renew() -> None:
                nonlocal lost
                await trio.sleep(RENEW)
                while True:
                    began = trio.current_time()
                    try:
                        nursery.cancel_scope.deadline = began + await store.keepalive(lease) - MARGIN
                    except LeaseLost:
                        lost = True
                        nursery.cancel_scope.cancel("the leader's lease is gone")
                    except Unavailable:
                        await trio.sleep(RETRY)
                    else:
                        await trio.sleep(RENEW)

            nursery.start_soon(renew)
            await work(Fenced(store, term))
            done = True
            nursery.cancel_scope.cancel("work is done")
    finally:
        with trio.move_on_after(REVOKE_SECONDS, shield=True):
            await _give_up(store, lease)
    if not done:
        raise NotLeader(f"term {term} ended: its lease was {'lost' if lost else 'not renewed in time'}")


async def _elected(store: Store, name: str) -> tuple[int, int, float]:
    """Lease, term, and until when it holds by our clock."""
    while True:
        began = trio.current_time()
        lease = await store.grant(TTL)
        term = vacant_from = 0
        try:
            term, vacant_from = await _stand(store, name, lease)
        finally:
            if not term:
                with trio.move_on_after(REVOKE_SECONDS, shield=True):
                    await _give_up(store, lease)
        if term:
            return lease, term, began + TTL - MARGIN
        await _vacant(store, vacant_from)


async def _stand(store: Store, name: str, lease: int) -> tuple[int, int]:
    """The term, 0 if somebody else leads; and the revision from which on the key may be seen to go."""
    unknown = False
    try:
        done = await store.txn([absent(LEADER)], [Put(LEADER, name.encode(), lease)], [Get(LEADER)])
        if done.succeeded:
            return done.revision, 0
    except OutcomeUnknown:
        unknown = True
    if unknown:
        found = await store.range(LEADER)
        for entry in found.entries:
            if entry.key == LEADER and entry.lease == lease:
                return entry.create_revision, 0
        return 0, found.revision + 1 if found.entries else 0
    return 0, done.revision + 1


async def _vacant(store: Store, revision: int) -> None:
    """Wait until the leader's key is deleted at *revision* or later; 0: it is absent already."""
    if not revision:
        await trio.sleep(RETRY)
        return
    try:
        async with store.watch(LEADER, revision) as changes:
            async for batch in changes:
                if any(event.key == LEADER and event.entry is None for event in batch.events):
                    return
    except Compacted:
        pass  # this standby slept too long to know: look again


async def _give_up(store: Store, lease: int) -> None:
    try:
        await store.revoke(lease)
    except (LeaseLost, Unavailable):
        pass  # it lapses by itself
