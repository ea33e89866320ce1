"""The bench works: its engine and clients agree, its tables find their place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.bench import page, streams
from tests.bench.programs import Bench, cpu_seconds

needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@needs_gcc
def test_clients_count_what_the_engine_sends(programs: Bench) -> None:
    with programs.engine(3, 1000) as port:
        streamed = programs.load(port, 2, 0.2, True, 64)
        plain = programs.load(port, 2, 0.1, False, 40_000)
    assert (streamed["errors"], plain["errors"]) == (0, 0)
    assert streamed["requests"] > 0
    assert streamed["events"] == streamed["requests"] * 4  # usage is an event, too
    assert streamed["gap"]["p50"] >= 0.9
    assert streamed["ttft"]["p50"] >= 0.9
    assert plain["requests"] > 0


@needs_gcc
def test_clients_tell_what_went_wrong(programs: Bench) -> None:
    import socket

    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        got = programs.load(nobody.getsockname()[1], 1, 0.1, False, 10)
    assert got["errors"] > 0
    assert got["why"] == "cannot connect"


@needs_gcc
def test_gateway_is_measured_and_its_engine_sees_who_left(programs: Bench) -> None:
    with programs.engine(100, 2000) as engine, programs.gateway("llmgw", engine) as (port, pid):
        before = cpu_seconds(pid)
        got = programs.load(port, 2, 0.2, False, 64)
        assert (got["errors"], got["requests"] > 0) == (0, True)
        assert cpu_seconds(pid) > before
        assert all(0 < ms < 5000 for ms in streams._leave(port, engine, 3))


def test_a_table_replaces_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("a\n<!-- x -->\nold\n<!-- /x -->\nb\n<!-- y -->\nkept\n<!-- /y -->\n")
    text = page.table(["name", "µs"], [["one", page.spread([3.0, 1.0, 2.0])], ["two", page.spread([1.0], 1)]])
    page.put("x", text, path)
    page.put("x", text, path)
    assert path.read_text() == (
        "a\n<!-- x -->\n"
        "| name |                  µs |\n|------|--------------------:|\n"
        "| one  | 2.00 (1.00 to 3.00) |\n| two  |                 1.0 |\n"
        "<!-- /x -->\nb\n<!-- y -->\nkept\n<!-- /y -->\n"
    )
    with pytest.raises(ValueError, match="no place for the part 'z'"):
        page.put("z", text, path)


def test_the_page_has_a_place_for_every_part() -> None:
    from tests.bench.__main__ import PARTS

    text = page.PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- {part} -->\n" in text and f"<!-- /{part} -->" in text for part in PARTS)


def test_every_step_is_measured() -> None:
    """The stand-ins of an exchange's surroundings are what it needs."""
    from tests.bench import micro

    assert len(micro.measure(1, scale=0.01).splitlines()) == 10
