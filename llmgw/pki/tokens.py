"""Join tokens: ``lgwj1.<id>.<secret>.<pin>``, one line that lets one machine become a node, once.

*id* (10 characters) is public and names the token in messages. *secret* is 26 base32 characters, 130 bits; the server
keeps its keyed hash only. *pin* is the SHA-256 of the root's public key: the node trusts no server whose root has
another one, so a man in the middle can stop a join but not learn the secret.

A token is read from a file, the environment or standard input, never from the command line: `ps` shows that.
"""

from __future__ import annotations

import base64
import re

import attrs

from llmgw.errors import ConfigError, Problem
from llmgw.pki.secret import random_text

ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
LIFE = 900.0  # seconds; time to walk to the other machine
MAX_LIFE = 86_400.0

_TOKEN = re.compile(r"lgwj1\.([a-z2-7]{10})\.([a-z2-7]{26})\.([a-z2-7]{52})")


@attrs.frozen
class JoinToken:
    id: str
    secret: str = attrs.field(repr=False)
    pin: bytes

    def text(self) -> str:
        """What the operator carries. Show it once."""
        pin = base64.b32encode(self.pin).decode().rstrip("=").lower()
        return f"lgwj1.{self.id}.{self.secret}.{pin}"


def new_token(pin: bytes) -> JoinToken:
    return JoinToken(random_text(ALPHABET, 10), random_text(ALPHABET, 26), pin)


def parse_token(text: str) -> JoinToken:
    """Raises ConfigError; the text of a token never stands in the message."""
    text = text.strip()
    found = _TOKEN.fullmatch(text)
    if found is None:
        problem = "the join token is empty" if not text else "the join token is incomplete or mistyped"
        raise ConfigError(
            [Problem(f"{problem}: it looks like lgwj1.ID.SECRET.PIN, 96 characters; make one: llmgw ctl token create")]
        )
    name, secret, pin = found.groups()
    return JoinToken(name, secret, base64.b32decode(pin.upper() + "===="))
