"""How often prompts with the same beginning come: whether a further copy of it in a cache would be used."""

from __future__ import annotations

from math import exp

WINDOW = 10.0  # seconds: shorter than a cache takes to turn over once, so that a copy lives that long
CAP = 50_000  # beginnings that are remembered; 150 bytes each


class Heat:
    """Uses in the last `WINDOW` seconds, decaying, by block value. Bounded: the one unheard of for longest goes."""

    def __init__(self, cap: int = CAP) -> None:
        self._cap = cap
        self._held: dict[int, tuple[float, float]] = {}  # block → uses, when

    def touch(self, block: int, now: float) -> None:
        """A prompt whose shared beginning ends with *block* was sent."""
        uses = self.uses(block, now) + 1.0
        self._held.pop(block, None)
        self._held[block] = (uses, now)
        if len(self._held) > self._cap:
            del self._held[next(iter(self._held))]

    def uses(self, block: int, now: float) -> float:
        found = self._held.get(block)
        return 0.0 if found is None else found[0] * exp((found[1] - now) / WINDOW)

    def __len__(self) -> int:
        return len(self._held)
