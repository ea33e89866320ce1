"""Which endpoint serves a session: sticky while it can, moved once when it cannot.

A session is what a client calls one (`x-session-id`), apart for every model. The table is bounded twice: a session unheard
of for `ttl` seconds is forgotten, and of more than `cap` the one unheard of for longest.
"""

from __future__ import annotations

TTL = 3600.0  # seconds: a KV cache has long forgotten by then
CAP = 100_000  # sessions; 200 bytes each


class Sessions:
    """Entries are kept in the order of their last use."""

    def __init__(self, ttl: float = TTL, cap: int = CAP) -> None:
        self._ttl = ttl
        self._cap = cap
        self._held: dict[tuple[str, str], tuple[str, float]] = {}

    def find(self, model: str, session: str, now: float) -> str:
        """Endpoint id; "" = none, or forgotten."""
        found = self._held.get((model, session))
        return found[0] if found is not None and now - found[1] <= self._ttl else ""

    def keep(self, model: str, session: str, endpoint: str, now: float) -> None:
        """It was served by *endpoint*: there it stays."""
        held, key = self._held, (model, session)
        held.pop(key, None)
        held[key] = (endpoint, now)
        while True:
            oldest = next(iter(held))
            if len(held) <= self._cap and now - held[oldest][1] <= self._ttl:
                return
            del held[oldest]

    def __len__(self) -> int:
        return len(self._held)
