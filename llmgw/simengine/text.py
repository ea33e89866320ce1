"""Tokens and words of a simulated engine: fast, deterministic, and the same for everybody.

A token is a piece of at most six letters (with the space before it), a digit, a run of white space or one other character,
so a token is about four bytes of English. What the engine says consists of words that are one token each, so an answer
that comes back as history makes the same tokens again, and the prefix cache finds it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec

if TYPE_CHECKING:
    import random

PIECE = re.compile(r" ?[^\W\d_]{1,6}|\d|\s+|.", re.DOTALL)

_HEADS = ("b", "br", "c", "cl", "d", "f", "fl", "g", "gr", "h", "k", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr", "v", "w", "y", "z")  # fmt: skip
_MIDDLES = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
_TAILS = ("", "n", "r", "l", "t")

WORDS: tuple[str, ...] = tuple(f" {h}{m}{t}" for h in _HEADS for m in _MIDDLES for t in _TAILS)
"""1,000 invented words; the token of WORDS[i] is FIRST_WORD + i."""

FIRST_WORD = 100
FIRST_OTHER = FIRST_WORD + len(WORDS)
VOCABULARY = 32000
PIECE_CACHE = 200_000
"""Distinct pieces remembered by a tokenizer (some 20 MB) before it starts anew."""


class Tokenizer:
    """Text to tokens and back. What was never seen as text comes back as a word of its own."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._texts: dict[int, str] = {}  # bounded by VOCABULARY
        self._start()

    def _start(self) -> None:
        self._ids = {word: FIRST_WORD + i for i, word in enumerate(WORDS)}

    def encode(self, text: str) -> list[int]:
        pieces = PIECE.findall(text)
        ids = self._ids
        try:
            return [ids[piece] for piece in pieces]
        except KeyError:
            pass
        if len(ids) > PIECE_CACHE:
            self._start()
            ids = self._ids
        for piece in pieces:
            if piece not in ids:
                token = FIRST_OTHER + crc32(piece.encode("utf-8", "surrogatepass")) % (VOCABULARY - FIRST_OTHER)
                ids[piece] = token
                self._texts[token] = piece
        return [ids[piece] for piece in pieces]

    def piece(self, token: int) -> str:
        index = token - FIRST_WORD
        if 0 <= index < len(WORDS):
            return WORDS[index]
        return self._texts.get(token) or (f" w{token}" if token >= FIRST_WORD else "")

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(self.piece, tokens))


def say(rng: random.Random, count: int) -> list[int]:
    """*count* tokens of output."""
    return rng.choices(range(FIRST_WORD, FIRST_OTHER), k=count)


def natural_length(rng: random.Random) -> int:
    """How long an answer is if nobody limits it: log-normal, median 180 tokens, mean 250."""
    return max(1, round(rng.lognormvariate(5.2, 0.8)))


def template(messages: Sequence[Any], *, generation_prompt: bool = True, tools: Sequence[Any] = ()) -> str:
    """A chat as one text. Media leave a mark each; what they are is told by `media_of`."""
    parts: list[str] = []
    if tools:
        parts.append(f"<|tools|>{msgspec.json.encode(tools).decode()}\n")
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_part(part) for part in content)
        calls = message.get("tool_calls")
        more = msgspec.json.encode(calls).decode() if calls else ""
        parts.append(f"<|{message.get('role', 'user')}|>{content or ''}{more}\n")
    if generation_prompt:
        parts.append("<|assistant|>")
    return "".join(parts)


MEDIA_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
MEDIA_TOKENS = 576
"""Tokens that one image takes: 24 x 24 patches, as in the widely used vision models."""


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        if isinstance(part.get("text"), str):
            return str(part["text"])
        return MEDIA_MARK
    return ""


def media_of(messages: Sequence[Any]) -> list[str]:
    """One content hash a medium, in order of appearance; a given `uuid` stands for the content."""
    found: list[str] = []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for part in content:
            if isinstance(part, dict) and not isinstance(part.get("text"), str):
                found.append(str(part.get("uuid") or f"{crc32(msgspec.json.encode(part, order='sorted')):08x}"))
    return found
