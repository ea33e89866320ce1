"""How fast KV blocks get from a prefill endpoint to a decode endpoint: learned from every hand-over, per pair.

A hand-over is the time from sending the decode leg to its first token. A link that silently fell back to TCP still
works, a hundred times slower; no engine says so, only this time does. What is disturbed is only ever slower, so the speed of
a link is a high quantile of its samples; and what is typical for a fabric comes from all its links.

    state      event                                             then
    good       a hand-over took `SLOW` × what is typical         one strike
    good       … `VERY_SLOW` ×, or a second strike in a row      degraded, for `RETRY` seconds
    good       a hand-over in time                               no strikes
    degraded   its time is over                                  trial: one transfer may use it at its normal price
    trial      that transfer was in time                         good
    trial      it was slow                                       degraded, twice as long (at most `RETRY_MOST`)

A transfer under way that is late counts as soon as it is late: nobody waits for its end. Degraded is a price, not a ban:
a pair that is the only one is still used.

Invariants: every `start` has at most one `done` or `drop`; a degraded pair has at most one trial in flight; the number of
pairs remembered is at most `PAIRS`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from math import exp, log

import attrs

SPEED = 12.5e9  # bytes a second until something is known: 100 Gbit/s, the slowest InfiniBand in use for this
FASTEST = 1e12  # bytes a second: a hand-over that seems quicker had nothing to move
OVERHEAD = 0.05  # seconds of a hand-over that are no transfer: handshake, scheduling, the first decode step
SLOW = 4.0
VERY_SLOW = 12.0
GRACE = 0.25  # seconds: below this a hand-over is never called slow, whatever its size
RETRY = 30.0
RETRY_MOST = 600.0
STEP = 0.2  # of log speed, a sample
QUANTILE = 0.75
LEAST = 8 << 20  # bytes: a smaller transfer says more of the overhead than of the link
PAIRS = 20_000  # 100 prefill × 200 decode endpoints

Pair = tuple[str, str]
"""Ids of the prefill and the decode endpoint."""


@attrs.define
class _Link:
    fabric: str
    log_speed: float | None = None
    strikes: int = 0
    degraded_until: float | None = None
    degraded_since: float = 0.0
    slow_speed: float = SPEED  # as measured when it was marked
    penalty: float = RETRY
    trial: Hashable | None = None
    under_way: dict[Hashable, None] = attrs.Factory(dict)


@attrs.define
class _Transfer:
    pair: Pair
    size: int
    started: float
    expected: float
    counted: int = 0  # strikes that it gave while under way


@attrs.frozen
class Change:
    """A pair changed its state: worth an event, a metric, a line in explain."""

    pair: Pair
    degraded: bool
    seconds: float  # what the hand-over took (so far)
    expected: float


class Links:
    """All pairs. Pure: times are arguments."""

    def __init__(self, speeds: dict[str, float] | None = None) -> None:
        """*speeds*: bytes a second by fabric, where the operator knows."""
        self._nominal = dict(speeds or {})
        self._links: OrderedDict[Pair, _Link] = OrderedDict()
        self._typical: dict[str, float] = {}  # log speed by fabric
        self._transfers: dict[Hashable, _Transfer] = {}

    def seconds(self, pair: Pair, fabric: str, size: int, now: float) -> float:
        """What a hand-over of *size* bytes over *pair* is expected to take."""
        link = self._links.get(pair)
        if link is not None and self._is_degraded(link, now):
            return OVERHEAD + size / link.slow_speed
        return OVERHEAD + size / self._speed(link, fabric)

    def degraded(self, pair: Pair, now: float) -> bool:
        """Whether the pair is avoided at present."""
        link = self._links.get(pair)
        return link is not None and self._is_degraded(link, now)

    def all_degraded(self, now: float) -> list[tuple[Pair, float]]:
        """Pairs that are avoided, with the time since when."""
        return [(p, link.degraded_since) for p, link in self._links.items() if self._is_degraded(link, now)]

    def start(self, transfer: Hashable, pair: Pair, fabric: str, size: int, now: float) -> None:
        """The decode leg was sent: *size* bytes are on their way."""
        link = self._link(pair, fabric)
        if link.degraded_until is not None and now >= link.degraded_until and link.trial is None:
            link.trial = transfer
        link.under_way[transfer] = None
        expected = OVERHEAD + size / exp(self._typical_speed(fabric))
        self._transfers[transfer] = _Transfer(pair, size, now, expected)

    def done(self, transfer: Hashable, now: float) -> Change | None:
        """Its first token came. Unknown transfers (dropped before) change nothing."""
        found = self._take(transfer)
        if found is None:
            return None
        flight, link = found
        took = now - flight.started
        strikes = self._strikes(took, flight.expected)
        trial = link.trial == transfer
        if trial:
            link.trial = None
        if strikes:
            return self._strike(flight, link, strikes - flight.counted, took, now)
        self._learn(link, flight, took)
        link.strikes = 0
        if link.degraded_until is not None and trial:
            link.degraded_until, link.penalty = None, RETRY
            return Change(flight.pair, False, took, flight.expected)
        return None

    def drop(self, transfer: Hashable) -> None:
        """It ended otherwise: client gone, engine lost. Says nothing of the link."""
        found = self._take(transfer)
        if found is not None and found[1].trial == transfer:
            found[1].trial = None

    def tick(self, now: float) -> list[Change]:
        """Look at what is under way. Called at least once a second, and before a pair is chosen."""
        changes = []
        for flight in self._transfers.values():
            took = now - flight.started
            strikes = self._strikes(took, flight.expected) - flight.counted
            if strikes > 0:
                flight.counted += strikes
                change = self._strike(flight, self._links[flight.pair], strikes, took, now)
                changes += [change] if change is not None else []
        return changes

    def forget(self, endpoint: str) -> None:
        """An endpoint is gone, or has restarted: its links are unknown again."""
        for pair in [pair for pair in self._links if endpoint in pair]:
            for transfer in self._links.pop(pair).under_way:
                self._transfers.pop(transfer, None)

    def _take(self, transfer: Hashable) -> tuple[_Transfer, _Link] | None:
        flight = self._transfers.pop(transfer, None)
        if flight is None:
            return None
        link = self._links[flight.pair]
        link.under_way.pop(transfer, None)
        return flight, link

    def _link(self, pair: Pair, fabric: str) -> _Link:
        link = self._links.get(pair)
        if link is None:
            link = self._links[pair] = _Link(fabric)
            if len(self._links) > PAIRS:
                idle = next((p for p, old in self._links.items() if not old.under_way and p != pair), None)
                if idle is not None:
                    del self._links[idle]
        self._links.move_to_end(pair)
        return link

    def _is_degraded(self, link: _Link, now: float) -> bool:
        if link.degraded_until is None:
            return False
        return now < link.degraded_until or link.trial is not None

    def _typical_speed(self, fabric: str) -> float:
        return self._typical.get(fabric, log(self._nominal.get(fabric, SPEED)))

    def _speed(self, link: _Link | None, fabric: str) -> float:
        known = link.log_speed if link is not None else None
        return exp(self._typical_speed(fabric) if known is None else known)

    def _strikes(self, took: float, expected: float) -> int:
        if took > VERY_SLOW * expected + GRACE:
            return 2
        return 1 if took > SLOW * expected + GRACE else 0

    def _strike(self, flight: _Transfer, link: _Link, strikes: int, took: float, now: float) -> Change | None:
        link.strikes += strikes
        link.slow_speed = min(link.slow_speed, max(1.0, flight.size / took))
        if link.degraded_until is not None:
            if now >= link.degraded_until:  # the trial, or a transfer of before
                link.penalty = min(RETRY_MOST, 2 * link.penalty)
                link.degraded_until = now + link.penalty
            return None
        if link.strikes < 2:
            return None
        link.degraded_since, link.degraded_until = now, now + link.penalty
        link.slow_speed = max(1.0, flight.size / took)
        return Change(flight.pair, True, took, flight.expected)

    def _learn(self, link: _Link, flight: _Transfer, took: float) -> None:
        if flight.size < LEAST:
            return
        sample = log(flight.size / max(took - OVERHEAD, 0.1 * took, flight.size / FASTEST))
        typical = self._typical_speed(link.fabric)
        self._typical[link.fabric] = typical + STEP * (QUANTILE if sample > typical else QUANTILE - 1)
        if link.log_speed is None:
            link.log_speed = sample
        else:
            link.log_speed += STEP * (QUANTILE if sample > link.log_speed else QUANTILE - 1)
