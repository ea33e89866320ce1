"""Addresses are read as the documentation says; listening and dialling work on TCP and AF_UNIX."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trio

from llmgw.errors import ConfigError
from llmgw.net.world import Address, RealWorld, Tcp, Unix, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":8080", Tcp("", 8080)),
        ("127.0.0.1:80", Tcp("127.0.0.1", 80)),
        ("gpu-1.local:0", Tcp("gpu-1.local", 0)),
        ("[::1]:8080", Tcp("::1", 8080)),
        ("unix:/run/llmgw.sock", Unix("/run/llmgw.sock")),
        ("unix:@llmgw", Unix("\0llmgw")),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "8080", "host", "::1:8080", "host:", "host:99999", "unix:", "unix:@", "http://x:80"]
)
def test_bad_addresses_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="address "):
        parse_address(text)


async def test_all_interfaces_share_one_port() -> None:
    socks = await RealWorld().listen(Tcp("", 0))
    try:
        assert len({s.getsockname()[1] for s in socks}) == 1
    finally:
        for sock in socks:
            sock.close()


async def test_dial_tcp_sets_nodelay() -> None:
    world = RealWorld()
    (listener,) = await world.listen(Tcp("127.0.0.1", 0))
    with listener, await world.dial(Tcp("127.0.0.1", listener.getsockname()[1])) as sock:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_dial_refused() -> None:
    world = RealWorld()
    (listener,) = await world.listen(Tcp("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        await world.dial(Tcp("127.0.0.1", port))


async def test_unix_socket_left_by_a_dead_process_is_replaced(tmp_path: Path) -> None:
    world = RealWorld()
    path = str(tmp_path / "s")
    (old,) = await world.listen(Unix(path))
    with pytest.raises(OSError, match="in use"):
        await world.listen(Unix(path))
    old.close()
    (new,) = await world.listen(Unix(path))
    with new, await world.dial(Unix(path)):
        await trio.lowlevel.checkpoint()
