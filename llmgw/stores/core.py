"""What a transaction, a lease and a compaction do, apart from where the rows lie.

`Core` decides; a `Table` keeps rows: every version of every key since the last compaction. The memory store and the
sqlite store differ in their tables and in who calls the core: the event loop, or one thread. Nothing here waits.

Leases lapse lazily: every call hands in the time, and what is due is deleted first. Whoever waits for a change waits
no longer than `next_lapse`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from llmgw.stores.base import (
    BadOperation,
    Changes,
    Compacted,
    Compare,
    Delete,
    Entry,
    Event,
    FutureRevision,
    LeaseLost,
    Op,
    Put,
    Range,
    Txn,
    check,
    check_ttl,
)

KEEP_REVISIONS = 10_000  # of history: a watcher that was away for less resumes without reading everything
KEEP_SECONDS = 3_600.0  # history older than this goes even if it is short: large values must not pile up
COMPACT_EVERY = 1_000  # revisions; also how far history may outgrow its bound
SAMPLE_EVERY = 60.0  # seconds between notes of "at this time the revision was that"
BATCH = 256  # changes a watch delivers at once


class Table(Protocol):
    """Rows: (key, revision) → entry or tombstone. Keys in the order of their UTF-8 bytes, as Python compares str."""

    revision: int
    compacted: int

    def get(self, key: str) -> Entry | None: ...
    def range(self, prefix: str, revision: int) -> list[Entry]: ...
    def history(self, prefix: str, after: int, limit: int) -> list[Event]:
        """At least *limit* events if there are that many, never part of a transaction, in the order they happened."""
        ...

    def append(self, revision: int, events: Sequence[Event]) -> None: ...
    def compact(self, revision: int) -> None: ...
    def leases(self) -> dict[int, int]:
        """Lease → seconds it was granted."""
        ...

    def add_lease(self, ttl: int) -> int: ...
    def drop_lease(self, lease: int) -> None: ...
    def leased(self, lease: int) -> list[str]: ...


class Core:
    """The state machine of one store. *now* is a monotonic time in seconds, the same clock in every call."""

    def __init__(self, table: Table, now: float) -> None:
        self.table = table
        self._ttl = table.leases()
        # Nobody could renew in between, so every lease starts anew, as after a change of etcd's leader.
        self._lapse = {lease: now + ttl for lease, ttl in self._ttl.items()}
        self._samples: deque[tuple[float, int]] = deque([(now, table.revision)])

    @property
    def next_lapse(self) -> float:
        return min(self._lapse.values(), default=math.inf)

    def tick(self, now: float) -> None:
        """Delete what hangs on leases that lapsed."""
        for lease in [lease for lease, end in self._lapse.items() if end <= now]:
            self._end(lease)

    def get(self, key: str, now: float) -> Entry | None:
        self.tick(now)
        return self.table.get(key)

    def range(self, prefix: str, revision: int, now: float) -> Range:
        self.tick(now)
        self._readable(revision)
        return Range(self.table.revision, tuple(self.table.range(prefix, revision or self.table.revision)))

    def txn(self, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op], now: float) -> Txn:
        check(compares, success, failure)
        self.tick(now)
        succeeded = all(holds(compare, self.table.get(compare.key)) for compare in compares)
        branch = success if succeeded else failure
        fresh = self.table.revision + 1
        written: dict[str, Entry | None] = {}
        entries: list[Entry | None] = []
        for op in branch:
            current = written[op.key] if op.key in written else self.table.get(op.key)
            if isinstance(op, Put):
                if op.lease and op.lease not in self._ttl:
                    raise LeaseLost(f"lease {op.lease} does not exist")
                created, version = (current.create_revision, current.version) if current else (fresh, 0)
                written[op.key] = Entry(op.key, op.value, created, fresh, version + 1, op.lease)
            elif isinstance(op, Delete):
                if current is not None:
                    written[op.key] = None
            else:
                entries.append(current)
        if written:
            self._append([Event(key, fresh, entry) for key, entry in written.items()], now)
        return Txn(succeeded, self.table.revision, tuple(entries))

    def grant(self, ttl: int, now: float) -> int:
        check_ttl(ttl)
        self.tick(now)
        lease = self.table.add_lease(ttl)
        self._ttl[lease] = ttl
        self._lapse[lease] = now + ttl
        return lease

    def keepalive(self, lease: int, now: float) -> int:
        self.tick(now)
        if lease not in self._ttl:
            raise LeaseLost(f"lease {lease} does not exist")
        self._lapse[lease] = now + self._ttl[lease]
        return self._ttl[lease]

    def revoke(self, lease: int, now: float) -> None:
        self.tick(now)
        if lease not in self._ttl:
            raise LeaseLost(f"lease {lease} does not exist")
        self._end(lease)

    def end_all(self, now: float) -> None:
        """End every lease: nobody is left who could renew one."""
        self._lapse = dict.fromkeys(self._lapse, now)
        self.tick(now)

    def compact(self, revision: int) -> None:
        if revision <= self.table.compacted:
            raise Compacted(self.table.compacted)
        if revision > self.table.revision:
            raise FutureRevision(f"revision {revision} is not reached; the store is at {self.table.revision}")
        self.table.compact(revision)

    def changes(self, prefix: str, after: int, now: float) -> Changes | None:
        """What happened under *prefix* after revision *after*; None if nothing did, in the whole store."""
        self.tick(now)
        if after < self.table.compacted:
            raise Compacted(self.table.compacted)
        if after >= self.table.revision:
            return None
        events = self.table.history(prefix, after, BATCH)
        if len(events) >= BATCH:
            return Changes(events[-1].revision, tuple(events))
        return Changes(self.table.revision, tuple(events))

    def _readable(self, revision: int) -> None:
        if revision < 0:
            raise BadOperation(f"revision {revision} is negative")
        if 0 < revision < self.table.compacted:
            raise Compacted(self.table.compacted)
        if revision > self.table.revision:
            raise FutureRevision(f"revision {revision} is not reached; the store is at {self.table.revision}")

    def _append(self, events: list[Event], now: float) -> None:
        self.table.append(events[0].revision, events)
        if now - self._samples[-1][0] >= SAMPLE_EVERY:
            self._samples.append((now, self.table.revision))
        self._trim(now)

    def _trim(self, now: float) -> None:
        """Compact by count and by age."""
        keep = self.table.compacted
        while self._samples and self._samples[0][0] <= now - KEEP_SECONDS:
            keep = max(keep, self._samples.popleft()[1])
        if not self._samples:
            self._samples.append((now, self.table.revision))
        if self.table.revision - self.table.compacted >= KEEP_REVISIONS + COMPACT_EVERY:
            keep = max(keep, self.table.revision - KEEP_REVISIONS)
        if keep > self.table.compacted:
            self.table.compact(keep)

    def _end(self, lease: int) -> None:
        del self._ttl[lease]
        end = self._lapse.pop(lease)
        revision = self.table.revision + 1
        self.table.drop_lease(lease)
        if keys := self.table.leased(lease):
            self._append([Event(key, revision, None) for key in keys], end)


class Watch:
    """Iterator of changes. *step(prefix, after)* waits for what happened after a revision; there is no queue to fill."""

    def __init__(self, step: Callable[[str, int], Awaitable[Changes]], prefix: str, after: int) -> None:
        self._step, self._prefix, self._after = step, prefix, after

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Changes:
        found = await self._step(self._prefix, self._after)
        self._after = found.revision
        return found


def holds(compare: Compare, entry: Entry | None) -> bool:
    """Whether a comparison is true of a key's present state."""
    actual: int | bytes
    if compare.target == "value":
        if entry is None:
            return False
        actual = entry.value
    elif entry is None:
        actual = 0
    else:
        actual = {
            "version": entry.version,
            "create": entry.create_revision,
            "mod": entry.mod_revision,
        }[compare.target]
    expected = compare.operand
    if isinstance(actual, bytes) or isinstance(expected, bytes):
        assert isinstance(actual, bytes)
        assert isinstance(expected, bytes)
        return _compare(compare.op, (actual > expected) - (actual < expected))
    return _compare(compare.op, (actual > expected) - (actual < expected))


def _compare(op: str, sign: int) -> bool:
    return {"==": sign == 0, "!=": sign != 0, "<": sign < 0, ">": sign > 0}[op]
