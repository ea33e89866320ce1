"""`llmgw server`, put together: log, probes, admin port, client port. Starts in that order, ends in the reverse one.

    starting ──listening──► serving ──drain()──► draining ──last request, or `timeouts.drain`──► forced ──► ended
                               └───────────────────────close()───────────────────────────────────►┘

- Draining: `/readyz` is 503, nothing is accepted, idle connections are closed, requests under way go on.
- Forced: streams under way get an error event, others a 503; LINGER later what is left is cut.
- The admin port stays until the end, so that one can watch.
"""

from __future__ import annotations

import gc
import logging
import resource
import signal
import socket
import ssl
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import trio

from llmgw import __version__, logs
from llmgw.config import Server
from llmgw.errors import ConfigError, Problem
from llmgw.logs import Handler, Log
from llmgw.metrics import Metrics
from llmgw.net.client import Client
from llmgw.net.doors import Door
from llmgw.net.media import MediaClient
from llmgw.net.relay import Relay
from llmgw.net.tls import client_context, server_context
from llmgw.net.world import Unix, World, parse_address
from llmgw.routing.profiles import profiles
from llmgw.routing.router import Router
from llmgw.server.admin import Admin
from llmgw.server.brain import Brain
from llmgw.server.control_plane import ControlPlane
from llmgw.server.fleet import Fleet
from llmgw.server.kv_events import Subscriber
from llmgw.server.pipeline import Pipelines
from llmgw.server.probes import Prober
from llmgw.server.reload import merge
from llmgw.server.scrapes import Scraper

RESERVE = 256  # descriptors that clients never get: log, admin port, store, probes, and what libraries open
LINGER = 2.0  # seconds for error events to reach clients
ADMIN_GRACE = 1.0  # seconds for a request on the admin port when all else has ended

GC_THRESHOLDS = (50_000, 20, 100)
"""A relay makes little garbage in cycles; the default (700) looks for it after every few requests."""


class Gateway:
    """One server. `run` once."""

    def __init__(self, config: Server, world: World, log_target: logs.Target) -> None:
        """Raises ConfigError for key files that cannot be read."""
        self._own_models = frozenset(config.models)
        self._policies = policies = dict(config.models)  # the catalogue's come and go in it
        config = attrs.evolve(config, models=policies)
        self._config = config
        self._world = world
        self.log = Log(log_target, world.wall, requests=config.log.requests)
        self.metrics = Metrics()
        clock = trio.current_time
        self.fleet = Fleet(
            self.metrics,
            self.log,
            clock,
            failures=config.probe.failures,
            policies=policies,
            read_key=self._key,
            router=Router(world.rng.random, 0.0, config.routing.profiles),
        )
        _check_keys(config)
        self._certificates = _certificates(config, world)
        self._engine_tls = _engine_tls(config, world)
        self.brain = Brain(config, self.fleet, self.metrics, self.log, clock, created=world.wall())
        self.client = Client(world, tls=self._engine_tls)
        self.media = MediaClient(world)
        self.pipelines: Pipelines | None = None
        if config.pipelines:
            self.pipelines = self.brain.pipelines = Pipelines(
                config, self.fleet, self.client, self.media, self.log, clock, world.rng, self.brain
            )
            self.metrics.more.append(self.pipelines.families)
        self.plane = ControlPlane(config, world, self.log, self.fleet, policies)
        self._prober = Prober(self.fleet, self.client, config.probe, world.rng)
        self._scraper = Scraper(self.fleet, self.client, config.routing.scrape, world.rng)
        self._admin = Admin(self.brain, self.metrics, clock)
        limits = attrs.evolve(config.limits, connections=_connections(config))
        self.relays = [
            Relay(
                world,
                self.brain,
                limits=limits,
                listener=listener,
                driver=config.driver,
                gaps=lambda model: self.metrics.itl(model).observe,
                bug=self._bug,
                several=self.pipelines,
                tls=self._certificate(index) if listener.tls else None,
                engine_tls=lambda: self._engine_tls,
            )
            for index, listener in enumerate(config.listeners)
        ]
        self.brain.movers = self.relays
        self.addresses: list[str] = []  # of the client port, as bound
        self.admin_addresses: list[str] = []
        self._draining = trio.Event()
        self._forced = trio.Event()
        self._gauges()

    def _key(self, reference: str) -> str:
        """Of an endpoint, where `Endpoint.auth` says that it is. Raises OSError."""
        known = self.plane.key_of(reference)
        return _read_key(reference) if known is None else known

    def _certificate(self, index: int) -> Callable[[], ssl.SSLContext]:
        return lambda: self._certificates[index]

    def reload(self, config: Server) -> None:
        """Serve as *config* says from now on, as far as that is possible without a restart; see `llmgw.server.reload`.

        Endpoints that stay keep health and ledger, streams go on. Raises ConfigError, and then nothing has changed.
        """
        config, waits = merge(self._config, config)
        _check_keys(config)
        certificates, engine_tls = _certificates(config, self._world), _engine_tls(config, self._world)
        own_profiles = profiles(config.routing.profiles)
        catalogued = {name: policy for name, policy in self._policies.items() if name not in self._own_models}
        self._own_models = frozenset(config.models)
        self._policies.clear()
        self._policies.update(catalogued | config.models)
        self.plane.control.own(self._own_models)
        self._config = config = attrs.evolve(config, models=self._policies)
        self._certificates, self._engine_tls = certificates, engine_tls
        self.client.configure(engine_tls)
        self.fleet.router.profiles = own_profiles
        self.brain.configure(config)
        if self.pipelines is not None:
            self.pipelines.configure(config)
        limits = attrs.evolve(config.limits, connections=_connections(config))
        for relay, listener in zip(self.relays, config.listeners, strict=True):
            relay.configure(limits, listener)
        self.fleet.replace("static", tuple(e.endpoint() for e in config.endpoints))
        self.log.event("reloaded", endpoints=len(config.endpoints), waiting=list(waits))

    def _gauges(self) -> None:
        self.metrics.clock = trio.current_time
        gauges, counters = self.metrics.gauges, self.metrics.counters
        gauges["llmgw_connections"] = ("Client connections.", lambda: sum(r.connections for r in self.relays))
        gauges["llmgw_inflight"] = ("Requests under way.", lambda: sum(r.inflight for r in self.relays))
        gauges["llmgw_ready"] = ("1 if an endpoint can serve.", lambda: self.brain.ready)
        counters["llmgw_log_lines_lost"] = ("Lines that the log's reader was too slow for.", lambda: self.log.dropped)

    def _bug(self, request_id: str, error: BaseException) -> None:
        self.metrics.bugs += 1
        text = "".join(traceback.format_exception(error))
        self.log.event("bug", "error", request_id=request_id, message=str(error), exception=text)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until drained or cancelled. Started when all ports listen.

        Raises ConfigError for addresses that cannot be listened on: all of them.
        """
        sockets = await self._listen()
        try:
            async with trio.open_nursery() as services:
                await services.start(self.log.run)
                self.fleet.replace("static", tuple(e.endpoint() for e in self._config.endpoints))
                await services.start(self._prober.run)
                await services.start(self.brain.admission.run)
                await services.start(Subscriber(self.fleet, self.fleet.router.affinity.exact, self.log).run)
                if self._config.routing.scrape.interval:
                    await services.start(self._scraper.run)
                await services.start(self.plane.run)
                doors = [Door(self._app(), kind="admin", world=self._world) for _ in sockets["admin"]]
                for door, socks in zip(doors, sockets["admin"], strict=True):
                    await services.start(door.run, socks)
                if self.pipelines is not None:
                    await services.start(self.media.run)
                    await services.start(self.pipelines.run)
                async with trio.open_nursery() as clients:
                    clients.start_soon(self._force_later, clients.cancel_scope)
                    async with trio.open_nursery() as relays:
                        for relay, socks in zip(self.relays, sockets["clients"], strict=True):
                            await relays.start(relay.run, socks)
                        self.log.event(
                            "started", version=__version__, listen=self.addresses, admin=self.admin_addresses
                        )
                        task_status.started()
                    clients.cancel_scope.cancel("all requests have ended")
                self.log.event("stopped")
                for door in doors:
                    door.drain(ADMIN_GRACE)
                services.cancel_scope.cancel("stopped")
        finally:
            self.client.close()
            for socks in (*sockets["admin"], *sockets["clients"]):
                for sock in socks:
                    sock.close()
            self._unlink()

    def _app(self) -> Any:
        hosts = set(self._config.admin.hosts)
        hosts |= {a.rpartition(":")[0].lower() for a in self.admin_addresses if not a.startswith("unix:")}
        return self._admin.app(hosts - {"", "0.0.0.0", "[::]"}, self.plane.api.routes())

    async def _listen(self) -> dict[str, list[list[socket.socket]]]:
        found: dict[str, list[list[socket.socket]]] = {"clients": [], "admin": []}
        problems: list[Problem] = []
        wanted = [("clients", one.address) for one in self._config.listeners]
        wanted += [("admin", address) for address in self._config.admin.addresses]
        for port, address in wanted:
            try:
                socks = await self._world.listen(parse_address(address))
            except OSError as error:
                problems.append(Problem(f"cannot listen on {address}: {error.strerror or error}"))
                continue
            found[port].append(socks)
            shown = self.addresses if port == "clients" else self.admin_addresses
            shown.append(_bound(address, socks))
        if problems:
            for sock in (s for ports in found.values() for socks in ports for s in socks):
                sock.close()
            raise ConfigError(problems)
        return found

    def _unlink(self) -> None:
        """Socket files are ours, and go with us."""
        for text in (*self.addresses, *self.admin_addresses):
            address = parse_address(text)
            if isinstance(address, Unix) and not address.path.startswith("\0"):
                Path(address.path).unlink(missing_ok=True)

    async def wait_serving(self, count: int = 1) -> None:
        """Until *count* endpoints can serve. For demos and tests: the caller sets the deadline."""
        while sum(1 for _ in self.fleet.serving()) < count:  # noqa: ASYNC110 -- nobody asks while requests run
            await trio.sleep(0.01)

    def drain(self) -> None:
        """Accept no more, let requests end, for `timeouts.drain` at most."""
        if self.brain.draining:
            return
        self.brain.draining = True
        self._draining.set()
        self.log.event("draining", requests=sum(r.inflight for r in self.relays), seconds=self._config.timeouts.drain)
        for relay in self.relays:
            relay.drain()

    def close(self) -> None:
        """End at once: what is under way gets an error."""
        self.drain()
        self._forced.set()

    async def _force_later(self, everything: trio.CancelScope) -> None:
        """After `close`, or `timeouts.drain` after `drain`."""
        await self._draining.wait()
        with trio.move_on_after(self._config.timeouts.drain):
            await self._forced.wait()
        cut = sum(r.inflight for r in self.relays)
        if cut:
            self.log.event("cutting", "warning", requests=cut)
        for relay in self.relays:
            relay.close()
        await trio.sleep(LINGER)
        everything.cancel("clients did not take their error in time")


def _bound(address: str, socks: list[socket.socket]) -> str:
    """*address* with the port that the kernel chose for port 0."""
    if address.startswith("unix:"):
        return address
    host = address.rpartition(":")[0]
    return f"{host}:{socks[0].getsockname()[1]}"


def _read_key(path: str) -> str:
    return Path(path).read_text(encoding="utf-8").strip()


def _check_keys(config: Server) -> None:
    problems = []
    for i, one in enumerate(config.endpoints):
        if one.api_key_file:
            try:
                key = _read_key(one.api_key_file)
                wrong = "" if key and key.isprintable() and " " not in key else "holds no key: one line, no spaces"
            except OSError as error:
                wrong = f"cannot be read: {error.strerror}"
            except UnicodeDecodeError:
                wrong = "holds no key: it is not text"
            if wrong:
                problems.append(Problem(f"{one.api_key_file} {wrong}", f"endpoints[{i}].api_key_file"))
    if problems:
        raise ConfigError(problems)


def _certificates(config: Server, world: World) -> dict[int, ssl.SSLContext]:
    """By the listener's position. Raises ConfigError with what is wrong with any."""
    found: dict[int, ssl.SSLContext] = {}
    problems: list[Problem] = []
    for index, one in enumerate(config.listeners):
        if one.tls is not None:
            try:
                found[index] = server_context(Path(one.tls.cert), Path(one.tls.key), now=world.wall())
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found


def _engine_tls(config: Server, world: World) -> ssl.SSLContext:
    return client_context(now=world.wall(), ca=Path(config.engine_ca) if config.engine_ca else None)


def _connections(config: Server) -> int:
    """Client connections of one listener: a client may need an engine's connection as well."""
    if config.limits.connections is not None:
        return config.limits.connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (OSError, ValueError):
        pass  # then with what there is
    reserve = RESERVE + 4 * len(config.endpoints)
    return max((soft - reserve) // 2 // len(config.listeners), 16)


async def _reload(gateway: Gateway, reread: Callable[[], Server]) -> None:
    """Keeps what is in force if the new configuration cannot be used."""
    try:
        gateway.reload(await trio.to_thread.run_sync(reread))
    except ConfigError as error:
        gateway.log.event("reload_refused", "error", problems=[str(p) for p in error.problems])


async def serve(
    config: Server,
    world: World,
    *,
    reread: Callable[[], Server] | None = None,
    task_status: trio.TaskStatus[Gateway] = trio.TASK_STATUS_IGNORED,
) -> None:
    """A whole process: as `Gateway.run`, with signals and the settings of the interpreter.

    SIGTERM and SIGINT drain; a second one ends at once. SIGHUP reloads what *reread* returns. Raises ConfigError.
    """
    target = logs.open_file(config.log.file) if config.log.file else logs.open_descriptor(1)
    try:
        gateway = Gateway(config, world, target)
    except BaseException:
        target.close()
        raise
    handler = Handler(gateway.log)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async with trio.open_nursery() as nursery:

                async def obey() -> None:
                    async for number in signals:
                        gateway.log.event("signal", signal=signal.Signals(number).name)
                        if number == signal.SIGHUP:
                            if reread is not None:
                                await _reload(gateway, reread)
                        elif gateway.brain.draining:
                            gateway.close()
                        else:
                            gateway.drain()

                nursery.start_soon(obey)
                async with trio.open_nursery() as inner:
                    await inner.start(gateway.run)
                    gc.collect()
                    gc.freeze()
                    gc.set_threshold(*GC_THRESHOLDS)
                    task_status.started(gateway)
                nursery.cancel_scope.cancel("the gateway has ended")
    finally:
        root.removeHandler(handler)
