"""The cluster port: where machines become nodes, and where nodes talk to their server.

    GET  /join/ca            the root certificate; anybody may ask
    POST /join               a join token and a signing request → certificates; anybody may try
    POST /agent/v1/renew     a signing request → certificates; a node for itself
    …    /agent/v1/…         the routes of the control plane, handed in; a node for itself

Everything but `/join…` needs a node's certificate. Who is refused follows the store: a revoked node's connections are
cut as soon as the store says so, on every server.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from llmgw.errors import ConfigError, Unavailable
from llmgw.net.doors import Door, Peer
from llmgw.net.tls import Reloadable, server_context
from llmgw.net.world import World
from llmgw.pki.ca import chain_pem
from llmgw.pki.folder import Identity
from llmgw.pki.issue import NODES, Code, Denied, JoinRequest, join, refused_of, renew
from llmgw.pki.join import Certificates, JoinBody, RenewBody
from llmgw.stores.base import Compacted, Store

T = TypeVar("T")

log = logging.getLogger("llmgw.cluster")

MAX_BODY = 64 << 10  # bytes of a join or a renewal: a signing request and a few words
LOOK_SECONDS = 3_600.0  # between looks at the server's own certificate, which lives 30 days
RETRY_SECONDS = 1.0  # while the store does not answer; the doors keep what they know

STATUS: dict[Code, int] = {
    "token_unknown": 403,
    "token_expired": 403,
    "token_used": 403,
    "token_other_node": 403,
    "token_other_key": 403,
    "node_active": 409,
    "node_unknown": 403,
    "node_revoked": 403,
    "bad_node_id": 400,
    "bad_request": 400,
    "clock": 400,
    "busy": 503,
}


class Cluster:
    """*names*: host names and addresses that nodes reach this server by. *routes*: more of `/agent/v1/`."""

    def __init__(
        self, world: World, store: Store, identity: Identity, names: list[str], routes: Sequence[Route] = ()
    ) -> None:
        self._world = world
        self._store = store
        self._identity = identity
        self._names = names
        self._tls = Reloadable(self._context)
        self._refused: dict[str, set[str]] = {}
        app = Starlette(
            routes=[
                Route("/join/ca", self._root, methods=["GET"]),
                Route("/join", self._join, methods=["POST"]),
                Route("/agent/v1/renew", self._renew, methods=["POST"]),
                *routes,
            ],
            exception_handlers={Denied: _denied},
        )
        self.door = Door(_NodesOnly(app), kind="cluster", world=world, tls=self._tls)

    async def run(
        self, sockets: list[socket.socket], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until `door.drain` or `door.close`. Raises Unavailable if the store cannot say at the start who is revoked."""
        position = await self._read()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow, position)
            nursery.start_soon(self._look_after_certificate)
            async with trio.open_nursery() as serving:
                await serving.start(self.door.run, sockets)
                task_status.started()
            nursery.cancel_scope.cancel("the cluster port is closed")

    def _context(self) -> ssl.SSLContext:
        now = self._world.wall()
        cert, key = self._identity.server_files(self._names, now)
        return server_context(cert, key, now=now, client_ca=self._identity.root_file)

    async def _look_after_certificate(self) -> None:
        while True:
            await trio.sleep(LOOK_SECONDS)
            try:
                self._tls.reload()
            except (ConfigError, OSError) as error:
                log.error("cluster port keeps its old certificate: %s", error)

    async def _follow(self, position: int) -> None:
        while True:
            try:
                async with self._store.watch(NODES, position + 1) as changes:
                    async for batch in changes:
                        for event in batch.events:
                            self._apply(event.key, refused_of(event.entry) if event.entry else set())
                        position = batch.revision
            except Compacted:
                position = await self._read_again()
            except Unavailable:
                await trio.sleep(RETRY_SECONDS)

    async def _read_again(self) -> int:
        while True:
            try:
                return await self._read()
            except Unavailable:
                await trio.sleep(RETRY_SECONDS)

    async def _read(self) -> int:
        found = await self._store.range(NODES)
        present = {entry.key: refused_of(entry) for entry in found.entries}
        for key in self._refused.keys() - present.keys():
            self._apply(key, set())
        for key, names in present.items():
            self._apply(key, names)
        return found.revision

    def _apply(self, key: str, names: set[str]) -> None:
        before = self._refused.pop(key, set())
        for name in before - names:
            self.door.pardon(name)
        for name in names - before:
            self.door.revoke(name)
        if names:
            self._refused[key] = names

    async def _root(self, _request: Request) -> Response:
        return PlainTextResponse(chain_pem([self._identity.root]))

    async def _join(self, request: Request) -> Response:
        body = await _decode(request, JoinBody)
        peer: Peer = request.state.peer
        ask = JoinRequest(body.token, body.secret, body.node, body.request.encode(), body.clock, peer.address)
        return _certificates(await join(self._store, self._identity, ask, self._world.wall()))

    async def _renew(self, request: Request) -> Response:
        body = await _decode(request, RenewBody)
        peer: Peer = request.state.peer
        now = self._world.wall()
        return _certificates(
            await renew(self._store, self._identity, peer.node, peer.serial, body.request.encode(), now)
        )


class _NodesOnly:
    """Lets nobody but nodes past `/join`, whatever routes there are."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        peer: Peer = scope["state"]["peer"]
        path: str = scope["path"]
        if peer.node or path == "/join" or path.startswith("/join/"):
            await self._app(scope, receive, send)
        else:
            message = "this needs a node's certificate: join this machine first"
            await _error(401, "no_certificate", message)(scope, receive, send)


def _error(status: int, code: str, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "cluster_error", "param": None, "code": code}}, status)


async def _denied(_request: Request, denied: Exception) -> Response:  # noqa: ASYNC124 (Starlette runs others in a thread)
    assert isinstance(denied, Denied)
    return _error(STATUS[denied.code], denied.code, str(denied))


async def _decode(request: Request, kind: type[T]) -> T:
    """The body. Raises Denied(bad_request)."""
    body = b""
    async with aclosing(request.stream()) as parts:
        async for part in parts:
            body += part
            if len(body) > MAX_BODY:
                raise Denied("bad_request", f"the body has more than {MAX_BODY} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise Denied("bad_request", f"the body is not what is expected here: {error}") from error


def _certificates(chain: bytes) -> Response:
    return Response(msgspec.json.encode(Certificates(chain.decode())), media_type="application/json")
