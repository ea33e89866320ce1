"""One task for every endpoint, for as long as it is there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from llmgw.server.fleet import Fleet, Place


async def each_place(fleet: Fleet, watch: Callable[[Place], Awaitable[None]]) -> None:
    """Run `watch(place)` for all places and those that come, until cancelled. It returns when its place is gone."""
    changed = trio.Event()

    def tell() -> None:
        changed.set()

    fleet.listeners.append(tell)
    watched: set[Place] = set()
    try:
        async with trio.open_nursery() as nursery:
            while True:
                changed = trio.Event()
                places = set(fleet.places.values())
                for place in places - watched:
                    nursery.start_soon(watch, place)
                watched = places
                await changed.wait()
    finally:
        fleet.listeners.remove(tell)
