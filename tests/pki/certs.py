"""A certificate authority on disk for tests, made by the same code as the real one, at any moment in time."""

from __future__ import annotations

import ssl
from pathlib import Path

import attrs
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from llmgw.net.tls import client_context, server_context
from llmgw.pki.ca import Authority, chain_pem, key_pem, make_root, make_tier, new_key, sign_node, sign_server
from llmgw.pki.files import PUBLIC, write_atomic

NOW = 1_900_000_000.0
"""Where tests that hand in the time stand; real handshakes need the real time, since OpenSSL looks at its own clock."""


@attrs.frozen
class Certs:
    folder: Path
    now: float
    root: Authority
    nodes: Authority
    servers: Authority

    @property
    def roots(self) -> Path:
        return self.folder / "root.pem"

    def save(self, name: str, chain: list[x509.Certificate], key: ec.EllipticCurvePrivateKey) -> tuple[Path, Path]:
        cert, private = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        write_atomic(cert, chain_pem(chain), mode=PUBLIC)
        write_atomic(private, key_pem(key))
        return cert, private

    def server_files(self, *names: str) -> tuple[Path, Path]:
        key = new_key()
        leaf = sign_server(self.servers, key.public_key(), list(names or ("127.0.0.1", "localhost")), self.now)
        return self.save("server", [leaf, *self.servers.chain], key)

    def node_files(self, node: str, now: float | None = None) -> tuple[Path, Path]:
        key = new_key()
        leaf = sign_node(self.nodes, key.public_key(), node, self.now if now is None else now)
        return self.save(node, [leaf, *self.nodes.chain], key)

    def server_context(self) -> ssl.SSLContext:
        return server_context(*self.server_files(), now=self.now, client_ca=self.roots)

    def client_context(self, node: str | None = None) -> ssl.SSLContext:
        cert, key = self.node_files(node) if node else (None, None)
        return client_context(now=self.now, ca=self.roots, cert=cert, key=key)


def make_certs(folder: Path, now: float) -> Certs:
    root = make_root(now)
    certs = Certs(folder, now, root, make_tier(root, "nodes", now), make_tier(root, "servers", now))
    write_atomic(certs.roots, chain_pem([root.certificate]), mode=PUBLIC)
    return certs
