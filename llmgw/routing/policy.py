"""Which model serves in the place of the one that was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32


def canary(model: str, shares: Mapping[str, float], sticky: str) -> str:
    """*model*, or one of *shares* (by name, 0 to 1 of the requests, together at most 1).

    *sticky*: what stays on one side, a session or else a request. Larger shares keep those whom a smaller one had.
    """
    at = crc32(sticky.encode(), crc32(model.encode())) / 2**32
    for name, share in shares.items():
        if at < share:
            return name
        at -= share
    return model
