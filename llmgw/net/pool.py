"""Idle connections to engines. The driver watches each one, so a dead one is known before it is reused.

Engines close idle sockets after 5 s (vLLM, SGLang, llama-server), and llama-server after every stream without saying so:
a connection is taken only younger than IDLE_SECONDS, and one that is closed by its engine leaves the pool at once.
What remains is the race of a request with a FIN on its way, which the exchange answers with one retry.
"""

from __future__ import annotations

from llmgw.net.channel import Channel

IDLE_SECONDS = 4.0
"""Less than the engines' 5 s, by more than a round trip."""

PER_TARGET = 1024
"""Idle connections kept for one engine: as many as it has sequences, at the most."""


class Pool:
    """Idle channels by target key, the youngest taken first so that the rest can grow old."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Channel]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._idle.values()))

    def take(self, key: str, now: float) -> Channel | None:
        """The youngest that is fit for use, unbound from the pool; None if there is none."""
        found = self._idle.get(key)
        while found:
            channel = found.pop()
            if now - channel.since <= IDLE_SECONDS:
                if not found:
                    del self._idle[key]
                return channel
            channel.close()
        self._idle.pop(key, None)
        return None

    def give(self, key: str, channel: Channel, now: float) -> None:
        """Keep *channel*, watched, until it is taken, grows old, or its engine closes it."""
        found = self._idle.setdefault(key, [])
        if len(found) >= PER_TARGET:
            channel.close()
            return
        channel.since = now
        found.append(channel)

        def leave(_: object = None) -> None:
            kept = self._idle.get(key)
            if kept is not None and channel in kept:
                kept.remove(channel)
                if not kept:
                    del self._idle[key]
            channel.close()

        channel.bind(leave, leave, None, leave)

    def sweep(self, now: float) -> None:
        """Close what has grown old."""
        for key, found in list(self._idle.items()):
            for channel in [c for c in found if now - c.since > IDLE_SECONDS]:
                found.remove(channel)
                channel.close()
            if not found:
                del self._idle[key]

    def close(self) -> None:
        for found in self._idle.values():
            for channel in found:
                channel.close()
        self._idle.clear()
