"""Where a server keeps its identity: one directory.

    root.pem             the root's certificate: public, what nodes and operators trust
    nodes.pem  .key      the intermediate that signs nodes
    servers.pem  .key    the intermediate that signs servers
    server.pem  .key     this server's own certificate, issued anew from two thirds of its life
    pepper               what join tokens and API keys are hashed with

The root's key is written to a path of the operator's choice and is not needed again until an intermediate runs out: it
belongs on a medium that is then taken out of the machine.
"""

from __future__ import annotations

from pathlib import Path

import attrs
from cryptography import x509

from llmgw.errors import ConfigError, Problem
from llmgw.net.tls import check_pair
from llmgw.pki.ca import (
    Authority,
    chain_pem,
    key_pem,
    load_authority,
    make_root,
    make_tier,
    new_key,
    sign_server,
    spki_sha256,
)
from llmgw.pki.files import PUBLIC, read_file, write_atomic
from llmgw.pki.secret import Pepper, load_pepper, make_pepper

RENEW_AT = 2 / 3
"""Of a certificate's life; the last third is for being down."""


@attrs.frozen
class Identity:
    """What a server with a certificate authority works with."""

    folder: Path
    root: x509.Certificate
    nodes: Authority
    servers: Authority
    pepper: Pepper

    @property
    def root_file(self) -> Path:
        return self.folder / "root.pem"

    @property
    def pin(self) -> bytes:
        return spki_sha256(self.root)

    def server_files(self, names: list[str], now: float) -> tuple[Path, Path]:
        """Certificate and key of this server for *names*; issued anew if they are missing, for other names, or old."""
        cert, key = self.folder / "server.pem", self.folder / "server.key"
        if not cert.exists() or not key.exists() or check_pair(cert, key, now) or self._stale(cert, names, now):
            private = new_key()
            leaf = sign_server(self.servers, private.public_key(), names, now)
            write_atomic(key, key_pem(private))
            write_atomic(cert, chain_pem([leaf, *self.servers.chain]), mode=PUBLIC)
        return cert, key

    def _stale(self, cert: Path, names: list[str], now: float) -> bool:
        leaf, *above = x509.load_pem_x509_certificates(cert.read_bytes())
        general = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        written = {str(name.value) for name in general}
        return written != set(names) or above != self.servers.chain or renew_at(leaf) <= now


def renew_at(certificate: x509.Certificate) -> float:
    """Seconds since 1970 from which on a certificate should be replaced."""
    begin, end = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    return begin + (end - begin) * RENEW_AT


def init_authority(folder: Path, root_key: Path, now: float) -> Identity:
    """`ctl ca init`: a new root and its intermediates. Replaces nothing. Raises ConfigError, OSError."""
    files = [folder / "root.pem", folder / "nodes.pem", folder / "servers.pem", folder / "pepper", root_key]
    standing = [
        Problem("exists; a new authority replaces nothing: every node would have to join again", file=str(path))
        for path in files
        if path.exists()
    ]
    if standing:
        raise ConfigError(standing)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    root = make_root(now)
    write_atomic(root_key, key_pem(root.key))
    for name, authority in (("nodes", make_tier(root, "nodes", now)), ("servers", make_tier(root, "servers", now))):
        write_atomic(folder / f"{name}.key", key_pem(authority.key))
        write_atomic(folder / f"{name}.pem", chain_pem([authority.certificate]), mode=PUBLIC)
    make_pepper(folder / "pepper")
    # Last: a server takes the folder for complete when this file is there.
    write_atomic(folder / "root.pem", chain_pem([root.certificate]), mode=PUBLIC)
    return load_identity(folder)


def load_identity(folder: Path) -> Identity:
    """Raises ConfigError naming the file."""
    root = folder / "root.pem"
    if not root.exists():
        raise ConfigError([Problem("there is no certificate authority; make one: llmgw ctl ca init", file=str(folder))])
    try:
        certificate = x509.load_pem_x509_certificate(read_file(root, "root certificate"))
    except ValueError as error:
        raise ConfigError([Problem("holds no certificate; restore it from a backup", file=str(root))]) from error
    nodes, servers = (
        load_authority(
            read_file(folder / f"{name}.pem", "certificate of the authority"),
            read_file(folder / f"{name}.key", "key of the authority", secret=True),
            str(folder / f"{name}.pem"),
        )
        for name in ("nodes", "servers")
    )
    return Identity(folder, certificate, nodes, servers, load_pepper(folder / "pepper"))
