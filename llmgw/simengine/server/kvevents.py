"""KV events: what became findable in the prefix cache and what ceased to be, in the messages that vLLM publishes.

A message is (topic, sequence number, MessagePack payload); a `Feed` takes it. `publisher` makes the feed that sends over
ZMQ; a rehearsal passes one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from llmgw.errors import ConfigError, Problem
from llmgw.simengine.blocks import Stored

Feed = Callable[[bytes, int, bytes], None]

TOPIC = b"kv-events"
HIGH_WATER = 100_000
"""Messages kept for a subscriber that lags (vLLM's default); more are lost, and it sees a gap in the numbers."""


class Announcer:
    """Turns a pool's log into numbered messages."""

    def __init__(self, feed: Feed, block_size: int, *, maps: bool) -> None:
        self._feed = feed
        self._block_size = block_size
        self._maps = maps
        self._next = 0

    def announce(self, log: Sequence[int | Stored], wall: float) -> None:
        """One message for what happened in one step."""
        events: list[Any] = []
        chain: list[Stored] = []
        removed: list[int] = []
        for entry in log:
            if isinstance(entry, Stored):
                if removed:
                    events.append(self._removed(removed))
                    removed = []
                if chain and (entry.parent != chain[-1].key or entry.lora != chain[-1].lora):
                    events.append(self._stored(chain))
                    chain = []
                chain.append(entry)
            else:
                if chain:
                    events.append(self._stored(chain))
                    chain = []
                removed.append(entry)
        if chain:
            events.append(self._stored(chain))
        if removed:
            events.append(self._removed(removed))
        payload = msgspec.msgpack.encode([wall, events, 0])
        self._feed(TOPIC, self._next, payload)
        self._next += 1

    def _stored(self, chain: list[Stored]) -> Any:
        keys = [block.key for block in chain]
        parent = chain[0].parent or None
        tokens = [token for block in chain for token in block.tokens]
        lora = chain[0].lora or None
        extra = [list(block.extra) if block.extra else None for block in chain]
        if not self._maps:
            return ["BlockStored", keys, parent, tokens, self._block_size, None, "GPU", lora, extra]
        return {
            "type": "BlockStored",
            "block_hashes": keys,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": self._block_size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": lora,
            "extra_keys": extra,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

    def _removed(self, keys: list[int]) -> Any:
        if not self._maps:
            return ["BlockRemoved", keys, "GPU"]
        return {"type": "BlockRemoved", "block_hashes": keys, "medium": "GPU", "group_idx": 0}


def publisher(address: str) -> tuple[Feed, Callable[[], None]]:
    """(feed, what closes it) for a ZMQ PUB socket: one with ``*`` or ``[::]`` binds, others connect.

    Raises ConfigError if pyzmq is missing or the address cannot be used.
    """
    try:
        import zmq
    except ImportError:
        message = "needs pyzmq: pip install 'llmgw[kv-events]'"
        raise ConfigError([Problem(message, where="--kv-events")]) from None
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.set(zmq.SNDHWM, HIGH_WATER)
    try:
        if "*" in address or "::" in address or address.startswith(("ipc://", "inproc://")):
            socket.bind(address)
        else:
            socket.connect(address)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise ConfigError([Problem(f"{address!r}: {error}", where="--kv-events")]) from None

    def feed(topic: bytes, number: int, payload: bytes) -> None:
        try:
            socket.send_multipart([topic, number.to_bytes(8, "big"), payload], flags=zmq.NOBLOCK)
        except zmq.Again:
            pass  # nobody takes it: the number tells the subscriber that one is missing

    return feed, lambda: context.destroy(linger=0)
