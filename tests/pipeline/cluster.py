"""A whole small cluster in one trio program: simulated engines, the real server in front of them, clients."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from llmgw import config
from llmgw.net.world import RealWorld
from llmgw.server.gateway import Gateway
from llmgw.simengine.options import Options
from llmgw.simengine.server import Engine
from tests.server.worlds import Lines
from tests.simengine.client import Client

CHAT = "/v1/chat/completions"
LONG = {"model": "m", "messages": [{"role": "user", "content": "word " * 320}], "max_tokens": 6}
RATES = {"prefill_tps": 1000.0, "decode_tps": 100.0}


@attrs.define(eq=False)
class Cluster:
    """*engines* by the names that the server knows them by."""

    gateway: Gateway
    lines: Lines
    engines: dict[str, Engine]
    scopes: dict[str, trio.CancelScope]
    clients: list[Client] = attrs.Factory(list)

    def client(self, address: str = "") -> Client:
        made = Client(RealWorld(2), address or self.gateway.addresses[0])
        self.clients.append(made)
        return made

    def logged(self, event: str = "") -> list[dict[str, Any]]:
        self.gateway.log._write(b"")
        found = [json.loads(line) for line in self.lines.data.splitlines()]
        return [line for line in found if (line.get("event", "") if event else line["kind"]) == (event or "request")]

    def die(self, name: str) -> None:
        """The engine is gone, with all of its connections."""
        self.scopes[name].cancel()

    async def page(self, name: str) -> bytes:
        return (await self.client(self.engines[name].addresses[0]).get("/metrics")).body

    def quiet(self) -> None:
        """Nothing is left of any request."""
        pipelines = self.gateway.pipelines
        assert pipelines is not None
        assert pipelines._jobs == {}
        for place in self.gateway.fleet.places.values():
            assert self.gateway.fleet.router.ledger.counts(place.endpoint.id) == (0, 0, 0), place.endpoint.name
        for links in pipelines._links.values():
            assert links._transfers == {}
        assert self.gateway.brain.inflight == 0
        assert self.gateway.metrics.bugs == 0, self.lines.data.decode()


async def _host(engine: Engine, scope: trio.CancelScope, started: trio.Event) -> None:
    with scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.serve)
            started.set()


@asynccontextmanager
async def cluster(
    pipeline: str,
    engines: dict[str, dict[str, Any]],
    *,
    tail: str = "",
    places: list[dict[str, Any]] | None = None,
) -> AsyncIterator[Cluster]:
    """*pipeline*: YAML of its keys. *engines*: options by name; `fabric`, `bootstrap` are the server's. *tail*: more of the file.
    *places*: further endpoints, as the file has them."""
    async with trio.open_nursery() as nursery:
        world = RealWorld(1)
        made: dict[str, Engine] = {}
        scopes: dict[str, trio.CancelScope] = {}
        places = list(places or ())
        for name, options in engines.items():
            fabric = options.pop("fabric", "")
            engine = Engine(
                Options(**{"listen": ("127.0.0.1:0",), "model": "m", "seed": 3, **RATES, **options}),
                world,
                lambda _: None,
            )
            scopes[name] = trio.CancelScope()
            started = trio.Event()
            nursery.start_soon(_host, engine, scopes[name], started)
            await started.wait()
            made[name] = engine
            places.append(
                {
                    "name": name,
                    "url": f"http://{engine.addresses[0]}",
                    "models": ["m"],
                    "phases": list(engine.options.phases),
                    "fabrics": [fabric] if fabric else [],
                    "bootstrap": engine.addresses[0],
                    "engine": "sim",
                }
            )
        text = (
            "version: 1\n"
            + ("" if "listeners" in tail else "listeners: [{address: '127.0.0.1:0'}]\n")
            + f"admin: {{addresses: ['127.0.0.1:0']}}\n{tail}\n"
            + f"endpoints: {json.dumps(places)}\npipeline: p\npipelines:\n  p:\n"
            + "".join(f"    {line}\n" for line in pipeline.strip().splitlines())
        )
        lines = Lines()
        gateway = Gateway(config.parse(text), world, lines)
        await nursery.start(gateway.run)
        if places:
            with trio.fail_after(20):
                await gateway.wait_serving(len(places))
        found = Cluster(gateway, lines, made, scopes)
        try:
            yield found
        finally:
            for client in found.clients:
                client.close()
            gateway.close()
            nursery.cancel_scope.cancel()
