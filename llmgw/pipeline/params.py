"""Converters for the parameters of steps: strict, so that a typing mistake is found at start and not at the first request.

An integer may be written as an integral float (YAML's ``8192.0``); a string or a bool is none. A duration is a string
with a unit. Each raises ValueError with what was expected; `key` makes an attrs field of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import attrs

from llmgw.errors import ConfigError
from llmgw.plugins import Registry
from llmgw.units import parse_duration

T = TypeVar("T")


def key(convert: Callable[[Any], Any], meaning: str, default: Any = attrs.NOTHING) -> Any:
    """A parameter of a plug-in: its converter, and what it means (docs/coordinator.md is made from it)."""
    return attrs.field(default=default, converter=convert, kw_only=True, metadata={"meaning": meaning})


def option(meaning: str, default: Any = attrs.NOTHING, *, check: Callable[[Any], str | None] | None = None) -> Any:
    """A key of the configuration file (`llmgw.config` reads it by its type); *check* says what is wrong with a value."""
    return attrs.field(default=default, kw_only=True, metadata={"meaning": meaning, "check": check})


def integer(least: int, most: int = 1 << 53) -> Callable[[Any], int]:
    """A whole number from *least* to *most*."""

    def convert(value: Any) -> int:
        if isinstance(value, float) and value.is_integer() and abs(value) <= most:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{value!r} is not a whole number")
        if not least <= value <= most:
            raise ValueError(f"{value!r} is not between {least} and {most}")
        return value

    return convert


def duration(value: Any) -> float:
    """Seconds. A default is given in seconds already."""
    if isinstance(value, float):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a duration; write a string with a unit: 30s, 1m30s, 100ms")
    return parse_duration(value)


def boolean(value: Any) -> bool:
    """true or false, nothing else."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def string(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return value


def strings(value: Any) -> tuple[str, ...]:
    """A list of strings."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{value!r} is not a list of strings")
    return tuple(value)


def http_address(value: Any) -> str:
    """``http://HOST[:PORT]`` or ``https://…``, without a trailing slash."""
    text = string(value).rstrip("/")
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{value!r} is not an address; write http://HOST:PORT")
    return text


def plugin(registry: Registry[T]) -> Callable[[Any], T]:
    """An instance of the plug-in of that name, or the instance that was given."""

    def convert(value: Any) -> T:
        if not isinstance(value, str):
            return cast("T", value)
        try:
            return registry.make(value, {})
        except ConfigError as error:
            raise ValueError(str(error)) from None

    return convert
