"""Downloads over real sockets: a small town of web servers on loopback, with a resolver that sends names where it likes.

Public addresses of the town (93.184.216.x) are dialled to loopback, as a router would do; what the client believes to connect
to is recorded.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial

import attrs
import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from llmgw.net import media as module
from llmgw.net.media import MediaClient
from llmgw.net.world import Address, RealWorld, Tcp
from llmgw.pipeline.commands import Failed, FetchLimits, Media

PNG = b"\x89PNG\r\n\x1a\n" + b"pixels" * 10
WEB = "93.184.216.34"

Handler = Callable[[bytes, trio.SocketStream], Awaitable[None]]


@attrs.define
class Town(RealWorld):
    """Names, and the ports that stand behind public addresses."""

    names: dict[str, list[list[str]]] = attrs.Factory(dict)  # each look-up takes the next answer, the last one stays
    doors: dict[tuple[str, int], int] = attrs.Factory(dict)
    dialled: list[str] = attrs.Factory(list)
    lookups: int = 0

    async def resolve(self, host: str, port: int) -> list[tuple[str, int]]:
        await trio.lowlevel.checkpoint()
        try:
            ipaddress.ip_address(host)
        except ValueError:
            self.lookups += 1
            if host not in self.names:
                raise OSError("no such name") from None
            answers = self.names[host]
            found = answers.pop(0) if len(answers) > 1 else answers[0]
            return [(address, port) for address in found]
        return [(host, port)]

    async def dial(self, address: Address) -> socket.socket:
        assert isinstance(address, Tcp)
        self.dialled.append(str(address))
        port = self.doors.get((address.host, address.port))
        return await super().dial(Tcp("127.0.0.1", port) if port is not None else address)


def answer(body: bytes = PNG, head: bytes = b"", status: bytes = b"200 OK", length: int | None = None) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n%s\r\n%s" % (
        status,
        len(body) if length is None else length,
        head,
        body,
    )


@attrs.define
class Site:
    """What a web server has: path → bytes to send, or a handler."""

    pages: dict[str, bytes | Handler] = attrs.Factory(dict)
    requests: list[bytes] = attrs.Factory(list)
    tls: ssl.SSLContext | None = None

    async def serve(self, stream: trio.SocketStream) -> None:
        peer: trio.SocketStream | trio.SSLStream[trio.SocketStream] = stream
        try:
            if self.tls is not None:
                peer = trio.SSLStream(stream, self.tls, server_side=True)
            head = b""
            while b"\r\n\r\n" not in head:
                more = await peer.receive_some()
                if not more:
                    return
                head += more
            self.requests.append(head)
            page = self.pages.get(head.split(b" ")[1].decode(), answer(b"", status=b"404 Not Found"))
            if callable(page):
                await page(head, stream)
            else:
                await peer.send_all(page)
        except trio.BrokenResourceError:
            return
        finally:
            await trio.aclose_forcefully(peer)


@asynccontextmanager
async def town(site: Site, **options: object) -> AsyncIterator[tuple[Town, MediaClient]]:
    world = Town(names={"img.example": [[WEB]]})
    client = MediaClient(world, **options)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, site.serve, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        world.doors = {(WEB, 80): port, (WEB, 443): port, (WEB, 8080): port}
        await nursery.start(client.run)
        try:
            yield world, client
        finally:
            nursery.cancel_scope.cancel()


async def get(client: MediaClient, url: str, **limits: object) -> Media | Failed:
    (found,) = await client.fetch((url,), FetchLimits(**limits))  # type: ignore[arg-type]
    return found


async def test_an_image() -> None:
    site = Site({"/a.png?x=1": answer(head=b"Content-Type: text/lies\r\nSet-Cookie: a=b\r\n")})
    async with town(site) as (world, client):
        found = await get(client, "http://img.example/a.png?x=1")
        assert isinstance(found, Media)
        assert found.content_type == "image/png"
        assert found.base64 == base64.b64encode(PNG).decode()
        assert world.dialled == [f"{WEB}:80"]
        (head,) = site.requests
        assert head.startswith(b"GET /a.png?x=1 HTTP/1.1\r\nHost: img.example\r\n")
        assert b"cookie" not in head.lower()


async def test_names_and_paths_beyond_ascii() -> None:
    site = Site({"/b%C3%BCcher%20neu?q=%C3%A9": answer()})
    async with town(site) as (world, client):
        world.names["xn--mnchen-3ya.example"] = [[WEB]]
        assert isinstance(await get(client, "http://münchen.example:8080/bücher%20neu?q=é"), Media)
        assert b"Host: xn--mnchen-3ya.example:8080\r\n" in site.requests[0]


async def test_the_environments_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with town(Site({"/": answer()})) as (_, client):
        assert isinstance(await get(client, "http://img.example/"), Media)


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "fd00::1"]
)
async def test_a_name_that_leads_inside(address: str) -> None:
    async with town(Site({"/": answer()})) as (world, client):
        world.names["evil.example"] = [[address]]
        for url in ("http://evil.example/", f"http://[{address}]/" if ":" in address else f"http://{address}/"):
            found = await get(client, url)
            assert isinstance(found, Failed)
            assert found.reason == "bad_field"
        assert world.dialled == []


async def test_loopback_only_by_explicit_configuration() -> None:
    async with town(Site({"/": answer()}), opened=[ipaddress.ip_network("127.0.0.0/8")]) as (world, client):
        world.doors[("127.0.0.1", 80)] = world.doors[(WEB, 80)]
        world.names["here.example"] = [["127.0.0.1"]]
        assert isinstance(await get(client, "http://here.example/"), Media)


async def test_what_was_checked_is_what_is_dialled() -> None:
    """A name that answers with a public address first and with loopback afterwards."""
    async with town(Site({"/": answer()})) as (world, client):
        world.names["rebind.example"] = [[WEB], ["127.0.0.1"]]
        assert isinstance(await get(client, "http://rebind.example/"), Media)
        assert world.lookups == 1
        assert world.dialled == [f"{WEB}:80"]


async def test_of_several_addresses_only_public_ones_are_dialled() -> None:
    async with town(Site({"/": answer()})) as (world, client):
        world.names["mixed.example"] = [["127.0.0.1", WEB]]
        assert isinstance(await get(client, "http://mixed.example/"), Media)
        assert world.dialled == [f"{WEB}:80"]


@pytest.mark.parametrize(
    "target",
    [
        b"http://169.254.169.254/latest/",
        b"http://inside.example/",
        b"http://127.0.0.1:22/",
        b"file:///etc/passwd",
        b"gopher://img.example/",
        b"//inside.example/",
    ],
)
async def test_a_redirect_is_checked_like_the_first_hop(target: bytes) -> None:
    site = Site({"/go": answer(b"", b"Location: " + target + b"\r\n", b"302 Found")})
    async with town(site) as (world, client):
        world.names["inside.example"] = [["127.0.0.1"]]
        found = await get(client, "http://img.example/go")
        assert isinstance(found, Failed)
        assert found.reason == "bad_field"
        assert world.dialled == [f"{WEB}:80"]


async def test_a_redirect_to_a_host_outside_the_allowed_domains() -> None:
    site = Site({"/go": answer(b"", b"Location: http://other.example/\r\n", b"301 Moved")})
    async with town(site) as (world, client):
        world.names["other.example"] = [[WEB]]
        found = await get(client, "http://img.example/go", domains=("img.example",))
        assert isinstance(found, Failed)
        assert "allowed domains" in found.detail


async def test_redirects_are_followed_and_bounded() -> None:
    site = Site(
        {
            "/go": answer(b"", b"Location: /there\r\n", b"302 Found"),
            "/there": answer(),
            "/loop": answer(b"", b"Location: /loop\r\n", b"302 Found"),
        }
    )
    async with town(site) as (_, client):
        assert isinstance(await get(client, "http://img.example/go"), Media)
        found = await get(client, "http://img.example/loop")
        assert isinstance(found, Failed)
        assert "redirects more than 5" in found.detail
        assert len(site.requests) == 2 + 6


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (answer(PNG + b"x" * (100 - len(PNG) + 1)), "bad_field"),
        (answer(PNG, length=101), "bad_field"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + PNG + b"x" * 100, "bad_field"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + PNG + b"x" * 1_000_000, "bad_field"),
        (answer(b"<svg/>"), "bad_field"),
        (answer(PNG, length=90), "phase_failed"),
        (answer(b"", status=b"404 Not Found"), "phase_failed"),
        (answer(PNG, head=b"Content-Encoding: gzip\r\n"), "phase_failed"),
        (b"nonsense\r\n\r\n", "phase_failed"),
        (b"", "phase_failed"),
    ],
    ids=[
        "over the cap",
        "length over the cap",
        "no length",
        "endless",
        "no image",
        "truncated",
        "404",
        "encoded",
        "no HTTP",
        "closed",
    ],
)
async def test_bad_answers(page: bytes, reason: str) -> None:
    async with town(Site({"/": page})) as (_, client):
        found = await get(client, "http://img.example/", max_bytes=100)
        assert isinstance(found, Failed)
        assert found.reason == reason, found


async def test_exactly_the_cap_passes() -> None:
    async with town(Site({"/": answer(PNG + b"x" * (100 - len(PNG)))})) as (_, client):
        assert isinstance(await get(client, "http://img.example/", max_bytes=100), Media)


async def test_unreachable_and_unknown_hosts_are_the_origins_fault() -> None:
    async with town(Site()) as (world, client):
        world.names["down.example"] = [["93.184.216.99"]]
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            world.doors[("93.184.216.99", 80)] = reserved.getsockname()[1]
            for url in ("http://down.example/", "http://nowhere.example/"):
                found = await get(client, url)
                assert isinstance(found, Failed)
                assert found.reason == "phase_failed"


async def test_order_is_that_of_the_request_and_one_failure_cancels_the_rest(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def slow(head: bytes, stream: trio.SocketStream) -> None:
        await trio.sleep(3)
        await stream.send_all(answer(b"GIF89a"))

    site = Site({"/slow": slow, "/quick": answer()})
    async with town(site) as (_, client):
        urls = ("http://img.example/slow", "http://img.example/quick")
        first, second = await client.fetch(urls, FetchLimits())
        assert isinstance(first, Media)
        assert isinstance(second, Media)
        assert (first.content_type, second.content_type) == ("image/gif", "image/png")
        begun = trio.current_time()
        slow2, missing = await client.fetch(("http://img.example/slow?2", "http://img.example/none"), FetchLimits())
        assert isinstance(slow2, Failed)
        assert isinstance(missing, Failed)
        assert trio.current_time() - begun < 1.0


async def hang(head: bytes, stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


async def test_time_is_bounded_for_each_who_waits(autojump_clock: trio.testing.MockClock) -> None:
    async with town(Site({"/": hang})) as (_, client):
        begun = trio.current_time()
        found = await get(client, "http://img.example/", timeout=2.5)
        assert isinstance(found, Failed)
        assert "2.5 s" in found.detail
        assert trio.current_time() - begun == pytest.approx(2.5)
        assert client._flights == {}


async def test_one_download_for_all_who_want_the_same(autojump_clock: trio.testing.MockClock) -> None:
    async def slow(head: bytes, stream: trio.SocketStream) -> None:
        await trio.sleep(1)
        await stream.send_all(answer())

    site = Site({"/": slow})
    async with town(site) as (_, client):
        found = []

        async def want() -> None:
            found.append(await get(client, "http://img.example/"))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(want)
            with trio.move_on_after(0.5):  # the first to ask leaves; the others still get it
                await get(client, "http://img.example/")
        assert len(found) == 20
        assert all(isinstance(one, Media) for one in found)
        assert len(site.requests) == 1
        assert isinstance(await get(client, "http://img.example/"), Media)
        assert len(site.requests) == 1, "it is cached"
        await trio.sleep(module.FRESH + 1)
        await get(client, "http://img.example/")
        assert len(site.requests) == 2


async def test_nobody_waits_any_more(autojump_clock: trio.testing.MockClock) -> None:
    gone = trio.Event()

    async def watch(head: bytes, stream: trio.SocketStream) -> None:
        assert await stream.receive_some() == b""
        gone.set()

    async with town(Site({"/": watch})) as (_, client):
        with trio.move_on_after(1):
            await get(client, "http://img.example/")
        with trio.fail_after(1):
            await gone.wait()


async def test_the_cache_is_bounded_in_bytes() -> None:
    site = Site({"/private": answer(head=b"Cache-Control: private\r\n")})
    site.pages.update((f"/{i}", answer(PNG + bytes([i]) * 300)) for i in range(6))
    async with town(site, cache_bytes=1200) as (_, client):
        for i in range(6):
            await get(client, f"http://img.example/{i}")
            assert client._cached_bytes <= 1200
        assert len(client._cache) == 2
        await get(client, "http://img.example/private")
        assert all("private" not in url for url, _ in client._cache)


async def test_tls_is_verified_against_the_name() -> None:
    server, trusting = certificate("img.example")
    async with town(Site({"/": answer()}, tls=server), ssl_context=trusting) as (world, client):
        found = await get(client, "https://img.example/")
        assert isinstance(found, Media), found
        world.names["other.example"] = [[WEB]]
        found = await get(client, "https://other.example/")
        assert isinstance(found, Failed)
        assert "TLS" in found.detail


def certificate(name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context with a fresh certificate for *name*, and a client's that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = cert.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        file.write(pem + private)
        file.flush()
        server.load_cert_chain(file.name)
    return server, ssl.create_default_context(cadata=pem.decode())
