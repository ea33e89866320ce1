"""Watching processes from outside."""

from __future__ import annotations

import os

import trio


async def gone(pid: int, within: float = 3.0) -> bool:
    """Whether the process has ended (a zombie has), or does so in time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        with trio.move_on_after(within):
            await trio.lowlevel.wait_readable(handle)
            return True
        return False
    finally:
        os.close(handle)
