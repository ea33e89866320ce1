"""Whose request it is behind a load balancer: believed from trusted addresses, never from others."""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import ip_address

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from llmgw.config import Listener
from llmgw.net.proxied import SECONDS, V1_BYTES, Malformed, Proxies, read_header
from llmgw.request import InferenceRequest, Lease, Page, Refusal, Wait
from tests.net.brains import RoundRobin
from tests.net.rig import DRIVERS, DriverName, Rig, Wire, answers, json_answer, post, rig

LOCAL = Proxies(["127.0.0.0/8", "10.0.0.1", "unix"])
V2 = b"\r\n\r\n\0\r\nQUIT\n"


def fields(*values: str) -> list[tuple[bytes, bytes]]:
    return [(b"Accept", b"*"), *((b"X-Forwarded-For", value.encode()) for value in values)]


@pytest.mark.parametrize(
    ("peer", "values", "client"),
    [
        ("192.0.2.1", ["1.1.1.1"], "192.0.2.1"),  # a stranger's claim
        ("127.0.0.1", [], "127.0.0.1"),
        ("127.0.0.1", ["1.1.1.1"], "1.1.1.1"),
        ("127.0.0.1", ["6.6.6.6, 1.1.1.1, 10.0.0.1"], "1.1.1.1"),  # 6.6.6.6 is what 1.1.1.1 claims
        ("127.0.0.1", ["6.6.6.6", "1.1.1.1:443, 10.0.0.1"], "1.1.1.1"),
        ("127.0.0.1", ["6.6.6.6, nonsense, 10.0.0.1"], "10.0.0.1"),
        ("127.0.0.1", ["127.0.0.9,10.0.0.1"], "127.0.0.9"),
        ("::ffff:127.0.0.1", ["[2001:db8::1]:9"], "2001:db8::1"),
        ("", ["1.1.1.1"], "1.1.1.1"),
    ],
)
def test_forwarded_for(peer: str, values: list[str], client: str) -> None:
    assert LOCAL.client(peer, fields(*values)) == client


def version_2(client: str, command: int = 1, more: bytes = b"") -> bytes:
    source = ip_address(client).packed
    addresses = source + source + b"\x01\x02\x03\x04" + more
    family = 0x11 if len(source) == 4 else 0x21
    return V2 + bytes([0x20 | command, family]) + len(addresses).to_bytes(2, "big") + addresses


GOOD = {
    b"PROXY TCP4 192.0.2.7 10.0.0.1 5 6\r\n": "192.0.2.7",
    b"PROXY TCP6 2001:db8::7 2001:db8::1 5 6\r\n": "2001:db8::7",
    b"PROXY UNKNOWN\r\n": None,
    b"PROXY UNKNOWN ffff:: a b c\r\n": None,
    version_2("192.0.2.7"): "192.0.2.7",
    version_2("2001:db8::7", more=b"\x04\x00\x02ab"): "2001:db8::7",
    version_2("192.0.2.7", command=0): None,
    V2 + b"\x21\x31\x00\x02ab": None,
}
BAD = [
    b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
    b"PROXY TCP4 here there 5 6\r\n",
    b"PROXY TCP4 192.0.2.7\r\n",
    b"PROXY " + b"x" * V1_BYTES + b"\r\n",
    V2 + b"\x31\x11\x00\x00",
    V2 + b"\x22\x11\x00\x00",
    V2 + b"\x21\x11\xff\xff",
    V2 + b"\x21\x11\x00\x04abcd",
    b"PROXY TCP4 1.1.1.1 ",
]


async def header_of(data: bytes, rest: bytes = b"") -> str | None:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        right.sendall(data + rest)
        right.shutdown(socket.SHUT_WR)
        found = await read_header(left)
        assert left.recv(1000) == rest
        return found


@pytest.mark.parametrize("data", GOOD)
async def test_headers(data: bytes) -> None:
    assert await header_of(data, b"POST / HTTP/1.1\r\n") == GOOD[data]


@pytest.mark.parametrize("data", BAD)
async def test_no_headers(data: bytes) -> None:
    with pytest.raises(Malformed):
        await header_of(data)


@given(data=st.binary(max_size=300), known=st.sampled_from([b"", b"PROXY ", V2, V2 + b"\x21\x11\x00\x0c"]))
def test_anything(data: bytes, known: bytes) -> None:
    async def check() -> None:
        left, right = socket.socketpair()
        with left, right:
            left.setblocking(False)
            right.sendall(known + data)
            right.shutdown(socket.SHUT_WR)
            try:
                found = await read_header(left)
            except Malformed:
                return
            assert found is None or str(ip_address(found)) == found

    trio.run(check)


class Seeing(RoundRobin):
    """Remembers whose requests they were."""

    clients: list[str]

    def admit(self, request: InferenceRequest) -> Lease | Wait | Refusal | Page:
        self.clients.append(request.head.client)
        return super().admit(request)


def watch(r: Rig) -> list[str]:
    r.brain.__class__ = Seeing
    r.brain.clients = []  # type: ignore[attr-defined]
    return r.brain.clients  # type: ignore[attr-defined,no-any-return]


async def raw(r: Rig) -> Wire:
    wire = Wire(socket.socket())
    await wire.connect(("127.0.0.1", r.port))
    return wire


@pytest.mark.parametrize("driver", ["pump", "tasks"])
async def test_through_the_relay(driver: DriverName, autojump_clock: MockClock) -> None:
    listener = Listener(trusted_proxies=("127.0.0.1",), proxy_protocol=True)
    async with rig(driver, answers(json_answer()), listener=listener) as r:
        clients = watch(r)
        for header in GOOD:
            wire = await raw(r)
            await wire.send(header + post())
            assert (await wire.answer())[0] == 200
            wire.close()
        assert clients == [client or "127.0.0.1" for client in GOOD.values()]
        for header in BAD:
            wire = await raw(r)
            await wire.send(header)
            with suppress(OSError):  # it may be gone already
                wire.shutdown()
            assert await wire.closed()
            wire.close()
        start = trio.current_time()
        wire = await raw(r)
        assert await wire.closed()
        assert trio.current_time() - start == pytest.approx(SECONDS)
        wire.close()


@pytest.mark.parametrize("driver", ["pump", "tasks"])
async def test_a_stranger_is_sent_away(driver: DriverName, autojump_clock: MockClock) -> None:
    listener = Listener(trusted_proxies=("10.0.0.0/8",), proxy_protocol=True)
    async with rig(driver, answers(json_answer()), listener=listener) as r:
        wire = await raw(r)
        await wire.send(next(iter(GOOD)) + post())
        assert await wire.closed()
        wire.close()
        assert r.brain.outcomes == []


@pytest.mark.parametrize("driver", DRIVERS)
async def test_forwarded_for_in_the_relay(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, answers(json_answer()), listener=Listener(trusted_proxies=("127.0.0.1",))) as r:
        clients = watch(r)
        client = await r.dial()
        for address in ("192.0.2.1", "192.0.2.2", "192.0.2.2"):
            await client.send(post(headers=[f"X-Forwarded-For: {address}"]))
            assert (await client.answer())[0] == 200
        client.close()
        assert clients == ["192.0.2.1", "192.0.2.2", "192.0.2.2"]
