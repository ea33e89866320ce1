"""Turn by turn: the simplest way to choose an endpoint. One cursor a model."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from llmgw.endpoint import Endpoint, Snapshot
from llmgw.request import Phase, Refusal

CURSORS = 4096  # models that are remembered; beyond it all begin anew, which costs nothing but fairness for a moment

WHOLE: frozenset[Phase] = frozenset({"prefill", "decode"})


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Which endpoint, and what it does of the request."""

    endpoint: Endpoint
    phases: tuple[Phase, ...] = ("prefill", "decode")


class RoundRobin:
    """Endpoints that serve a model, are healthy, do all phases and have room, one after the other."""

    def __init__(self) -> None:
        self._cursors: dict[str, int] = {}
        self._endpoints: tuple[Endpoint, ...] = ()
        self._having: dict[str, tuple[int, ...]] = {}  # model → indexes of the endpoints that have it

    def pick(self, snapshot: Snapshot, model: str, tried: Collection[str] = ()) -> Decision | Refusal:
        """*model*: a name that endpoints know (an own name, an alias, an adapter). *tried*: ids that failed already.

        A degraded endpoint is used only where no ready one has room.
        """
        endpoints, views = snapshot.endpoints, snapshot.views
        if endpoints is not self._endpoints or len(self._having) > CURSORS:
            self._endpoints = endpoints
            self._having = {}
        having = self._having.get(model)
        if having is None:
            having = tuple(i for i, e in enumerate(endpoints) if _has(e, model))
            self._having[model] = having
        ready: list[int] = []
        degraded: list[int] = []
        healthy = whole = fresh = 0
        for i in having:
            view, endpoint = views[i], endpoints[i]
            if view.health not in ("ready", "degraded"):
                continue
            healthy += 1
            if not endpoint.phases >= WHOLE:
                continue
            whole += 1
            if endpoint.id in tried:
                continue
            fresh += 1
            if endpoint.max_concurrency is None or view.inflight < endpoint.max_concurrency:
                (ready if view.health == "ready" else degraded).append(i)
        found = ready or degraded
        if not found:
            return _refusal(model, len(having), healthy, whole, fresh)
        if len(self._cursors) > CURSORS:
            self._cursors.clear()
        turn = self._cursors.get(model, 0)
        self._cursors[model] = turn + 1
        return Decision(endpoints[found[turn % len(found)]])


def _has(endpoint: Endpoint, model: str) -> bool:
    return any(model == m.name or model in m.aliases or model in m.loras for m in endpoint.models)


def _refusal(model: str, having: int, healthy: int, whole: int, fresh: int) -> Refusal:
    """Names the filter that emptied the set."""
    if not having:
        return Refusal(reason="no_endpoint", filter="model", message=f"No endpoint serves {model!r} at the moment.")
    if not healthy:
        return Refusal(
            reason="none_healthy",
            message=f"None of the {having} endpoints of {model!r} is healthy; `llmgw ctl endpoints` says why.",
        )
    if not whole:
        return Refusal(
            reason="no_endpoint",
            filter="phases",
            message=f"No healthy endpoint of {model!r} does both prefill and decode.",
        )
    if not fresh:
        return Refusal(
            reason="no_endpoint", filter="tried", message=f"All {whole} healthy endpoints of {model!r} were tried."
        )
    return Refusal(
        reason="no_endpoint",
        filter="concurrency",
        message=f"All {fresh} endpoints of {model!r} have as many requests as max_concurrency allows.",
    )
