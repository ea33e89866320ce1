"""What every store does. A test module derives from `Conformance` and gives the fixture `store`.

A store may be shared between tests and have a past: keys live under a prefix of the test's own, and revisions are
compared, never given.
"""

from __future__ import annotations

import itertools

import pytest
import trio

from llmgw.stores.base import (
    MAX_OPS,
    MAX_VALUE,
    BadOperation,
    Changes,
    Compacted,
    Compare,
    Delete,
    Event,
    FutureRevision,
    Get,
    LeaseLost,
    Op,
    Put,
    Store,
    absent,
    delete,
    put,
    unchanged,
)

COUNTER = itertools.count(1)


def summary(changes: list[Changes]) -> list[tuple[str, bytes | None]]:
    return [(e.key.rsplit("/", 1)[1], e.entry.value if e.entry else None) for c in changes for e in c.events]


class Conformance:
    @pytest.fixture
    def p(self) -> str:
        return f"/{type(self).__name__}/{next(COUNTER)}/"

    async def test_an_entry_knows_its_revisions(self, store: Store, p: str) -> None:
        assert await store.get(p + "a") is None
        first = await put(store, p + "a", b"1")
        second = await put(store, p + "a", b"2")
        entry = await store.get(p + "a")
        assert entry is not None
        assert (entry.key, entry.value, entry.lease) == (p + "a", b"2", 0)
        assert (entry.create_revision, entry.mod_revision, entry.version) == (first, second, 2)
        assert second == first + 1

    async def test_created_anew_after_deletion(self, store: Store, p: str) -> None:
        await put(store, p + "a", b"1")
        assert await delete(store, p + "a")
        assert await store.get(p + "a") is None
        assert not await delete(store, p + "a")
        again = await put(store, p + "a", b"2")
        entry = await store.get(p + "a")
        assert entry is not None
        assert (entry.create_revision, entry.mod_revision, entry.version) == (again, again, 1)

    async def test_any_bytes_and_unicode_keys(self, store: Store, p: str) -> None:
        for key, value in ((p + "ключ 🔑", bytes(range(256))), (p + "empty", b"")):
            await put(store, key, value)
            entry = await store.get(key)
            assert entry is not None
            assert (entry.key, entry.value) == (key, value)

    async def test_range_is_sorted_and_only_the_prefix(self, store: Store, p: str) -> None:
        for key in ("b", "a", "a/x", "ab", "ÿ", "\U0010ffff"):
            await put(store, p + "k/" + key, key.encode())
        await put(store, p + "k", b"no")
        last = await put(store, p + "l", b"no")
        found = await store.range(p + "k/")
        assert [e.value.decode() for e in found.entries] == ["a", "a/x", "ab", "b", "ÿ", "\U0010ffff"]
        assert found.revision >= last
        assert (await store.range(p + "none/")).entries == ()
        assert p + "k/a" in {e.key for e in (await store.range("")).entries}

    async def test_range_in_the_past(self, store: Store, p: str) -> None:
        one = await put(store, p + "a", b"1")
        two = await put(store, p + "b", b"1")
        await put(store, p + "a", b"2")
        await delete(store, p + "b")
        assert [(e.key, e.value) for e in (await store.range(p, one)).entries] == [(p + "a", b"1")]
        assert [(e.key, e.value) for e in (await store.range(p, two)).entries] == [(p + "a", b"1"), (p + "b", b"1")]
        assert [(e.key, e.value) for e in (await store.range(p)).entries] == [(p + "a", b"2")]
        with pytest.raises(FutureRevision):
            await store.range(p, two + 1_000_000)

    async def test_transaction_takes_one_branch(self, store: Store, p: str) -> None:
        won = await store.txn([absent(p + "l")], [Put(p + "l", b"me")], [Get(p + "l")])
        assert (won.succeeded, won.entries) == (True, ())
        lost = await store.txn([absent(p + "l")], [Put(p + "l", b"you")], [Get(p + "l"), Get(p + "none")])
        assert not lost.succeeded
        assert lost.revision == won.revision, "nothing was written"
        assert lost.entries[0] is not None
        assert (lost.entries[0].value, lost.entries[0].create_revision) == (b"me", won.revision)
        assert lost.entries[1] is None

    async def test_writes_of_a_transaction_share_a_revision(self, store: Store, p: str) -> None:
        await put(store, p + "old", b"x")
        done = await store.txn(success=[Put(p + "a", b"1"), Put(p + "b", b"2"), Delete(p + "old"), Get(p + "a")])
        found = await store.range(p)
        assert [(e.key, e.mod_revision) for e in found.entries] == [(p + "a", done.revision), (p + "b", done.revision)]
        assert done.entries[0] is not None
        assert done.entries[0].value == b"1", "a read sees what the transaction wrote before it"

    async def test_nothing_written_is_no_revision(self, store: Store, p: str) -> None:
        before = (await store.range(p)).revision
        done = await store.txn(success=[Delete(p + "none"), Get(p + "none")])
        assert (done.succeeded, done.revision, done.entries) == (True, before, (None,))

    @pytest.mark.parametrize(
        ("target", "op", "operand", "true"),
        [
            ("version", "==", 2, True),
            ("version", ">", 1, True),
            ("version", "<", 2, False),
            ("version", "!=", 2, False),
            ("value", "==", b"m", True),
            ("value", "!=", b"m", False),
            ("value", "<", b"n", True),
            ("value", ">", b"n", False),
            ("create", ">", 0, True),
            ("mod", "<", 2**60, True),
        ],
    )
    async def test_comparisons(self, store: Store, p: str, target: str, op: str, operand: object, true: bool) -> None:
        await put(store, p + "a", b"l")
        await put(store, p + "a", b"m")
        done = await store.txn([Compare(p + "a", target, op, operand)], [], [])  # type: ignore[arg-type]
        assert done.succeeded is true

    @pytest.mark.parametrize(
        ("target", "op", "operand", "true"),
        [
            ("version", "==", 0, True),
            ("create", "==", 0, True),
            ("mod", "<", 1, True),
            ("value", "==", b"", False),
            ("value", "!=", b"x", False),
        ],
    )
    async def test_comparisons_with_an_absent_key(
        self, store: Store, p: str, target: str, op: str, operand: object, true: bool
    ) -> None:
        done = await store.txn([Compare(p + "a", target, op, operand)], [], [])  # type: ignore[arg-type]
        assert done.succeeded is true

    async def test_all_comparisons_must_hold(self, store: Store, p: str) -> None:
        await put(store, p + "a", b"1")
        entry = await store.get(p + "a")
        assert entry is not None
        assert (await store.txn([unchanged(entry), absent(p + "b")])).succeeded
        assert not (await store.txn([unchanged(entry), absent(p + "a")])).succeeded

    async def test_increments_by_compare_and_swap_lose_nothing(self, store: Store, p: str) -> None:
        await put(store, p + "n", b"0")

        async def add() -> None:
            for _ in range(5):
                while True:
                    entry = await store.get(p + "n")
                    assert entry is not None
                    fresh = str(int(entry.value) + 1).encode()
                    if (await store.txn([unchanged(entry)], [Put(p + "n", fresh)])).succeeded:
                        break

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(add)
        entry = await store.get(p + "n")
        assert entry is not None
        assert (entry.value, entry.version) == (b"20", 21)

    @pytest.mark.parametrize(
        "ops",
        [
            [Put("", b"")],
            [Put("a\0b", b"")],
            [Put("k" * 1025, b"")],
            [Put("\ud800", b"")],
            [Put("a", bytes(MAX_VALUE + 1))],
            [Put("a", bytes(MAX_VALUE)), Put("b", bytes(MAX_VALUE))],
            [Put("a", b""), Put("a", b"")],
            [Put("a", b""), Delete("a")],
            [Get("a")] * (MAX_OPS + 1),
        ],
        ids=["empty", "nul", "long", "no-unicode", "large", "large-together", "twice", "put-and-delete", "many"],
    )
    async def test_bounds(self, store: Store, ops: list[Op]) -> None:
        with pytest.raises(BadOperation):
            await store.txn(success=ops)

    async def test_the_largest_that_is_allowed(self, store: Store, p: str) -> None:
        await put(store, p + "a", bytes(MAX_VALUE))
        entry = await store.get(p + "a")
        assert entry is not None
        assert len(entry.value) == MAX_VALUE
        await store.txn(success=[Put(f"{p}{n}", b"") for n in range(MAX_OPS)])
        assert len((await store.range(p)).entries) == MAX_OPS + 1

    async def test_compare_with_the_wrong_kind(self, store: Store, p: str) -> None:
        with pytest.raises(BadOperation):
            await store.txn([Compare(p, "value", "==", 1)])

    async def test_revoked_lease_takes_its_keys(self, store: Store, p: str) -> None:
        lease = await store.grant(60)
        assert lease != 0
        await put(store, p + "a", b"1", lease)
        await put(store, p + "b", b"1", lease)
        await put(store, p + "b", b"1")  # no longer under the lease
        entry = await store.get(p + "a")
        assert entry is not None
        assert entry.lease == lease
        assert await store.keepalive(lease) >= 60
        await store.revoke(lease)
        assert [e.key for e in (await store.range(p)).entries] == [p + "b"]
        with pytest.raises(LeaseLost):
            await store.keepalive(lease)
        with pytest.raises(LeaseLost):
            await store.revoke(lease)
        with pytest.raises(LeaseLost):
            await put(store, p + "a", b"1", lease)
        assert await store.get(p + "a") is None

    async def test_lease_lapses_unless_it_is_renewed(self, store: Store, p: str) -> None:
        start = trio.current_time()
        kept, left = await store.grant(2), await store.grant(1)
        await store.txn(success=[Put(p + "kept", b"", kept), Put(p + "left", b"", left)])
        async with store.watch(p) as changes:
            with trio.fail_after(6):
                while True:
                    await store.keepalive(kept)
                    with trio.move_on_after(0.5):
                        if summary([await anext(changes)]) == [("left", None)]:
                            break
            assert trio.current_time() - start >= 1
        assert [e.key for e in (await store.range(p)).entries] == [p + "kept"]
        await store.revoke(kept)

    @pytest.mark.parametrize("ttl", [0, -1, 86_401])
    async def test_lease_of_no_length(self, store: Store, ttl: int) -> None:
        with pytest.raises(BadOperation):
            await store.grant(ttl)

    async def test_watch_from_now_on(self, store: Store, p: str) -> None:
        await put(store, p + "before", b"x")
        async with store.watch(p) as changes:
            await put(store, p + "a", b"1")
            await put(store, p + "a", b"2")
            await delete(store, p + "a")
            await delete(store, p + "before")
            assert await self.take(changes, 4) == [("a", b"1"), ("a", b"2"), ("a", None), ("before", None)]

    async def test_watch_waits(self, store: Store, p: str) -> None:
        async with store.watch(p) as changes, trio.open_nursery() as nursery:
            nursery.start_soon(self._later, store, p + "a")
            assert await self.take(changes, 1) == [("a", b"late")]

    async def _later(self, store: Store, key: str) -> None:
        await trio.sleep(0.05)
        await put(store, key, b"late")

    async def test_watch_resumes_without_a_gap(self, store: Store, p: str) -> None:
        start = await put(store, p + "a", b"0")
        for n in range(1, 6):
            await store.txn(success=[Put(p + "a", b"%d" % n), Put(p + "other", b"x")])
        seen: list[tuple[str, bytes | None]] = []
        position = start
        while len(seen) < 11:
            async with store.watch(p, position) as changes:
                batch = await anext(changes)
                seen += summary([batch])
                position = batch.revision + 1
        expected = [("a", b"0")]
        for n in range(1, 6):
            expected += [("a", b"%d" % n), ("other", b"x")]
        assert seen == expected

    async def test_watch_entries_are_whole(self, store: Store, p: str) -> None:
        async with store.watch(p) as changes:
            await put(store, p + "a", b"1")
            await put(store, p + "a", b"2")
            events: list[Event] = []
            while len(events) < 2:
                events += (await anext(changes)).events
            assert events[-1].entry is not None
            assert events[-1].entry == await store.get(p + "a")
            assert events[-1].revision == events[-1].entry.mod_revision

    async def test_watch_never_splits_a_transaction(self, store: Store, p: str) -> None:
        start = (await store.range(p)).revision + 1
        for _ in range(5):
            await store.txn(success=[Put(f"{p}{n}", b"") for n in range(100)])
        seen: list[int] = []
        async with store.watch(p, start) as changes:
            while len(seen) < 500:
                batch = await anext(changes)
                counts = [sum(e.revision == r for e in batch.events) for r in {e.revision for e in batch.events}]
                assert set(counts) <= {100}
                seen += [e.revision for e in batch.events]
        assert seen == sorted(seen)

    async def test_slow_watch_misses_nothing(self, store: Store, p: str) -> None:
        async with store.watch(p) as changes:
            for n in range(50):
                await put(store, p + "a", b"%d" % n)
            assert await self.take(changes, 50) == [("a", b"%d" % n) for n in range(50)]

    async def test_cancelled_wait_loses_nothing(self, store: Store, p: str) -> None:
        async with store.watch(p) as changes:
            with trio.move_on_after(0.05):
                await self.take(changes, 1)
            await put(store, p + "a", b"1")
            assert await self.take(changes, 1) == [("a", b"1")]

    async def test_compaction(self, store: Store, p: str) -> None:
        first = await put(store, p + "a", b"1")
        await put(store, p + "gone", b"1")
        await delete(store, p + "gone")
        await put(store, p + "a", b"2")
        await put(store, p + "b", b"1")
        last = await put(store, p + "a", b"3")
        await store.compact(last)
        assert [(e.key, e.value, e.version) for e in (await store.range(p)).entries] == [
            (p + "a", b"3", 3),
            (p + "b", b"1", 1),
        ]
        with pytest.raises(Compacted) as caught:
            await store.range(p, first)
        with pytest.raises(Compacted):
            await store.compact(last)
        with pytest.raises(FutureRevision):
            await store.compact(last + 1_000_000)
        with pytest.raises(Compacted) as caught:
            async with store.watch(p, first) as changes:
                await anext(changes)
        assert caught.value.revision == last
        async with store.watch(p, last + 1) as changes:
            await put(store, p + "a", b"4")
            assert await self.take(changes, 1) == [("a", b"4")]

    async def take(self, changes: object, count: int) -> list[tuple[str, bytes | None]]:
        """The next *count* events; progress in between is no event."""
        taken: list[tuple[str, bytes | None]] = []
        with trio.fail_after(5):
            while len(taken) < count:
                taken += summary([await anext(changes)])  # type: ignore[call-overload]
        return taken
