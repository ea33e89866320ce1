"""How hot a beginning is."""

from __future__ import annotations

import pytest

from llmgw.kvcache.heat import WINDOW, Heat


def test_uses_decay() -> None:
    heat = Heat()
    for at in range(100):
        heat.touch(7, at * 0.1)

    assert heat.uses(7, 10.0) == pytest.approx(64, abs=2)
    assert heat.uses(7, 10.0 + 3 * WINDOW) < 4
    assert heat.uses(8, 10.0) == 0.0


def test_the_coldest_is_forgotten() -> None:
    heat = Heat(cap=3)
    for block in (1, 2, 3, 1, 4):
        heat.touch(block, 0.0)

    assert len(heat) == 3
    assert heat.uses(2, 0.0) == 0.0
    assert heat.uses(1, 0.0) == 2.0
