"""From `ca init` to a node that renews and is revoked, over real TLS; and every way in which a join fails."""

from __future__ import annotations

import os
import re
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import trio
from cryptography import x509
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from llmgw.errors import ConfigError, Unavailable
from llmgw.net.client import Client
from llmgw.net.tls import blind_context, client_context
from llmgw.net.world import RealWorld, Tcp
from llmgw.pki.ca import make_request, new_key
from llmgw.pki.folder import Identity, init_authority, load_identity
from llmgw.pki.issue import CODES, MAX_SKEW, NODES, TOKENS, Denied, NodeRow, TokenRow, create_token, revoke
from llmgw.pki.join import JoinFailed, join, member_context, renew, renewal
from llmgw.pki.tokens import JoinToken, parse_token
from llmgw.request import Target
from llmgw.server.cluster import STATUS, Cluster
from llmgw.stores.base import Store, put
from llmgw.stores.memory import MemoryStore
from tests.pki.test_doors import GET, ended, read_until


class World(RealWorld):
    """The real one, with a clock that is off."""

    def __init__(self, off: float = 0.0) -> None:
        super().__init__(0)
        self.off = off

    def wall(self) -> float:
        return time.time() + self.off


@attrs.define
class Site:
    folder: Path
    store: Store
    identity: Identity
    cluster: Cluster
    address: Tcp
    world: World = attrs.field(factory=World)

    async def token(self, **options: Any) -> JoinToken:
        text = (await create_token(self.store, self.identity, time.time(), **options)).text()
        return parse_token(text)

    async def join(self, token: JoinToken, node: str, *, world: World | None = None, folder: str = "") -> Path:
        own = self.folder / (folder or node)
        with trio.fail_after(5):
            await join(world or self.world, self.address, token, node, own, "0.1.0")
        return own

    async def refused(self, token: JoinToken, node: str, *, world: World | None = None, folder: str = "") -> JoinFailed:
        with pytest.raises(JoinFailed) as caught:
            await self.join(token, node, world=world, folder=folder)
        return caught.value

    async def get(self, context: ssl.SSLContext, path: str = "/agent/v1/who") -> tuple[int, str]:
        client = Client(self.world, tls=context)
        target = Target(endpoint="", name="server", address=str(self.address), host=str(self.address), tls=True)
        try:
            with trio.fail_after(5):
                answer = await client.request(target, "GET", path)
        finally:
            client.close()
        return answer.status, answer.body.decode()


async def who(request: Request) -> Response:  # noqa: ASYNC124
    return PlainTextResponse(request.state.peer.node)


@asynccontextmanager
async def open_site(folder: Path, identity: Identity | None = None, host: str = "127.0.0.1") -> AsyncIterator[Site]:
    identity = identity or init_authority(folder / "pki", folder / "root.key", time.time())
    world, store = World(), MemoryStore()
    cluster = Cluster(world, store, identity, [host], [Route("/agent/v1/who", who)])
    sockets = await world.listen(Tcp(host, 0))
    address = Tcp(host, sockets[0].getsockname()[1])
    async with trio.open_nursery() as nursery:
        await nursery.start(cluster.run, sockets)
        yield Site(folder, store, identity, cluster, address)
        cluster.door.close()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with open_site(tmp_path) as site:
        yield site


async def test_from_token_to_renewal_to_revocation(site: Site) -> None:
    folder = await site.join(await site.token(), "gpu-1")
    assert sorted(os.listdir(folder)) == ["node.pem", "root.pem"]
    assert os.stat(folder / "node.pem").st_mode & 0o777 == 0o600
    assert await site.get(member_context(folder, time.time())) == (200, "gpu-1")

    before = member_context(folder, time.time())
    with trio.fail_after(5):
        await renew(site.world, site.address, folder)
    assert await site.get(member_context(folder, time.time())) == (200, "gpu-1")
    assert await site.get(before) == (200, "gpu-1"), "the old certificate holds until it expires"
    row = msgspec.json.decode((await site.store.range(NODES)).entries[0].value, type=NodeRow)
    assert len(row.issued) == 2

    await revoke(site.store, "gpu-1", time.time())
    await trio.sleep(0.1)
    for context in (before, member_context(folder, time.time())):
        with pytest.raises(Unavailable):
            await site.get(context)
    with pytest.raises(Unavailable):
        await renew(site.world, site.address, folder)


async def test_by_an_ipv6_address(tmp_path: Path) -> None:
    try:
        for sock in await RealWorld().listen(Tcp("::1", 0)):
            sock.close()
    except OSError:
        pytest.skip("no IPv6 here")
    async with open_site(tmp_path, host="::1") as site:
        folder = await site.join(await site.token(), "gpu-1")
        assert await site.get(member_context(folder, time.time())) == (200, "gpu-1")


async def test_revocation_cuts_a_living_connection_within_a_second(site: Site) -> None:
    folder = await site.join(await site.token(), "gpu-1")
    context = member_context(folder, time.time())
    plain = trio.SocketStream(trio.socket.from_stdlib_socket(await site.world.dial(site.address)))
    async with trio.SSLStream(plain, context, server_hostname="127.0.0.1", https_compatible=True) as stream:
        await stream.send_all(GET % b"/agent/v1/who")
        await read_until(stream, b"gpu-1")
        await revoke(site.store, "gpu-1", time.time())
        with trio.fail_after(1):
            assert await ended(stream)


async def test_a_revoked_node_comes_back_with_a_token_made_for_it(site: Site) -> None:
    old = member_context(await site.join(await site.token(), "gpu-1"), time.time())
    await revoke(site.store, "gpu-1", time.time())
    failed = await site.refused(await site.token(), "gpu-1", folder="again")
    assert failed.code == "node_revoked"
    assert "to let it in again make a token for it: llmgw ctl token create --node gpu-1" in str(failed)
    folder = await site.join(await site.token(node="gpu-1"), "gpu-1", folder="again")
    with trio.fail_after(2):
        while await site.get(member_context(folder, time.time())) != (200, "gpu-1"):
            pass
    with pytest.raises(Unavailable):
        await site.get(old)


async def test_the_token_is_used_up(site: Site) -> None:
    token = await site.token()
    await site.join(token, "gpu-1")
    failed = await site.refused(token, "gpu-2")
    assert failed.code == "token_used"
    assert str(failed).startswith(f"join token {token.id} was used at ")
    assert str(failed).endswith("by node gpu-1, and works once; make a new one on the server: llmgw ctl token create")


async def test_a_lost_answer_is_given_again_to_the_same_key_only(site: Site) -> None:
    token = await site.token()
    folder = await site.join(token, "gpu-1")
    first = (folder / "node.pem").read_bytes()
    # The node crashed before it wrote the answer down: it has its key, and asks again.
    key, _, _ = first.partition(b"-----BEGIN CERTIFICATE")
    (folder / "node.pem").unlink()
    (folder / "joining.key").write_bytes(key)
    (folder / "joining.key").chmod(0o600)
    await site.join(token, "gpu-1")
    assert (folder / "node.pem").read_bytes() == first
    failed = await site.refused(token, "gpu-1", folder="thief")
    assert failed.code == "token_other_key"
    assert "by this node with another key; if that was not you, revoke the node: llmgw ctl node revoke gpu-1" in str(
        failed
    )


async def test_an_expired_token(site: Site) -> None:
    token = await site.token(life=60)
    key = TOKENS + token.id
    entry = await site.store.get(key)
    assert entry is not None
    row = msgspec.json.decode(entry.value, type=TokenRow)
    await put(site.store, key, msgspec.json.encode(msgspec.structs.replace(row, expires=900_000_000.0)))
    failed = await site.refused(token, "gpu-1")
    assert failed.code == "token_expired"
    assert str(failed) == (
        f"join token {token.id} expired at 1998-07-09 16:00:00 UTC; "
        "make a new one on the server: llmgw ctl token create"
    )


async def test_a_token_for_another_node(site: Site) -> None:
    token = await site.token(node="gpu-1")
    failed = await site.refused(token, "gpu-2")
    assert failed.code == "token_other_node"
    assert str(failed) == (
        f"join token {token.id} was made for node gpu-1, and this is gpu-2; "
        "make a new one on the server: llmgw ctl token create"
    )
    await site.join(token, "gpu-1")


async def test_a_wrong_secret_and_an_unknown_token_look_alike(site: Site) -> None:
    token = await site.token()
    wrong = attrs.evolve(token, secret="a" * 26)
    unknown = attrs.evolve(token, id="a" * 10)
    for bad in (wrong, unknown):
        failed = await site.refused(bad, "gpu-1")
        assert failed.code == "token_unknown"
        assert str(failed) == (
            f"join token {bad.id} is not known to this server, or its secret is wrong; "
            "make a new one on the server: llmgw ctl token create"
        )


async def test_a_wrong_pin_and_a_man_in_the_middle_see_no_secret(site: Site, tmp_path: Path) -> None:
    token = attrs.evolve(await site.token(), pin=bytes(32))
    failed = await site.refused(token, "gpu-1")
    assert failed.code == "wrong_pin"
    assert str(failed) == (
        f"the server at {site.address} has another certificate authority than the one that the join token was made by: "
        "this is the wrong server, its authority was made anew since, or somebody is in between. Nothing secret was sent"
    )
    assert (await site.store.range(NODES)).entries == ()


async def test_somebody_who_shows_the_right_root_and_has_no_key_of_it(site: Site, tmp_path: Path) -> None:
    """The root is public, so an impostor can show it; its own certificate comes from elsewhere."""
    false = init_authority(tmp_path / "false", tmp_path / "false.key", time.time())
    async with open_site(tmp_path / "false", attrs.evolve(false, root=site.identity.root)) as impostor:
        token = await site.token()
        failed = await impostor.refused(token, "gpu-1")
        assert failed.code == "untrusted"
        assert "does not hold: unable to get local issuer certificate. Nothing secret was sent" in str(failed)
        assert (await impostor.store.range("")).entries == ()


@pytest.mark.parametrize(("off", "side"), [(-3600.0, "behind"), (3600.0, "ahead of")])
async def test_a_clock_that_is_an_hour_off(site: Site, off: float, side: str) -> None:
    failed = await site.refused(await site.token(), "gpu-1", world=World(off))
    assert failed.code == "clock"
    text = str(failed)
    assert re.match(rf"this machine's clock is (3599|360\d) s {side} the server's \(", text)
    assert text.endswith(" there); set it, for instance with `timedatectl set-ntp true`, then try again")


async def test_a_clock_that_is_a_little_off_does_not_matter(site: Site) -> None:
    for off in (-MAX_SKEW + 60, MAX_SKEW - 60):
        folder = await site.join(
            await site.token(), f"gpu{off:+.0f}".replace("+", "p").replace("-", "m"), world=World(off)
        )
        assert (folder / "node.pem").exists()


async def test_a_second_machine_under_a_name_that_is_taken(site: Site) -> None:
    await site.join(await site.token(), "gpu-1")
    failed = await site.refused(await site.token(), "gpu-1", folder="other")
    assert failed.code == "node_active"
    assert str(failed).startswith("node id gpu-1 is already active from 127.0.0.1:")
    folder = await site.join(await site.token(node="gpu-1"), "gpu-1", folder="other")
    assert await site.get(member_context(folder, time.time())) == (200, "gpu-1")


@pytest.mark.parametrize("node", ["", "GPU 1", "a/../b", "-a", "a" * 64])
async def test_bad_node_ids(site: Site, node: str) -> None:
    failed = await site.refused(await site.token(), node, folder="x")
    assert failed.code == "bad_node_id"


async def test_joined_already(site: Site) -> None:
    await site.join(await site.token(), "gpu-1")
    with pytest.raises(ConfigError, match="this machine is a node already"):
        await site.join(await site.token(), "gpu-1")


async def test_without_a_certificate_there_is_only_join(site: Site) -> None:
    context = client_context(now=time.time(), ca=site.identity.root_file)
    status, text = await site.get(context)
    assert status == 401
    assert "this needs a node's certificate" in text
    assert (await site.get(context, "/join/ca"))[0] == 200
    assert (await site.get(context, "/nowhere"))[0] == 401


async def test_a_body_that_is_no_join(site: Site) -> None:
    client = Client(site.world, tls=blind_context())
    target = Target(endpoint="", name="server", address=str(site.address), host="x", tls=True)
    for body in (b"", b"{}", b"[" * 1000, b"x" * 100_000):
        answer = await client.request(target, "POST", "/join", body=body)
        assert answer.status == 400
        assert b'"code":"bad_request"' in answer.body
    client.close()


async def test_nobody_there(tmp_path: Path) -> None:
    (listener,) = await RealWorld().listen(Tcp("127.0.0.1", 0))
    address = Tcp("127.0.0.1", listener.getsockname()[1])
    listener.close()
    token = parse_token(f"lgwj1.{'a' * 10}.{'a' * 26}.{'a' * 52}")
    with pytest.raises(Unavailable, match="cannot connect"):
        await join(World(), address, token, "gpu-1", tmp_path, "0.1.0")


async def test_renewal_is_due_around_two_thirds(site: Site) -> None:
    import random

    folder = await site.join(await site.token(), "gpu-1")
    due = [renewal(folder, random.Random(n)) - time.time() for n in range(50)]
    life = 86_400 + 300
    assert life * (2 / 3) * 0.9 - 301 <= min(due) < max(due) <= life * (2 / 3) * 1.1 - 299
    assert max(due) - min(due) > 5_000


async def test_tokens_are_stored_hashed(site: Site) -> None:
    token = await site.token()
    (entry,) = (await site.store.range(TOKENS)).entries
    assert token.secret.encode() not in entry.value
    assert token.secret not in repr(token)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"node": "A b"}, "must be a host name"), ({"life": 0.0}, "between 1 s and 24 h"), ({"life": 1e6}, "24 h")],
)
async def test_bad_token_options(site: Site, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        await site.token(**options)


async def test_revoking_nobody(site: Site) -> None:
    with pytest.raises(Denied, match="there is no node gpu-9"):
        await revoke(site.store, "gpu-9", time.time())


def test_every_code_has_a_status_and_stands_in_the_documentation() -> None:
    assert set(STATUS) == set(CODES)
    page = (Path(__file__).parents[2] / "docs" / "identity.md").read_text()
    for code, status in STATUS.items():
        assert f"| `{code}` | {status} |" in page


def test_ca_init_replaces_nothing(tmp_path: Path) -> None:
    now = time.time()
    made = init_authority(tmp_path / "pki", tmp_path / "root.key", now)
    with pytest.raises(ConfigError) as caught:
        init_authority(tmp_path / "pki", tmp_path / "root.key", now)
    assert len(caught.value.problems) == 5
    assert load_identity(tmp_path / "pki").pin == made.pin
    for name in ("nodes.key", "servers.key", "pepper"):
        assert os.stat(tmp_path / "pki" / name).st_mode & 0o777 == 0o600
    os.chmod(tmp_path / "pki" / "nodes.key", 0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        load_identity(tmp_path / "pki")


def test_no_authority_yet(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no certificate authority; make one: llmgw ctl ca init"):
        load_identity(tmp_path)


def test_the_servers_certificate_is_issued_anew_in_time(tmp_path: Path) -> None:
    now = time.time()
    identity = init_authority(tmp_path / "pki", tmp_path / "root.key", now)

    def serial(names: list[str], at: float) -> int:
        cert, _ = identity.server_files(names, at)
        return x509.load_pem_x509_certificates(cert.read_bytes())[0].serial_number

    first = serial(["a.local", "10.0.0.1"], now)
    assert serial(["10.0.0.1", "a.local"], now + 86_400) == first
    assert serial(["a.local"], now + 86_400) != first
    second = serial(["a.local"], now + 86_400)
    assert serial(["a.local"], now + 86_400 + 21 * 86_400) != second
    (tmp_path / "pki" / "server.key").write_text("")
    assert serial(["a.local"], now)


def test_requests_with_other_keys_are_refused() -> None:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from cryptography.hazmat.primitives.serialization import Encoding

    from llmgw.pki.ca import key_of_request

    for good in (new_key(), ed25519.Ed25519PrivateKey.generate()):
        assert key_of_request(make_request(good)) == good.public_key()
    for key in (rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())):
        pem = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
        with pytest.raises(ValueError, match="neither P-256 nor Ed25519"):
            key_of_request(pem.public_bytes(Encoding.PEM))
    with pytest.raises(ValueError, match="not a PEM certificate request"):
        key_of_request(b"hello")
