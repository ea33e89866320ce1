"""`python -m sim` (in a checkout) or `python -m llmgw.rehearse` (installed): run scenarios.

Exit codes: 0 done, nothing wrong · 1 a checker found something · 2 the scenario cannot be used (all problems listed).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from llmgw.config import tables
from llmgw.errors import ConfigError, Problem

from . import report, scenario
from .records import Result


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Rehearse a cluster in virtual time."""


@main.command()
def scenarios() -> None:
    """The scenarios that come with it."""
    for name in scenario.built_in():
        click.echo(f"{name:12}  {scenario.load(name).about}")


@main.command()
def keys() -> None:
    """Every key of a scenario, as docs/simulation.md lists them."""
    click.echo("\n".join(tables(scenario.Scenario, "###")))


@main.command()
@click.argument("scenario_file", metavar="SCENARIO")
@click.option("--seed", type=int, help="Instead of the scenario's.")
@click.option(
    "--level",
    type=click.Choice(["http", "decisions"]),
    default="http",
    show_default=True,
    help="Real gateway and HTTP, or engine cores and round robin alone.",
)
@click.option(
    "--report", "folder", type=click.Path(file_okay=False, path_type=Path), help="Write report.json and plots there."
)
@click.option("--plots/--no-plots", default=True, help="Plots need matplotlib.")
def run(scenario_file: str, seed: int | None, level: str, folder: Path | None, plots: bool) -> None:
    """Run SCENARIO: a file, or the name of one that comes with it."""
    console = Console(stderr=False)
    try:
        chosen = scenario.load(scenario_file)
        number = chosen.seed if seed is None else seed
        started = time.perf_counter()
        result = _run(chosen, number, level)
        wall = time.perf_counter() - started
        if folder is not None:
            _write(folder / "report.json", report.encode(report.document(chosen, number, level, result)))
            if result.problems:
                text = scenario.pinned(scenario_file, number)
                _write(folder / f"{chosen.name}-{number}.yaml", text.encode())
            if plots:
                report.plot(chosen, result, folder)
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    report.show(chosen, number, level, result, wall, console)
    if result.problems:
        program = "llmgw.rehearse" if __package__ == "llmgw.rehearse" else "sim"
        click.echo(
            f"to see it again: python -m {program} run {scenario_file} --seed {number} --level {level}", err=True
        )
        sys.exit(1)


def _write(path: Path, text: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    except OSError as error:
        raise ConfigError([Problem(f"cannot write {path}: {error.strerror}", where="--report")]) from None


def _run(chosen: scenario.Scenario, seed: int, level: str) -> Result:
    total = max(load.start + load.duration for load in chosen.load)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[now]:.0f} virtual s · {task.fields[requests]} requests · {task.fields[active]} open"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,  # by a thread, which a world in virtual time must not have
    )
    with bar:
        task = bar.add_task(chosen.name, total=total, now=0.0, requests=0, active=0)

        def progress(now: float, requests: int, active: int) -> None:
            bar.update(task, completed=min(now, total), now=now, requests=requests, active=active, refresh=True)

        if level == "decisions":
            from .policies import run as run_decisions

            return run_decisions(chosen, seed)
        from .cluster import run as run_http

        return run_http(chosen, seed, progress)


if __name__ == "__main__":
    main()
