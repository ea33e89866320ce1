"""TLS files that cannot be used are named with what to do about them, all at once."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from llmgw.errors import ConfigError
from llmgw.net.tls import Reloadable, client_context, server_context
from llmgw.pki.ca import TIER_LIFE, new_key
from tests.pki.certs import NOW, Certs, make_certs


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return make_certs(tmp_path_factory.mktemp("tls"), NOW)


def problems(certs: Certs, cert: Path, key: Path, now: float = NOW, client_ca: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        server_context(cert, key, now=now, client_ca=client_ca)
    return [str(p).replace(str(certs.folder) + "/", "") for p in caught.value.problems]


def test_good_files(certs: Certs) -> None:
    context = server_context(*certs.server_files(), now=NOW, client_ca=certs.roots)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_OPTIONAL
    assert context.options & ssl.OP_NO_TICKET
    required = server_context(*certs.server_files(), now=NOW, client_ca=certs.roots, require_client=True)
    assert required.verify_mode == ssl.CERT_REQUIRED


def test_all_problems_are_listed(certs: Certs) -> None:
    nowhere = certs.folder / "nowhere"
    assert problems(certs, nowhere / "a.pem", nowhere / "a.key", client_ca=nowhere / "ca.pem") == [
        "nowhere/a.pem: certificate cannot be read: No such file or directory",
        "nowhere/a.key: key cannot be read: No such file or directory",
        "nowhere/ca.pem: certificate of the authority cannot be read: No such file or directory",
    ]


def test_swapped_files(certs: Certs) -> None:
    cert, key = certs.server_files()
    assert problems(certs, key, cert) == [
        "server.key: holds no certificate: it holds a key; are certificate and key swapped?",
        "server.pem: holds no private key in PEM form",
    ]


def test_key_of_another_certificate(certs: Certs) -> None:
    cert, _ = certs.server_files()
    _, key = certs.node_files("gpu-1")
    (problem,) = problems(certs, cert, key)
    assert problem.startswith("server.pem: does not belong to the key in")


def test_encrypted_key(certs: Certs) -> None:
    cert, _ = certs.server_files()
    locked = certs.folder / "locked.key"
    secret = new_key().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"pw"))
    locked.write_bytes(secret)
    (problem,) = problems(certs, cert, locked)
    assert "is encrypted; decrypt it once: openssl pkey -in" in problem


def test_expired_and_not_yet_valid(certs: Certs) -> None:
    cert, key = certs.server_files()
    assert problems(certs, cert, key, NOW + TIER_LIFE) == ["server.pem: expired at 2030-04-16 17:46:40 UTC; renew it"]
    (early,) = problems(certs, cert, key, NOW - 3_600)
    assert early.startswith("server.pem: is not valid before 2030-03-17 17:41:40 UTC, and it is 2030-03-17 16:46:40")
    assert early.endswith("check this machine's clock")


def test_authority_that_is_none(certs: Certs) -> None:
    cert, key = certs.server_files()
    garbage = certs.folder / "garbage.pem"
    garbage.write_text("hello")
    (problem,) = problems(certs, cert, key, client_ca=garbage)
    assert problem.startswith("garbage.pem: holds no certificate of an authority in PEM form")


def test_client_with_half_a_pair(certs: Certs) -> None:
    cert, key = certs.node_files("gpu-1")
    with pytest.raises(ConfigError, match="is given without its key; give both or neither"):
        client_context(now=NOW, ca=certs.roots, cert=cert)
    with pytest.raises(ConfigError, match="is given without its certificate"):
        client_context(now=NOW, ca=certs.roots, key=key)


def test_client_without_own_authority_trusts_the_system() -> None:
    context = client_context(now=NOW)
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname


def test_reload_keeps_the_old_context_when_the_new_files_are_bad(certs: Certs) -> None:
    cert, key = certs.server_files()
    source = Reloadable(lambda: server_context(cert, key, now=NOW))
    first = source()
    cert.write_text("half a")
    with pytest.raises(ConfigError):
        source.reload()
    assert source() is first
    certs.server_files()
    source.reload()
    assert source() is not first
