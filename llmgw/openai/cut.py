"""Cuts a stream of server-sent events into events, as bytes, whatever slices it arrives in.

An event ends with a blank line; a line ends with LF, CRLF or CR. Lone line ends between events are pieces of their
own. Nothing is lost or changed: the pieces, joined, are the stream.

Invariant: the pieces of a stream depend on its bytes alone, never on how it was sliced, but for two liberties that no
reader of pieces may care about: where an event above the cap is divided, and whether the LF of a CRLF that ends an
event comes with it or right after it (`REST`).

    state      held          skip_lf   next
    boundary   empty         False     bytes → inside; a whole event → boundary
    boundary   empty         True      LF → REST; anything else as above
    inside     1…cap+3       False     end of event → EVENT; more than cap+3 bytes → PART, then oversized
    oversized  last 3 bytes  False     end of event → LAST; bytes → PART
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal

Piece = Literal["event", "part", "last", "rest"]
EVENT: Final = "event"  # one whole event with its blank line, or lone line ends between events
PART: Final = "part"  # a piece of an event above the cap; the first one has more than cap bytes
LAST: Final = "last"  # … and its end
REST: Final = "rest"  # the LF of a CRLF whose CR ended the piece before

CAP = 1 << 20
"""Bytes of one event that are held. The largest regular ones (logprobs, the final event of a Responses stream) have
some 100 KiB."""

_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_TAIL = 3  # bytes of a line end and a blank line that may be waiting for their last


class Cutter:
    """Feed it slices; it yields ``(piece, bytes)``."""

    __slots__ = ("_cap", "_held", "_oversized", "_seen", "_skip_lf")

    def __init__(self, cap: int = CAP) -> None:
        self._cap = cap
        self._held = bytearray()
        self._seen = 0  # bytes of `_held` in which no end of an event begins
        self._oversized = False
        self._skip_lf = False

    @property
    def at_boundary(self) -> bool:
        """Do the bytes so far end where an event may begin?"""
        return not self._held and not self._oversized

    @property
    def idle(self) -> bool:
        """At a boundary, and no LF is owed: a whole event may be handled without the cutter."""
        return not self._held and not self._oversized and not self._skip_lf

    def feed(self, data: bytes) -> Iterator[tuple[Piece, bytes]]:
        """The pieces that *data* completes. To be exhausted before the next call."""
        if self._skip_lf and data:
            self._skip_lf = False
            if data.startswith(b"\n"):
                yield REST, b"\n"
                data = data[1:]
        held = self._held
        held += data
        plain = b"\r" not in held  # find is several times faster than the pattern
        start = 0
        at = self._seen
        while start < len(held):
            if not self._oversized and at == start and held[start] in b"\r\n":
                end = start + 2 if held[start : start + 2] == b"\r\n" else start + 1
            elif plain:
                end = held.find(b"\n\n", at) + 2
                if end == 1:
                    break
            else:
                found = _END.search(held, at)
                if found is None:
                    break
                end = found.end()
            piece = bytes(held[start:end])
            yield LAST if self._oversized else EVENT, piece
            self._oversized = False
            self._skip_lf = end == len(held) and piece.endswith(b"\r")
            start = at = end
        del held[:start]
        if self._oversized or len(held) > self._cap + _TAIL:
            keep = len(held) - _TAIL if len(held) > _TAIL else 0
            if keep:
                part = bytes(held[:keep])
                del held[:keep]
                yield PART, part
                self._oversized = True
        self._seen = max(0, len(held) - _TAIL)

    def finish(self) -> bytes:
        """What is left when the stream has ended: an event without its blank line, or nothing."""
        left = bytes(self._held)
        self._held.clear()
        self._seen = 0
        return left


def data_of(event: bytes) -> bytes | None:
    """The data of one event: its ``data:`` lines, joined by LF. None if it has none (comments, keep-alives)."""
    if b"\r" in event:
        event = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
