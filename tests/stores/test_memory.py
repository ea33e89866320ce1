"""The store in memory, in virtual time."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from llmgw.stores import core
from llmgw.stores.base import Compacted, put
from llmgw.stores.memory import MemoryStore
from tests.stores.conformance import Conformance


class TestMemory(Conformance):
    @pytest.fixture
    async def store(self) -> MemoryStore:
        return MemoryStore()

    async def test_lapse_is_exact(self, store: MemoryStore, autojump_clock: MockClock) -> None:
        lease = await store.grant(15)
        await put(store, "/leader", b"me", lease)
        start = trio.current_time()
        async with store.watch("/") as changes:
            await anext(changes)
        assert trio.current_time() == start + 15
        assert await store.get("/leader") is None

    async def test_history_is_bounded_by_age(self, store: MemoryStore, autojump_clock: MockClock) -> None:
        first = await put(store, "/a", b"1")
        for _ in range(3):
            await trio.sleep(core.KEEP_SECONDS / 2)
            await put(store, "/a", b"2")
        with pytest.raises(Compacted):
            await store.range("", first)
        assert (await store.range("")).entries[0].version == 4

    async def test_history_is_bounded_by_count(self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(core, "KEEP_REVISIONS", 10)
        monkeypatch.setattr(core, "COMPACT_EVERY", 5)
        revisions = [await put(store, "/a", b"") for _ in range(100)]
        async with store.watch("/", revisions[-9]) as changes:
            assert len((await anext(changes)).events) == 9
        with pytest.raises(Compacted):
            async with store.watch("/", revisions[-20]) as changes:
                await anext(changes)
