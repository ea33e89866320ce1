"""The server's side of the link: the real cluster port and join, and a control plane that says what a test tells it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import msgspec
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmgw.control.observed import Answer, Desired, Observed, Run, Sync
from llmgw.net.world import RealWorld, Tcp
from llmgw.pki.folder import Identity, init_authority, load_identity
from llmgw.pki.issue import create_token
from llmgw.server.cluster import Cluster
from llmgw.stores.memory import MemoryStore


@attrs.define
class Control:
    """What it wants, and what it heard."""

    term: int = 1
    desired: tuple[Desired, ...] = ()
    weights: tuple[str, ...] = ()
    settled: bool = True
    heartbeat: float = 0.5
    skew: float = 0.0  # of the server's clock
    follow: str = ""  # replica whose log somebody follows
    followed: list[str] = attrs.field(factory=list)
    syncs: list[Sync] = attrs.field(factory=list)
    observed: Observed | None = None
    digest: str = ""

    async def sync(self, request: Request) -> Response:
        sync = msgspec.json.decode(await request.body(), type=Sync)
        assert sync.node == request.state.peer.node
        self.syncs.append(sync)
        if sync.observed is not None:
            self.observed, self.digest = sync.observed, sync.digest
        now = time.time() + self.skew
        for logs in sync.logs:
            assert logs.first == len(self.followed)
            self.followed += logs.lines
        wanted = {self.follow: len(self.followed)} if self.follow else {}
        answer = Answer(
            term=self.term, revision=1, digest=self.digest, desired=self.desired, settled=self.settled, weights=self.weights,
            heartbeat=self.heartbeat, received=now, sent=now, logs=wanted,
        )  # fmt: skip
        return Response(msgspec.json.encode(answer), media_type="application/json")

    def run(self, replica: str) -> Run | None:
        runs = self.observed.runs if self.observed else ()
        return next((r for r in runs if r.replica == replica), None)

    def checking(self) -> bool:
        return self.observed is None or self.observed.inventory.checking

    def state(self, replica: str) -> str:
        run = self.run(replica)
        return run.state if run else ""


@attrs.define
class Site:
    control: Control
    address: Tcp
    store: MemoryStore
    identity: Identity
    scope: trio.CancelScope

    async def token(self) -> str:
        return (await create_token(self.store, self.identity, time.time())).text()

    async def until(self, condition: object, within: float = 30.0) -> None:
        """*condition* is looked at after every sync."""
        seen = -1
        with trio.fail_after(within):
            while not condition():  # type: ignore[operator]
                if len(self.control.syncs) == seen:
                    await trio.sleep(0.02)
                seen = len(self.control.syncs)


@asynccontextmanager
async def open_site(
    folder: Path, control: Control, port: int = 0, store: MemoryStore | None = None
) -> AsyncIterator[Site]:
    """Serving until it is left; the same *folder*, *port* and *store* again are the same server come back."""
    pki = folder / "pki"
    identity = load_identity(pki) if pki.exists() else init_authority(pki, folder / "root.key", time.time())
    world, store = RealWorld(seed=0), store or MemoryStore()
    route = Route("/agent/v1/sync", control.sync, methods=["POST"])
    cluster = Cluster(world, store, identity, ["127.0.0.1"], [route])
    sockets = await world.listen(Tcp("127.0.0.1", port))
    address = Tcp("127.0.0.1", sockets[0].getsockname()[1])
    scope = trio.CancelScope()  # of the server alone: not of whoever uses it

    async def serve() -> None:
        with scope:
            await cluster.run(sockets)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)  # noqa: ASYNC113 -- its sockets listen already: whoever connects early waits
        yield Site(control, address, store, identity, scope)
        scope.cancel()
