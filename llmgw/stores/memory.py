"""The store in memory: for worlds in virtual time and for tests. No threads, no files; it ends with its process."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

import trio

from llmgw.stores.base import Changes, Compare, Entry, Event, Op, Range, Txn
from llmgw.stores.core import Core, Watch

P = ParamSpec("P")
T = TypeVar("T")


class MemoryTable:
    """Every version of every key since the last compaction, in dicts; a log of events in order."""

    def __init__(self) -> None:
        self.revision = 1  # as in etcd: 0 means "none" wherever a revision is expected
        self.compacted = 0
        self._keys: list[str] = []
        self._versions: dict[str, list[Event]] = {}
        self._log: list[Event] = []
        self._leases: dict[int, int] = {}
        self._last_lease = 0

    def get(self, key: str) -> Entry | None:
        versions = self._versions.get(key)
        return versions[-1].entry if versions else None

    def range(self, prefix: str, revision: int) -> list[Entry]:
        found = []
        for key in self._keys[bisect_left(self._keys, prefix) :]:
            if not key.startswith(prefix):
                break
            versions = self._versions[key]
            at = bisect_left(versions, revision + 1, key=lambda e: e.revision)
            if at and (entry := versions[at - 1].entry) is not None:
                found.append(entry)
        return found

    def history(self, prefix: str, after: int, limit: int) -> list[Event]:
        found: list[Event] = []
        for event in self._log[bisect_left(self._log, after + 1, key=lambda e: e.revision) :]:
            if len(found) >= limit and event.revision != found[-1].revision:
                break
            if event.key.startswith(prefix):
                found.append(event)
        return found

    def append(self, revision: int, events: Sequence[Event]) -> None:
        for event in events:
            if event.key not in self._versions:
                insort(self._keys, event.key)
                self._versions[event.key] = []
            self._versions[event.key].append(event)
            self._log.append(event)
        self.revision = revision

    def compact(self, revision: int) -> None:
        self.compacted = revision
        del self._log[: bisect_left(self._log, revision + 1, key=lambda e: e.revision)]
        for key, versions in list(self._versions.items()):
            at = bisect_left(versions, revision + 1, key=lambda e: e.revision)
            if at and versions[at - 1].entry is not None:
                at -= 1  # what the key holds at *revision* stays; a tombstone goes
            del versions[:at]
            if not versions:
                del self._versions[key]
                del self._keys[bisect_left(self._keys, key)]

    def leases(self) -> dict[int, int]:
        return dict(self._leases)

    def add_lease(self, ttl: int) -> int:
        self._last_lease += 1
        self._leases[self._last_lease] = ttl
        return self._last_lease

    def drop_lease(self, lease: int) -> None:
        del self._leases[lease]

    def leased(self, lease: int) -> list[str]:
        return [key for key in self._keys if (entry := self.get(key)) is not None and entry.lease == lease]


class MemoryStore:
    """See `llmgw.stores.base.Store`. Create it inside a trio program."""

    def __init__(self) -> None:
        self._core = Core(MemoryTable(), trio.current_time())
        self._changed = trio.Event()

    async def get(self, key: str) -> Entry | None:
        return await self._call(self._core.get, key, trio.current_time())

    async def range(self, prefix: str, revision: int = 0) -> Range:
        return await self._call(self._core.range, prefix, revision, trio.current_time())

    async def txn(
        self, compares: Sequence[Compare] = (), success: Sequence[Op] = (), failure: Sequence[Op] = ()
    ) -> Txn:
        return await self._call(self._core.txn, compares, success, failure, trio.current_time())

    async def grant(self, ttl: int) -> int:
        return await self._call(self._core.grant, ttl, trio.current_time())

    async def keepalive(self, lease: int) -> int:
        return await self._call(self._core.keepalive, lease, trio.current_time())

    async def revoke(self, lease: int) -> None:
        await self._call(self._core.revoke, lease, trio.current_time())

    async def compact(self, revision: int) -> None:
        await self._call(self._core.compact, revision)

    @asynccontextmanager
    async def watch(self, prefix: str, from_revision: int = 0) -> AsyncIterator[AsyncIterator[Changes]]:
        await trio.lowlevel.checkpoint()
        yield Watch(self._changes, prefix, from_revision - 1 if from_revision else self._core.table.revision)

    async def _changes(self, prefix: str, after: int) -> Changes:
        while True:
            changed = self._changed
            if found := await self._call(self._core.changes, prefix, after, trio.current_time()):
                return found
            with trio.move_on_at(self._core.next_lapse):
                await changed.wait()

    async def _call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """One step of the core; wakes the watches if it changed something, or how long they may wait."""
        await trio.lowlevel.checkpoint()
        before = self._core.table.revision, self._core.next_lapse
        try:
            return method(*args, **kwargs)
        finally:
            if before != (self._core.table.revision, self._core.next_lapse):
                self._changed.set()
                self._changed = trio.Event()
