"""Secrets on disk: written whole or not at all, readable by their owner alone.

A key file that is empty after a power cut, or readable by everybody for the blink of an eye, are the two classic
mistakes. So: a new name created with its final mode, contents and directory entry synced, then renamed over the old.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from llmgw.errors import ConfigError, Problem

SECRET = 0o600
PUBLIC = 0o644
MAX_FILE = 1 << 20  # bytes; certificates, keys and peppers are a few KiB: more is a wrong path


def write_atomic(path: Path, data: bytes, *, mode: int = SECRET) -> None:
    """Replace *path* by *data*. After a crash at any instant the file holds the old or the new bytes, all of them.

    Raises OSError; then the old file stands.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        try:
            os.fchmod(handle, mode)  # the umask may have taken bits away
            with open(handle, "wb", closefd=False) as file:
                file.write(data)
            os.fsync(handle)
        finally:
            os.close(handle)
        os.rename(fresh, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames within *path* survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_file(path: Path, what: str, *, secret: bool = False) -> bytes:
    """The bytes of *path*, called *what* in messages. Raises ConfigError: missing, unreadable, empty, too large.

    *secret*: also refused when others than its owner can read it.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(MAX_FILE + 1)
    except FileNotFoundError:
        raise _bad(path, f"{what} is missing: no such file") from None
    except OSError as error:
        raise _bad(path, f"{what} cannot be read: {error.strerror}") from error
    if not data:
        raise _bad(path, f"{what} is empty; restore it from a backup or create it anew")
    if len(data) > MAX_FILE:
        raise _bad(path, f"{what} is larger than {MAX_FILE} bytes; is this the right file?")
    if secret and status.st_mode & 0o077:
        raise _bad(path, f"{what} can be read by others (mode {status.st_mode & 0o777:04o}); run: chmod 600 {path}")
    return data


def _bad(path: Path, message: str) -> ConfigError:
    return ConfigError([Problem(message, file=str(path))])
