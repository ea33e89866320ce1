"""The embedded store: one SQLite file, for one server.

    callers ──job──▶ queue ──▶ THE thread: takes all jobs that wait, one transaction, one fsync ──▶ answers

- One thread owns the connection from opening to closing. WAL and synchronous=FULL: an acknowledged write survives
  kill -9 and power loss. Jobs that arrive while a commit runs share the next one (group commit).
- A job either fails before it writes a row, or writes all of them; if the commit fails, everybody in the batch hears
  `Unavailable`, and the core is read back from the file.
- A second process is kept out by `flock` on ``<file>.lock``, so a lease or a leader is trivially ours.
- At start: is it a database, is it ours, is it whole (integrity_check), is its schema not newer than this program?
  If not, `CannotOpen` says what to do, and nothing was changed.
- Watches read history from the table: rows since the last compaction.

Not for network file systems: SQLite's locks do not hold there.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import queue
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import trio

from llmgw.errors import Unavailable
from llmgw.stores.base import (
    CannotOpen,
    Changes,
    Compare,
    Entry,
    Event,
    Op,
    Range,
    StoreError,
    Txn,
    prefix_end,
)
from llmgw.stores.core import Core, Watch

T = TypeVar("T")

APPLICATION = 0x6C6D6777  # "lmgw", in the file's header
SCHEMA = 1
MAX_WAITING = 1_024  # jobs that may wait for the thread; callers beyond it wait their turn
MAX_BATCH = 256  # jobs in one commit, so that the first of them does not wait for the thousandth
REVISION_JUMP = 1_000_000  # added by a restore: more writes than can have followed a backup, at 10/s a day and more
CLOSE_SECONDS = 10.0
SECRET = 0o600  # the store holds hashes of tokens and keys

TABLES = """
CREATE TABLE kv (
    key BLOB NOT NULL, mod INTEGER NOT NULL, sub INTEGER NOT NULL,
    created INTEGER NOT NULL, version INTEGER NOT NULL, lease INTEGER NOT NULL,
    value BLOB,
    PRIMARY KEY (key, mod)
) WITHOUT ROWID;
CREATE INDEX kv_by_mod ON kv (mod, sub);
CREATE TABLE lease (id INTEGER PRIMARY KEY AUTOINCREMENT, ttl INTEGER NOT NULL);
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('revision', 1), ('compacted', 0);
"""
"""`value` NULL is a tombstone. `sub` orders the changes of one transaction."""


class SqliteTable:
    """Rows of the core in a database; used by the thread alone, within its transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.revision = self.compacted = 0
        self.reload()

    def reload(self) -> None:
        meta = dict(self._db.execute("SELECT name, value FROM meta"))
        self.revision, self.compacted = meta["revision"], meta["compacted"]

    def get(self, key: str) -> Entry | None:
        row = self._db.execute(
            "SELECT key, mod, created, version, lease, value FROM kv WHERE key = ? ORDER BY mod DESC LIMIT 1",
            (key.encode(),),
        ).fetchone()
        return None if row is None else _event(row).entry

    def range(self, prefix: str, revision: int) -> list[Entry]:
        where, arguments = _under(prefix)
        # With a bare max(), SQLite takes the other columns from the row that has the maximum.
        rows = self._db.execute(
            f"SELECT key, max(mod), created, version, lease, value FROM kv WHERE {where} AND mod <= ? "
            "GROUP BY key ORDER BY key",
            (*arguments, revision),
        )
        return [entry for row in rows if (entry := _event(row).entry) is not None]

    def history(self, prefix: str, after: int, limit: int) -> list[Event]:
        where, arguments = _under(prefix)
        rows = self._db.execute(
            f"SELECT key, mod, created, version, lease, value FROM kv INDEXED BY kv_by_mod "
            f"WHERE mod > ? AND {where} ORDER BY mod, sub",
            (after, *arguments),
        )
        found: list[Event] = []
        for row in rows:
            event = _event(row)
            if len(found) >= limit and event.revision != found[-1].revision:
                break
            found.append(event)
        rows.close()
        return found

    def append(self, revision: int, events: Sequence[Event]) -> None:
        self._db.executemany(
            "INSERT INTO kv (key, mod, sub, created, version, lease, value) VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (event.key.encode(), revision, sub, 0, 0, 0, None)
                if (entry := event.entry) is None
                else (event.key.encode(), revision, sub, entry.create_revision, entry.version, entry.lease, entry.value)
                for sub, event in enumerate(events)
            ],
        )
        self._set("revision", revision)
        self.revision = revision

    def compact(self, revision: int) -> None:
        self._db.execute(
            "DELETE FROM kv WHERE mod <= ?1 AND (value IS NULL OR EXISTS "
            "(SELECT 1 FROM kv AS newer WHERE newer.key = kv.key AND newer.mod > kv.mod AND newer.mod <= ?1))",
            (revision,),
        )
        self._set("compacted", revision)
        self.compacted = revision

    def leases(self) -> dict[int, int]:
        return dict(self._db.execute("SELECT id, ttl FROM lease"))

    def add_lease(self, ttl: int) -> int:
        lease = self._db.execute("INSERT INTO lease (ttl) VALUES (?)", (ttl,)).lastrowid
        assert lease is not None
        return lease

    def drop_lease(self, lease: int) -> None:
        self._db.execute("DELETE FROM lease WHERE id = ?", (lease,))

    def leased(self, lease: int) -> list[str]:
        return [entry.key for entry in self.range("", self.revision) if entry.lease == lease]

    def jump(self, revision: int) -> None:
        """Go on at *revision* as if it had been reached by writing; what came before is no history any more."""
        self._set("revision", revision)
        self.revision = revision
        self.compact(revision)

    def _set(self, name: str, value: int) -> None:
        self._db.execute("UPDATE meta SET value = ? WHERE name = ?", (value, name))


def _under(prefix: str) -> tuple[str, tuple[bytes, ...]]:
    low = prefix.encode()
    return ("key >= ? AND key < ?", (low, prefix_end(low))) if low else ("1", ())


def _event(row: Any) -> Event:
    raw, mod, created, version, lease, value = row
    key = raw.decode()
    return Event(key, mod, None if value is None else Entry(key, value, created, mod, version, lease))


@attrs.define(eq=False)
class _Job:
    """*run* is called in the thread; then *done* is set in the event loop, and *result* or *error* is there.

    *alone*: outside any transaction.
    """

    run: Callable[[], Any]
    now: float
    alone: bool = False
    result: Any = None
    error: Exception | None = None
    done: trio.Event = attrs.field(factory=trio.Event)

    def perform(self) -> None:
        try:
            self.result = self.run()
        except Exception as error:
            self.error = error


class SqliteStore:
    """See `llmgw.stores.base.Store`. Made by `open_sqlite`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._waiting = trio.Semaphore(MAX_WAITING)
        self._token = trio.lowlevel.current_trio_token()
        self._changed = trio.Event()
        self._ended = trio.Event()
        self._stopped = ""
        self._mark = (0, math.inf)  # revision and next lapse, as of the last answer
        # Used by the thread alone:
        self._db: sqlite3.Connection
        self._core: Core
        self._stopping = False

    async def get(self, key: str) -> Entry | None:
        return await self._call(lambda now: self._core.get(key, now))

    async def range(self, prefix: str, revision: int = 0) -> Range:
        return await self._call(lambda now: self._core.range(prefix, revision, now))

    async def txn(
        self, compares: Sequence[Compare] = (), success: Sequence[Op] = (), failure: Sequence[Op] = ()
    ) -> Txn:
        return await self._call(lambda now: self._core.txn(compares, success, failure, now))

    async def grant(self, ttl: int) -> int:
        return await self._call(lambda now: self._core.grant(ttl, now))

    async def keepalive(self, lease: int) -> int:
        return await self._call(lambda now: self._core.keepalive(lease, now))

    async def revoke(self, lease: int) -> None:
        await self._call(lambda now: self._core.revoke(lease, now))

    async def compact(self, revision: int) -> None:
        await self._call(lambda _now: self._core.compact(revision))

    @asynccontextmanager
    async def watch(self, prefix: str, from_revision: int = 0) -> AsyncIterator[AsyncIterator[Changes]]:
        here = await self._call(lambda _now: self._core.table.revision)
        yield Watch(self._changes, prefix, from_revision - 1 if from_revision else here)

    async def backup(self, path: Path) -> None:
        """A consistent copy at *path*, while the store is in use. Raises StoreError if it cannot be made."""
        await self._call(lambda _now: _copy(self._db, path), alone=True)

    async def _changes(self, prefix: str, after: int) -> Changes:
        while True:
            changed = self._changed
            if found := await self._call(lambda now: self._core.changes(prefix, after, now)):
                return found
            with trio.move_on_at(self._mark[1]):
                await changed.wait()

    async def _call(self, run: Callable[[float], T], *, alone: bool = False) -> T:
        now = trio.current_time()
        async with self._waiting:
            if self._stopped:
                raise Unavailable(self._stopped)
            job = _Job(lambda: run(now), now, alone)
            self._jobs.put(job)
            await job.done.wait()
        if job.error is not None:
            raise job.error
        result: T = job.result
        return result

    async def _start(self) -> None:
        def run() -> None:
            self._db = _open(self._path)
            self._core = Core(SqliteTable(self._db), job.now)

        # Leases belong to the process that asked for them, and that one is dead: this one holds the lock.
        job = _Job(run, trio.current_time(), alone=True)
        end = _Job(lambda: self._core.end_all(job.now), job.now)
        self._jobs.put(job)
        threading.Thread(target=self._work, name=f"store {self._path.name}", daemon=True).start()
        with trio.CancelScope(shield=True):  # bounded by the check of a file of some megabytes
            await job.done.wait()
            if job.error is not None:
                await self._ended.wait()
                raise job.error
            self._jobs.put(end)
            await end.done.wait()
            if end.error is not None:
                await self._stop()
        if end.error is not None:
            raise CannotOpen(str(end.error))

    async def _stop(self) -> None:
        def stop() -> None:
            self._stopping = True

        self._jobs.put(_Job(stop, 0.0, alone=True))
        await self._ended.wait()

    def _work(self) -> None:
        """The thread: the first job opens the file; then batch after batch, until told to stop."""
        reason = f"the store {self._path} is closed"
        try:
            opening = self._jobs.get()
            opening.perform()
            self._stopping = opening.error is not None
            self._deliver([opening])
            while not self._stopping:
                for alone, jobs in itertools.groupby(self._take(), key=lambda job: job.alone):
                    self._serve(list(jobs), alone)
            if opening.error is None:
                self._db.close()
        except BaseException as error:
            reason = f"the store {self._path} stopped: {error!r}"
            raise  # a defect: shown by threading's hook; nobody waits for ever all the same
        finally:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._end, reason)

    def _take(self) -> list[_Job]:
        """All jobs that wait, at least one."""
        taken = [self._jobs.get()]
        with contextlib.suppress(queue.Empty):
            while len(taken) < MAX_BATCH:
                taken.append(self._jobs.get_nowait())
        return taken

    def _serve(self, jobs: list[_Job], alone: bool) -> None:
        if alone:
            for job in jobs:
                job.perform()
        else:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                for job in jobs:
                    job.perform()
                    if isinstance(job.error, sqlite3.Error):
                        raise job.error
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                self._core = Core(SqliteTable(self._db), jobs[-1].now)
                for job in jobs:
                    job.error = Unavailable(f"the store {self._path} cannot write: {error}; nothing was changed")
        self._deliver(jobs)

    def _deliver(self, jobs: list[_Job]) -> None:
        mark = self._mark if self._stopping else (self._core.table.revision, self._core.next_lapse)

        def deliver() -> None:
            for job in jobs:
                job.done.set()
            if mark != self._mark:
                self._mark = mark
                self._changed.set()
                self._changed = trio.Event()

        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(deliver)

    def _end(self, reason: str) -> None:
        """In the event loop, after the thread: whoever still waits is told."""
        self._stopped = reason
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                job.error = Unavailable(reason)
                job.done.set()
        self._ended.set()


@asynccontextmanager
async def open_sqlite(path: Path) -> AsyncIterator[SqliteStore]:
    """The store in the file *path*, made if it is missing. Raises CannotOpen; then nothing was changed."""
    with _locked(path):
        store = SqliteStore(path)
        await store._start()
        try:
            yield store
        finally:
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await store._stop()


def restore(backup: Path, path: Path) -> int:
    """Put *backup* in the place of the store *path*, whose server is stopped; the revision it goes on from.

    That lies far above what any server of the lost store can have reached, so terms, epochs and revisions that agents
    remember stay in the past, and a server that still runs on the lost store is the one that they refuse. The old file
    is kept beside it as ``….before-restore-N``. Raises CannotOpen.
    """
    with _locked(path):
        _inspect(backup)
        reached = 0
        if path.exists():
            try:
                _inspect(path)
                with contextlib.closing(_connect(path)) as old:
                    reached = SqliteTable(old).revision
                    old.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except (CannotOpen, sqlite3.Error):
                pass  # damaged: that is why a backup comes back
        part = path.with_name(f".{path.name}.restore")
        part.unlink(missing_ok=True)
        with contextlib.closing(_connect(backup, read_only=True)) as source:
            source.execute("VACUUM INTO ?", (str(part),))
        with contextlib.closing(_connect(part)) as db:
            table = SqliteTable(db)
            revision = max(reached, table.revision) + REVISION_JUMP
            db.execute("BEGIN IMMEDIATE")
            table.jump(revision)
            db.execute("COMMIT")
        os.chmod(part, SECRET)
        _sync(part)
        if path.exists():
            kept = next(p for n in itertools.count(1) if not (p := Path(f"{path}.before-restore-{n}")).exists())
            os.link(path, kept)
            for suffix in ("-wal", "-shm"):
                if (beside := Path(f"{path}{suffix}")).exists():
                    os.rename(beside, f"{kept}{suffix}")
        os.rename(part, path)
        _sync(path.parent)
        return revision


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = Path(f"{path}.lock")
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, SECRET)
    except OSError as error:
        raise CannotOpen(
            f"{lock} cannot be written: {error.strerror}; create the directory, or fix its owner"
        ) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            raise CannotOpen(
                f"{path} is in use by another llmgw server (process {holder}); stop that one first, "
                "or give this one a state file of its own"
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def _open(path: Path) -> sqlite3.Connection:
    """In the thread. Raises CannotOpen before it changes anything."""
    try:
        if not path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, SECRET))
        elif path.stat().st_size:
            _inspect(path)
        db = _connect(path)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            if db.execute("PRAGMA user_version").fetchone()[0] == 0:
                db.executescript(
                    f"BEGIN IMMEDIATE; {TABLES} PRAGMA application_id = {APPLICATION}; "
                    f"PRAGMA user_version = {SCHEMA}; COMMIT;"
                )
        except BaseException:
            db.close()
            raise
    except (OSError, sqlite3.Error) as error:
        raise CannotOpen(f"{path} cannot be opened: {error}") from error
    return db


def _inspect(path: Path) -> None:
    """Raise CannotOpen unless *path* is a whole store that this program understands. Reads only."""
    remedy = "nothing was changed; move the file away to start empty, or bring back a backup: llmgw ctl restore FILE"
    try:
        with path.open("rb") as file:
            head = file.read(16)
        if head != b"SQLite format 3\0":
            raise CannotOpen(f"{path} is no store of llmgw, or its first page is damaged; {remedy}")
        with contextlib.closing(_connect(path, read_only=True)) as db:
            (application,) = db.execute("PRAGMA application_id").fetchone()
            (schema,) = db.execute("PRAGMA user_version").fetchone()
            if application != APPLICATION:
                raise CannotOpen(f"{path} is a database of another program; {remedy}")
            if schema > SCHEMA:
                raise CannotOpen(
                    f"{path} was written by a newer llmgw (schema {schema}, this program knows {SCHEMA}); "
                    "start that version, or bring back the backup made before the upgrade: llmgw ctl restore FILE"
                )
            (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()
            if found != "ok":
                raise CannotOpen(f"{path} is damaged ({found}); {remedy}")
            SqliteTable(db)
    except (OSError, KeyError, TypeError) as error:
        raise CannotOpen(f"{path} cannot be read: {error}") from error
    except sqlite3.Error as error:
        raise CannotOpen(f"{path} is damaged ({error}); {remedy}") from error


def _connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    mode = "mode=rw"
    if read_only:
        # Without a WAL there is nothing to recover, and `immutable` leaves no files beside a database that is only read.
        mode = "mode=ro" if Path(f"{path}-wal").exists() else "mode=ro&immutable=1"
    return sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, isolation_level=None, timeout=5)


def _copy(db: sqlite3.Connection, path: Path) -> None:
    if path.exists():
        raise StoreError(f"{path} exists, and a backup replaces nothing; choose another name")
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)
        db.execute("VACUUM INTO ?", (str(part),))
        os.chmod(part, SECRET)
        _sync(part)
        os.rename(part, path)
        _sync(path.parent)
    except (OSError, sqlite3.Error) as error:
        part.unlink(missing_ok=True)
        raise StoreError(f"no backup was made at {path}: {error}") from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
