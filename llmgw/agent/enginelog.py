"""The output of one engine: a file that the engine writes to itself, rotated and followed by the agent.

A file and not a pipe: with a dead reader a pipe kills its writer, and the agent must be free to die. The engine holds
the file open for append, so a full one is copied away and cut; what is written between the two is lost.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path

LINES_KEPT = 400  # the root cause of vLLM's failures stands some 250 lines before its end
LINE_LIMIT = 4096  # bytes of a line that are kept; engines print whole configurations in one
READ_AT_ONCE = 1 << 20


class EngineLog:
    """Follows the file at *path*. `read` and `rotate` do file I/O: small reads, and a copy at rotation."""

    def __init__(self, path: Path, size: int, files: int) -> None:
        self.path = path
        self.tail: deque[str] = deque(maxlen=LINES_KEPT)
        self.count = 0  # lines of this life so far; the tail's last one is number count - 1
        self._size, self._files = size, files
        self._offset = 0
        self._partial = b""

    def open(self) -> int:
        """A descriptor for the engine's stdout and stderr; what was written before is followed no more."""
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
        self._offset, self._partial = os.fstat(handle).st_size, b""
        self.tail.clear()
        self.count = 0
        return handle

    def resume(self) -> None:
        """For an adopted engine: its last lines, then what comes."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return
        self._offset = max(0, size - READ_AT_ONCE)
        self.read()

    def read(self) -> list[str]:
        """Lines that have come since, at most `READ_AT_ONCE` bytes of them."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # it was cut by somebody else
                    self._offset, self._partial = 0, b""
                file.seek(self._offset)
                data = file.read(READ_AT_ONCE)
        except OSError:
            return []
        self._offset += len(data)
        *whole, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > LINE_LIMIT:
            whole.append(self._partial)
            self._partial = b""
        lines = [clean(line) for line in whole]
        self.tail.extend(lines)
        self.count += len(lines)
        return lines

    def since(self, number: int) -> tuple[int, tuple[str, ...]]:
        """(number of the first, lines) from *number* on, as far as they are kept; -1 = from the oldest kept."""
        oldest = self.count - len(self.tail)
        first = oldest if number < 0 else min(max(number, oldest), self.count)
        return first, tuple(self.tail)[first - oldest :]

    def last(self) -> tuple[str, ...]:
        """The last lines, one without an end included."""
        return (*self.tail, *([clean(self._partial)] if self._partial else []))

    def rotate(self) -> bool:
        """Copies a full file away and cuts it. Slow for large ones: call it in a thread."""
        try:
            if self.path.stat().st_size < self._size:
                return False
            for number in range(self._files, 0, -1):
                older = self.path.with_name(f"{self.path.name}.{number}")
                if number == self._files:
                    older.unlink(missing_ok=True)
                elif older.exists():
                    older.rename(self.path.with_name(f"{self.path.name}.{number + 1}"))
            if self._files:
                shutil.copyfile(self.path, self.path.with_name(f"{self.path.name}.1"))
            os.truncate(self.path, 0)
        except OSError:  # a full disk must not end the replica; the next try comes
            return False
        self._offset = 0
        return True


_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def clean(line: bytes) -> str:
    """Without colours, and what a carriage return overwrote (progress bars)."""
    return _COLOUR.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])[:LINE_LIMIT].decode(errors="replace")


class Novelty:
    """Whether a log line is news: the same line with other numbers, over and over, is no progress."""

    def __init__(self, kept: int = 64) -> None:
        self._seen: deque[str] = deque(maxlen=kept)

    def news(self, lines: Iterator[str] | list[str]) -> bool:
        found = False
        for line in lines:
            shape = re.sub(r"\d+", "0", line).strip()[:200]
            if shape and shape not in self._seen:
                self._seen.append(shape)
                found = True
        return found
