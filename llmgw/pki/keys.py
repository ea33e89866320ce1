"""API keys: ``lgw_<id>_<secret>_<check>``.

*id* (8 characters) is public: logs, lists and metrics name a key by it. *secret* has 40 characters, 238 bits. *check* is
a CRC-32 over the rest: a mistyped key is refused before any look-up, and secret scanners can tell a real one.
"""

from __future__ import annotations

import re
import zlib

import attrs

from llmgw.pki.secret import random_text

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

_KEY = re.compile(r"(lgw_([0-9A-Za-z]{8})_([0-9A-Za-z]{40}))_([0-9a-f]{8})")


@attrs.frozen
class ApiKey:
    id: str
    secret: str = attrs.field(repr=False)

    def text(self) -> str:
        """What the user gets. Show it once."""
        body = f"lgw_{self.id}_{self.secret}"
        return f"{body}_{zlib.crc32(body.encode()):08x}"


def new_key() -> ApiKey:
    return ApiKey(random_text(ALPHABET, 8), random_text(ALPHABET, 40))


def parse_key(text: str) -> ApiKey | None:
    """None: not one of our keys, or mistyped."""
    found = _KEY.fullmatch(text)
    if found is None or zlib.crc32(found[1].encode()) != int(found[4], 16):
        return None
    return ApiKey(found[2], found[3])
