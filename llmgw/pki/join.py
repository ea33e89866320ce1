"""The node's side: become a member with a join token, stay one by renewing, and the contexts that this gives.

Two connections. The first verifies nothing and sends nothing secret: it fetches the server's root, and keeps it only if
its public key has the hash that the token pins. The second is verified against that root and the server's name, and only
it carries the secret. So somebody in between can stop a join, and learn nothing.

`root.pem` is whom the node trusts; `node.pem` holds its key and its certificates in one file, because two files cannot
be replaced at one instant; `joining.key` is there while an answer is outstanding: asked again with the same key, the
server gives the same certificate.
"""

from __future__ import annotations

import os
import random
import ssl
from email.utils import parsedate_to_datetime
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from llmgw.errors import ConfigError, LlmgwError, Problem, Unavailable
from llmgw.net.client import Answer, Client
from llmgw.net.tls import blind_context, client_context
from llmgw.net.world import Tcp, World
from llmgw.pki.ca import chain_pem, key_pem, make_request, new_key, spki_sha256
from llmgw.pki.files import PUBLIC, read_file, write_atomic
from llmgw.pki.folder import RENEW_AT
from llmgw.pki.issue import Denied, check_clock
from llmgw.pki.tokens import JoinToken
from llmgw.request import Target

MAX_ANSWER = 64 << 10  # bytes; a bundle of roots or a chain has some KiB
JITTER = 0.1  # of the moment of renewal, so that nodes that joined together do not renew together


class JoinFailed(LlmgwError):
    """This machine did not become, or remain, a node. *code*: that of `llmgw.pki.issue`, or wrong_pin, untrusted."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class JoinBody(msgspec.Struct):
    """Body of ``POST /join``. *request*: PEM."""

    token: str
    secret: str
    node: str
    request: str
    clock: float
    version: str


class RenewBody(msgspec.Struct):
    """Body of ``POST /agent/v1/renew``."""

    request: str


class Certificates(msgspec.Struct):
    """Answer of both: the node's certificate, then its intermediate, PEM."""

    certificates: str


class _Error(msgspec.Struct):
    message: str
    code: str = ""


class _Errors(msgspec.Struct):
    error: _Error


async def join(world: World, server: Tcp, token: JoinToken, node: str, folder: Path, version: str) -> None:
    """Make this machine the node *node*; afterwards *folder* holds its identity.

    Raises JoinFailed with a text for the operator, Unavailable if the server cannot be reached, ConfigError for files.
    The caller sets the deadline.
    """
    if (folder / "node.pem").exists():
        raise ConfigError(
            [
                Problem(
                    "this machine is a node already; to join anew, delete the file first", file=str(folder / "node.pem")
                )
            ]
        )
    first = await _ask(world, server, blind_context(), "GET", "/join/ca", b"")
    root = _pinned(first, token, server)
    if "date" in first.headers:
        _compare_clocks(world.wall(), first.headers["date"])
    os.makedirs(folder, mode=0o700, exist_ok=True)
    write_atomic(folder / "root.pem", chain_pem([root]), mode=PUBLIC)
    key = _pending_key(folder / "joining.key")
    body = JoinBody(token.id, token.secret, node, make_request(key).decode(), world.wall(), version)
    context = client_context(now=world.wall(), ca=folder / "root.pem")
    answer = await _ask(world, server, context, "POST", "/join", msgspec.json.encode(body))
    _save(folder, key, _certificates(answer, server))
    (folder / "joining.key").unlink()


async def renew(world: World, server: Tcp, folder: Path) -> None:
    """Replace this node's key and certificate while the old ones hold. Raises as `join`."""
    key = new_key()
    body = RenewBody(make_request(key).decode())
    context = member_context(folder, world.wall())
    answer = await _ask(world, server, context, "POST", "/agent/v1/renew", msgspec.json.encode(body))
    _save(folder, key, _certificates(answer, server))


def member_context(folder: Path, now: float) -> ssl.SSLContext:
    """For every connection of a node to its server. Raises ConfigError: not joined, expired, unreadable."""
    own = folder / "node.pem"
    return client_context(now=now, ca=folder / "root.pem", cert=own, key=own)


def renewal(folder: Path, rng: random.Random) -> float:
    """When to call `renew`, seconds since 1970: two thirds into the certificate's life, give or take a tenth."""
    leaf = x509.load_pem_x509_certificates(read_file(folder / "node.pem", "certificate of the node", secret=True))[0]
    begin, end = leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()
    return begin + (end - begin) * RENEW_AT * rng.uniform(1 - JITTER, 1 + JITTER)


async def _ask(world: World, server: Tcp, context: ssl.SSLContext, method: str, path: str, body: bytes) -> Answer:
    client = Client(world, tls=context)
    target = Target(endpoint="", name=f"server {server}", address=str(server), host=str(server), tls=True)
    try:
        return await client.request(
            target, method, path, headers=[("content-type", "application/json")], body=body, limit=MAX_ANSWER
        )
    except Unavailable as error:
        if "certificate verify failed" in str(error).lower().replace("_", " "):
            raise JoinFailed("untrusted", _untrusted(error, server)) from error
        raise
    finally:
        client.close()


def _untrusted(error: BaseException, server: Tcp) -> str:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    why = cause.verify_message if cause is not None else str(error)
    return (
        f"the certificate of the server at {server} does not hold: {why.rstrip('.')}. Nothing secret was sent. "
        "Use an address that the server's certificate names, and check both clocks"
    )


def _pinned(answer: Answer, token: JoinToken, server: Tcp) -> x509.Certificate:
    if answer.status != 200:
        raise JoinFailed(
            "bad_request",
            f"{server} answers {answer.status} to GET /join/ca; is that the server's cluster port (:9443)?",
        )
    try:
        offered = x509.load_pem_x509_certificates(answer.body)
    except ValueError:
        offered = []
    for certificate in offered:
        if spki_sha256(certificate) == token.pin:
            return certificate
    raise JoinFailed(
        "wrong_pin",
        f"the server at {server} has another certificate authority than the one that the join token was made by: "
        "this is the wrong server, its authority was made anew since, or somebody is in between. Nothing secret was sent",
    )


def _compare_clocks(clock: float, date: str) -> None:
    try:
        there = parsedate_to_datetime(date).timestamp()
    except ValueError:
        return
    try:
        check_clock(clock, there)
    except Denied as denied:
        raise JoinFailed(denied.code, str(denied)) from denied


def _certificates(answer: Answer, server: Tcp) -> list[x509.Certificate]:
    if answer.status != 200:
        try:
            error = msgspec.json.decode(answer.body, type=_Errors).error
        except msgspec.DecodeError:
            error = _Error(f"{server} answers {answer.status}")
        raise JoinFailed(error.code, error.message)
    try:
        text = msgspec.json.decode(answer.body, type=Certificates).certificates
        return x509.load_pem_x509_certificates(text.encode())
    except (msgspec.DecodeError, ValueError) as error:
        raise JoinFailed("bad_request", f"{server} sent no certificate") from error


def _pending_key(path: Path) -> ec.EllipticCurvePrivateKey:
    if path.exists():
        key = load_pem_private_key(read_file(path, "key of a join that was interrupted", secret=True), None)
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key
    key = new_key()
    write_atomic(path, key_pem(key))
    return key


def _save(folder: Path, key: ec.EllipticCurvePrivateKey, chain: list[x509.Certificate]) -> None:
    if chain[0].public_key() != key.public_key():
        raise JoinFailed("bad_request", "the server sent a certificate for another key")
    write_atomic(folder / "node.pem", key_pem(key) + chain_pem(chain))
