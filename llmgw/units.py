"""How operators write values: durations (Go's syntax), sizes in bytes, socket addresses.

One notation everywhere: configuration, flags, admin API. Each is parsed and printed here and nowhere else.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NewType

import attrs

from llmgw.errors import ConfigError, Problem

Duration = NewType("Duration", float)  # seconds; written 30s, 1m30s, 100ms
Size = NewType("Size", int)  # bytes; written 64MiB, 64KiB, 4096

_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(h|ms|m|s|us|µs|ns)")

_BYTES = {
    "": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "KB": 10**3, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)")


def parse_duration(text: str) -> float:
    """Seconds of ``30s``, ``1m30s``, ``100ms``, ``1.5h``, ``0``. Raises ValueError; there are no negative durations."""
    if text == "0":
        return 0.0
    total, at = 0.0, 0
    while found := _DURATION.match(text, at):
        total += float(found[1]) * _SECONDS[found[2]]
        at = found.end()
    if at == 0 or at != len(text):
        raise ValueError(f"{text!r} is not a duration; write 30s, 1m30s, 100ms")
    return total


def format_duration(seconds: float) -> str:
    """The shortest text that `parse_duration` reads back: ``1m30s``, ``100ms``, ``0s``."""
    ns = round(seconds * 1e9)
    if ns == 0:
        return "0s"
    text = ""
    for unit, size in (("h", 3600 * 10**9), ("m", 60 * 10**9), ("s", 10**9), ("ms", 10**6), ("us", 10**3), ("ns", 1)):
        count, ns = divmod(ns, size)
        if count:
            text += f"{count}{unit}"
    return text


def parse_size(text: str) -> int:
    """Bytes of ``64MiB``, ``1.5GiB``, ``64KB`` (decimal), ``4096``. Raises ValueError."""
    found = _SIZE.fullmatch(text)
    if found is None or found[2] not in _BYTES:
        raise ValueError(f"{text!r} is not a size; write 64MiB, 64KiB, 4096")
    size = Fraction(found[1]) * _BYTES[found[2]]
    if size.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(size)


def format_size(size: int) -> str:
    """The shortest text that `parse_size` reads back: ``64MiB``, ``1000B``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _BYTES[unit] == 0:
            return f"{size // _BYTES[unit]}{unit}"
    return f"{size}B"


@attrs.frozen
class Tcp:
    """*host* is a name or a literal address without brackets; "" = all interfaces."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@attrs.frozen
class Unix:
    """A path; a leading NUL means Linux's abstract namespace, written ``@name``."""

    path: str

    def __str__(self) -> str:
        return "unix:" + self.path.replace("\0", "@", 1)


Address = Tcp | Unix

_ADDRESS = re.compile(r"(?:tcp:)?(?:\[(?P<v6>[^\]]*)\]|(?P<host>[^:\[\]]*)):(?P<port>\d{1,5})")


def parse_address(text: str) -> Address:
    """``:8080`` (all interfaces), ``HOST:PORT``, ``[v6]:PORT``, ``unix:/path``, ``unix:@abstract``; ``tcp:`` may precede.

    Raises ConfigError for anything else.
    """
    if text.startswith("unix:"):
        path = text[5:]
        if path in ("", "@"):
            raise ConfigError([Problem(f"address {text!r} names no path; write unix:/run/llmgw.sock")])
        return Unix("\0" + path[1:] if path.startswith("@") else path)
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise ConfigError([Problem(f"address {text!r} is none of :PORT, HOST:PORT, [IPV6]:PORT, unix:/path")])
    return Tcp(found["v6"] if found["v6"] is not None else found["host"], int(found["port"]))
