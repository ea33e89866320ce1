"""Metric names against pages that real engines gave."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmgw.engines import ENGINES

CAPTURES = Path(__file__).parents[2].parent / "shared" / "captures"


def families(page: str) -> dict[str, str]:
    """Family name → its labels, of every sample."""
    return {m[1]: m[2] or "" for m in re.finditer(r"^([\w:]+)(\{.*\})? [\d.eE+-]+", page, re.M)}


@pytest.mark.parametrize("kind", ["vllm", "llama-server"])
def test_names_stand_on_the_captured_page(kind: str) -> None:
    page = CAPTURES / kind / "metrics.txt"
    if not page.exists():
        pytest.skip(f"no captures at {page}")
    found = families(page.read_text())
    metrics = ENGINES.make(kind, {}).metrics

    for specs in (metrics.running, metrics.waiting, metrics.block_size, metrics.blocks, metrics.progress):
        if specs:
            name, _, label = specs[0].partition("@")
            assert name in found
            assert not label or f'{label}="' in found[name]


@pytest.mark.parametrize("kind", ENGINES.all())
def test_running_and_waiting_are_always_known(kind: str) -> None:
    metrics = ENGINES.make(kind, {}).metrics
    assert metrics.running
    assert metrics.waiting
    assert metrics.progress
