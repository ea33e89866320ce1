"""Which endpoint holds which blocks, exactly, from the KV events that engines publish.

vLLM and SGLang announce every block that they store or remove (specs: frames `[topic][seq 8 bytes][msgpack]`). Their block hashes
cannot be computed here (a random start value a process), but BlockStored carries the token ids: so each engine hash is
mapped to our own value of the same tokens (`blocks.token_blocks`), and a prompt known by its token ids is looked up by that.

One `Feed` a publisher (an endpoint has one for each data-parallel rank):

    state       event                                   next      effect
    new, live   message, next in line (or seq 0, 1)     live      applied
    new, live   message, later                          resync    replay asked for; message kept
    live        message that a replay has brought       live      ignored
    resync      message                                 resync    kept; more than `KEPT`: as if the replay had ended
    resync      replayed, next in line                  resync    applied
    resync      replayed, later                         resync    all forgotten, then applied (older ones are not to be had)
    resync      end of replay, or no answer in time     live      kept messages applied; if a gap is left, all forgotten first
    any         live message not later than the last    as new    a restart: all forgotten
    any         malformed message                       same      all forgotten: removals may be among what it said
    any         connection lost                         new       nothing forgotten: the next message tells what was missed

While a feed is not live its endpoint is not *trusted*: decisions use the estimated index for it. Forgetting is always safe:
what is missing costs an estimate, what is wrongly believed costs a prefill. Events are untrusted input: sizes are checked before use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal
from zlib import adler32, crc32

import msgspec

from llmgw.kvcache.blocks import WORD, chain, seed, token_blocks, words
from llmgw.kvcache.holders import Holders

PAYLOAD = 4 << 20  # bytes a message; a step of 16k tokens is 100 KB
BLOCK_TOKENS = 4096  # the largest block size that any engine offers is 1024
ENTRIES = 2_000_000  # engine blocks an endpoint: 32M tokens at 16 a block, several times the largest real cache
KEPT = 1_000  # messages kept while a replay runs: some seconds of a busy engine
END = 0xFFFFFFFFFFFFFFFF  # seq that ends a replay

State = Literal["new", "live", "resync"]

_SOURCE = re.compile(r"(?P<mode>connect|bind) (?P<address>tcp://\S+:\d+)(?: replay (?P<replay>tcp://\S+:\d+))?")


class Source(msgspec.Struct, frozen=True):
    """Where an endpoint's events are: ``connect tcp://HOST:PORT`` or ``bind tcp://*:PORT``, then perhaps
    ``replay tcp://HOST:PORT``."""

    mode: Literal["connect", "bind"]
    address: str
    replay: str = ""


def parse_source(text: str) -> Source:
    """Raises ValueError."""
    found = _SOURCE.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r} is not `connect tcp://HOST:PORT` or `bind tcp://*:PORT` (then `replay tcp://HOST:PORT`)"
        )
    return Source("connect" if found["mode"] == "connect" else "bind", found["address"], found["replay"] or "")


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks now in the cache: *hashes* are the engine's, one for every *block_size* token ids."""

    hashes: tuple[int, ...]
    parent: int | None
    words: bytes  # the token ids, as `blocks.words` writes them
    block_size: int
    lora: str = ""
    extra: tuple[bytes, ...] = ()  # what else is in each block's key (media, salt), encoded; () = nothing


class Removed(msgspec.Struct, frozen=True, gc=False):
    hashes: tuple[int, ...]


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """The engine's cache is empty."""


Event = Stored | Removed | Cleared


class Malformed(ValueError):
    """A message that is not a batch of KV events, or breaks a limit."""


def decode(payload: bytes | memoryview) -> tuple[Event, ...]:
    """Events of one message, in either encoding. Events of other tiers and cache groups are left out.

    Raises Malformed.
    """
    if len(payload) > PAYLOAD:
        raise Malformed(f"message of {len(payload)} bytes; at most {PAYLOAD}")
    try:
        batch: Any = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise Malformed(f"not msgpack: {error}") from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise Malformed("not [timestamp, [events], …]")
    return tuple(event for item in batch[1] if (event := _event(item)) is not None)


_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
_REMOVED = ("block_hashes", "medium")


def _event(item: Any) -> Event | None:
    if isinstance(item, list) and item:
        kind = item[0]
        names = _STORED if kind == "BlockStored" else _REMOVED
        fields = dict(zip(names, item[1:], strict=False))
    elif isinstance(item, dict):
        kind, fields = item.get("type"), item
    else:
        raise Malformed("an event is neither an array nor a map")
    if kind == "AllBlocksCleared":
        return Cleared()
    if kind not in ("BlockStored", "BlockRemoved"):
        return None  # of a later version
    medium = fields.get("medium")
    if medium is not None and str(medium).upper() != "GPU":
        return None  # an offload tier: present, but not without a copy
    if fields.get("group_idx") or fields.get("kv_cache_spec_kind") not in (None, "full_attention"):
        return None  # sliding windows and state spaces: a hit needs the full-attention group as well
    hashes = _hashes(fields.get("block_hashes"))
    return Removed(hashes) if kind == "BlockRemoved" else _stored(fields, hashes)


def _stored(fields: dict[str, Any], hashes: tuple[int, ...]) -> Stored:
    size, tokens, parent = fields.get("block_size"), fields.get("token_ids"), fields.get("parent_block_hash")
    if not isinstance(size, int) or not 0 < size <= BLOCK_TOKENS:
        raise Malformed(f"block_size {size!r}; 1 to {BLOCK_TOKENS}")
    if not isinstance(tokens, list) or len(tokens) != size * len(hashes):
        count = len(tokens) if isinstance(tokens, list) else "no"
        raise Malformed(f"{count} token ids for {len(hashes)} blocks of {size}")
    try:
        data = words(tokens)
    except (TypeError, OverflowError) as error:
        raise Malformed(f"a token id is not a number of 32 bits: {error}") from error
    lora, lora_id = fields.get("lora_name"), fields.get("lora_id")
    extra = fields.get("extra_keys")
    keys: tuple[bytes, ...] = ()
    if isinstance(extra, list) and len(extra) == len(hashes) and any(extra):
        keys = tuple(msgspec.msgpack.encode(key) if key else b"" for key in extra)
    return Stored(
        hashes,
        None if parent is None else _hash(parent),
        data,
        size,
        str(lora) if lora else f"#{lora_id}" if lora_id is not None else "",
        keys,
    )


def _hashes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise Malformed("block_hashes is not an array")
    return tuple(map(_hash, value))


def _hash(value: Any) -> int:
    """An engine's hash as 64 bits: a number as it is, a digest by its last 8 bytes."""
    if isinstance(value, bytes) and 8 <= len(value) <= 64:
        return int.from_bytes(value[-8:], "big")
    if type(value) is int and -(1 << 63) <= value < 1 << 64:
        return value & END
    raise Malformed(f"a block hash is neither 64 bits nor a digest: {value!r:.40}")


class ExactIndex:
    """Engine blocks of every endpoint, by our own value of their tokens."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self._entries = entries
        self._holders = Holders()
        self._engine: dict[str, dict[int, int]] = {}  # endpoint → engine hash → own value
        self._copies: dict[str, dict[int, int]] = {}  # endpoint → own value → engine hashes with it, where above 1
        self.block_size: dict[str, int] = {}  # tokens, as the events say
        self.trusted: set[str] = set()
        self.on_cleared: Callable[[str], None] = lambda _: None  # an engine said that its cache is empty

    def apply(self, endpoint: str, event: Event) -> None:
        known = self._engine.get(endpoint)
        if known is None:
            self._holders.join(endpoint)
            known = self._engine[endpoint] = {}
            self._copies[endpoint] = {}
        match event:
            case Stored():
                self._store(endpoint, known, event)
            case Removed():
                self._remove(endpoint, known, event.hashes)
            case Cleared():
                self.clear(endpoint)
                self.on_cleared(endpoint)

    def clear(self, endpoint: str) -> None:
        """Nothing is known of its cache, or it is empty; the difference does not matter to a decision."""
        if known := self._engine.get(endpoint):
            self._holders.discard(endpoint, set(known.values()))
            known.clear()
            self._copies[endpoint].clear()

    def forget(self, endpoint: str) -> None:
        """*endpoint* is gone."""
        if endpoint in self._engine:
            self.clear(endpoint)
            self._holders.leave(endpoint)
            del self._engine[endpoint], self._copies[endpoint]
        self.block_size.pop(endpoint, None)
        self.trusted.discard(endpoint)

    def match(self, ids: Sequence[int], lora: str = "") -> dict[str, int]:
        """Leading *tokens* of a prompt that each trusted endpoint holds; absent = none, or not trusted."""
        found: dict[str, int] = {}
        for size in {size for name, size in self.block_size.items() if name in self.trusted}:
            for name, depth in self._holders.match(token_blocks(ids, size, _start(size, lora))).items():
                if name in self.trusted and self.block_size.get(name) == size:
                    found[name] = depth * size
        return found

    def blocks(self, endpoint: str) -> int:
        """Engine blocks known for *endpoint*."""
        return len(self._engine.get(endpoint, ()))

    def _store(self, endpoint: str, known: dict[int, int], event: Stored) -> None:
        size = event.block_size
        if self.block_size.setdefault(endpoint, size) != size:
            self.clear(endpoint)  # hashes of another size cannot be compared: it was restarted with other flags
            self.block_size[endpoint] = size
        if event.parent is None:
            value: int | None = _start(size, event.lora)
        else:
            value = known.get(event.parent)
        if value is None or len(known) + len(event.hashes) > self._entries:
            return  # its head was stored before we listened: without the head no prompt can match it
        width = size * WORD
        for number, engine in enumerate(event.hashes):
            if event.extra and (key := event.extra[number]):
                value = crc32(key, value >> 32) << 32 | adler32(key, value & 0xFFFFFFFF)
            (value,) = chain(event.words[number * width : (number + 1) * width], width, value)
            before = known.get(engine)
            if before == value:
                continue
            if before is not None:
                self._remove(endpoint, known, (engine,))
            known[engine] = value
            if self._holders.holds(endpoint, value):
                copies = self._copies[endpoint]
                copies[value] = copies.get(value, 1) + 1
            else:
                self._holders.add(endpoint, (value,))

    def _remove(self, endpoint: str, known: dict[int, int], hashes: Iterable[int]) -> None:
        copies = self._copies[endpoint]
        for engine in hashes:
            value = known.pop(engine, None)
            if value is None:
                continue
            more = copies.get(value, 1)
            if more == 1:
                self._holders.discard(endpoint, (value,))
            elif more == 2:
                del copies[value]
            else:
                copies[value] = more - 1


def _start(size: int, lora: str) -> int:
    return seed(f"{size}/{lora}")


class Feed:
    """One publisher's messages in order. The shell brings messages, and a replay when `replay_from` is not None.

    *endpoint*: what the index calls it.
    """

    def __init__(self, index: ExactIndex, endpoint: str) -> None:
        self._index = index
        self._endpoint = endpoint
        self._kept: list[tuple[int, bytes]] = []
        self._heard: int | None = None  # seq of the last live message
        self._last: int | None = None  # seq applied last
        self.state: State = "new"
        self.replay_from: int | None = None  # ask the publisher for a replay from this seq
        self.resyncs = 0
        self.malformed = 0

    def message(self, seq: int, payload: bytes) -> None:
        """A live message."""
        if self._heard is not None and seq <= self._heard:
            self._restarted()
        self._heard = seq
        if self.state == "resync":
            if len(self._kept) < KEPT:
                self._kept.append((seq, payload))
                return
            self._catch_up()
        if self._last is not None and seq <= self._last:
            return
        if seq <= 1 if self._last is None else seq == self._last + 1:
            self._become("live")
            self._apply(seq, payload)
        else:
            self._kept.append((seq, payload))
            self._become("resync")
            self.replay_from = 0 if self._last is None else self._last + 1
            self.resyncs += 1

    def replayed(self, seq: int, payload: bytes) -> None:
        """One message of a replay; `END` ends it."""
        if self.state != "resync":
            return
        if seq == END:
            self._catch_up()
        elif self._last is None or seq > self._last:
            self._apply_after_gap(seq, payload)

    def no_replay(self) -> None:
        """The publisher has no replay port, or did not answer in time."""
        if self.state == "resync":
            self._catch_up()

    def disconnected(self) -> None:
        self._kept.clear()
        self.replay_from = None
        self._become("new")

    def _restarted(self) -> None:
        self._index.clear(self._endpoint)
        self._last = None
        self.disconnected()

    def _catch_up(self) -> None:
        kept, self._kept = self._kept, []
        self.replay_from = None
        for seq, payload in kept:
            if self._last is None or seq > self._last:
                self._apply_after_gap(seq, payload)
        self._become("live")

    def _apply_after_gap(self, seq: int, payload: bytes) -> None:
        if seq > (1 if self._last is None else self._last + 1):
            self._index.clear(self._endpoint)
        self._apply(seq, payload)

    def _apply(self, seq: int, payload: bytes) -> None:
        self._last = seq
        try:
            events = decode(payload)
        except Malformed:
            self.malformed += 1
            self._index.clear(self._endpoint)
            return
        for event in events:
            self._index.apply(self._endpoint, event)

    def _become(self, state: State) -> None:
        self.state = state
        if state == "live":
            self._index.trusted.add(self._endpoint)
        else:
            self._index.trusted.discard(self._endpoint)
