"""What a configuration class is made of: keys with a meaning and a check.

The classes of llmgw.config and of the catalogue are attrs classes whose fields come from `key`; llmgw.config structures
both, with all problems listed, and makes the reference pages from the meanings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import attrs

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

Check = Callable[[Any], str | None]
"""What is wrong with a value of the right type, or None."""


def key(meaning: str, default: Any = attrs.NOTHING, *, check: Check | None = None, hash: bool | None = None) -> Any:  # noqa: A002
    """A key of a file. *hash* False: not part of the class's hash (mappings)."""
    return attrs.field(default=default, metadata={"meaning": meaning, "check": check}, hash=hash)


def positive(value: float) -> str | None:
    return None if value > 0 else "must be more than 0"


def not_negative(value: float) -> str | None:
    return None if value >= 0 else "must not be negative"


def a_name(value: str) -> str | None:
    return None if NAME.fullmatch(value) else f"{value!r} is not a name: letters, digits, . _ - (63 at most)"


def not_empty(value: Sequence[object]) -> str | None:
    return None if value else "must not be empty"
