"""The store: a small key-value map with etcd's semantics, the same for every back end.

- One *revision* for the whole store, +1 for each transaction that changes something. An entry knows the revision that
  created it, the one that changed it last, and its *version* (1 at creation, +1 a change).
- A *transaction* compares, then applies `success` or `failure`, all of it or nothing. A key may be written once in it.
- A *lease* is a promise to renew; when it lapses, the keys written under it are deleted.
- A *watch* delivers every change under a prefix from a revision on, whole transactions, in order, without a gap; what
  was compacted meanwhile cannot be delivered, and it says so (`Compacted`): read everything, watch from there.

Keys are few and small (models, replicas, nodes, leader): heartbeats and load never come here.

Errors are a closed set:

    StoreError
    ├── BadOperation     the caller's mistake: too large, too many, a key twice, an empty key
    ├── Compacted        the history asked for is gone; `.revision` = from where on there is some
    ├── FutureRevision   a revision that the store has not reached
    ├── LeaseLost        no such lease (any more)
    ├── NotLeader        a fenced write by somebody who does not lead (any more); nothing was written
    └── CannotOpen       the store on disk cannot be used; the text says why and what to do

and `llmgw.errors.Unavailable` (nobody answers; nothing was written) with its subclass `OutcomeUnknown` (a write was
sent and no answer came: it may have happened; read before trying again).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

import attrs
import msgspec

from llmgw.errors import LlmgwError, Unavailable

MAX_KEY = 1 << 10  # bytes of UTF-8
MAX_VALUE = 1 << 20  # bytes
MAX_TXN = 1 << 20  # bytes of keys and values together: etcd refuses requests above 1.5 MiB
MAX_OPS = 128  # in one branch of a transaction: etcd's own limit
MAX_TTL = 86_400  # seconds


class StoreError(LlmgwError):
    """Base of what a store raises besides `Unavailable`."""


class BadOperation(StoreError):
    """The operation breaks a bound or a rule of the interface."""


class Compacted(StoreError):
    """History before *revision* is gone."""

    def __init__(self, revision: int) -> None:
        super().__init__(f"history before revision {revision} was compacted; read anew and watch from there")
        self.revision = revision


class FutureRevision(StoreError):
    """The store has not reached this revision."""


class LeaseLost(StoreError):
    """The lease does not exist: it lapsed, was revoked, or never was."""


class NotLeader(StoreError):
    """This process does not lead (any more); nothing was written."""


class CannotOpen(StoreError):
    """The store on disk cannot be used. Nothing was changed."""


class OutcomeUnknown(Unavailable):
    """A write was sent and its answer never came. It may have been applied: read before trying again."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A key with its value. *lease*: 0 = none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int = 0


class Event(msgspec.Struct, frozen=True, gc=False):
    """A change: *entry* is the new state, None if *key* was deleted, at *revision*."""

    key: str
    revision: int
    entry: Entry | None


class Changes(msgspec.Struct, frozen=True, gc=False):
    """What a watch delivers: the events of whole transactions up to and including *revision*.

    Without events it is *progress*: everything up to *revision* was delivered, so a later watch may start after it.
    """

    revision: int
    events: tuple[Event, ...] = ()


class Range(msgspec.Struct, frozen=True, gc=False):
    """Entries in the order of their keys, and the revision of the store at which this was true."""

    revision: int
    entries: tuple[Entry, ...] = ()


@attrs.frozen
class Compare:
    """A condition on a key. A key that does not exist has version, create and mod revision 0, and no value.

    A comparison of the value of a key that does not exist is false.
    """

    key: str
    target: Literal["value", "version", "create", "mod"]
    op: Literal["==", "!=", "<", ">"]
    operand: int | bytes


@attrs.frozen
class Put:
    key: str
    value: bytes
    lease: int = 0


@attrs.frozen
class Delete:
    key: str


@attrs.frozen
class Get:
    key: str


Op = Put | Delete | Get


@attrs.frozen
class Txn:
    """Result of a transaction. *entries*: for each `Get` of the branch taken, in order, the entry or None.

    *revision*: of the store afterwards; where the branch wrote, what its writes got as mod revision.
    """

    succeeded: bool
    revision: int
    entries: tuple[Entry | None, ...] = ()


def absent(key: str) -> Compare:
    return Compare(key, "create", "==", 0)


def unchanged(entry: Entry) -> Compare:
    return Compare(entry.key, "mod", "==", entry.mod_revision)


class Store(Protocol):
    """Every method may raise Unavailable; those that write, OutcomeUnknown. Deadlines are the caller's cancel scopes.

    A write that is cancelled may or may not have happened.
    """

    async def get(self, key: str) -> Entry | None: ...

    async def range(self, prefix: str, revision: int = 0) -> Range:
        """All entries under *prefix* ("" = everything), now or as they were at *revision*.

        Raises Compacted, FutureRevision.
        """
        ...

    async def txn(
        self, compares: Sequence[Compare] = (), success: Sequence[Op] = (), failure: Sequence[Op] = ()
    ) -> Txn:
        """Raises BadOperation; LeaseLost if a `Put` names a lease that is gone."""
        ...

    async def grant(self, ttl: int) -> int:
        """A new lease of *ttl* seconds (a back end may round it up); its id, never 0."""
        ...

    async def keepalive(self, lease: int) -> int:
        """Renew; the seconds it now has. Raises LeaseLost."""
        ...

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys. Raises LeaseLost."""
        ...

    def watch(self, prefix: str, from_revision: int = 0) -> AbstractAsyncContextManager[AsyncIterator[Changes]]:
        """Changes under *prefix* with revision ≥ *from_revision*; 0: all that happen after entering.

        The iterator raises Compacted and never ends by itself. A consumer that is slow holds no memory.
        """
        ...

    async def compact(self, revision: int) -> None:
        """Forget history before *revision*. Raises Compacted if that is done already, FutureRevision."""
        ...


async def put(store: Store, key: str, value: bytes, lease: int = 0) -> int:
    """Write *key* whatever it holds; the new revision."""
    return (await store.txn(success=[Put(key, value, lease)])).revision


async def delete(store: Store, key: str) -> bool:
    """Delete *key*; whether it was there."""
    return (await store.txn([Compare(key, "version", ">", 0)], [Delete(key)])).succeeded


def check(compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op]) -> None:
    """Raise BadOperation unless every back end accepts this transaction."""
    if len(compares) > MAX_OPS:
        raise BadOperation(f"{len(compares)} comparisons in one transaction; at most {MAX_OPS}")
    for compare in compares:
        check_key(compare.key)
        if isinstance(compare.operand, bytes) != (compare.target == "value"):
            raise BadOperation(
                f"comparison of {compare.target} of {compare.key!r} with {type(compare.operand).__name__}"
            )
    for branch in (success, failure):
        if len(branch) > MAX_OPS:
            raise BadOperation(f"{len(branch)} operations in one transaction; at most {MAX_OPS}")
        size = 0
        written: set[str] = set()
        for op in branch:
            check_key(op.key)
            size += len(op.key)
            if isinstance(op, Get):
                continue
            if op.key in written:
                raise BadOperation(f"{op.key!r} is written twice in one transaction")
            written.add(op.key)
            if isinstance(op, Put):
                if len(op.value) > MAX_VALUE:
                    raise BadOperation(f"value of {op.key!r} has {len(op.value)} bytes; at most {MAX_VALUE}")
                size += len(op.value)
        if size > MAX_TXN + MAX_KEY:
            raise BadOperation(f"a transaction of {size} bytes; at most {MAX_TXN}")


def check_key(key: str) -> bytes:
    """The bytes of *key*. Raises BadOperation."""
    try:
        raw = key.encode()
    except UnicodeEncodeError as error:
        raise BadOperation(f"key {key!r} is not Unicode text") from error
    if not raw or len(raw) > MAX_KEY or b"\0" in raw:
        raise BadOperation(f"key {key[:80]!r} must have 1 to {MAX_KEY} bytes and no NUL")
    return raw


def check_ttl(ttl: int) -> None:
    if not 1 <= ttl <= MAX_TTL:
        raise BadOperation(f"a lease of {ttl} s; from 1 to {MAX_TTL}")


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all that start with *prefix*; b"" if there is none (UTF-8 never ends in 0xFF)."""
    return prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else b""
