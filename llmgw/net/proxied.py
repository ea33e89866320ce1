"""Who the client is when a load balancer stands before the gateway: PROXY protocol (v1, v2) and X-Forwarded-For.

Both are believed from trusted addresses only; from anybody else they are a claim, and the socket's own address counts.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence

import trio

SECONDS = 10.0
"""For a load balancer to say whom it stands for; it does so with the first packet."""

V1_BYTES = 107
"""Longest line of version 1, its CRLF included."""

V2_BYTES = 2048
"""Of addresses and further records of version 2; real ones have some 200."""

_V2 = b"\r\n\r\n\0\r\nQUIT\n"


class Malformed(Exception):
    """What came first is no PROXY header."""


class Proxies:
    """*texts*: addresses and networks that are trusted; ``unix`` = whoever connects to a Unix socket."""

    def __init__(self, texts: Iterable[str]) -> None:
        texts = tuple(texts)
        self._unix = "unix" in texts
        self._networks = [ipaddress.ip_network(text, strict=False) for text in texts if text != "unix"]

    def trusts(self, address: str) -> bool:
        """*address* as a socket tells it; "" = Unix."""
        if not address:
            return self._unix
        found = _ip(address)
        return found is not None and any(found in network for network in self._networks)

    def client(self, peer: str, fields: Sequence[tuple[bytes, bytes]]) -> str:
        """The nearest address that is not a trusted proxy. *fields*: of the request's head."""
        if not self.trusts(peer):
            return peer
        hops = b",".join(value for name, value in fields if name.lower() == b"x-forwarded-for")
        for hop in reversed(hops.decode("latin-1").split(",")):
            found = _ip(hop.strip())
            if found is None:
                break
            peer = str(found)
            if not self.trusts(peer):
                break
        return peer


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Of ``1.2.3.4``, ``1.2.3.4:5``, ``::1`` or ``[::1]:5``; an IPv4 address mapped into IPv6 is IPv4."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


async def read_header(sock: socket.socket) -> str | None:
    """The client's address, None = the proxy speaks for itself (a health check). Takes the header off *sock*, no more.

    Raises Malformed, OSError. The caller sets the deadline.
    """
    start = await _exactly(sock, 8)
    if start.startswith(b"PROXY "):
        line = start
        while not line.endswith(b"\r\n"):
            if len(line) >= V1_BYTES:
                raise Malformed("its line is too long")
            line = line + await _exactly(sock, 1)
        return _version_1(line)
    head = start + await _exactly(sock, 8)
    if not head.startswith(_V2) or head[12] >> 4 != 2:
        raise Malformed("it is neither version 1 nor version 2")
    length = int.from_bytes(head[14:16], "big")
    if length > V2_BYTES:
        raise Malformed(f"it has {length} bytes")
    return _version_2(head, await _exactly(sock, length))


def _version_1(line: bytes) -> str | None:
    words = line[:-2].decode("latin-1").split(" ")
    if words[1:2] == ["UNKNOWN"]:
        return None
    found = _ip(words[2]) if len(words) == 6 and words[1] in ("TCP4", "TCP6") else None
    if found is None:
        raise Malformed("its line names no address")
    return str(found)


def _version_2(head: bytes, rest: bytes) -> str | None:
    command, family = head[12] & 15, head[13] >> 4
    if command == 0:
        return None
    if command != 1:
        raise Malformed("its command is unknown")
    size = {1: 4, 2: 16}.get(family)
    if size is None:
        return None  # not an Internet address
    if len(rest) < 2 * size + 4:
        raise Malformed("its addresses are cut off")
    return str(_ip(str(ipaddress.ip_address(rest[:size]))))


async def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        try:
            piece = sock.recv(count - len(data))
        except BlockingIOError:
            await trio.lowlevel.wait_readable(sock)
            continue
        if not piece:
            raise Malformed("the connection ended before it was whole")
        data += piece
    return data
