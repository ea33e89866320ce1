"""The network of a rehearsal: hosts with names, and links that are slow, clogged or cut.

Every address is an abstract AF_UNIX one, so all is in this process and nothing depends on ports or on timing outside. Each
participant has a `HostWorld` of its own, which is what the gateway and the engines take for their surroundings.

A connection over a link that has, or will have, something the matter with it passes through a *wire*: two tasks that copy,
late by the link's latency, at most WINDOW bytes under way. All others are direct and cost nothing.
"""

from __future__ import annotations

import errno
import os
import random
import socket
from collections import deque
from itertools import count

import attrs
import trio

from llmgw.net.world import BACKLOG, Address, Tcp, connect

EPOCH = 1_767_225_600.0
"""Wall time at virtual time 0: the first of January 2026, UTC."""
WINDOW = 65536
"""Bytes on a wire: enough for any answer's events, and a sender that is not read stops soon."""

_networks = count()


@attrs.define(eq=False)
class Link:
    """Between one host and all others. *clogged*: nothing passes, nothing breaks."""

    latency: float = 0.0
    clogged: bool = False
    cut: bool = False
    changed: trio.Event = attrs.Factory(trio.Event)
    wired: bool = False  # its connections go through wires

    def change(self, *, latency: float | None = None, clogged: bool | None = None, cut: bool | None = None) -> None:
        self.latency = self.latency if latency is None else latency
        self.clogged = self.clogged if clogged is None else clogged
        self.cut = self.cut if cut is None else cut
        self.changed.set()
        self.changed = trio.Event()


class Network:
    """All hosts. *nursery* owns the wires."""

    def __init__(self, seed: int, nursery: trio.Nursery, latency: float = 0.0) -> None:
        self.seed = seed
        self.skew: dict[str, float] = {}  # seconds that a host's wall clock is ahead; "*": all hosts'
        self._nursery = nursery
        self._latency = latency
        self._links: dict[str, Link] = {}
        self._prefix = f"\0llmgw-rehearsal-{os.getpid()}-{next(_networks)}/"

    def host(self, name: str) -> HostWorld:
        return HostWorld(self, name)

    def link(self, host: str) -> Link:
        found = self._links.get(host)
        if found is None:
            found = self._links[host] = Link(self._latency, wired=bool(self._latency))
        return found

    def path(self, address: Address) -> str:
        """Where *address* really is."""
        return self._prefix + f"{address.host}:{address.port}" if isinstance(address, Tcp) else address.path

    def host_of(self, path: str) -> str:
        return path.removeprefix(self._prefix).rpartition(":")[0] if path.startswith(self._prefix) else ""

    async def dial(self, address: Address) -> socket.socket:
        path = self.path(address)
        link = self.link(self.host_of(path))
        if link.cut:
            raise OSError(errno.ECONNREFUSED, "the link is cut")
        far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            far.setblocking(False)
            await connect(far, path)
        except BaseException:
            far.close()
            raise
        if not link.wired:
            return far
        near, end = socket.socketpair()
        for sock in (near, end):
            sock.setblocking(False)
        self._nursery.start_soon(self._wire, end, far, link)
        return near

    async def _wire(self, one: socket.socket, two: socket.socket, link: Link) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_copy, one, two, link)
                nursery.start_soon(_copy, two, one, link)
                while not link.cut:
                    await link.changed.wait()
                nursery.cancel_scope.cancel("the link is cut")
        except* (OSError, _Over):
            pass
        finally:
            for sock in (one, two):
                trio.lowlevel.notify_closing(sock)
                sock.close()


class _Over(Exception):
    """One side of a wire has closed, and the other has been told."""


async def _copy(source: socket.socket, sink: socket.socket, link: Link) -> None:
    """One direction: what is read at t is written at t + latency, in order."""
    under_way: deque[tuple[float, bytes]] = deque()
    held = 0
    wake = trio.Event()
    room = trio.Event()

    async def read() -> None:
        nonlocal held, wake, room
        while True:
            while held >= WINDOW:
                room = trio.Event()
                await room.wait()
            await trio.lowlevel.wait_readable(source)
            try:
                data = source.recv(WINDOW - held)
            except BlockingIOError:
                continue
            under_way.append((trio.current_time() + link.latency, data))
            held += len(data)
            wake.set()
            if not data:
                return

    async def write() -> None:
        nonlocal held, wake
        while True:
            while not under_way:
                wake = trio.Event()
                await wake.wait()
            due, data = under_way.popleft()
            await trio.sleep_until(due)
            while link.clogged:
                await link.changed.wait()
            if not data:
                sink.shutdown(socket.SHUT_WR)
                raise _Over
            rest = memoryview(data)
            while rest:
                await trio.lowlevel.wait_writable(sink)
                try:
                    rest = rest[sink.send(rest) :]
                except BlockingIOError:
                    continue
            held -= len(data)
            room.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        nursery.start_soon(write)


class HostWorld:
    """The surroundings of one participant (`llmgw.net.world.World`)."""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.rng = random.Random(f"{network.seed}/{name}")

    def wall(self) -> float:
        skew = self.network.skew
        return EPOCH + trio.current_time() + skew.get(self.name, 0.0) + skew.get("*", 0.0)

    async def listen(self, address: Address) -> list[socket.socket]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.bind(self.network.path(address))
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise
        return [sock]

    async def dial(self, address: Address) -> socket.socket:
        return await self.network.dial(address)

    async def resolve(self, host: str, port: int) -> list[tuple[str, int]]:
        return [(host, port)]
