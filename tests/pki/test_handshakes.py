"""Certificates that must not open a door, each in a real handshake; and servers that a node must not believe."""

from __future__ import annotations

import datetime
import ssl
import time
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.net.tls import client_context
from llmgw.pki.ca import (
    DAY,
    Authority,
    chain_pem,
    key_pem,
    make_root,
    make_tier,
    new_key,
    sign_node,
    sign_server,
    spki_sha256,
)
from llmgw.pki.names import holder_of, node_uri
from tests.pki.certs import Certs, make_certs
from tests.pki.test_doors import GET, House, house, read_until


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return make_certs(tmp_path_factory.mktemp("pki"), time.time())


def forge(
    issuer: Authority,
    key: Any,
    *,
    subject: x509.Name | None = None,
    name: str = "gpu-1",
    uri: str | None = None,
    purposes: tuple[x509.ObjectIdentifier, ...] = (ExtendedKeyUsageOID.CLIENT_AUTH,),
    ca: bool = False,
    begin: float = -300,
    end: float = DAY,
    extra: list[x509.GeneralName] | None = None,
) -> x509.Certificate:
    """A leaf as a thief of *issuer*'s key could make it."""
    now = datetime.datetime.now(datetime.UTC)
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri or node_uri(name)), *(extra or [])]
    return (
        x509.CertificateBuilder()
        .subject_name(subject or x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(seconds=begin))
        .not_valid_after(now + datetime.timedelta(seconds=end))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(issuer.key, hashes.SHA256())
    )


def context_of(certs: Certs, tmp_path: Path, chain: list[x509.Certificate], key: Any) -> ssl.SSLContext:
    """A client that presents *chain* whatever it is: `client_context` would refuse most of them."""
    context = client_context(now=certs.now, ca=certs.roots)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    pem = tmp_path / "bad.pem"
    pem.write_bytes(chain_pem(chain) + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    context.load_cert_chain(pem)
    return context


async def refused(home: House, context: ssl.SSLContext) -> bool:
    """The client gets no answer, and the app never hears of it."""
    before = len(home.app.seen)
    try:
        async with await home.connect(context) as stream:
            with trio.fail_after(5):
                await stream.send_all(GET % b"/who")
                await read_until(stream, b"]")
    except (trio.BrokenResourceError, OSError, EOFError):
        assert len(home.app.seen) == before
        return True
    return False


def bad_chain(certs: Certs, kind: str) -> tuple[list[x509.Certificate], Any]:
    key = new_key()
    above = certs.nodes.chain
    match kind:
        case "expired":
            return [forge(certs.nodes, key, begin=-2 * DAY, end=-60), *above], key
        case "not yet valid":
            return [forge(certs.nodes, key, begin=120), *above], key
        case "wrong purpose":
            return [forge(certs.nodes, key, purposes=(ExtendedKeyUsageOID.SERVER_AUTH,)), *above], key
        case "from the servers' authority":
            return [forge(certs.servers, key), *certs.servers.chain], key
        case "wrong authority of the same name":
            false = new_key()
            fake = forge(
                Authority(certs.root.certificate, false), false, subject=certs.nodes.certificate.subject, ca=True
            )
            return [forge(Authority(fake, false), key), fake], key
        case "leaf that is an authority":
            return [forge(certs.nodes, key, ca=True), *above], key
        case "RSA of 1024 bits":
            short = rsa.generate_private_key(65537, 1024)
            return [forge(certs.nodes, short), *above], short
        case "self-signed":
            itself = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gpu-1")])
            stand_in = x509.CertificateBuilder().subject_name(itself).issuer_name(itself)
            now = datetime.datetime.now(datetime.UTC)
            leaf = (
                stand_in.public_key(key.public_key())
                .serial_number(1)
                .not_valid_before(now - datetime.timedelta(hours=1))
                .not_valid_after(now + datetime.timedelta(hours=1))
                .sign(key, hashes.SHA256())
            )
            return [leaf], key
        case "intermediate as leaf":
            return certs.nodes.chain, certs.nodes.key
        case "chain without its intermediate":
            return [forge(certs.nodes, key)], key
        case "name and URI disagree":
            return [forge(certs.nodes, key, name="gpu-1", uri=node_uri("gpu-2")), *above], key
        case "URI of another host":
            return [forge(certs.nodes, key, uri="llmgw://servers.llmgw.internal/gpu-1"), *above], key
        case "URI of a subdomain":
            return [forge(certs.nodes, key, uri="llmgw://x.nodes.llmgw.internal/gpu-1"), *above], key
        case "DNS name of elsewhere":
            return [forge(certs.nodes, key, extra=[x509.DNSName("example.org")]), *above], key
        case "address":
            import ipaddress

            return [forge(certs.nodes, key, extra=[x509.IPAddress(ipaddress.ip_address("10.0.0.1"))]), *above], key
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "expired",
        "not yet valid",
        "wrong purpose",
        "from the servers' authority",
        "wrong authority of the same name",
        "leaf that is an authority",
        "RSA of 1024 bits",
        "self-signed",
        "intermediate as leaf",
        "chain without its intermediate",
        "name and URI disagree",
        "URI of another host",
        "URI of a subdomain",
        "DNS name of elsewhere",
        "address",
    ],
)
async def test_certificates_that_open_no_door(certs: Certs, tmp_path: Path, kind: str) -> None:
    async with house(certs) as home:
        assert await refused(home, context_of(certs, tmp_path, *bad_chain(certs, kind)))
        assert not await refused(home, certs.client_context("gpu-1")), "the door is open for a good one"


async def test_revoked_by_serial(certs: Certs) -> None:
    async with house(certs) as home:
        cert, _ = certs.node_files("gpu-1")
        context = client_context(now=certs.now, ca=certs.roots, cert=cert, key=certs.folder / "gpu-1.key")
        holder = holder_of(x509.load_pem_x509_certificates(cert.read_bytes())[0])
        assert holder is not None
        home.door.revoke(holder.serial)
        assert await refused(home, context)


async def serve(
    certs: Certs, tmp_path: Path, chain: list[x509.Certificate], key: Any, trust: ssl.SSLContext, name: str
) -> str:
    """Shake hands with a server that shows *chain*; what the client says, "" if it is content."""
    pem = tmp_path / "server.pem"
    pem.write_bytes(chain_pem(chain) + key_pem(key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    left, right = trio.socket.socketpair()
    server = trio.SSLStream(trio.SocketStream(left), context, server_side=True, https_compatible=True)
    client = trio.SSLStream(trio.SocketStream(right), trust, server_hostname=name, https_compatible=True)
    said = ""

    async def answer() -> None:
        try:
            await server.do_handshake()
        except trio.BrokenResourceError:
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        try:
            await client.do_handshake()
        except trio.BrokenResourceError as error:
            said = str(error.__cause__)
        right.close()
    left.close()
    return said


async def test_servers_that_a_node_does_not_believe(certs: Certs, tmp_path: Path) -> None:
    trust = client_context(now=certs.now, ca=certs.roots)
    key = new_key()
    good = [sign_server(certs.servers, key.public_key(), ["10.0.0.1", "gw.local"], certs.now), *certs.servers.chain]
    assert await serve(certs, tmp_path, good, key, trust, "10.0.0.1") == ""
    assert await serve(certs, tmp_path, good, key, trust, "gw.local") == ""
    assert "not valid for '10.0.0.2'" in await serve(certs, tmp_path, good, key, trust, "10.0.0.2")

    theft = [forge(certs.nodes, key, purposes=(ExtendedKeyUsageOID.SERVER_AUTH,)), *certs.nodes.chain]
    assert "unsuitable certificate purpose" in await serve(certs, tmp_path, theft, key, trust, "10.0.0.1")

    node = [sign_node(certs.nodes, key.public_key(), "gpu-1", certs.now), *certs.nodes.chain]
    assert "unsuitable certificate purpose" in await serve(certs, tmp_path, node, key, trust, "gpu-1")

    other = make_root(certs.now)
    tier = make_tier(other, "servers", certs.now)
    foreign = [sign_server(tier, key.public_key(), ["10.0.0.1"], certs.now), *tier.chain]
    assert "unable to get local issuer certificate" in await serve(certs, tmp_path, foreign, key, trust, "10.0.0.1")


async def test_what_we_issue_passes_strict_verification(certs: Certs, tmp_path: Path) -> None:
    """Python 3.13 turns this on by default: certificates without AKI, SKI or KeyUsage would break at the upgrade."""
    key = new_key()
    chain = [sign_server(certs.servers, key.public_key(), ["10.0.0.1"], certs.now), *certs.servers.chain]
    trust = client_context(now=certs.now, ca=certs.roots)
    trust.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    assert await serve(certs, tmp_path, chain, key, trust, "10.0.0.1") == ""


def test_authorities_never_share_a_name(certs: Certs) -> None:
    again = make_root(certs.now)
    assert again.certificate.subject != certs.root.certificate.subject
    assert spki_sha256(again.certificate) != spki_sha256(certs.root.certificate)


def test_lives(certs: Certs) -> None:
    key = new_key().public_key()
    leaf = sign_node(certs.nodes, key, "gpu-1", certs.now)
    assert leaf.not_valid_before_utc.timestamp() == pytest.approx(certs.now - 300, abs=1)
    assert leaf.not_valid_after_utc.timestamp() == pytest.approx(certs.now + DAY, abs=1)
    late = certs.nodes.certificate.not_valid_after_utc.timestamp() - 60
    assert sign_node(certs.nodes, key, "gpu-1", late).not_valid_after_utc.timestamp() <= late + 60
