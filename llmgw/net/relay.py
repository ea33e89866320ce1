"""The moving end put together: listener, connection tasks, driver, pool, timers, and the mover's side of the seam.

    nursery of `run`
    ├── driver (pump or tasks), timers, pool sweep          end last
    └── handlers nursery
        ├── accept loop a listening socket                   cancelled first, by `drain`
        └── one task a connection: its exchange's home       a nursery ties each stream to its client

A connection's task sleeps; it is woken for what must wait (a dial) and for its end. All else happens in the driver.
"""

from __future__ import annotations

import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Literal, Protocol

import trio

from llmgw.net import http1, secure
from llmgw.net.channel import Channel
from llmgw.net.exchange import Exchange, State
from llmgw.net.pool import IDLE_SECONDS, Pool
from llmgw.net.proxied import SECONDS, Proxies, read_header
from llmgw.net.proxied import Malformed as NotProxied
from llmgw.net.pump import Pump
from llmgw.net.tasks import Tasks
from llmgw.net.timers import Timers
from llmgw.net.tls import client_context, host_name
from llmgw.net.world import World, nodelay, parse_address
from llmgw.openai import peek
from llmgw.request import Brain, Failure, InferenceRequest, Lease, LegMover, Page, Refusal, Target

if TYPE_CHECKING:
    from llmgw.config import ClientLimits, Listener

ACCEPTS = 64
"""Connections accepted in one go, before the tasks of those accepted get their turn."""

FULL_SECONDS = 0.05
"""Pause of the accept loop when descriptors or memory ran out: short for clients, long enough not to spin."""

OUT_OF_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

log = logging.getLogger("llmgw.net")


def _no_gaps(_: str) -> Callable[[float], None]:
    return _ignore


def _ignore(_: float) -> None:
    return None


def _log_bug(request_id: str, error: BaseException) -> None:
    log.error("bug while request %s was served", request_id or "-", exc_info=error)


class Legs(Protocol):
    """Who performs pipelines: `llmgw.server.pipeline`. *strips*: all requests go through pipelines that take out what
    aims an engine. *all_headers*: a gateway gets to see the client's headers."""

    @property
    def strips(self) -> bool: ...

    @property
    def all_headers(self) -> bool: ...

    def begin(
        self,
        ticket: int,
        request: InferenceRequest,
        head: http1.RequestHead,
        body: bytes | bytearray,
        mover: LegMover,
    ) -> None:
        """Start; `mover.granted(ticket, …)` follows, at once or later."""
        ...


class Relay:
    """Serves one listener's clients. It is the exchanges' `Host` and the brain's `Mover`.

    *connections*: most at once; further ones wait in the kernel's backlog. *gaps*: where inter-token gaps of a model's
    streams go. *bug*: gets tracebacks.
    """

    def __init__(
        self,
        world: World,
        brain: Brain,
        *,
        limits: ClientLimits,
        listener: Listener,
        driver: Literal["pump", "tasks"] = "pump",
        gaps: Callable[[str], Callable[[float], None]] = _no_gaps,
        bug: Callable[[str, BaseException], None] = _log_bug,
        several: Legs | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        engine_tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """*several*: who performs pipelines, where the brain asks for one. *tls*: the context for each new client; None
        = plain. *engine_tls*: for https endpoints; None = a context that trusts what this machine trusts."""
        self.world = world
        self.brain = brain
        self.rng = world.rng
        self._several = several
        self._exchanges: set[Exchange] = set()
        self._greeting = 0  # connections whose PROXY header has not come yet
        self.configure(limits, listener)
        self.draining = False
        self.gaps = gaps
        self.bug = bug
        self._driver: Pump | Tasks = Pump() if driver == "pump" else Tasks()
        self.clock = self._driver
        self._pool = Pool()
        self._timers = Timers()
        self._tickets: dict[int, Exchange] = {}
        self._prefixes: dict[str, str] = {}
        self._accepting = trio.CancelScope()
        self._room: trio.Event | None = None
        self._tls = tls
        self._engine_tls = engine_tls or _trusting(world)
        self.soon = self._driver.soon
        self.schedule = self._timers.schedule

    def configure(self, limits: ClientLimits, listener: Listener) -> None:
        """What clients may do from their next request on."""
        several = self._several
        self.limits = limits
        self.read_request = http1.RequestReader(
            field_count=limits.header_count,
            forward=http1.TO_ENGINE | {name.lower().encode("ascii") for name in listener.forward_headers},
            keep=bool(listener.trusted_proxies) or (several is not None and several.all_headers),
            internal=listener.internal,
        )
        self.internal = listener.internal
        self.bands = listener.bands
        self.strips = not listener.internal and several is not None and several.strips
        self.allow = peek.Allow(
            priority=listener.allow_priority or listener.internal, transfer=self.strips or listener.internal
        )
        self.half_close = listener.half_close == "allow"
        self.proxies = Proxies(listener.trusted_proxies) if listener.trusted_proxies else None
        self._proxy_header = listener.proxy_protocol
        for exchange in self._exchanges:
            exchange.read_afresh()

    # -- what the shell sees ----------------------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        return len(self._exchanges)

    @property
    def inflight(self) -> int:
        """Requests under way, queued ones included."""
        return sum(State.BODY <= e.state <= State.FLUSHING for e in self._exchanges)

    @property
    def registered(self) -> int:
        """Sockets that the driver holds: clients and engines, idle ones too."""
        return self._driver.registered

    @property
    def idle_upstreams(self) -> int:
        return len(self._pool)

    async def run(
        self, sockets: Sequence[socket.socket], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve *sockets* (owned from now on) until drained or cancelled."""
        try:
            async with trio.open_nursery() as outer:
                await outer.start(self._driver.run)
                outer.start_soon(self._timers.run)
                outer.start_soon(self._sweep)
                try:
                    async with trio.open_nursery() as handlers:
                        handlers.start_soon(self._accept, tuple(sockets), handlers)
                        task_status.started()
                finally:
                    for exchange in tuple(self._exchanges):
                        exchange.hang_up()
                    self._pool.close()
                outer.cancel_scope.cancel("the last connection has ended")
        finally:
            for sock in sockets:
                sock.close()

    def drain(self) -> None:
        """Stop accepting, end idle connections, let requests finish: `run` returns after the last one."""
        self.draining = True
        self._accepting.cancel("draining")
        for exchange in tuple(self._exchanges):
            if exchange.state in (State.IDLE, State.LINGERING):
                exchange.abandon(_DRAINED)

    def close(self) -> None:
        """End every request now: with an error event, an error answer, or a cut, as its state allows."""
        self.drain()
        for exchange in tuple(self._exchanges):
            exchange.abandon(_DRAINED)

    # -- the mover's side of the seam -------------------------------------------------------------------------------------

    def granted(self, ticket: int, answer: Lease | Refusal | Page) -> None:
        exchange = self._tickets.pop(ticket, None)
        if exchange is None:
            return  # withdrawn: the brain has been told
        self._now()
        try:
            exchange.granted(answer)
        except Exception as error:
            exchange.crashed(error)

    def abandon(self, lease: int, refusal: Refusal) -> None:
        for exchange in tuple(self._exchanges):
            if exchange.lease is not None and exchange.lease.id == lease:
                self._now()
                exchange.abandon(refusal)
                return

    def recall(self, lease: int, failure: Failure) -> bool:
        for exchange in tuple(self._exchanges):
            if exchange.lease is not None and exchange.lease.id == lease:
                self._now()
                return exchange.recall(failure)
        return False

    # -- the exchanges' host ----------------------------------------------------------------------------------------------

    def _now(self) -> None:
        """Called from outside the driver: its time may be old."""
        self._driver.now = trio.current_time()

    def take(self, target: Target) -> Channel | None:
        return self._pool.take(target.endpoint, self._driver.now)

    def give(self, target: Target, channel: Channel) -> None:
        if self.draining:
            channel.close()
        else:
            self._pool.give(target.endpoint, channel, self._driver.now)

    def waiting(self, ticket: int, exchange: Exchange) -> None:
        self._tickets[ticket] = exchange

    def forget(self, ticket: int) -> None:
        self._tickets.pop(ticket, None)

    def several(self, ticket: int, request: InferenceRequest, head: http1.RequestHead, body: bytes | bytearray) -> None:
        assert self._several is not None, "the brain asks for pipelines, and nobody performs them"
        self._several.begin(ticket, request, head, body, self)

    def dial(self, exchange: Exchange, lease: Lease) -> None:
        exchange.job = lease
        self._wake(exchange)

    def undial(self, exchange: Exchange) -> None:
        job, exchange.job = exchange.job, None
        if isinstance(job, trio.CancelScope):
            job.cancel("the request has ended")

    def ended(self, exchange: Exchange) -> None:
        self._exchanges.discard(exchange)
        exchange.job = None
        self._wake(exchange)
        if self._room is not None:
            self._room.set()

    def _wake(self, exchange: Exchange) -> None:
        task, exchange.task = exchange.task, None
        if isinstance(task, trio.lowlevel.Task):
            trio.lowlevel.reschedule(task)

    # -- tasks ------------------------------------------------------------------------------------------------------------

    async def _accept(self, sockets: tuple[socket.socket, ...], handlers: trio.Nursery) -> None:
        with self._accepting:
            async with trio.open_nursery() as nursery:
                for sock in sockets:
                    nursery.start_soon(self._accept_from, sock, handlers)
        for sock in sockets:
            trio.lowlevel.notify_closing(sock)
            sock.close()

    async def _accept_from(self, listener: socket.socket, handlers: trio.Nursery) -> None:
        while True:
            await trio.lowlevel.wait_readable(listener)
            for _ in range(ACCEPTS):
                while (most := self.limits.connections) is not None and len(self._exchanges) + self._greeting >= most:
                    self._room = trio.Event()
                    await self._room.wait()
                try:
                    sock, address = listener.accept()
                except BlockingIOError:
                    break
                except OSError as error:
                    if error.errno in OUT_OF_RESOURCES:
                        log.warning("cannot accept a connection: %s; raise the limit of open files", error)
                        await trio.sleep(FULL_SECONDS)
                    continue  # else the client is gone already (ECONNABORTED and its kin)
                try:
                    sock.setblocking(False)
                    nodelay(sock)
                except OSError:  # gone before we looked
                    sock.close()
                    continue
                peer = str(address[0]) if isinstance(address, tuple) and address else ""
                if self._proxy_header:
                    self._greeting += 1
                    handlers.start_soon(self._greet, sock, peer, handlers)
                else:
                    self._welcome(sock, peer, handlers)

    async def _greet(self, sock: socket.socket, peer: str, handlers: trio.Nursery) -> None:
        """Let a load balancer say whom it stands for; a stranger that claims to be one is sent away."""
        client = None
        try:
            if self.proxies is not None and self.proxies.trusts(peer):
                with trio.move_on_after(SECONDS):
                    client = await read_header(sock) or peer
        except (NotProxied, OSError) as error:
            log.info("no PROXY header from %s: %s", peer or "a Unix socket", error)
        finally:
            self._greeting -= 1
            if client is None or self.draining:
                sock.close()
                if self._room is not None:
                    self._room.set()
            else:
                self._welcome(sock, client, handlers)

    def _welcome(self, sock: socket.socket, peer: str, handlers: trio.Nursery) -> None:
        self._now()
        if self._tls is None:
            channel = Channel(sock, self._driver, peer)
        else:
            channel = secure.serve(sock, self._driver, peer, self._tls())
        exchange = Exchange(self, channel, peer)
        self._exchanges.add(exchange)
        self._driver.attach(channel)
        handlers.start_soon(self._connection, exchange)

    async def _connection(self, exchange: Exchange) -> None:
        def cancelled(_: object) -> trio.lowlevel.Abort:
            exchange.task = None  # trio wakes it: nobody else may. Runs inside any handler, since `cancel` calls it
            return trio.lowlevel.Abort.SUCCEEDED

        try:
            while exchange.state is not State.CLOSED:
                lease = exchange.job
                if isinstance(lease, Lease):
                    await self._dial(exchange, lease)
                else:
                    exchange.task = trio.lowlevel.current_task()
                    await trio.lowlevel.wait_task_rescheduled(cancelled)
        finally:
            exchange.task = None
            exchange.hang_up()

    async def _dial(self, exchange: Exchange, lease: Lease) -> None:
        answer: Channel | str = f"no connection within {lease.limits.connect:g} s"
        with trio.move_on_after(lease.limits.connect) as scope:
            exchange.job = scope
            try:
                answer = await self._connect(lease.target)
            except ssl.SSLError as error:
                answer = f"TLS: {error.reason or error}"
            except OSError as error:
                answer = str(error)
            else:
                self._driver.attach(answer)
        if exchange.job is not scope:  # undialled meanwhile, or the next request's dial has been asked for
            if isinstance(answer, Channel):
                answer.close()
            return
        exchange.job = None
        self._now()
        try:
            exchange.dialled(answer)
        except Exception as error:
            exchange.crashed(error)

    async def _connect(self, target: Target) -> Channel:
        sock = await self.world.dial(parse_address(target.address.removeprefix("tcp:")))
        if not target.tls:
            return Channel(sock, self._driver, target.name)
        try:
            return await secure.connect(sock, self._driver, target.name, self._engine_tls(), host_name(target.host))
        except BaseException:
            sock.close()
            raise

    async def _sweep(self) -> None:
        while True:
            await trio.sleep(IDLE_SECONDS)
            self._pool.sweep(trio.current_time())


def _trusting(world: World) -> Callable[[], ssl.SSLContext]:
    return cache(lambda: client_context(now=world.wall()))


_DRAINED = Refusal(reason="draining", message="this server is shutting down; try again")
