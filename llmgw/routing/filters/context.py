"""Fits its context."""

from __future__ import annotations

from collections.abc import Sequence

from llmgw.endpoint import Endpoint, Snapshot
from llmgw.routing.field import Query


class Context:
    """The prompt fits its context length. Where it fits nowhere all stay: the engine says so with exact numbers."""

    api = 1
    name = "context"

    def __init__(self) -> None:
        self._endpoints: tuple[Endpoint, ...] = ()
        self._lengths: list[float] = []
        self._shortest = 0.0

    def keep(self, query: Query, snapshot: Snapshot, at: Sequence[int], now: float) -> Sequence[int]:
        endpoints = snapshot.endpoints
        if endpoints is not self._endpoints:
            self._endpoints = endpoints
            self._lengths = [max((m.max_model_len or float("inf") for m in e.models), default=0) for e in endpoints]
            self._shortest = min(self._lengths, default=0)
        need = query.request.prompt_tokens + (query.request.max_tokens or 0)
        if need <= self._shortest:
            return at
        return [i for i in at if self._lengths[i] >= need] or at
