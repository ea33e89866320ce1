"""Request bodies that came compressed: taken apart in steps, under the same limit as a plain body.

A bomb is stopped where it exceeds the limit, with one step more in memory than that. What does not end where its coding
says, or goes on behind it, is refused: two readers could see two bodies.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator

import zstandard

from llmgw.request import Refusal

CODINGS = ("gzip", "zstd")
"""Of requests. Clients that compress send one of these."""

OUT = 256 << 10
"""Bytes that one step of gzip makes: below a millisecond."""

IN = 512
"""Bytes that one step of zstd reads: its smallest block has 4 bytes and makes 128 KiB, so a step makes 16 MiB at most."""

WINDOW = 8 << 20
"""Largest window of zstd, as RFC 9659 has it for HTTP."""

BETWEEN = 64 << 10
"""Bytes made between two yields."""


def coding_of(value: bytes | None) -> str:
    """What Content-Encoding says: "" = none, one of CODINGS, or "?"."""
    name = (value or b"identity").strip().lower()
    if name == b"identity":
        return ""
    if name == b"x-gzip":
        return "gzip"
    text = name.decode("ascii", "replace")
    return text if text in CODINGS else "?"


def decoded(body: bytes | bytearray, coding: str, limit: int) -> Generator[None, None, bytes | Refusal]:
    """*body* without its *coding*; yields between steps."""
    pieces: list[bytes] = []
    size = since = 0
    try:
        for piece in _gzip(body) if coding == "gzip" else _zstd(body):
            pieces.append(piece)
            size += len(piece)
            since += len(piece) + IN // 8
            if size > limit:
                return Refusal(
                    reason="too_large", message=f"the body is larger than `limits.body` ({limit} bytes) when decoded"
                )
            if since > BETWEEN:
                since = 0
                yield
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        said = str(error).splitlines()[0]
        return Refusal(reason="bad_encoding", message=f"the body is not {coding} as Content-Encoding says: {said}")
    return b"".join(pieces)


def _gzip(body: bytes | bytearray) -> Generator[bytes, None, None]:
    reader = zlib.decompressobj(16 + zlib.MAX_WBITS)
    data: bytes | bytearray = body
    while True:
        yield reader.decompress(data, OUT)
        data = reader.unconsumed_tail
        if reader.eof:
            break
        if not data:
            raise EOFError("it is cut off")
    if reader.unused_data:
        raise EOFError("bytes follow its end")


def _zstd(body: bytes | bytearray) -> Generator[bytes, None, None]:
    reader = zstandard.ZstdDecompressor(max_window_size=WINDOW).decompressobj()
    view = memoryview(body)
    at = 0
    while not reader.eof:
        if at >= len(view):
            raise EOFError("it is cut off")
        yield reader.decompress(view[at : at + IN])
        at += IN
    if reader.unused_data or at < len(view):
        raise EOFError("bytes follow its end")
