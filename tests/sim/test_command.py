"""`python -m sim`: what it prints, what it writes, how it refuses. And the examples."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

from sim.__main__ import main
from sim.cluster import run
from sim.scenario import Scenario, built_in, load

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "simulation").glob("*.yaml"))

QUICK = """
version: 1
name: quick
about: A little.
engines: [{name: gpu}]
load: [{kind: poisson, rate: 5, duration: 2s, prompt_tokens: 20, output_tokens: 5}]
"""


def shorter(scenario: Scenario) -> Scenario:
    """The start of it: enough to see that it runs."""
    loads = [attrs.evolve(one, duration=3.0, limit=10) for one in scenario.load]
    return attrs.evolve(scenario, load=tuple(loads), faults=(), expect=())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_run(path: Path) -> None:
    result = run(shorter(load(str(path))))

    assert result.problems == []
    assert result.served()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_run_to_their_end(path: Path) -> None:
    assert run(load(str(path))).problems == []


def test_there_are_examples_and_built_in_scenarios() -> None:
    assert [path.stem for path in EXAMPLES] == ["day", "mixed-gpus", "two-engines"]
    assert "smoke" in built_in()
    for name in built_in():
        assert load(name).about


@pytest.mark.parametrize("level", ["http", "decisions"])
def test_a_report_is_printed_and_written(level: str, tmp_path: Path) -> None:
    path = tmp_path / "quick.yaml"
    path.write_text(QUICK)

    got = CliRunner().invoke(
        main, ["run", str(path), "--seed", "3", "--level", level, "--report", str(tmp_path / "r"), "--no-plots"]
    )

    assert got.exit_code == 0, got.output
    assert "first token" in got.output
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert (report["scenario"], report["seed"], report["level"]) == ("quick", 3, level)
    assert report["summary"]["served"] == len(report["requests"]) > 0


@pytest.mark.full
def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "quick.yaml"
    path.write_text(QUICK)

    got = CliRunner().invoke(main, ["run", str(path), "--level", "decisions", "--report", str(tmp_path)])

    assert got.exit_code == 0, got.output
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "report.svg").read_bytes()


def test_what_is_found_gives_exit_code_1_a_command_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "quick.yaml"
    path.write_text(QUICK + "expect: [preempted]\n")

    got = CliRunner().invoke(main, ["run", str(path), "--seed", "3", "--report", str(tmp_path), "--no-plots"])

    assert got.exit_code == 1
    assert "promises 'preempted'" in got.output
    assert f"python -m sim run {path} --seed 3 --level http" in got.output
    assert load(str(tmp_path / "quick-3.yaml")).seed == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engines: 3\n", "expected a list"),
        ("nonsense: [\n", "not YAML"),
        ("engines: [{name: a, num_gpu_blocks: 10}]\nload: [{}]\n", "needs 2048 KV blocks, but only 9 can be used"),
        ("engines: [{name: a}]\nload: [{kind: trace, file: none.csv}]\n", "No such file"),
    ],
)
def test_a_scenario_that_cannot_be_used_gives_exit_code_2(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("version: 1\n" + text)

    got = CliRunner().invoke(main, ["run", str(path), "--level", "decisions"])

    assert got.exit_code == 2
    assert message in got.output


def test_pipelines_are_refused_at_the_decisions_level() -> None:
    got = CliRunner().invoke(main, ["run", "pd", "--level", "decisions"])

    assert got.exit_code == 2
    assert "pipelines run at the http level only" in got.output


def test_a_scenario_that_is_not_there_names_those_that_are() -> None:
    got = CliRunner().invoke(main, ["run", "nothing-like-it"])

    assert got.exit_code == 2
    assert "built in: " in got.output
    assert "smoke" in got.output


def test_it_works_under_another_name(tmp_path: Path) -> None:
    """The wheel carries this package as `llmgw.rehearse`: it must not know its own name."""
    package = tmp_path / "elsewhere" / "rehearse"
    shutil.copytree(ROOT / "sim", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package.parent / "__init__.py").touch()
    path = tmp_path / "quick.yaml"
    path.write_text(QUICK)
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; sys.argv[1:] = ['run', {str(path)!r}]\n"
    code += "import runpy; sys.modules['sim'] = None; runpy.run_module('elsewhere.rehearse', run_name='__main__')"

    got = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert got.returncode == 0, got.stderr
    assert "quick seed 0" in got.stdout


def test_the_page_lists_every_key() -> None:
    page = (ROOT / "docs" / "simulation.md").read_text()
    keys = CliRunner().invoke(main, ["keys"]).output

    assert keys.strip() in page, "docs/simulation.md is old: put in what `python -m sim keys` prints"
