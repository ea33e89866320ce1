"""Every body of every leg, as written down in golden/*.yaml."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pipeline.script import cases, play


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case['file']}: {case['name']}")
def test_conversation(case: dict[str, Any]) -> None:
    play(case)
