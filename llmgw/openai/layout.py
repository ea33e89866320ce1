"""Where the top-level fields of a JSON object stand in its bytes, found exactly and without decoding the values.

Used where msgspec is not exact enough (it silently takes the last of two equal keys) or not to be had in one go (a
body of many megabytes must not stop the pump): `fields` is a generator that yields between steps, each of which looks
at no more than `STEP` bytes, or at one string without escapes, at the speed of memchr.

It finds the layout; it does not validate what is inside the values. Linear in the length of the body, never recursive.

How a container is skipped, first by stepping from bracket to bracket (cheap for short ones), then by windows:

    neutralise escapes (same length) → split at quotes → every other part is outside strings → keep the brackets
    fewer closing brackets than the depth, or a running depth that never reaches zero → the whole window is inside
    else the end is in this window → step through it
"""

from __future__ import annotations

import re
from collections.abc import Generator
from itertools import accumulate
from typing import TypeVar

import msgspec

STEP = 32 << 10
"""Bytes a window. The worst window (nothing but brackets) costs some 10 ms, a usual one 0.1 ms [measured]."""

FIELDS = 1024
"""Top-level fields a body may have. Real ones have some forty; each costs about a microsecond here."""

DEPTH = 512
"""Nesting that is followed in a long body. msgspec gives up at the interpreter's recursion limit, some 900 levels."""

NEAR = 64
NEAR_BYTES = 2 << 10
"""Brackets, and bytes, that are stepped over one by one before windows pay off."""


class Malformed(ValueError):
    """Not one JSON object. The text says what is wrong and at which byte; it never quotes the body."""


class Field(msgspec.Struct, frozen=True, gc=False):
    """One member: its key decoded, and where its parts stand. ``body[start:end]`` is ``"key": value``."""

    key: str
    start: int  # of the key's opening quote
    value: int  # of the value's first byte
    end: int  # after the value's last byte


class Layout(msgspec.Struct, frozen=True, gc=False):
    """All members of the object, in order, and where its closing brace stands."""

    fields: tuple[Field, ...]
    close: int

    def all(self, key: str) -> list[Field]:
        return [field for field in self.fields if field.key == key]


_SIMPLE = re.compile(
    rb'[ \t\r\n]{0,64}("([^"\\\x00-\x1f]{0,64})"[ \t\r\n]{0,64}:[ \t\r\n]{0,64})'
    rb'("[^"\\]{0,256}"|[^\x00-\x20,:"{}\[\]]{1,32})[ \t\r\n]{0,64}([,}])'
)
_SPACE = re.compile(rb"[ \t\r\n]*")
_KEY = re.compile(rb'"([^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*)"[ \t\r\n]*:', re.DOTALL)
_SCALAR = re.compile(rb'[^\x00-\x20,:"{}\[\]]+')
_BRACKET = re.compile(rb'[^"\[\]{}]*(?:"[^"\\]*(?:\\.[^"\\]*)*"[^"\[\]{}]*)*([\[\]{}])', re.DOTALL)
_NO_BRACKET = bytes(sorted(set(range(256)) - set(b"[]{}")))
_RISE = [0] * 256
for _open, _close in (b"[]", b"{}"):
    _RISE[_open], _RISE[_close] = 1, -1

_QUOTE, _BACKSLASH, _COMMA, _OBJECT, _ARRAY, _END = b'"\\,{[}'

ATOM = 64 << 10
"""Bytes that a field's name, or a number, may have."""

RUN = 64
"""Backslashes before a quote that are counted directly."""

T = TypeVar("T")
Steps = Generator[None, None, int]


def layout(body: bytes | bytearray) -> Layout:
    """The layout, in one go: for bodies of up to about a megabyte. Raises `Malformed`."""
    return drain(steps(body))


def drain(generator: Generator[None, None, T]) -> T:
    """What *generator* returns, in one go."""
    while True:
        try:
            next(generator)
        except StopIteration as stop:
            found: T = stop.value
            return found


def steps(body: bytes | bytearray) -> Generator[None, None, Layout]:
    """The layout, yielding where the caller may want to do something else. Raises `Malformed`."""
    at = yield from _space(body, 0)
    if body[at : at + 1] != b"{":
        raise Malformed("the body is not a JSON object")
    fields: list[Field] = []
    at = yield from _space(body, at + 1)
    if body[at : at + 1] == b"}":
        return (yield from _closed(body, at, fields))
    while True:
        simple = _SIMPLE.match(body, at)  # most members are short
        if simple is not None and len(fields) < FIELDS:
            (start, value), end = simple.span(1), simple.end(3)
            fields.append(Field(_decoded(simple.group(2), start), start, value, end))
            at = simple.end()
            if body[at - 1] == _END:
                return (yield from _closed(body, at - 1, fields))
            continue
        at = yield from _space(body, at)
        key = _KEY.match(body, at, at + ATOM)
        if key is None:
            raise Malformed(f"a field's name was expected at byte {at}")
        value = yield from _space(body, key.end())
        end = yield from _value(body, value)
        fields.append(Field(_decoded(key.group(1), at), at, value, end))
        if len(fields) > FIELDS:
            raise Malformed(f"more than {FIELDS} top-level fields")
        at = yield from _space(body, end)
        byte = body[at] if at < len(body) else 0
        if byte == _END:
            return (yield from _closed(body, at, fields))
        if byte != _COMMA:
            raise Malformed(f"a comma or the end of the object was expected at byte {at}")
        at += 1


def _decoded(raw: bytes, at: int) -> str:
    try:
        return raw.decode() if b"\\" not in raw else msgspec.json.decode(b'"' + raw + b'"', type=str)
    except ValueError:
        raise Malformed(f"the field's name at byte {at} is not valid") from None


def _closed(body: bytes | bytearray, close: int, fields: list[Field]) -> Generator[None, None, Layout]:
    end = yield from _space(body, close + 1)
    if end != len(body):
        raise Malformed(f"there is more after the object, at byte {end}")
    return Layout(tuple(fields), close)


def _space(body: bytes | bytearray, at: int) -> Steps:
    """Where the white space that begins at *at* ends."""
    while True:
        found = _SPACE.match(body, at, at + STEP)
        assert found is not None  # the pattern matches nothing, too
        if found.end() < at + STEP:
            return found.end()
        at = found.end()
        yield


def _value(body: bytes | bytearray, at: int) -> Steps:
    """Where the value that begins at *at* ends."""
    byte = body[at] if at < len(body) else 0
    if byte == _QUOTE:
        return (yield from _string(body, at + 1))
    if byte in (_OBJECT, _ARRAY):
        return (yield from _container(body, at))
    scalar = _SCALAR.match(body, at, at + ATOM)
    if scalar is None or scalar.end() == at + ATOM:
        raise Malformed(f"a value was expected at byte {at}")
    return scalar.end()


def _string(body: bytes | bytearray, at: int) -> Steps:
    """Where the string ends, quote included, that is open at *at* (not within an escape)."""
    start = at
    for _ in range(NEAR):
        quote = body.find(b'"', at)
        if quote < 0:
            raise Malformed("a string has no end")
        run = body[max(start, quote - RUN) : quote]
        backslashes = len(run) - len(run.rstrip(b"\\"))
        if backslashes % 2 == 0 and backslashes < RUN:
            return quote + 1
        if backslashes == RUN:
            break  # even or odd: the windows will tell
        at = quote + 1
    while at < len(body):
        yield
        window = _neutral(body, at)
        end = window.find(b'"')
        if end >= 0:
            return at + end + 1
        at += len(window)
    raise Malformed("a string has no end")


def _neutral(body: bytes | bytearray, at: int) -> bytes:
    """The window at *at* (not within an escape) with its escapes overwritten, so that every quote is a delimiter."""
    window = bytes(body[at : at + STEP]).replace(b"\\\\", b"__").replace(b'\\"', b"__")
    if window.endswith(b"\\") and at + len(window) < len(body):
        return window[:-1]  # an escape cut in two belongs to the next window
    return window


def _container(body: bytes | bytearray, at: int) -> Steps:
    """Where the object or array that begins at *at* ends."""
    depth, count = 0, 0
    limit = at + NEAR_BYTES
    while count < NEAR:
        found = _BRACKET.match(body, at, limit)
        if found is None:
            break
        at = found.end()
        depth += _RISE[body[at - 1]]
        count += 1
        if depth == 0:
            return at
    while at < len(body):
        yield
        window = _neutral(body, at)
        parts = window.split(b'"')
        brackets = b"".join(parts[::2]).translate(None, _NO_BRACKET)
        heights = list(accumulate(map(_RISE.__getitem__, brackets), initial=depth))
        if max(heights) > DEPTH:
            raise Malformed(f"nested deeper than {DEPTH} levels")
        if min(heights) <= 0:  # below zero is what follows the end
            return at + _place(parts, heights.index(0))
        depth = heights[-1]
        at += len(window)
        if len(parts) % 2 == 0:  # it ends within a string, which may be an image of many megabytes
            at = yield from _string(body, at)
    raise Malformed("an object or array has no end")


def _place(parts: list[bytes], number: int) -> int:
    """Offset after the *number*-th bracket (1-based) outside the strings of a window split at its quotes."""
    offset = 0
    for index, part in enumerate(parts):
        if index % 2 == 0:
            here = len(part.translate(None, _NO_BRACKET))
            if here >= number:
                for at, byte in enumerate(part):
                    number -= _RISE[byte] != 0
                    if number == 0:
                        return offset + at + 1
            number -= here
        offset += len(part) + 1
    raise AssertionError("the bracket was counted, so it is there")
