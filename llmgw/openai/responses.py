"""The id that an engine gives to a stored answer (`/v1/responses`), read while the answer passes by."""

from __future__ import annotations

import re

LOOKED_AT = 64 << 10
"""Bytes of an answer that are searched. The id stands in the first event of a stream, and near the start of JSON."""

_ID = re.compile(rb'"id"[ \t]*:[ \t]*"(resp[A-Za-z0-9_.-]{1,124})"')
_TAIL = 160  # bytes that a match cut in two can have in the first part


class IdFinder:
    """Fed with slices cut anywhere. The answer's own id comes before whatever it repeats of the request."""

    __slots__ = ("_held", "_seen")

    def __init__(self) -> None:
        self._held = b""
        self._seen = 0

    def feed(self, data: bytes) -> str | None:
        """The id; None = not seen yet; "" = there is none."""
        text = self._held + data
        found = _ID.search(text)
        if found is not None:
            return found.group(1).decode("ascii")
        self._seen += len(data)
        self._held = text[-_TAIL:]
        return "" if self._seen > LOOKED_AT else None
