"""The KV cache of one simulated engine: a pool of fixed-size blocks with automatic prefix caching.

Block 0 is the null block that a paged-attention engine reserves, so *total* - 1 blocks can be used. A block is in
exactly one of three places:

    held        ref > 0; belongs to one or more sequences (several only through a shared prefix)
    blank       ref 0, holds nothing worth keeping
    kept        ref 0, its content may be found again under its key; least recently freed first

Invariants: held + blank + kept = total - 1 · a key names at most one block · only full blocks have keys ·
allocation takes blank blocks before kept ones, and kept ones oldest first · nothing is taken unless all is there.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import attrs

Extra = tuple[object, ...]

ROOT_KEY = 0
"""Parent of a first block."""


@attrs.frozen
class Stored:
    """A full block that can be found from now on."""

    key: int
    parent: int
    tokens: tuple[int, ...]
    lora: str = ""
    extra: Extra | None = None


def block_key(parent: int, tokens: Sequence[int], extra: Extra | None = None) -> int:
    """Chained 64-bit key of one full block: what came before, its tokens, and what else makes its content differ."""
    digest = blake2b(parent.to_bytes(8, "big"), digest_size=8)
    digest.update(struct.pack(f">{len(tokens)}I", *tokens))
    if extra:
        digest.update(repr(extra).encode())
    return int.from_bytes(digest.digest(), "big") or 1


class BlockPool:
    """See the module. *keep* bounds the unreferenced blocks that stay findable (None: no bound but the pool's)."""

    def __init__(self, total: int, keep: int | None = None) -> None:
        self.total = total
        self.usable = total - 1
        self._keep = self.usable if keep is None else keep
        self._ref = [0] * total
        self._key = [0] * total  # 0: none
        self._by_key: dict[int, int] = {}
        self._blank: list[int] = list(range(total - 1, 0, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self.log: list[int | Stored] | None = None
        """What became findable, and the keys of what stopped to be, in order; None: nobody wants to know."""

    @property
    def free(self) -> int:
        """Blocks that can be had now; what is kept for reuse counts as free."""
        return len(self._blank) + len(self._kept)

    @property
    def used(self) -> int:
        return self.usable - self.free

    @property
    def findable(self) -> int:
        """Blocks whose content would be found, held or not."""
        return len(self._by_key)

    def usage(self) -> float:
        """0..1, as the engine's gauge defines it: the null block is no block, kept blocks are free."""
        return self.used / self.usable if self.usable else 0.0

    def find(self, keys: Iterable[int], limit: int) -> list[int]:
        """The blocks of the longest cached prefix of *keys*, at most *limit*. Takes nothing."""
        found: list[int] = []
        by_key = self._by_key
        for key in keys:
            if len(found) >= limit:
                break
            block = by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, count: int, shared: Sequence[int] = ()) -> list[int] | None:
        """*count* new blocks, and one more reference on each of *shared* (from `find`); None and no change if short.

        Returns shared + new.
        """
        ref, kept = self._ref, self._kept
        revived = sum(1 for block in shared if ref[block] == 0)
        if count > len(self._blank) + len(kept) - revived:
            return None
        for block in shared:
            if ref[block] == 0:
                del kept[block]
            ref[block] += 1
        blocks = list(shared)
        blank = self._blank
        for _ in range(count):
            if blank:
                block = blank.pop()
            else:
                block = kept.popitem(last=False)[0]
                self._forget(block)
            ref[block] = 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, key: int) -> bool:
        """A held block is full: it can be found under *key* from now on. False if another block already is."""
        if key in self._by_key or self._keep == 0:
            return False
        if self._key[block]:
            self._forget(block)
        self._by_key[key] = block
        self._key[block] = key
        return True

    def give_back(self, blocks: Sequence[int]) -> None:
        """One reference less on each; the tail of a sequence is evicted before its head."""
        ref, kept = self._ref, self._kept
        for block in reversed(blocks):
            ref[block] -= 1
            if ref[block]:
                continue
            if self._key[block]:
                kept[block] = None
            else:
                self._blank.append(block)
        while len(kept) > self._keep:
            block = kept.popitem(last=False)[0]
            self._forget(block)
            self._blank.append(block)

    def clear(self) -> None:
        """Forget all cached content that no sequence holds."""
        while self._kept:
            block = self._kept.popitem(last=False)[0]
            self._forget(block)
            self._blank.append(block)

    def _forget(self, block: int) -> None:
        key = self._key[block]
        self._key[block] = 0
        del self._by_key[key]
        if self.log is not None:
            self.log.append(key)
