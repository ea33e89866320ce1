"""Engines over AF_UNIX; tests add `autojump_clock` for virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest
import trio

from llmgw.net.world import RealWorld
from llmgw.simengine.options import Options
from llmgw.simengine.server import Engine
from tests.simengine.client import Client

_names = count()


class Bench:
    """Starts engines and clients; all end with the test."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.world = RealWorld(1)
        self.journal: list[bytes] = []
        self.clients: list[Client] = []

    async def engine(self, **options: Any) -> Engine:
        options.setdefault("listen", (f"unix:@sim-test-{id(self)}-{next(_names)}",))
        options.setdefault("model", "llama")
        engine = Engine(Options(**options), self.world, self.journal.append)
        await self.nursery.start(lambda task_status: engine.serve(task_status=task_status))
        return engine

    def client(self, engine: Engine) -> Client:
        client = Client(self.world, engine.addresses[0])
        self.clients.append(client)
        return client


@pytest.fixture
async def bench(nursery: trio.Nursery) -> AsyncIterator[Bench]:
    bench = Bench(nursery)
    yield bench
    for client in bench.clients:
        client.close()
