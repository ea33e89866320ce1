"""Which endpoint holds which blocks, estimated from what was sent where.

Each endpoint has an LRU as large as its real cache, so that what the engine must have evicted by now is forgotten here too. The
LRU is kept by generations: a touch moves a whole prompt to the newest with two dictionary updates, and the oldest generation
goes at once. The order is exact to within one part in `GENERATIONS` of the cache.

Invariants (tested against a brute-force model):
  `holders` says that an endpoint holds a block  ⇔  the block is in that endpoint's LRU
  an endpoint holds at most its capacity, or its last prompt where that alone is more
  of a prompt, what is held is held without holes from its first block on (heads are never older than tails)
  all endpoints together hold at most `entries`: capacities are scaled down together where their sum is more
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from llmgw.kvcache.holders import Holders

GENERATIONS = 16
ENTRIES = 400_000  # blocks over all endpoints; an entry costs about 250 bytes, so 100 MB when all are used
CAPACITY = 2_000  # blocks of an endpoint whose cache size is unknown: 256k tokens, a mid-sized engine


class _Lru:
    """The LRU of one endpoint."""

    __slots__ = ("capacity", "evicted", "filler", "generations", "newest", "wanted", "where")

    def __init__(self) -> None:
        self.wanted = self.capacity = 0
        self.evicted = False  # something has been pushed out since it was last empty
        self.newest = 0  # number of the newest generation
        self.where: dict[int, int] = {}  # block → generation that touched it last
        self.generations: deque[dict[int, None]] = deque([{}])  # oldest first; blocks may have moved on to a newer one
        self.filler = 0  # blocks that take room and match nothing are numbered downwards from here

    def evict(self) -> list[int]:
        """Drop oldest generations until the rest fits; the newest always stays."""
        gone: list[int] = []
        where = self.where
        while len(where) > self.capacity and len(self.generations) > 1:
            number = self.newest - len(self.generations) + 1
            dropped = [block for block in self.generations.popleft() if where.get(block) == number]
            for block in dropped:
                del where[block]
            gone += dropped
            self.evicted = True
        return gone

    def touch(self, blocks: Sequence[int] | range) -> None:
        if len(self.generations[-1]) * GENERATIONS >= self.capacity:
            self.newest += 1
            self.generations.append({})
        self.where.update(dict.fromkeys(blocks, self.newest))
        self.generations[-1].update(dict.fromkeys(blocks))


class PrefixIndex:
    """The estimated index. No clock: the order of calls is the order of use."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self._entries = entries
        self._holders = Holders()
        self._lrus: dict[str, _Lru] = {}

    def resize(self, endpoint: str, capacity: int = CAPACITY) -> None:
        """*endpoint* exists, and its cache has room for *capacity* blocks of ours (its tokens ÷ tokens a block)."""
        lru = self._lrus.get(endpoint)
        if lru is None:
            self._holders.join(endpoint)
            lru = self._lrus[endpoint] = _Lru()
        if lru.wanted != (wanted := max(capacity, GENERATIONS)):
            lru.wanted = wanted
            self._share()

    def forget(self, endpoint: str) -> None:
        """*endpoint* is gone. (A restarted engine has an empty cache, and another id.)"""
        if endpoint in self._lrus:
            self.clear(endpoint)
            self._holders.leave(endpoint)
            del self._lrus[endpoint]
            self._share()

    def clear(self, endpoint: str) -> None:
        """Its cache is empty."""
        if (lru := self._lrus.get(endpoint)) is not None:
            self._holders.discard(endpoint, lru.where)
            lru.where = {}
            lru.generations = deque([{}])
            lru.evicted = False

    def record(self, endpoint: str, blocks: Sequence[int]) -> None:
        """A prompt with these *blocks* was sent to *endpoint*: it has, or will soon have, all of them."""
        lru = self._lrus.get(endpoint)
        if lru is None:
            self.resize(endpoint)
            lru = self._lrus[endpoint]
        where = lru.where
        self._holders.add(endpoint, [block for block in blocks if block not in where])
        lru.touch(blocks)
        self._evict(endpoint, lru)

    def fill(self, endpoint: str, blocks: int) -> None:
        """*endpoint* generated so much: it takes room in its cache, though no prompt asks for it by these values."""
        lru = self._lrus.get(endpoint)
        if lru is not None and blocks > 0:
            lru.filler -= blocks
            lru.touch(range(lru.filler, lru.filler + blocks))
            self._evict(endpoint, lru)

    def correct(self, endpoint: str, blocks: Sequence[int], held: int) -> None:
        """The engine says that it had only *held* leading blocks of *blocks* when they came: forget the others.

        For prompts that were refused or aborted before they were computed, and where an eviction was missed.
        """
        if (lru := self._lrus.get(endpoint)) is not None:
            where = lru.where
            gone = [block for block in blocks[held:] if where.pop(block, None) is not None]
            self._holders.discard(endpoint, gone)

    def match(self, blocks: Sequence[int]) -> dict[str, int]:
        """How many leading blocks each endpoint holds; endpoints that hold none are absent."""
        return self._holders.match(blocks)

    def held(self, endpoint: str) -> int:
        """Blocks now held for *endpoint*, filler included."""
        lru = self._lrus.get(endpoint)
        return 0 if lru is None else len(lru.where)

    def full(self, endpoint: str) -> bool:
        """Whether recording more pushes something else out."""
        lru = self._lrus.get(endpoint)
        return lru is not None and lru.evicted

    def __len__(self) -> int:
        return sum(len(lru.where) for lru in self._lrus.values())

    def _evict(self, endpoint: str, lru: _Lru) -> None:
        if len(lru.where) > lru.capacity:
            self._holders.discard(endpoint, lru.evict())

    def _share(self) -> None:
        wanted = sum(lru.wanted for lru in self._lrus.values())
        scale = min(1.0, self._entries / wanted) if wanted else 1.0
        for endpoint, lru in self._lrus.items():
            lru.capacity = max(GENERATIONS, int(lru.wanted * scale))
            self._evict(endpoint, lru)
