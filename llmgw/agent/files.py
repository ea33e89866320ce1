"""Reading /sys, /proc and /dev below a root, so that a re-created tree reads like the real thing.

Nothing here raises for what is absent or unreadable: drivers put files there or not, and `None` means not known.
"""

from __future__ import annotations

import os
from pathlib import Path

import attrs


@attrs.frozen
class Root:
    """*path* is "/" on a real machine."""

    path: str = "/"

    def at(self, name: str) -> Path:
        return Path(self.path, name.lstrip("/"))

    def text(self, name: str) -> str | None:
        """Contents without surrounding blanks. None: absent, unreadable, or a slot that gives EINVAL."""
        try:
            return self.at(name).read_text(errors="replace").strip("\0 \t\n")
        except (OSError, ValueError):
            return None

    def number(self, name: str) -> int | None:
        """The first word of the file as a number, decimal or 0x…"""
        text = self.text(name)
        try:
            return int(text.split()[0], 0) if text else None
        except ValueError:
            return None

    def names(self, folder: str) -> list[str]:
        """What is in *folder*, sorted; nothing if there is no such folder."""
        try:
            return sorted(os.listdir(self.at(folder)))
        except OSError:
            return []

    def exists(self, name: str) -> bool:
        return self.at(name).exists()

    def real(self, name: str) -> str:
        """The path behind symbolic links, relative to the root ("/sys/devices/…"). "" if it does not exist."""
        path = self.at(name)
        if not path.exists():
            return ""
        found, top = os.path.realpath(path), os.path.realpath(self.path)
        return found if top == "/" else "/" + os.path.relpath(found, top)
