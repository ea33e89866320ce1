"""How an endpoint is doing: a state machine without clock or sockets. `probes` and `brain` feed it.

    state        may serve   event ──► next state
    joining      no          probe_ok ──► ready · anything else: stays (an engine loads for minutes; it is waited for)
    ready        yes         connect_failed ──► quarantined · probe_failed, broke ──► degraded
    degraded     yes         probe_ok, served ──► ready · connect_failed ──► quarantined
                             probe_failed, broke: the `failures`-th in a row ──► quarantined, if it may be ejected
    quarantined  no          probe_ok ──► ready · anything else: stays
    draining     no          undrain ──► joining · anything else: stays (an operator said so)

Invariants: *failures* counts what went wrong since the last sign of health, and is 0 in `ready`; *since* changes with the
state and only with it; *why* says in words what went wrong last, and is empty in `ready`.

*broke*: a stream that was cut, an answer that was no HTTP, a 5xx of the engine's own. At most `EJECTED` of a pool is
quarantined for what is only suspicion (`may_eject`): where half the engines look broken the fault is likely elsewhere, and
the other half could not carry the load. Slowness is no event either: routing measures speed, and a slow engine gets
its share of the work; `slow` names it.

A refused connection ejects at once: nobody listens there. A slow or broken answer does not, for it may be the request's
fault. What the client caused (4xx) is no event at all. A probe that finds no time to answer while tokens flow is no
failure either: the caller asks `overlooks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

from llmgw.endpoint import Health as State

Event = Literal["probe_ok", "probe_failed", "connect_failed", "broke", "served", "drain", "undrain"]

SERVING: frozenset[State] = frozenset({"ready", "degraded"})

FIRST_PAUSE = 1.0
"""Seconds until an endpoint that does not serve is probed again; doubles with each failure."""


@attrs.frozen
class Health:
    """State of one endpoint. *since*: event loop's time."""

    since: float
    state: State = "joining"
    failures: int = 0
    why: str = ""

    @property
    def serving(self) -> bool:
        return self.state in SERVING


EJECTED = 0.5
"""Share of a pool that may be quarantined on suspicion; of a pool of one, one."""

SLOW = 0.5
"""Of the median speed of its pool: who is below is named slow. Mixed GPU types are a factor of 2 to 4 apart."""


def may_eject(size: int, quarantined: int) -> bool:
    """Whether one more of a pool of *size*, of which so many are *quarantined*, may go."""
    return quarantined < max(1, int(size * EJECTED))


def slow(speed: float | None, pool: Sequence[float | None]) -> float | None:
    """*speed* ÷ the median of its *pool* where that is below `SLOW`; None: not slow, or unknown."""
    known = sorted(s for s in pool if s is not None)
    if speed is None or len(known) < 3:
        return None
    share = speed / known[len(known) // 2]
    return share if share < SLOW else None


def step(health: Health, event: Event, now: float, limit: int, why: str = "", *, eject: bool = True) -> Health:
    """The next state. *limit*: failures in a row that `degraded` survives not. *eject*: see `may_eject`."""
    state = health.state
    if event == "drain":
        return health if state == "draining" else Health(now, "draining", 0, why or "drained by an operator")
    if state == "draining":
        return Health(now) if event == "undrain" else health
    if event in ("probe_ok", "served"):
        if event == "served" and state not in SERVING:
            return health  # an old stream that ends well says nothing about new connections
        return health if state == "ready" else Health(now, "ready")
    if event == "undrain":
        return health
    failures = health.failures + 1
    if state in ("joining", "quarantined"):
        return attrs.evolve(health, failures=failures, why=why)
    if event == "connect_failed" or (failures >= limit and eject):
        return Health(now, "quarantined", failures, why)
    return Health(health.since if state == "degraded" else now, "degraded", min(failures, limit - 1), why)


def pause(health: Health, interval: float, longest: float, jitter: float) -> float:
    """Seconds until the next probe. *jitter* in [0, 1): spreads the probes of many endpoints over ± 10 %."""
    if health.serving or health.state == "draining":
        base = interval
    else:
        cap = interval if health.state == "joining" else longest
        base = min(cap, FIRST_PAUSE * 2.0 ** min(health.failures, 16))
    return base * (0.9 + 0.2 * jitter)


def overlooks(alive: float | None, now: float, timeout: float) -> bool:
    """Whether a probe's timeout is overlooked, since the endpoint gave a token within that time."""
    return alive is not None and now - alive <= timeout
