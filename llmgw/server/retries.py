"""Two guards against making a bad hour worse: a budget for retries, and a memory of bodies that kill engines."""

from __future__ import annotations

SHARE = 0.2  # retries a request, over WINDOW: a fleet that fails gets at most a fifth more load
BURST = 10  # retries that are always allowed in WINDOW: with little traffic a share of it is nothing
WINDOW = 10  # seconds

POISON_SECONDS = 600.0
POISON_BODIES = 4096  # digests remembered; the oldest goes first. An attacker can only make us forget


class RetryBudget:
    """At most SHARE of the requests of the last WINDOW seconds, plus BURST."""

    def __init__(self) -> None:
        self._requests = [0] * WINDOW
        self._retries = [0] * WINDOW
        self._second = 0

    def _advance(self, now: float) -> int:
        second = int(now)
        for old in range(max(self._second + 1, second - WINDOW + 1), second + 1):
            self._requests[old % WINDOW] = 0
            self._retries[old % WINDOW] = 0
        self._second = max(second, self._second)
        return self._second % WINDOW

    def request(self, now: float) -> None:
        """A request has come."""
        self._requests[self._advance(now)] += 1

    def take(self, now: float) -> bool:
        """Whether one more retry is allowed; it is counted."""
        slot = self._advance(now)
        if sum(self._retries) >= BURST + SHARE * sum(self._requests):
            return False
        self._retries[slot] += 1
        return True


class Poison:
    """Bodies (by digest and length) that made engines close without an answer.

    A digest costs more than everything else that is done to a request, so it is asked for only where a body of this
    very length is known: `of_length`.
    """

    def __init__(self) -> None:
        self._seen: dict[
            int, tuple[float, int, frozenset[str]]
        ] = {}  # digest → last time, length, engines; oldest first
        self._poison: dict[int, list[int]] = {}  # length → digests

    def closed(self, digest: int, length: int, endpoint: str, now: float) -> bool:
        """*endpoint* closed on this body. True: it is the second engine, the body is poison from now on."""
        if digest in self._seen and now - self._seen[digest][0] >= POISON_SECONDS:
            self._forget(digest)
        _, _, engines = self._seen.pop(digest, (now, length, frozenset[str]()))
        engines |= {endpoint}
        while len(self._seen) >= POISON_BODIES:
            self._forget(next(iter(self._seen)))
        self._seen[digest] = (now, length, engines)
        if len(engines) < 2:
            return False
        if digest not in self._poison.setdefault(length, []):
            self._poison[length].append(digest)
        return True

    def of_length(self, length: int, now: float) -> tuple[int, ...]:
        """Digests of poisonous bodies of *length* bytes; nearly always none."""
        if length not in self._poison:
            return ()
        for digest in tuple(self._poison[length]):
            if now - self._seen[digest][0] >= POISON_SECONDS:
                self._forget(digest)
        return tuple(self._poison.get(length, ()))

    def _forget(self, digest: int) -> None:
        _, length, _ = self._seen.pop(digest)
        digests = self._poison.get(length, [])
        if digest in digests:
            digests.remove(digest)
            if not digests:
                del self._poison[length]
