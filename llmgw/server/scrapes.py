"""Reads every engine's metrics page, one task each, so that a slow one delays no other.

What a page says corrects the router's ledger while it is fresh. A page that cannot be had changes nothing: what was
known ages, and everything works on the gateway's own account. An engine without a page is asked seldom.
"""

from __future__ import annotations

import random

import attrs
import trio

from llmgw.config import Scrape
from llmgw.engines.base import MetricNames
from llmgw.errors import Unavailable
from llmgw.net.client import Client
from llmgw.routing.report import PAGE, Reader, Reading, detect, kinds
from llmgw.server.fleet import Fleet, Place
from llmgw.server.targets import target
from llmgw.server.watching import each_place

SELDOM = 30.0  # seconds until an engine that has no metrics page is asked for one again


class Scraper:
    """Keeps one task for every place of the fleet."""

    def __init__(self, fleet: Fleet, client: Client, options: Scrape, rng: random.Random) -> None:
        self._fleet = fleet
        self._client = client
        self._options = options
        self._rng = rng
        own = {kind: MetricNames(**attrs.asdict(mapping)) for kind, mapping in options.metrics.items()}
        self._readers = {kind: Reader(names) for kind, names in {**kinds(), **own}.items()}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read until cancelled."""
        task_status.started()
        await each_place(self._fleet, self._watch)

    async def _watch(self, place: Place) -> None:
        """Until *place* is gone."""
        interval: float = self._options.interval
        await trio.sleep(interval * self._rng.random())  # spread over the interval
        while place.index >= 0:
            begun = trio.current_time()
            if place.health.state in ("ready", "degraded", "draining"):
                reading = await self._read(place)
                if reading is None:
                    interval = min(SELDOM, interval * 2)
                    place.slot.scrapes_failed += 1
                else:
                    interval = self._options.interval
                    if place.index >= 0:
                        self._fleet.learned(place, reading)
            await trio.sleep_until(max(begun + interval, trio.current_time()))

    async def _read(self, place: Place) -> Reading | None:
        """One page; None: it could not be had, or is none."""
        reader = self._readers.get(place.endpoint.engine)
        path = reader.path if reader is not None else "/metrics"
        with trio.move_on_after(self._options.timeout):
            try:
                answer = await self._client.request(target(place.endpoint, place.key), "GET", path, limit=PAGE)
            except Unavailable:
                return None
            if answer.status != 200:
                return None
            if reader is None:
                reader = self._readers.get(detect(answer.body) or "")
            found = None if reader is None else reader.read(answer.body, trio.current_time())
            return None if found is None or found.empty else found
        return None
