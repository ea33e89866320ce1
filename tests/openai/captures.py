"""Bodies of real engines' answers, where the captures lie beside the checkout; tests that need them skip otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2].parent / "shared" / "captures"


def body(name: str) -> bytes:
    """The body of ``ENGINE/FILE`` as the engine sent it, without the capture's own first and last lines."""
    path = FOLDER / f"{name}.txt"
    if not path.exists():
        pytest.skip(f"no captures at {FOLDER}")
    text = path.read_bytes().replace(b"\r\n", b"\n")
    _, _, rest = text.partition(b"\n\n")  # the command
    _, _, rest = rest.partition(b"\n\n")  # status and headers
    return rest.removesuffix(b"\n[curl exit 0]\n")
