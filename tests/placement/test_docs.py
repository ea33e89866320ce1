"""docs/placement.md holds the tables that the code makes."""

from __future__ import annotations

from pathlib import Path

from llmgw.config import Document
from llmgw.control import catalog
from llmgw.placement import explain

PAGE = Path(__file__).parent.parent.parent / "docs" / "placement.md"


def test_the_tables_are_current() -> None:
    text = PAGE.read_text()
    assert explain.reference() in text, "docs/placement.md is old: put in `python -m llmgw.placement.explain`"
    assert catalog.reference() in text, "docs/placement.md is old: put in `python -m llmgw.control.catalog`"


def test_the_example_loads_as_it_stands() -> None:
    example = PAGE.read_text().partition("```yaml\n")[2].partition("```")[0]
    document = Document(example, "cluster.yaml")
    found, wrong = document.structure(catalog.Catalogue)
    assert found is not None
    assert not wrong + catalog.problems(found.models, document.problem)
    assert [s.label for s in found.models[0].shapes] == ["tp2", "tp4", "pair"]


def test_every_code_says_what_to_do() -> None:
    rows = explain.reasons()
    assert len({code for _, code, _, _ in rows}) == len(rows)
    for name, code, meaning, remedy in rows:
        assert meaning.endswith("."), code
        assert remedy.endswith("."), code
        assert code.partition(".")[0] in (name, "weights", "ports", "pin", "backoff")
