"""TLS contexts: one place that says which protocol versions, which names in ALPN, and what is wrong with a file.

TLS 1.2 or newer, HTTP/1.1 only. Every problem with certificate and key is a ConfigError that names the file and what
to do; all of them at once. `Reloadable` keeps serving the old certificate when the new files are unusable.
"""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from llmgw.errors import ConfigError, Problem

ALPN = ["http/1.1"]


def server_context(
    cert: Path, key: Path, *, now: float, client_ca: Path | None = None, require_client: bool = False
) -> ssl.SSLContext:
    """A context for a listener. *cert*: PEM, leaf first, then its intermediates. *now*: seconds since 1970.

    *client_ca*: PEM of the roots that client certificates must lead to; a client may come without one unless
    *require_client*. Session tickets are then off: a resumed session would skip the check of the certificate.
    Raises ConfigError.
    """
    problems = check_pair(cert, key, now)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _common(context)
    if not problems:
        _load_pair(context, cert, key, problems)
    if client_ca is not None:
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        context.verify_mode = ssl.CERT_REQUIRED if require_client else ssl.CERT_OPTIONAL
        _load_roots(context, client_ca, problems)
    if problems:
        raise ConfigError(problems)
    return context


def client_context(
    *,
    now: float,
    ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
    check_hostname: bool = True,
) -> ssl.SSLContext:
    """A context for dialling. *ca*: PEM of the only roots to trust; None: those of the system.

    *cert* and *key*: who we are, where the server asks. Raises ConfigError.
    """
    problems: list[Problem] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _common(context)
    context.check_hostname = check_hostname
    if ca is None:
        context.load_default_certs()
    else:
        _load_roots(context, ca, problems)
    if cert is not None and key is not None:
        problems += (pair := check_pair(cert, key, now))
        if not pair:
            _load_pair(context, cert, key, problems)
    elif cert is not None or key is not None:
        given, other = (cert, "key") if cert is not None else (key, "certificate")
        problems.append(Problem(f"is given without its {other}; give both or neither", file=str(given)))
    if problems:
        raise ConfigError(problems)
    return context


def blind_context() -> ssl.SSLContext:
    """A context that verifies nothing, for the first of a join's two connections: it sends no secret over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _common(context)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def host_name(host: str) -> str:
    """The name that a certificate must have, of a Host header's value: no port, no brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def check_pair(cert: Path, key: Path, now: float) -> list[Problem]:
    """What is wrong with a certificate and its key; empty if a listener can use them at *now*."""
    problems: list[Problem] = []
    cert_pem, key_pem = _read(cert, "certificate", problems), _read(key, "key", problems)
    leaf = private = None
    if cert_pem is not None:
        try:
            leaf = x509.load_pem_x509_certificates(cert_pem)[0]
        except ValueError:
            hint = "it holds a key; are certificate and key swapped?" if b"PRIVATE KEY" in cert_pem else "PEM expected"
            problems.append(Problem(f"holds no certificate: {hint}", file=str(cert)))
    if key_pem is not None:
        if b"ENCRYPTED" in key_pem:
            problems.append(
                Problem(f"is encrypted; decrypt it once: openssl pkey -in {key} -out {key}.plain", file=str(key))
            )
        else:
            try:
                private = load_pem_private_key(key_pem, None)
            except (ValueError, TypeError):
                problems.append(Problem("holds no private key in PEM form", file=str(key)))
    if leaf is not None:
        problems += _check_dates(leaf, cert, now)
        if private is not None and private.public_key() != leaf.public_key():
            problems.append(
                Problem(f"does not belong to the key in {key}; the leaf certificate must come first", file=str(cert))
            )
    return problems


class Reloadable:
    """The current context of a listener, made from files that change under it.

    Call it for the context of each new connection. `reload` re-reads the files; if they are unusable it raises
    ConfigError and the old context stays.
    """

    def __init__(self, make: Callable[[], ssl.SSLContext]) -> None:
        self._make = make
        self._context = make()

    def __call__(self) -> ssl.SSLContext:
        return self._context

    def reload(self) -> None:
        self._context = self._make()


def _common(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # a peer could ask for one handshake after another
    context.set_alpn_protocols(ALPN)


def _read(path: Path, what: str, problems: list[Problem]) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError as error:
        problems.append(Problem(f"{what} cannot be read: {error.strerror}", file=str(path)))
        return None


def _check_dates(leaf: x509.Certificate, cert: Path, now: float) -> list[Problem]:
    begin, end = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    moment = datetime.datetime.fromtimestamp(now, datetime.UTC)
    if moment > end:
        return [Problem(f"expired at {end:%Y-%m-%d %H:%M:%S} UTC; renew it", file=str(cert))]
    if moment < begin:
        return [
            Problem(
                f"is not valid before {begin:%Y-%m-%d %H:%M:%S} UTC, and it is {moment:%Y-%m-%d %H:%M:%S} here; "
                "check this machine's clock",
                file=str(cert),
            )
        ]
    return []


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path, problems: list[Problem]) -> None:
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # without it OpenSSL asks at the terminal
    except (ssl.SSLError, OSError) as error:
        problems.append(Problem(f"OpenSSL refuses it: {_reason(error)}", file=str(cert)))


def _load_roots(context: ssl.SSLContext, path: Path, problems: list[Problem]) -> None:
    pem = _read(path, "certificate of the authority", problems)
    if pem is None:
        return
    try:
        context.load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        problems.append(Problem(f"holds no certificate of an authority in PEM form: {_reason(error)}", file=str(path)))


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)
