"""The admin and the cluster port: our listener, hypercorn behind it, and the name of whoever is at the other end.

hypercorn passes the app neither client certificates nor SO_PEERCRED, and shields its writes from cancellation. So the
door accepts and shakes hands itself, hands the stream to hypercorn's `TCPServer` with the app wrapped for this one
connection, and keeps the raw socket: closing that is the only thing that frees a write to a client that stopped reading.

    accepting ──drain(grace)──▶ draining ──last connection, or grace over──▶ closed
        └───────────────close(), or `run` cancelled───────────────▶ closed

- The app finds `scope["state"]["peer"]`, a `Peer`; what a peer may do is the app's business.
- `revoke(name)` closes the living connections of that peer at once, and refuses it at later handshakes.
- A connection is closed when its peer's certificate expires: TLS looks at dates during the handshake only.
- The app gets no lifespan events: tasks that it needs belong to the shell that owns the door.
"""

from __future__ import annotations

import errno
import logging
import math
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import attrs
import trio
from cryptography import x509
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState, LifespanState

from llmgw.net.world import World
from llmgw.pki.names import holder_of

log = logging.getLogger("llmgw.doors")

HANDSHAKE = 10.0  # seconds; a TCP peer that says nothing must not hold a task
IDLE = 75.0  # seconds without a request; longer than the 60 s after which common proxies drop an idle upstream
MAX_CONNECTIONS = 4_096  # 2 per node at 1,000 nodes, twice; ~50 KiB each with TLS
MAX_HEAD = 64 << 10  # bytes of request line and headers, as on the client port
CLOCK_STEP = 30.0  # seconds between looks at the wall clock, which may be set while a connection lives
OUT_OF_HANDLES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
COMPLAIN_EVERY = 10.0  # seconds between log lines while no connection can be taken

Kind = Literal["admin", "cluster"]
Scope = dict[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


@attrs.frozen
class Peer:
    """Who is at the other end of a connection.

    *kind*: ``certificate`` a verified client certificate · ``unix`` a local process, vouched for by the kernel ·
    ``loopback`` somebody on this machine · ``network`` nobody known. *name*: what logs show and `Door.revoke` takes:
    the certificate's common name, ``uid:1000``, or the address. *node*: node id, where it is a node's certificate.
    *serial*: of the certificate, lower-case hex. *expires*: of the certificate, seconds since 1970.
    """

    kind: Literal["certificate", "unix", "loopback", "network"]
    name: str
    address: str
    node: str = ""
    serial: str = ""
    expires: float = math.inf
    uid: int = -1


class _Refused(Exception):
    """This peer is not let in; the text is for the log."""


@attrs.define(eq=False)
class _Connection:
    sock: trio.socket.SocketType
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    peer: Peer | None = None

    def abort(self, why: str) -> None:
        """Close at once. Cancelling alone is not enough: hypercorn shields its writes."""
        self.scope.cancel(why)
        self.sock.close()


class Door:
    """One port with *app* (ASGI) behind it. *tls* gives the context for each new connection; None: plain."""

    def __init__(self, app: App, *, kind: Kind, world: World, tls: Callable[[], ssl.SSLContext] | None = None) -> None:
        self.kind = kind
        self._app = app
        self._world = world
        self._tls = tls
        self._connections: set[_Connection] = set()
        self._revoked: set[str] = set()
        self._context = WorkerContext(None)
        self._config = _config()
        self._accepting = trio.CancelScope()
        self._linger = trio.CancelScope()
        self._empty = trio.Event()
        self._complained = -math.inf

    @property
    def connections(self) -> int:
        return len(self._connections)

    async def run(  # noqa: ASYNC114 (asks that every name of a starter is listed in a command line)
        self, sockets: list[socket.socket], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve the listening *sockets*, which the door owns from here on, until drained or closed.

        Once: a closed door stays closed. Raises OSError if a listening socket breaks.
        """
        listeners = [trio.socket.from_stdlib_socket(s) for s in sockets]
        try:
            async with trio.open_nursery() as handlers:
                try:
                    with self._accepting:
                        async with trio.open_nursery() as nursery:
                            for listener in listeners:
                                nursery.start_soon(self._accept, listener, handlers)
                            task_status.started()
                    for listener in listeners:
                        listener.close()
                    await self._context.terminated.set()  # hypercorn: close idle connections, keep-alive is over
                    with self._linger:
                        while self._connections:
                            await self._empty.wait()
                finally:
                    for connection in list(self._connections):
                        connection.abort("the door is closed")
        finally:
            for listener in listeners:
                listener.close()

    def drain(self, grace: float) -> None:
        """Accept no more; requests under way have *grace* seconds, then their connections are closed by force."""
        self._linger.deadline = min(self._linger.deadline, trio.current_time() + grace)
        self._accepting.cancel("draining")

    def close(self) -> None:
        """Accept no more and close every connection now."""
        self.drain(0)
        for connection in list(self._connections):
            connection.abort("the door is closed")

    def revoke(self, identity: str) -> int:
        """Refuse a peer by its name or its certificate's serial from now on; how many connections were closed."""
        self._revoked.add(identity)
        cut = [c for c in self._connections if c.peer is not None and identity in (c.peer.name, c.peer.serial)]
        for connection in cut:
            connection.abort("revoked")
        return len(cut)

    def pardon(self, identity: str) -> None:
        """Undo `revoke`: a node joined anew, or a revoked certificate has expired."""
        self._revoked.discard(identity)

    async def _accept(self, listener: trio.socket.SocketType, handlers: trio.Nursery) -> None:
        while True:
            try:
                sock, _ = await listener.accept()
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                if error.errno not in OUT_OF_HANDLES:
                    raise
                self._complain(f"cannot accept: {error.strerror}; raise the limit of open files")
                await trio.sleep(0.1)
                continue
            if len(self._connections) >= MAX_CONNECTIONS:
                self._complain(f"has {MAX_CONNECTIONS} connections and refuses more")
                sock.close()
                continue
            connection = _Connection(sock)
            self._connections.add(connection)
            handlers.start_soon(self._serve, connection)

    def _complain(self, what: str) -> None:
        """One line for a flood of the same."""
        now = trio.current_time()
        if now - self._complained >= COMPLAIN_EVERY:
            self._complained = now
            log.error("%s port %s", self.kind, what)

    async def _serve(self, connection: _Connection) -> None:
        try:
            with connection.scope:
                stream = await self._handshake(connection)
                peer = connection.peer
                assert peer is not None
                async with trio.open_nursery() as nursery:
                    if peer.expires < math.inf:
                        nursery.start_soon(self._expire, connection, peer)
                    server = TCPServer(
                        _named(self._app, peer),
                        self._config,
                        self._context,
                        ConnectionState(LifespanState({})),
                        stream,  # type: ignore[arg-type]
                    )
                    await server.run()
                    nursery.cancel_scope.cancel()
        except _Refused as refused:
            log.info("%s port: %s", self.kind, refused)
        except Exception:
            # One connection's failure ends that connection. What an aborted socket provokes is no news.
            if not connection.scope.cancel_called:
                log.exception("%s port: a connection broke", self.kind)
        finally:
            connection.sock.close()
            self._connections.discard(connection)
            if not self._connections:
                self._empty.set()
                self._empty = trio.Event()

    async def _handshake(self, connection: _Connection) -> trio.abc.Stream:
        """The stream for hypercorn, with `connection.peer` set. Raises _Refused."""
        plain = trio.SocketStream(connection.sock)
        peer = _peer_of_socket(connection.sock)
        stream: trio.abc.Stream = plain
        if self._tls is not None:
            secure = trio.SSLStream(plain, self._tls(), server_side=True, https_compatible=True)
            try:
                with trio.fail_after(HANDSHAKE):
                    await secure.do_handshake()
            except trio.TooSlowError:
                raise _Refused(f"{peer.address}: no TLS handshake within {HANDSHAKE:.0f} s") from None
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise _Refused(f"{peer.address}: TLS handshake failed: {error.__cause__ or error}") from None
            stream = secure
            der = secure.getpeercert(binary_form=True)
            if der is not None:
                peer = self._peer_of_certificate(der, peer.address)
        if not self._revoked.isdisjoint((peer.name, peer.serial)):
            raise _Refused(f"{peer.address}: {peer.name} is revoked")
        connection.peer = peer
        return stream

    def _peer_of_certificate(self, der: bytes, address: str) -> Peer:
        holder = holder_of(x509.load_der_x509_certificate(der))
        if holder is None:
            raise _Refused(f"{address}: the client certificate is not one that llmgw issues")
        if holder.expires <= self._world.wall():
            raise _Refused(f"{address}: the certificate of {holder.name} has expired")
        return Peer("certificate", holder.name, address, holder.node, holder.serial, holder.expires)

    async def _expire(self, connection: _Connection, peer: Peer) -> None:
        while (left := peer.expires - self._world.wall()) > 0:  # noqa: ASYNC110 (waits for a date)
            await trio.sleep(min(left, CLOCK_STEP))
        log.info("%s port: the certificate of %s has expired, closing its connection", self.kind, peer.name)
        connection.abort("certificate expired")


def _config() -> Config:
    config = Config()
    config.errorlog = logging.getLogger("llmgw.doors.http")
    config.accesslog = None
    config.include_server_header = False
    config.keep_alive_timeout = IDLE
    config.h11_max_incomplete_size = MAX_HEAD
    return config


def _named(app: App, peer: Peer) -> Any:
    """*app* as hypercorn calls it, with the peer in its scope."""

    async def named(
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
        _spawn: object,
        _soon: object,
    ) -> None:
        await app({**scope, "state": {**scope.get("state", {}), "peer": peer}}, receive, send)

    return named


def _peer_of_socket(sock: trio.socket.SocketType) -> Peer:
    if sock.family == socket.AF_UNIX:
        _pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return Peer("unix", f"uid:{uid}", f"unix uid:{uid}", uid=uid)
    try:
        host, port, *_ = sock.getpeername()
    except OSError as error:
        raise _Refused(f"a peer left before it was served: {error.strerror}") from None
    mapped = str(host).removeprefix("::ffff:")
    local = mapped == "::1" or mapped.startswith("127.")
    shown = f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    return Peer("loopback" if local else "network", mapped, shown)
