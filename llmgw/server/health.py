"""How an endpoint is doing: a state machine without clock or sockets. `probes` and `brain` feed it.

    state        may serve   event ──► next state
    joining      no          probe_ok ──► ready · anything else: stays (an engine loads for minutes; it is waited for)
    ready        yes         connect_failed ──► quarantined · probe_failed, broke ──► degraded
    degraded     yes         probe_ok, served ──► ready · connect_failed ──► quarantined
                             probe_failed, broke: the `failures`-th in a row ──► quarantined
    quarantined  no          probe_ok ──► ready · anything else: stays
    draining     no          undrain ──► joining · anything else: stays (an operator said so)

Invariants: *failures* counts what went wrong since the last sign of health, and is 0 in `ready`; *since* changes with the
state and only with it; *why* says in words what went wrong last, and is empty in `ready`.

A refused connection ejects at once: nobody listens there. A slow or broken answer does not, for it may be the request's
fault. What the client caused (4xx) is no event at all. A probe that finds no time to answer while tokens flow is no
failure either: the caller asks `overlooks`.
"""

from __future__ import annotations

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


def step(health: Health, event: Event, now: float, limit: int, why: str = "") -> Health:
    """The next state. *limit*: failures in a row that `degraded` survives not."""
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
    if event == "connect_failed" or failures >= limit:
        return Health(now, "quarantined", failures, why)
    return Health(health.since if state == "degraded" else now, "degraded", failures, why)


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
