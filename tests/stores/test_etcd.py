"""etcd as the store: a real etcd on loopback, its captured answers, endpoints that fail."""

from __future__ import annotations

import ipaddress
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from llmgw.errors import Unavailable
from llmgw.net.tls import client_context
from llmgw.pki.ca import new_key
from llmgw.stores.base import (
    Compacted,
    LeaseLost,
    OutcomeUnknown,
    Put,
    StoreError,
    put,
)
from llmgw.stores.etcd import MAX_LINE, EtcdStore, WatchParser, decode, open_etcd
from tests.pki.certs import Certs, make_certs
from tests.pki.test_handshakes import forge
from tests.stores.conformance import Conformance

CAPTURES = Path(__file__).parents[2] / ".." / "shared" / "captures" / "etcd"
ETCD = shutil.which("etcd")
needs_etcd = pytest.mark.skipif(ETCD is None, reason="no etcd here: apt-get install etcd-server")


def free_ports(count: int) -> list[int]:
    socks = [socket.socket() for _ in range(count)]
    try:
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]
    finally:
        for sock in socks:
            sock.close()


def start_etcd(folder: Path, port: int, peer: int, *arguments: str, scheme: str = "http") -> subprocess.Popen[bytes]:
    assert ETCD is not None
    with (folder / "etcd.log").open("wb") as log:
        process = subprocess.Popen(
            [
                ETCD,
                f"--data-dir={folder / 'data'}",
                f"--listen-client-urls={scheme}://127.0.0.1:{port}",
                f"--advertise-client-urls={scheme}://127.0.0.1:{port}",
                f"--listen-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-cluster=default=http://127.0.0.1:{peer}",
                "--unsafe-no-fsync",
                *arguments,
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    end = time.monotonic() + 20
    while time.monotonic() < end and process.poll() is None:
        if b"ready to serve client requests" in (folder / "etcd.log").read_bytes():
            return process
        time.sleep(0.02)
    stop(process)
    raise AssertionError((folder / "etcd.log").read_text())


def stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, peer = free_ports(2)
    process = start_etcd(tmp_path_factory.mktemp("etcd"), port, peer)
    yield f"http://127.0.0.1:{port}"
    stop(process)


@needs_etcd
class TestEtcd(Conformance):
    @pytest.fixture
    async def store(self, etcd: str) -> AsyncIterator[EtcdStore]:
        async with open_etcd([etcd]) as store:
            yield store

    async def test_a_dead_endpoint_is_passed_over(self, etcd: str, p: str) -> None:
        (nobody,) = free_ports(1)
        async with open_etcd([f"http://127.0.0.1:{nobody}", etcd]) as store, store.watch(p) as changes:
            revision = await put(store, p + "a", b"1")
            assert (await anext(changes)).revision == revision

    async def test_nobody_answers(self) -> None:
        one, two = free_ports(2)
        async with open_etcd([f"http://127.0.0.1:{one}", f"http://127.0.0.1:{two}"]) as store:
            with pytest.raises(Unavailable, match="no endpoint of etcd answers") as caught:
                await put(store, "/a", b"1")
            assert not isinstance(caught.value, OutcomeUnknown), "nothing was sent"
            with pytest.raises(Unavailable):
                async with store.watch("/", 5) as changes:
                    await anext(changes)

    async def test_namespaces_do_not_meet(self, etcd: str, p: str) -> None:
        async with open_etcd([etcd], namespace="/one") as one, open_etcd([etcd], namespace="/two") as two:
            await put(one, p + "a", b"1")
            assert await two.get(p + "a") is None
            assert (await two.range("")).entries == ()


@needs_etcd
async def test_a_watch_survives_the_restart_of_etcd(tmp_path: Path) -> None:
    port, peer = free_ports(2)
    process = start_etcd(tmp_path, port, peer)
    try:
        async with open_etcd([f"http://127.0.0.1:{port}"]) as store, store.watch("/") as changes:
            await put(store, "/a", b"1")
            assert [e.key for e in (await anext(changes)).events] == ["/a"]
            await put(store, "/b", b"1")
            stop(process)
            with pytest.raises(Unavailable):
                await store.get("/a")
            process = start_etcd(tmp_path, port, peer)
            await put(store, "/c", b"1")
            seen: list[str] = []
            with trio.fail_after(10):
                while len(seen) < 2:
                    seen += [e.key for e in (await anext(changes)).events]
            assert seen == ["/b", "/c"]
    finally:
        stop(process)


@needs_etcd
async def test_tls_with_client_certificates(tmp_path: Path) -> None:
    certs: Certs = make_certs(tmp_path, time.time())
    # etcd's gateway dials etcd itself and shows the server's certificate there, so that one serves both purposes.
    both = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
    secret = new_key()
    leaf = forge(certs.root, secret, purposes=both, extra=[x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    cert, key = certs.save("etcd", [leaf], secret)
    port, peer = free_ports(2)
    process = start_etcd(
        tmp_path,
        port,
        peer,
        f"--cert-file={cert}",
        f"--key-file={key}",
        f"--trusted-ca-file={certs.roots}",
        "--client-cert-auth",
        scheme="https",
    )
    try:
        tls = certs.client_context("server-1")
        async with open_etcd([f"https://127.0.0.1:{port}"], tls=tls) as store:
            await put(store, "/a", b"1")
        strangers = client_context(now=certs.now, ca=certs.roots)
        async with open_etcd([f"https://127.0.0.1:{port}"], tls=strangers) as store:
            with pytest.raises(Unavailable):
                await store.get("/a")
        no_trust = client_context(now=certs.now)
        async with open_etcd([f"https://127.0.0.1:{port}"], tls=no_trust) as store:
            with pytest.raises(Unavailable, match="certificate verify failed"):
                await store.get("/a")
    finally:
        stop(process)


async def test_a_write_without_an_answer_may_have_happened() -> None:
    """An endpoint that takes the request and hangs up."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def hang_up(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, hang_up, listeners)
        port = listeners[0].socket.getsockname()[1]
        async with open_etcd([f"http://127.0.0.1:{port}"] * 2) as store:
            with pytest.raises(OutcomeUnknown):
                await store.txn(success=[Put("/a", b"1")])
            with pytest.raises(Unavailable) as caught:
                await store.get("/a")
            assert not isinstance(caught.value, OutcomeUnknown)
        nursery.cancel_scope.cancel()


def capture(name: str) -> tuple[int, bytes]:
    """Status and body of a captured answer."""
    path = CAPTURES / f"{name}.txt"
    if not path.exists():
        pytest.skip(f"no captured answers here ({path})")
    _command, _, rest = path.read_bytes().partition(b"\n\n")
    head, _, body = rest.replace(b"\r\n", b"\n").partition(b"\n\n")
    return int(head.split()[1]), body.partition(b"Grpc-Trailer-Content-Type")[0]  # curl prints trailers after the body


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("error-range-compacted", Compacted, "compacted"),
        ("put-unknown-lease", LeaseLost, "requested lease not found"),
        ("lease-revoke", LeaseLost, "requested lease not found"),
        ("error-bad-base64", StoreError, "illegal base64 data"),
        ("error-bad-json", StoreError, "unexpected EOF"),
        ("error-unknown-path", StoreError, "HTTP 404"),
    ],
)
def test_captured_errors(name: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        decode(*capture(name))


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (503, b'{"error":"etcdserver: no leader","code":14}', Unavailable),
        (503, b'{"error":"etcdserver: request timed out","code":14}', OutcomeUnknown),
        (504, b'{"error":"context deadline exceeded","code":4}', OutcomeUnknown),
        (502, b"<html>", OutcomeUnknown),
        (429, b'{"error":"etcdserver: too many requests","code":8}', Unavailable),
        (429, b'{"error":"etcdserver: mvcc: database space exceeded","code":8}', Unavailable),
        (200, b"[]", StoreError),
    ],
)
def test_errors_that_need_a_bad_day(status: int, body: bytes, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        decode(status, body)
    assert type(caught.value) is error


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_captured_watch_in_any_slices(step: int) -> None:
    _, body = capture("watch-prefix")
    parser = WatchParser()
    results = [r for at in range(0, len(body), step) for r in parser.feed(body[at : at + step])]
    store = EtcdStore(None, ["http://x"], "/llmgw")  # type: ignore[arg-type]
    found = [c for r in results if (c := store.changes(r))]
    assert [(e.key, e.revision, e.entry and e.entry.value) for c in found for e in c.events] == [
        ("/workers/c", 7, b"vc"),
        ("/workers/b", 8, None),
        ("/workers/leased", 9, None),
    ]


def test_captured_compaction_of_a_watch() -> None:
    _, body = capture("watch-compacted")
    store = EtcdStore(None, ["http://x"], "/llmgw")  # type: ignore[arg-type]
    created, canceled = WatchParser().feed(body)
    assert store.changes(created) is None
    with pytest.raises(Compacted) as caught:
        store.changes(canceled)
    assert caught.value.revision == 4


def test_fragments_are_put_together() -> None:
    parser = WatchParser()
    assert parser.feed(b'{"result":{"fragment":true,"events":[1]}}\n{"result":{"fragment":true,"events":[2]}}\n') == []
    assert [m["events"] for m in parser.feed(b'{"result":{"events":[3]}}\n{"result":{}}\n')] == [[1, 2, 3], []]


def test_a_message_without_end_is_refused() -> None:
    parser = WatchParser()
    with pytest.raises(StoreError, match="more than"):
        parser.feed(b"x" * (MAX_LINE + 1))
