"""Has room."""

from __future__ import annotations

from collections.abc import Sequence

from llmgw.endpoint import Endpoint, Snapshot
from llmgw.routing.field import Query


class Concurrency:
    """Has fewer requests of ours than its `max_concurrency`."""

    api = 1
    name = "concurrency"

    def __init__(self) -> None:
        self._endpoints: tuple[Endpoint, ...] = ()
        self._limits: list[tuple[int, int]] = []  # (position, limit) of those that have one

    def keep(self, query: Query, snapshot: Snapshot, at: Sequence[int], now: float) -> Sequence[int]:
        endpoints, views = snapshot.endpoints, snapshot.views
        if endpoints is not self._endpoints:
            self._endpoints = endpoints
            self._limits = [(i, e.max_concurrency) for i, e in enumerate(endpoints) if e.max_concurrency is not None]
        if not self._limits:
            return at
        full = {i for i, limit in self._limits if views[i].inflight >= limit}
        return [i for i in at if i not in full] if full else at
