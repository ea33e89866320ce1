"""The certificate authority: a root that may lie in a safe, and two intermediates that the server works with.

    root      10 years, path length 1, signs the intermediates only
    ├── nodes    1 year, path length 0, clientAuth only, names under nodes.llmgw.internal only, no IP address
    └── servers  1 year, path length 0, serverAuth only (people reach servers by address, so any name)

Whoever steals the key of *nodes* cannot mint a server: both the purpose and the names forbid it. Each name type needs
its own constraint: a constraint on DNS names alone leaves addresses and URIs free. Every certificate carries AKI and
SKI and every authority KeyUsage from the first day: strict verification (Python 3.13's default) demands them.

A subject ends in random characters, because OpenSSL finds issuers by name: an authority made anew under the old name
gives "signature failure" instead of "unknown issuer".
"""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from typing import Literal

import attrs
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.errors import ConfigError, Problem
from llmgw.pki.names import NODES_HOST, node_uri

Tier = Literal["nodes", "servers"]
PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey

DAY = 86_400.0
ROOT_LIFE = 3_650 * DAY
TIER_LIFE = 365 * DAY
NODE_LIFE = 1 * DAY
SERVER_LIFE = 30 * DAY  # the server re-issues its own at start and from two thirds of this
BACKDATE = 300.0  # seconds; a certificate that starts now is refused by a peer whose clock is two minutes behind


@attrs.frozen
class Authority:
    """A certificate that signs others, and its key. *chain*: its certificate and those above it, without the root."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = attrs.field(repr=False)

    @property
    def chain(self) -> list[x509.Certificate]:
        return [] if self.certificate.issuer == self.certificate.subject else [self.certificate]


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def chain_pem(certificates: list[x509.Certificate]) -> bytes:
    return b"".join(c.public_bytes(Encoding.PEM) for c in certificates)


def spki_sha256(certificate: x509.Certificate) -> bytes:
    """SHA-256 of the public key in its DER form: what a join token pins."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    return digest.finalize()


def make_root(now: float) -> Authority:
    """A new root. *now*: seconds since 1970."""
    key = new_key()
    subject = _subject("root")
    builder = _builder(subject, subject, key.public_key(), key.public_key(), now, ROOT_LIFE)
    return Authority(_authority(builder, path_length=1).sign(key, hashes.SHA256()), key)


def make_tier(root: Authority, tier: Tier, now: float) -> Authority:
    """An intermediate under *root*. It does not outlive the root."""
    key = new_key()
    life = min(TIER_LIFE, root.certificate.not_valid_after_utc.timestamp() - now)
    builder = _builder(
        _subject(tier), root.certificate.subject, key.public_key(), root.certificate.public_key(), now, life
    )
    builder = _authority(builder, path_length=0)
    purpose = ExtendedKeyUsageOID.CLIENT_AUTH if tier == "nodes" else ExtendedKeyUsageOID.SERVER_AUTH
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    if tier == "nodes":
        builder = builder.add_extension(
            x509.NameConstraints(
                permitted_subtrees=[x509.DNSName(NODES_HOST), x509.UniformResourceIdentifier(NODES_HOST)],
                excluded_subtrees=[
                    x509.IPAddress(ipaddress.ip_network("0.0.0.0/0")),
                    x509.IPAddress(ipaddress.ip_network("::/0")),
                ],
            ),
            critical=True,
        )
    return Authority(builder.sign(root.key, hashes.SHA256()), key)


def sign_node(authority: Authority, public_key: PublicKey, node: str, now: float) -> x509.Certificate:
    """A node's certificate for *public_key*, valid for a day. Nothing in it comes from the node but the key."""
    builder = _leaf(authority, public_key, node, ExtendedKeyUsageOID.CLIENT_AUTH, now, NODE_LIFE)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(node_uri(node))])
    return builder.add_extension(names, critical=False).sign(authority.key, hashes.SHA256())


def sign_server(authority: Authority, public_key: PublicKey, names: list[str], now: float) -> x509.Certificate:
    """A server's certificate for *names*: host names and literal addresses, the first is its common name."""
    general: list[x509.GeneralName] = []
    for name in names:
        try:
            general.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            general.append(x509.DNSName(name))
    builder = _leaf(authority, public_key, names[0], ExtendedKeyUsageOID.SERVER_AUTH, now, SERVER_LIFE)
    return builder.add_extension(x509.SubjectAlternativeName(general), critical=False).sign(
        authority.key, hashes.SHA256()
    )


def key_of_request(pem: bytes) -> PublicKey:
    """The public key of a signing request, the only thing in it that counts. Raises ValueError with the reason.

    The signature of the request proves that the asker holds the private key.
    """
    try:
        request = x509.load_pem_x509_csr(pem)
        genuine = request.is_signature_valid
        key = request.public_key()
    except (ValueError, InvalidSignature) as error:
        raise ValueError("the signing request is not a PEM certificate request") from error
    if isinstance(key, ec.EllipticCurvePublicKey):
        allowed = isinstance(key.curve, ec.SECP256R1)
    else:
        allowed = isinstance(key, ed25519.Ed25519PublicKey)
    if not allowed or not isinstance(key, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey):
        raise ValueError("the signing request has a key that is neither P-256 nor Ed25519")
    if not genuine:
        raise ValueError("the signature of the signing request is wrong: its sender does not hold the key")
    return key


def make_request(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    """A signing request for *key*, PEM. It asks for no name: names are given, not asked for."""
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .sign(key, algorithm)
        .public_bytes(Encoding.PEM)
    )


def load_authority(certificate_pem: bytes, private_pem: bytes, file: str) -> Authority:
    """Read back what `chain_pem` and `key_pem` wrote. Raises ConfigError naming *file*."""
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        key = load_pem_private_key(private_pem, None)
    except (ValueError, TypeError) as error:
        raise ConfigError([Problem(f"is no certificate authority of llmgw: {error}", file=file)]) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError([Problem("its key is not a P-256 key", file=file)])
    if key.public_key() != certificate.public_key():
        raise ConfigError([Problem("certificate and key do not belong together", file=file)])
    return Authority(certificate, key)


def _time(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def _subject(role: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"llmgw {role} {secrets.token_hex(4)}")])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, issuer_key: object, now: float, life: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_time(now - BACKDATE))
        .not_valid_after(_time(now + life))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key),  # type: ignore[arg-type]
            critical=False,
        )
    )


def _authority(builder: x509.CertificateBuilder, path_length: int) -> x509.CertificateBuilder:
    return builder.add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True).add_extension(
        _usage(sign_certificates=True), critical=True
    )


def _leaf(
    authority: Authority, key: PublicKey, name: str, purpose: x509.ObjectIdentifier, now: float, life: float
) -> x509.CertificateBuilder:
    issuer = authority.certificate
    life = min(life, issuer.not_valid_after_utc.timestamp() - now)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    return (
        _builder(subject, issuer.subject, key, issuer.public_key(), now, life)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    )


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
