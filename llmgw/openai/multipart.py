"""What routing must know of a ``multipart/form-data`` body: a few short fields, found in steps, nothing copied.

Strict, since an engine's parser will read the same bytes: a part whose name could be read in two ways is refused, and
so is a routed field that occurs twice.

    delimiter → "--": the end · CRLF → head (≤ HEAD bytes) → content → CRLF delimiter …
"""

from __future__ import annotations

import re
from collections.abc import Generator

import msgspec

HEAD = 8 << 10
"""Bytes of one part's head; browsers and SDKs need some 200."""

PARTS = 256
"""Of one form. Real ones have a dozen."""

WINDOW = 1 << 20
"""Bytes searched in one step: half a millisecond."""

_BOUNDARY = re.compile(rb';[ \t]*boundary=(?:"([^"\\\r\n]{1,70})"|([^\s;",\\]{1,70}))[ \t]*(?:;|\Z)', re.IGNORECASE)
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\x00]*)\r\n")
_PARAMETER = re.compile(rb""";[ \t]*([A-Za-z0-9_*-]+)=(?:"((?:[^"\\\r\n]|\\.)*)"|([^\s;"\\]*))[ \t]*""")


class Malformed(ValueError):
    """Not a form that two parsers would read alike. The text says what is wrong; it never quotes the body."""


class Part(msgspec.Struct, frozen=True, gc=False):
    """One field's content is ``body[start:end]``. *plain*: not encoded, and no file."""

    name: str
    start: int
    end: int
    plain: bool


def boundary_of(content_type: bytes) -> bytes | None:
    """The delimiter's text, None if the header names none."""
    found = _BOUNDARY.search(content_type)
    return (found.group(1) or found.group(2)) if found is not None else None


def parts(body: bytes | bytearray, boundary: bytes) -> Generator[None, None, list[Part]]:
    """All parts in their order; yields between steps. Raises Malformed."""
    delimiter = b"--" + boundary
    found: list[Part] = []
    if not body.startswith(delimiter):
        raise Malformed("it does not begin with the boundary that Content-Type names")
    at = len(delimiter)
    while body[at : at + 2] != b"--":
        if body[at : at + 2] != b"\r\n":
            raise Malformed(f"part {len(found) + 1} is not preceded by a boundary and a line end")
        if len(found) >= PARTS:
            raise Malformed(f"it has more than {PARTS} parts")
        start = body.find(b"\r\n\r\n", at, at + HEAD)
        if start < 0:
            raise Malformed(f"the head of part {len(found) + 1} is longer than {HEAD} bytes, or cut off")
        name, plain = _head(bytes(body[at + 2 : start + 2]), len(found) + 1)
        start += 4
        end = yield from _end(body, b"\r\n" + delimiter, start)
        if end < 0:
            raise Malformed("its last boundary is missing")
        found.append(Part(name, start, end, plain))
        at = end + 2 + len(delimiter)
        yield
    return found


def _end(body: bytes | bytearray, mark: bytes, at: int) -> Generator[None, None, int]:
    while at < len(body):
        found = body.find(mark, at, at + WINDOW + len(mark))
        if found >= 0:
            return found
        at += WINDOW
        yield
    return -1


def _head(head: bytes, number: int) -> tuple[str, bool]:
    """The part's name, and whether its content is just its value."""
    disposition: bytes | None = None
    plain = True
    at = 0
    while at < len(head):
        line = _FIELD.match(head, at)
        if line is None:
            raise Malformed(f"the head of part {number} has a line that is no header field")
        at = line.end()
        field = line.group(1).lower()
        if field == b"content-disposition":
            if disposition is not None:
                raise Malformed(f"part {number} has two Content-Disposition fields")
            disposition = line.group(2)
        elif field == b"content-transfer-encoding":
            plain = False
    kind, _, _ = (disposition or b"").partition(b";")
    if disposition is None or kind.strip().lower() != b"form-data":
        raise Malformed(f"part {number} is not form-data")
    given: dict[bytes, bytes] = {}
    at = len(kind)
    while at < len(disposition):
        found = _PARAMETER.match(disposition, at)
        if found is None:
            raise Malformed(f"the Content-Disposition of part {number} cannot be read")
        key = found.group(1).lower()
        if key in given or key == b"name*":
            raise Malformed(f"part {number} could have two names")
        given[key] = found.group(3) if found.group(2) is None else found.group(2)
        at = found.end()
    name = given.get(b"name")
    if name is None or b"\\" in name:
        raise Malformed(f"part {number} has no name, or one with a backslash")
    return name.decode("utf-8", "replace"), plain and b"filename" not in given and b"filename*" not in given
