"""Block value → which endpoints hold it, as a bit mask, so that one walk over a prompt answers for all endpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Holders:
    """Endpoints get a bit each; a freed bit is used again. A mask that becomes empty is removed."""

    __slots__ = ("_bits", "_masks", "_names")

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def join(self, endpoint: str) -> None:
        if endpoint not in self._bits:
            bit = 1
            while bit in self._names:
                bit <<= 1
            self._bits[endpoint] = bit
            self._names[bit] = endpoint

    def leave(self, endpoint: str) -> None:
        """Its blocks must have been discarded before: a bit that is used again must not be set anywhere."""
        del self._names[self._bits.pop(endpoint)]

    def add(self, endpoint: str, blocks: Iterable[int]) -> None:
        bit, masks = self._bits[endpoint], self._masks
        for block in blocks:
            masks[block] = masks.get(block, 0) | bit

    def discard(self, endpoint: str, blocks: Iterable[int]) -> None:
        bit, masks = self._bits[endpoint], self._masks
        for block in blocks:
            mask = masks.get(block, 0)
            if mask == bit:
                del masks[block]
            elif mask & bit:
                masks[block] = mask ^ bit

    def match(self, blocks: Sequence[int]) -> dict[str, int]:
        """How many leading blocks each endpoint holds; endpoints that hold none are absent."""
        found: dict[str, int] = {}
        held = -1
        masks = self._masks
        for depth, block in enumerate(blocks):
            now = held & masks.get(block, 0)
            if now != held:
                if depth:
                    self._say(held & ~now, depth, found)
                if not now:
                    return found
                held = now
        if blocks:
            self._say(held, len(blocks), found)
        return found

    def holds(self, endpoint: str, block: int) -> bool:
        return bool(self._masks.get(block, 0) & self._bits.get(endpoint, 0))

    def _say(self, mask: int, depth: int, found: dict[str, int]) -> None:
        while mask:
            bit = mask & -mask
            found[self._names[bit]] = depth
            mask ^= bit
