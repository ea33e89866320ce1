"""Whatever is done to them, the store on disk and the one in memory give the same answers, over restarts as well."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llmgw.stores.base import Compare, Delete, Get, Put, StoreError
from llmgw.stores.core import Core
from llmgw.stores.memory import MemoryTable
from llmgw.stores.sqlite import SqliteTable, _open

KEYS = st.sampled_from(["/a", "/a/x", "/a/y", "/b", "/ÿ", "/\U0010ffff"])
PREFIXES = st.sampled_from(["", "/", "/a", "/a/", "/c"])
VALUES = st.sampled_from([b"", b"1", b"2"])
LEASES = st.integers(0, 3)
OPS = st.lists(
    st.one_of(st.builds(Put, KEYS, VALUES, LEASES), st.builds(Delete, KEYS), st.builds(Get, KEYS)), max_size=4
)
OPERATORS = st.sampled_from(["==", "!=", "<", ">"])
COMPARES = st.lists(
    st.one_of(
        st.builds(Compare, KEYS, st.just("value"), OPERATORS, VALUES),
        st.builds(Compare, KEYS, st.sampled_from(["version", "create", "mod"]), OPERATORS, st.integers(0, 9)),
    ),
    max_size=2,
)


class Stores(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "state.db"
        self.now = 0.0
        self.db = self.connect()
        self.disk = Core(SqliteTable(self.db), self.now)
        self.memory = Core(MemoryTable(), self.now)

    def connect(self) -> sqlite3.Connection:
        db = _open(self.path)
        db.execute("PRAGMA synchronous = OFF")  # this test is about answers, not about power cuts
        return db

    def both(self, method: str, *arguments: Any) -> None:
        answers = []
        for core in (self.disk, self.memory):
            try:
                answers.append((True, getattr(core, method)(*arguments)))
            except StoreError as error:
                answers.append((False, (type(error), str(error))))
        assert answers[0] == answers[1]

    @rule(compares=COMPARES, success=OPS, failure=OPS)
    def txn(self, compares: Any, success: Any, failure: Any) -> None:
        self.both("txn", compares, success, failure, self.now)

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        self.both("get", key, self.now)

    @rule(prefix=PREFIXES, revision=st.integers(-1, 30))
    def range(self, prefix: str, revision: int) -> None:
        self.both("range", prefix, revision, self.now)

    @rule(prefix=PREFIXES, after=st.integers(0, 30))
    def changes(self, prefix: str, after: int) -> None:
        self.both("changes", prefix, after, self.now)

    @rule(revision=st.integers(0, 30))
    def compact(self, revision: int) -> None:
        self.both("compact", revision)

    @rule(ttl=st.integers(1, 5))
    def grant(self, ttl: int) -> None:
        self.both("grant", ttl, self.now)

    @rule(lease=LEASES)
    def keepalive(self, lease: int) -> None:
        self.both("keepalive", lease, self.now)

    @rule(lease=LEASES)
    def revoke(self, lease: int) -> None:
        self.both("revoke", lease, self.now)

    @rule(seconds=st.sampled_from([1.0, 3.0, 4_000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def restart(self) -> None:
        """The file is closed and opened; nobody holds a lease any more."""
        self.db.close()
        self.db = self.connect()
        samples = self.disk._samples
        self.disk = Core(SqliteTable(self.db), self.now)
        self.disk._samples = samples
        self.both("end_all", self.now)

    @invariant()
    def same_table(self) -> None:
        if hasattr(self, "disk"):
            for core in (self.disk, self.memory):
                core.tick(self.now)
            assert self.disk.table.revision == self.memory.table.revision
            assert self.disk.table.compacted == self.memory.table.compacted
            assert self.disk.next_lapse == self.memory.next_lapse

    def teardown(self) -> None:
        if hasattr(self, "db"):
            self.db.close()
            self.folder.cleanup()


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
