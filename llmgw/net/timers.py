"""Deadlines of all exchanges: one heap, updated lazily, served by one task.

A deadline that moves later costs nothing (the entry is looked at when it comes up and put back); one that moves earlier
costs a push. An entry whose time is not the exchange's `timer` any more is stale and dropped.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from llmgw.net.exchange import Exchange


class Timers:
    """`schedule` may be called from anywhere; `run` is the task."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Exchange]] = []
        self._count = 0
        self._scope: trio.CancelScope | None = None

    def schedule(self, exchange: Exchange) -> None:
        """Look at *exchange* at its deadline."""
        when = exchange.deadline
        if when == float("inf"):
            exchange.timer = when
            return
        exchange.timer = when
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, exchange))
        if self._scope is not None and when < self._scope.deadline:
            self._scope.deadline = when

    async def run(self) -> None:
        while True:
            now = trio.current_time()
            while self._heap and self._heap[0][0] <= now:
                when, _, exchange = heapq.heappop(self._heap)
                if exchange.timer != when:
                    continue
                exchange.timer = float("inf")
                try:
                    exchange.tick(now)
                except Exception as error:
                    exchange.crashed(error)
            with trio.CancelScope(deadline=self._heap[0][0] if self._heap else float("inf")) as self._scope:
                await trio.sleep_forever()
            self._scope = None
