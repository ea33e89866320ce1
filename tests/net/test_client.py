"""The client reads every way in which an answer can be framed, and says in words what is wrong with the others."""

from __future__ import annotations

import os
import ssl
import time
from functools import partial
from pathlib import Path

import pytest
import trio

from llmgw.errors import Unavailable
from llmgw.net.client import IDLE, KEPT, Client
from llmgw.net.world import RealWorld
from llmgw.request import Target
from tests.server.raw import Engine, engine, free_port, response


@pytest.fixture
def client() -> Client:
    return Client(RealWorld())


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\nx-late: 1\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (response(b"hello"), 200, b"hello"),
        (response(b"", "503 Service Unavailable"), 503, b""),
        (CHUNKED, 200, b"abcde"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + response(b"real"), 200, b"real"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED, 200, b"abcde"),
    ],
)
async def test_framings(client: Client, answer: bytes, status: int, body: bytes) -> None:
    async with engine({"/x": answer}) as one:
        for _ in range(2):
            found = await client.request(one.target, "GET", "/x")
            assert (found.status, found.body) == (status, body)
            assert "x-late" not in found.headers
            assert "link" not in found.headers
        assert one.connections == 1
        client.close()


async def test_any_split_of_an_answer(client: Client) -> None:
    async def slowly(_: Engine, stream: trio.SocketStream, request: bytes) -> None:
        for i in range(len(CHUNKED)):
            await stream.send_all(CHUNKED[i : i + 1])

    async with engine(script=slowly) as one:
        assert (await client.request(one.target, "GET", "/x")).body == b"abcde"
        client.close()


async def test_an_answer_that_ends_with_the_connection(client: Client) -> None:
    async def close_after(_: Engine, stream: trio.SocketStream, request: bytes) -> None:
        await stream.send_all(b"HTTP/1.0 200 OK\r\n\r\nall")
        await stream.aclose()

    async with engine(script=close_after) as one:
        assert (await client.request(one.target, "GET", "/x")).body == b"all"
        assert not client._kept


async def test_what_is_sent(client: Client) -> None:
    async with engine({"/p/x": response(b"")}) as one:
        target = Target(
            endpoint="e",
            name="e",
            address=f"tcp:127.0.0.1:{one.port}",
            host="gpu:1",
            path="/p",
            headers=(("authorization", "Bearer k"),),
        )
        await client.request(target, "POST", "/x", headers=[("content-type", "application/json")], body=b"{}")
        client.close()
    assert one.requests == [
        b"POST /p/x HTTP/1.1\r\nhost: gpu:1\r\nauthorization: Bearer k\r\ncontent-type: application/json\r\n"
        b"content-length: 2\r\n\r\n{}"
    ]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc", "closed the connection before its answer was whole"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n", "does not answer in HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", "another protocol"),
        (b"", "closed the connection before"),
        (response(b"x" * 2000), "larger than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", "larger than"),
    ],
)
async def test_broken_answers_are_told_apart(client: Client, answer: bytes, said: str) -> None:
    async def close_after(_: Engine, stream: trio.SocketStream, request: bytes) -> None:
        if answer:
            await stream.send_all(answer)
        await stream.aclose()

    async with engine(script=close_after) as one:
        with pytest.raises(Unavailable, match=f"^e: .*{said}"):
            await client.request(one.target, "GET", "/x", limit=1000)
        assert not client._kept


async def test_nobody_listens(client: Client) -> None:
    target = Target(endpoint="e", name="gpu-1", address=f"tcp:127.0.0.1:{free_port()}", host="x")
    with pytest.raises(Unavailable, match=r"gpu-1: cannot connect: .*ECONNREFUSED"):
        await client.request(target, "GET", "/x")


@pytest.mark.parametrize("path", ["/a b", "/a\r\nx: y"])
async def test_a_request_is_one_request(client: Client, path: str) -> None:
    async with engine() as one:
        with pytest.raises(ValueError, match="another request"):
            await client.request(one.target, "GET", path)


async def test_surplus_bytes_end_the_connection(client: Client) -> None:
    async with engine({"/x": response(b"a") + response(b"unasked")}) as one:
        for _ in range(2):
            assert (await client.request(one.target, "GET", "/x")).body == b"a"
        assert one.connections == 2


async def test_an_engine_that_closes_idle_connections_is_no_error(client: Client) -> None:
    async def once(_: Engine, stream: trio.SocketStream, request: bytes) -> None:
        await stream.send_all(response(b"a"))
        await stream.aclose()

    async with engine(script=once) as one:
        for _ in range(5):
            assert (await client.request(one.target, "GET", "/x")).body == b"a"
        client.close()


async def test_connections_are_kept_for_less_than_engines_keep_them(
    client: Client, autojump_clock: trio.testing.MockClock
) -> None:
    async with engine({"/x": response(b"a")}) as one:
        await client.request(one.target, "GET", "/x")
        await trio.sleep(IDLE - 0.01)
        await client.request(one.target, "GET", "/x")
        assert one.connections == 1
        await trio.sleep(IDLE + 0.01)
        await client.request(one.target, "GET", "/x")
        assert one.connections == 2
        client.close()


async def test_few_connections_are_kept(client: Client) -> None:
    gate = trio.Event()

    async def together(_: Engine, stream: trio.SocketStream, request: bytes) -> None:
        await gate.wait()
        await stream.send_all(response(b"a"))

    async with engine(script=together) as one:
        async with trio.open_nursery() as nursery:
            for _ in range(3 * KEPT):
                nursery.start_soon(client.request, one.target, "GET", "/x")
            await trio.testing.wait_all_tasks_blocked()
            gate.set()
        assert client._kept == KEPT
        client.close()
        assert client._kept == 0


async def test_a_cancelled_request_closes_its_connection(
    client: Client, autojump_clock: trio.testing.MockClock
) -> None:
    async def never(_: Engine, stream: trio.SocketStream, request: bytes) -> None:
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc")

    async with engine(script=never) as one:
        before = set(os.listdir("/proc/self/fd"))
        with trio.move_on_after(3):
            await client.request(one.target, "GET", "/x")
        await trio.testing.wait_all_tasks_blocked()
        assert one.closed == 1
        assert set(os.listdir("/proc/self/fd")) <= before


async def test_tls(tmp_path: Path) -> None:
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = tmp_path / "pem"
    pem.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + cert.public_bytes(serialization.Encoding.PEM)
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pem)

    async def answer(stream: trio.SocketStream) -> None:
        async with trio.SSLStream(stream, server, server_side=True, https_compatible=True) as tls:
            try:
                while await tls.receive_some(1000):
                    await tls.send_all(response(b"secret"))
            except trio.BrokenResourceError:
                pass

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]

        def target(host: str) -> Target:
            return Target(endpoint="e", name="e", address=f"tcp:127.0.0.1:{port}", host=host, tls=True)

        client = Client(RealWorld(), tls=ssl.create_default_context(cafile=str(pem)))
        for _ in range(2):
            assert (await client.request(target(f"localhost:{port}"), "GET", "/")).body == b"secret"
        with pytest.raises(Unavailable, match="TLS: CERTIFICATE_VERIFY_FAILED"):
            await client.request(target("elsewhere"), "GET", "/")
        with pytest.raises(Unavailable, match="TLS: CERTIFICATE_VERIFY_FAILED"):
            await Client(RealWorld()).request(target("localhost"), "GET", "/")
        client.close()
        nursery.cancel_scope.cancel()


async def test_a_small_request_is_cheap(client: Client) -> None:
    """Both ends in one thread, so the engine's share is in the figure; the bound is ten times what an idle machine needs."""
    answer = response(b"{}")

    async def fast(_: Engine, stream: trio.SocketStream, request: bytes) -> None:
        await stream.send_all(answer)

    async with engine(script=fast) as one:
        await client.request(one.target, "GET", "/x")
        before = time.process_time()
        for _ in range(200):
            await client.request(one.target, "GET", "/x")
        each = (time.process_time() - before) / 200
        assert one.connections == 1
        assert each < 2e-3
        client.close()
