"""The control plane of one server, put together: store, loop, cluster port, and what the admin port shows of it.

    off (no `cluster` in the configuration) │ store opened ──► loop; as soon as there is an authority: cluster port

A store or a port that cannot be used ends the start, with the reason. Later troubles end nothing: requests go on.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from llmgw.config import ClusterConfig, ModelPolicy, Server, StoreConfig
from llmgw.control.state import Settings
from llmgw.errors import ConfigError, Problem, Unavailable
from llmgw.logs import Log
from llmgw.net.tls import client_context
from llmgw.net.world import Unix, World, parse_address
from llmgw.pki.folder import Identity, load_identity
from llmgw.pki.issue import create_token, revoke
from llmgw.server.cluster import Cluster
from llmgw.server.control import Control
from llmgw.server.control_api import ControlApi, Write
from llmgw.server.fleet import Fleet
from llmgw.stores.base import Store
from llmgw.stores.etcd import open_etcd
from llmgw.stores.memory import MemoryStore
from llmgw.stores.sqlite import SqliteStore, open_sqlite

LOOK = 2.0  # seconds between looks for a certificate authority, while there is none
RETRY = 1.0  # seconds while the store cannot say who is revoked
NAME_SECONDS = 5.0  # for the resolver to tell the host's full name
CHUNK = 256 << 10  # bytes of a copy of the store at once

OFF = "This server has no control plane; start it with --state DIR, or `cluster:` in its configuration."


class ControlPlane:
    """*policies*: the routing policies in force, by model; the catalogue's are put there."""

    def __init__(self, config: Server, world: World, log: Log, fleet: Fleet, policies: dict[str, ModelPolicy]) -> None:
        self._config, self._world, self._log = config, world, log
        load = fleet.router.ledger.counts
        cluster = config.cluster or ClusterConfig()
        settings = Settings(
            heartbeat=cluster.heartbeat, lost_after=cluster.lost_after, reschedule_after=cluster.reschedule_after
        )
        self.control = Control(world, log, fleet, lambda endpoint: load(endpoint)[0], policies, settings)
        self.api = ControlApi(self.control, config, world.wall, lambda: list(fleet.places.values()))
        self.api.off = OFF
        self.address = ""  # of the cluster port, as bound; "" = it is not open

    def key_of(self, reference: str) -> str | None:
        """The key of a replica's engine, if *reference* is one."""
        return self.control.keys.get(reference)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Raises ConfigError, StoreError (CannotOpen) before it has started."""
        cluster = self._config.cluster
        if cluster is None:
            task_status.started()
            return
        identity = Path(cluster.state) / "identity"
        async with (
            _open(self._config.store or StoreConfig(), cluster, self._world) as store,
            trio.open_nursery() as nursery,
        ):
            port = await self._prepare(cluster, identity, store) if (identity / "root.pem").exists() else None
            self.api.off = ""
            if isinstance(store, SqliteStore):
                self.api.copy = partial(_copy, store, Path(cluster.state))
            name = self.address or f"{socket.gethostname()} (no cluster port yet)"
            nursery.start_soon(self.control.run, store, name)
            task_status.started()
            while port is None:
                await trio.sleep(LOOK)
                if (identity / "root.pem").exists():
                    try:
                        port = await self._prepare(cluster, identity, store)
                    except ConfigError as error:
                        self._log.event("cluster_port_closed", "error", why=str(error))
            await self._serve(*port)

    async def _prepare(self, cluster: ClusterConfig, folder: Path, store: Store) -> tuple[Cluster, list[socket.socket]]:
        """The cluster port, listening. Raises ConfigError."""
        identity = load_identity(folder)
        names = list(cluster.names) or await _names()
        address = parse_address(cluster.address)
        try:
            sockets = await self._world.listen(address)
        except OSError as error:
            text = f"the cluster port cannot listen on {cluster.address}: {error.strerror or error}"
            raise ConfigError([Problem(text)]) from error
        port = cluster.address if isinstance(address, Unix) else str(sockets[0].getsockname()[1])
        self.address = port if isinstance(address, Unix) else f"{names[0]}:{port}"
        self.api.authority = _Authority(store, identity, self._world, self.address)
        made = Cluster(self._world, store, identity, names, self.api.agent_routes())
        self._log.event("cluster_port", address=self.address, names=names)
        return made, sockets

    async def _serve(self, cluster: Cluster, sockets: list[socket.socket]) -> None:
        while True:
            try:
                await cluster.run(sockets)
            except* Unavailable as error:
                self._log.event("cluster_port_closed", "error", why=str(error.exceptions[0]))
                await trio.sleep(RETRY)
            else:
                return


class _Authority:
    """Tokens and revocation, for the admin port."""

    def __init__(self, store: Store, identity: Identity, world: World, address: str) -> None:
        self._store, self._identity, self._world, self._address = store, identity, world, address

    async def token(self, node: str, pool: str, life: float) -> dict[str, Any]:
        """Raises ConfigError."""
        now = self._world.wall()
        made = await create_token(self._store, self._identity, now, node=node, pool=pool, life=life)
        return {
            "id": made.id,
            "token": made.text(),
            "node": node,
            "pool": pool,
            "expires": now + life,
            "server": self._address,
        }

    async def revoke(self, node: str) -> None:
        """Raises Denied."""
        await revoke(self._store, node, self._world.wall())


@asynccontextmanager
async def _open(config: StoreConfig, cluster: ClusterConfig, world: World) -> AsyncIterator[Store]:
    """Raises CannotOpen, ConfigError."""
    if config.kind == "memory":
        yield MemoryStore()
    elif config.kind == "sqlite":
        path = Path(config.path) if config.path else Path(cluster.state) / "store.db"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            text = f"the folder of the store cannot be made: {error.strerror or error}; give another with --state"
            raise ConfigError([Problem(text, file=str(path.parent))]) from error
        async with open_sqlite(path) as file:
            yield file
    else:
        paths = [None if name is None else Path(name) for name in (config.ca_file, config.cert_file, config.key_file)]
        secure = any(e.startswith("https:") for e in config.endpoints)
        tls = client_context(now=world.wall(), ca=paths[0], cert=paths[1], key=paths[2]) if secure else None
        async with open_etcd(config.endpoints, tls=tls) as remote:
            yield remote


async def _copy(store: SqliteStore, folder: Path, write: Write) -> None:
    """A consistent copy of the store, in pieces. It lies in the server's own folder meanwhile, readable by nobody else."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".backup-") as place:
        path = Path(place) / "store.db"
        await store.backup(path)
        async with await trio.open_file(path, "rb") as file:
            while part := await file.read(CHUNK):
                await write(part)


async def _names() -> list[str]:
    """What this host is probably reached by, best first."""
    found = [socket.gethostname()]
    with trio.move_on_after(NAME_SECONDS):  # a broken resolver must not keep the server from starting
        found.append(await trio.to_thread.run_sync(socket.getfqdn, abandon_on_cancel=True))
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))  # asks the routing table; nothing is sent
                found.append(str(probe.getsockname()[0]))
            except OSError:
                pass
    return list(dict.fromkeys([*found, "localhost", "127.0.0.1", "::1"]))
