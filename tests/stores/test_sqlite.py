"""The embedded store: the same as the others, and what a file on a disk can do to it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from llmgw.errors import Unavailable
from llmgw.stores import sqlite
from llmgw.stores.base import CannotOpen, Compacted, StoreError, delete, put
from llmgw.stores.sqlite import SqliteStore, open_sqlite, restore
from tests.stores.conformance import Conformance


class TestSqlite(Conformance):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[SqliteStore]:
        async with open_sqlite(tmp_path / "state.db") as store:
            yield store


async def fill(path: Path, count: int = 3) -> int:
    async with open_sqlite(path) as store:
        for n in range(count):
            await put(store, f"/k/{n}", b"%d" % n)
        return (await store.range("")).revision


def bytes_of(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.parent.glob(path.name + "*") if not p.name.endswith(".lock")}


async def test_what_was_written_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    revision = await fill(path)
    async with open_sqlite(path) as store:
        found = await store.range("")
        assert (found.revision, [e.value for e in found.entries]) == (revision, [b"0", b"1", b"2"])
        async with store.watch("/k/", revision) as changes:
            assert [e.key for e in (await anext(changes)).events] == ["/k/2"]


async def test_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sqlite(path) as store:
        await put(store, "/a", b"1")
        for name in os.listdir(tmp_path):
            assert os.stat(tmp_path / name).st_mode & 0o077 == 0, name


async def test_durability_is_what_the_header_says(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "state.db") as store:
        got = await store._call(
            lambda _now: [store._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
        )
        assert got == ["wal", 2]


async def test_leases_end_with_their_process(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sqlite(path) as store:
        lease = await store.grant(60)
        before = await put(store, "/leader", b"me", lease)
    async with open_sqlite(path) as store:
        assert await store.get("/leader") is None
        assert await store.grant(60) != lease
        assert await put(store, "/leader", b"me") > before


async def test_concurrent_writes_share_commits(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "state.db") as store:
        commits = 0

        def trace(statement: str) -> None:
            nonlocal commits
            commits += statement == "COMMIT"

        await store._call(lambda _now: store._db.set_trace_callback(trace), alone=True)
        async with trio.open_nursery() as nursery:
            for n in range(500):
                nursery.start_soon(put, store, f"/{n}", b"x")
        assert len((await store.range("")).entries) == 500
        assert commits < 50


async def test_second_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sqlite(path):
        with pytest.raises(CannotOpen, match=rf"in use by another llmgw server \(process {os.getpid()}\); stop that"):
            async with open_sqlite(path):
                pass
        with pytest.raises(CannotOpen, match="in use"):
            restore(path, path)
    async with open_sqlite(path):
        pass


async def test_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    await fill(path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 7")
    before = bytes_of(path)
    with pytest.raises(CannotOpen, match=r"written by a newer llmgw \(schema 7, this program knows 1\); start that"):
        async with open_sqlite(path):
            pass
    assert bytes_of(path) == before


async def test_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE photos (x)")
    before = bytes_of(path)
    with pytest.raises(CannotOpen, match="is a database of another program; nothing was changed"):
        async with open_sqlite(path):
            pass
    assert bytes_of(path) == before


@pytest.mark.parametrize(("offset", "length"), [(0, 100), (4096, 4096), (8192, 8192), (0, 0)])
async def test_damaged_file_is_refused_and_kept(tmp_path: Path, offset: int, length: int) -> None:
    path = tmp_path / "state.db"
    await fill(path, 300)
    if length:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(random.Random(1).randbytes(length))
    else:
        os.truncate(path, path.stat().st_size // 2)
    before = bytes_of(path)
    with pytest.raises(CannotOpen, match=r"nothing was changed; move the file away to start empty, or bring back a"):
        async with open_sqlite(path):
            pass
    assert bytes_of(path) == before


async def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CannotOpen, match="create the directory"):
        async with open_sqlite(tmp_path / "none" / "state.db"):
            pass


async def test_full_disk_fails_the_write_and_nothing_else(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "state.db") as store:
        await put(store, "/a", b"1")
        await store._call(lambda _now: store._db.execute("PRAGMA max_page_count = 20").fetchone(), alone=True)
        with pytest.raises(Unavailable, match=r"cannot write: database or disk is full; nothing was changed"):
            await put(store, "/b", bytes(500_000))
        found = await store.range("")
        assert [e.key for e in found.entries] == ["/a"]
        assert await put(store, "/a", b"2") == found.revision + 1


async def test_closed_store_says_so(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "state.db") as store:
        pass
    with pytest.raises(Unavailable, match="is closed"):
        await store.get("/a")


async def test_cancelled_caller_does_not_harm_the_store(tmp_path: Path) -> None:
    async with open_sqlite(tmp_path / "state.db") as store:
        for n in range(50):
            with trio.move_on_after(0.0001 * (n % 5)):
                await put(store, f"/{n}", b"x")
        assert await put(store, "/last", b"x") == (await store.range("")).revision


async def test_backup_of_a_living_store_and_restore(tmp_path: Path) -> None:
    path, copy = tmp_path / "state.db", tmp_path / "backup.db"
    async with open_sqlite(path) as store:
        await put(store, "/a", b"1")
        await store.backup(copy)
        with pytest.raises(StoreError, match="exists, and a backup replaces nothing"):
            await store.backup(copy)
        with pytest.raises(StoreError, match="no backup was made at"):
            await store.backup(tmp_path / "none" / "backup.db")
        await delete(store, "/a")
        lost = await put(store, "/b", b"1")
    revision = restore(copy, path)
    assert revision >= lost + sqlite.REVISION_JUMP
    async with open_sqlite(path) as store:
        assert [(e.key, e.value) for e in (await store.range("")).entries] == [("/a", b"1")]
        with pytest.raises(Compacted):
            async with store.watch("/", lost) as changes:
                await anext(changes)
        assert await put(store, "/leader", b"me") > revision
    async with open_sqlite(Path(f"{path}.before-restore-1")) as store:
        assert [e.key for e in (await store.range("")).entries] == ["/b"]


async def test_restore_over_a_damaged_and_over_no_store(tmp_path: Path) -> None:
    path, copy = tmp_path / "state.db", tmp_path / "backup.db"
    await fill(path)
    os.rename(path, copy)
    path.write_bytes(b"garbage" * 1000)
    restore(copy, path)
    assert bytes_of(Path(f"{path}.before-restore-1")) == {"state.db.before-restore-1": b"garbage" * 1000}
    async with open_sqlite(path) as store:
        assert len((await store.range("")).entries) == 3
    restore(copy, tmp_path / "fresh.db")
    with pytest.raises(CannotOpen, match="no store of llmgw"):
        restore(Path(f"{path}.before-restore-1"), path)


WRITER = """
import sys, trio
from pathlib import Path
from llmgw.stores.base import put
from llmgw.stores.sqlite import open_sqlite

async def main():
    async with open_sqlite(Path(sys.argv[1])) as store:
        async def write(worker):
            n = int(sys.argv[2])
            while True:
                n += 1
                await put(store, f"/{worker}/{n % 50}", bytes(2000))
                await put(store, f"/{worker}", str(n).encode())
                sys.stdout.write(f"{worker} {n}\\n")
                sys.stdout.flush()
        async with trio.open_nursery() as nursery:
            for worker in range(4):
                nursery.start_soon(write, worker)

trio.run(main)
"""


def kill_loop(path: Path, seconds: float) -> int:
    """Kill a writer at random instants until time is up; every write it acknowledged must be there. How many kills."""
    rng = random.Random(3)
    end = time.monotonic() + seconds
    kills = base = 0
    while time.monotonic() < end:
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(base)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        try:
            lines = [writer.stdout.readline()]
            assert lines[0], "the writer could not start"
            time.sleep(rng.random() * 0.2)
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        with writer.stdout:
            lines += writer.stdout.read().splitlines()
        kills += 1
        acknowledged: dict[str, int] = {}
        for line in lines:
            worker, _, count = line.strip().partition(" ")
            acknowledged[worker] = int(count)
        with contextlib.closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            for name, number in acknowledged.items():
                (value,) = db.execute(
                    "SELECT value FROM kv WHERE key = ? ORDER BY mod DESC LIMIT 1", (f"/{name}".encode(),)
                ).fetchone()
                assert int(value) >= number, f"worker {name} had an answer for {number}, and {value!r} is there"
                base = max(base, int(value))
    return kills


def test_kill_9_loses_no_acknowledged_write(tmp_path: Path) -> None:
    assert kill_loop(tmp_path / "state.db", 4) >= 2


@pytest.mark.full
def test_kill_9_for_longer(tmp_path: Path) -> None:
    assert kill_loop(tmp_path / "state.db", 60) >= 30
