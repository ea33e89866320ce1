"""Random text that people carry from one machine to another, and how it is kept: as a keyed hash.

The pepper is a file outside the store: whoever steals a backup of the store cannot try secrets against its hashes. What
is hashed has 130 bits of chance or more, so a slow hash would protect nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

import attrs

from llmgw.errors import ConfigError, Problem
from llmgw.pki.files import read_file, write_atomic

PEPPER_BYTES = 32


@attrs.frozen
class Pepper:
    """*id*: stands beside each hash, so that a pepper can be replaced while old hashes are still checked."""

    id: str
    key: bytes = attrs.field(repr=False)

    def digest(self, secret: str) -> str:
        """BLAKE2b-256 of *secret*, keyed; hex."""
        return hashlib.blake2b(secret.encode(), key=self.key, digest_size=32).hexdigest()

    def matches(self, secret: str, digest: str) -> bool:
        return hmac.compare_digest(self.digest(secret), digest)


def random_text(alphabet: str, length: int) -> str:
    """From the operating system's source of chance: secrets never come from a seed."""
    return "".join(secrets.choice(alphabet) for _ in range(length))


def load_pepper(path: Path) -> Pepper:
    """Raises ConfigError naming *path*."""
    key = read_file(path, "pepper", secret=True)
    if len(key) != PEPPER_BYTES:
        raise ConfigError(
            [
                Problem(
                    f"pepper has {len(key)} bytes instead of {PEPPER_BYTES}; restore it from a backup", file=str(path)
                )
            ]
        )
    return Pepper(hashlib.sha256(key).hexdigest()[:8], key)


def make_pepper(path: Path) -> Pepper:
    write_atomic(path, secrets.token_bytes(PEPPER_BYTES))
    return load_pepper(path)
