"""The five things that the gateway takes from its surroundings, and nothing else does.

`listen`, `dial`, `resolve`, `wall`, `rng`: one object, passed down from `cli`. The real one is here; a simulated world
(virtual time, AF_UNIX, links that add latency) gives another. Time that passes is `trio.current_time()`.
"""

from __future__ import annotations

import errno
import random
import socket
import time
from typing import Protocol

import trio

from llmgw.units import Address, Tcp, Unix, parse_address

__all__ = ["Address", "RealWorld", "Tcp", "Unix", "World", "connect", "nodelay", "parse_address"]

BACKLOG = (
    4096  # the kernel cuts it to net.core.somaxconn; a burst of connects must not be dropped while a batch is served
)


class World(Protocol):
    """The surroundings of a server, an agent or an engine."""

    rng: random.Random

    def wall(self) -> float:
        """Seconds since 1970, for people; never for measuring how long something took."""
        ...

    async def listen(self, address: Address) -> list[socket.socket]:
        """Non-blocking listening sockets, bound. Raises OSError (address in use, no permission)."""
        ...

    async def dial(self, address: Address) -> socket.socket:
        """A connected non-blocking socket, TCP_NODELAY set. Raises OSError. The caller owns it and the deadline."""
        ...

    async def resolve(self, host: str, port: int) -> list[tuple[str, int]]:
        """Literal addresses of *host*, best first. Raises OSError if there are none."""
        ...


def nodelay(sock: socket.socket) -> None:
    """TCP_NODELAY where the socket is TCP; AF_UNIX has no such option."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def connect(sock: socket.socket, address: object) -> None:
    """Connect a non-blocking socket; returns when connected, raises OSError, closes nothing."""
    while True:
        code = sock.connect_ex(address)  # type: ignore[arg-type]
        if code == 0:
            return
        if code == errno.EAGAIN:  # AF_UNIX with a full backlog: there is no event to wait for
            await trio.sleep(0.001)
            continue
        if code != errno.EINPROGRESS:
            raise OSError(code, f"connect: {errno.errorcode.get(code, code)}")
        await trio.lowlevel.wait_writable(sock)
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, f"connect: {errno.errorcode.get(code, code)}")
        return


def listen_unix(path: str) -> socket.socket:
    """A listening AF_UNIX socket. A path left behind by a dead process is replaced, a living one's is not."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        try:
            sock.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or path.startswith("\0"):
                raise
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) != errno.ECONNREFUSED:
                    raise
            import os

            os.unlink(path)
            sock.bind(path)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


class RealWorld:
    """The machine that this process runs on."""

    def __init__(self, seed: int | None = None) -> None:
        self.rng = random.Random(seed)

    def wall(self) -> float:
        return time.time()

    async def listen(self, address: Address) -> list[socket.socket]:
        if isinstance(address, Unix):
            return [listen_unix(address.path)]
        found: list[socket.socket] = []
        port = address.port
        infos = await trio.socket.getaddrinfo(
            address.host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        try:
            for family, kind, proto, _name, where in dict.fromkeys(infos):
                try:
                    sock = socket.socket(family, kind, proto)
                except OSError as error:
                    if error.errno == errno.EAFNOSUPPORT and len(infos) > 1:
                        continue  # a host without IPv6
                    raise
                found.append(sock)
                sock.setblocking(False)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                try:
                    sock.bind((where[0], port, *where[2:]))
                except OSError as error:
                    if error.errno == errno.EADDRNOTAVAIL and len(infos) > 1:
                        found.pop().close()
                        continue
                    raise
                sock.listen(BACKLOG)
                port = sock.getsockname()[1]  # port 0: the same free port on every family
        except BaseException:
            for sock in found:
                sock.close()
            raise
        if not found:
            raise OSError(errno.EADDRNOTAVAIL, f"no address of {address.host!r} can be listened on")
        return found

    async def dial(self, address: Address) -> socket.socket:
        if isinstance(address, Unix):
            return await _dial(socket.AF_UNIX, address.path)
        failed: OSError | None = None
        for host, port in await self.resolve(address.host, address.port):
            try:
                return await _dial(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, port))
            except OSError as error:
                failed = error
        raise failed or OSError(errno.EHOSTUNREACH, f"{address.host!r} has no address")

    async def resolve(self, host: str, port: int) -> list[tuple[str, int]]:
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                socket.inet_pton(family, host)
            except OSError:
                continue
            return [(host, port)]  # a literal: no thread, no lookup
        infos = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys((str(where[0]), int(where[1])) for *_rest, where in infos))


async def _dial(family: int, where: object) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        nodelay(sock)
        await connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock
