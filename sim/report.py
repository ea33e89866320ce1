"""What is shown of a rehearsal: a table, a JSON document that is the same for the same seed, and plots.

The JSON holds virtual time only: two runs of one scenario and seed are equal, byte for byte.
"""

from __future__ import annotations

from collections import Counter
from math import isnan
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from llmgw.errors import ConfigError, Problem

from .records import Record, Result, percentile, window
from .scenario import Scenario

WINDOWS = 60
"""Points of a plot over time."""
REQUESTS_SHOWN = 100_000
"""Requests that the JSON lists one by one; of longer rehearsals it has the figures over time only."""


def _clean(value: Any) -> Any:
    """Floats to the microsecond, what is not a number as null."""
    if isinstance(value, float):
        return None if isnan(value) else round(value, 6)
    if isinstance(value, dict):
        return {str(key): _clean(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in value]
    return value


def document(scenario: Scenario, seed: int, level: str, result: Result) -> dict[str, Any]:
    """All of a report as plain data."""
    width = max(result.end / WINDOWS, 1e-9)
    over_time = {
        name: [[at, len(values), percentile(values, 50), percentile(values, 99)] for at, values in series]
        for name, series in (
            ("ttft", window(result.records, width, lambda r: r.ttft)),
            ("itl", window(result.records, width, lambda r: r.itl)),
        )
    }
    loads = {
        name: Result([r for r in result.records if r.load == name], end=result.end).summary(
            scenario.slo.ttft, scenario.slo.itl
        )
        for name in sorted({record.load for record in result.records})
    }
    found = {
        "kind": "rehearsal",
        "scenario": scenario.name,
        "seed": seed,
        "level": level,
        "summary": result.summary(scenario.slo.ttft, scenario.slo.itl),
        "loads": loads if len(loads) > 1 else {},
        "engines": {
            name: {**counters, "requests": sum(1 for r in result.records if r.endpoint == name)}
            for name, counters in sorted(result.engines.items())
        },
        "seen": dict(sorted(result.seen.items())),
        "problems": result.problems,
        "over_time": over_time,
        "samples": [[s.at, s.engine, s.running, s.waiting, s.kv_usage] for s in result.samples],
        "requests": [_row(record) for record in result.records[:REQUESTS_SHOWN]],
    }
    cleaned: dict[str, Any] = _clean(found)
    return cleaned


def _row(record: Record) -> list[Any]:
    r = record
    return [
        r.id,
        r.endpoint,
        r.status,
        r.reason,
        r.at,
        r.ttft,
        r.itl,
        r.end,
        r.prompt_tokens,
        r.cached_tokens,
        r.tokens,
    ]


def encode(report: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


def _seconds(value: float | None) -> str:
    if value is None or isnan(value):
        return "–"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def show(scenario: Scenario, seed: int, level: str, result: Result, wall: float, console: Console) -> None:
    """The report for people."""
    s = result.summary(scenario.slo.ttft, scenario.slo.itl)
    console.print(f"[bold]{scenario.name}[/] seed {seed}, level {level}: {scenario.about}")
    console.print(
        f"{result.end:.1f} virtual seconds in {wall:.1f} s · {s['requests']} requests, {s['served']} served · "
        f"{s['tokens']} tokens, {s['tokens_per_second']:.0f} a virtual second"
    )
    table = Table("", "p50", "p90", "p99")
    for name, label in (("ttft", "first token"), ("itl", "between tokens"), ("e2e", "whole answer")):
        table.add_row(label, *(_seconds(s[f"{name}_p{p}"]) for p in (50, 90, 99)))
    console.print(table)
    slo = f"first token ≤ {_seconds(scenario.slo.ttft)}, between tokens ≤ {_seconds(scenario.slo.itl)}"
    console.print(f"goodput {_share(s['goodput'])} ({slo}) · cache hits {_share(s['hit_rate'])} of prompt tokens")
    engines = Table("engine", "requests", "tokens", "busy", "cache hits", "preempted")
    requests = Counter(record.endpoint for record in result.records)
    for name, e in sorted(result.engines.items()):
        hits = e["cached_tokens"] / e["prompt_tokens"] if e["prompt_tokens"] else float("nan")
        busy = e["busy"] / result.end if result.end else float("nan")
        engines.add_row(
            name,
            str(requests[name]),
            str(int(e["generation_tokens"])),
            _share(busy),
            _share(hits),
            str(int(e["preemptions"])),
        )
    console.print(engines)
    if s["refused"]:
        console.print("not served: " + ", ".join(f"{reason} {count}" for reason, count in s["refused"].items()))
    console.print(
        "reached: " + (", ".join(f"{what} {n}" for what, n in sorted(result.seen.items()) if n) or "nothing of note")
    )
    for problem in result.problems:
        console.print(f"[red]problem:[/] {problem}", highlight=False)


def _share(value: float) -> str:
    return "–" if isnan(value) else f"{value:.1%}"


def plot(scenario: Scenario, result: Result, folder: Path) -> list[Path]:
    """PNG and SVG plots in *folder*. Raises ConfigError if matplotlib is missing."""
    try:
        import matplotlib as mpl

        mpl.use("agg")
        from matplotlib import pyplot as plt
    except ImportError:
        raise ConfigError([Problem("plots need matplotlib: pip install 'llmgw[sim]'", where="--report")]) from None
    width = max(result.end / WINDOWS, 1e-9)
    figure, axes = plt.subplots(3, 2, figsize=(13, 12), layout="constrained")
    figure.suptitle(f"{scenario.name}: {scenario.about}")
    for axis, value, limit, label in (
        (axes[0][0], lambda r: r.ttft, scenario.slo.ttft, "first token, s"),
        (axes[0][1], lambda r: r.itl, scenario.slo.itl, "between tokens, s"),
    ):
        series = window(result.records, width, value)
        for p in (50, 90, 99):
            axis.plot([at for at, _ in series], [percentile(values, p) for _, values in series], label=f"p{p}")
        axis.axhline(limit, linestyle=":", color="grey", label="SLO")
        axis.set_title(label)
        axis.legend()
    for axis, field, label in (
        (axes[1][0], "running", "running, an engine"),
        (axes[1][1], "waiting", "waiting, an engine"),
        (axes[2][0], "kv_usage", "KV blocks used, an engine"),
    ):
        for name in sorted(result.engines):
            own = [sample for sample in result.samples if sample.engine == name]
            axis.plot(
                [s.at for s in own], [getattr(s, field) for s in own], label=name if len(result.engines) <= 8 else None
            )
        axis.set_title(label)
        if len(result.engines) <= 8:
            axis.legend()
    axis = axes[2][1]
    good = window(
        result.records,
        width,
        lambda r: float(r.served and r.ttft <= scenario.slo.ttft and not r.itl > scenario.slo.itl),
    )
    hits = window(
        result.records,
        width,
        lambda r: r.cached_tokens / r.prompt_tokens if r.served and r.prompt_tokens else float("nan"),
    )
    refused = window(result.records, width, lambda r: float(not r.served))
    for series, label in ((good, "good under SLO"), (hits, "cache hits"), (refused, "not served")):
        axis.plot([at for at, _ in series], [sum(values) / len(values) for _, values in series], label=label)
    axis.set_title("shares")
    axis.set_ylim(-0.02, 1.02)
    axis.legend()
    for row in axes:
        for axis in row:
            axis.set_xlabel("virtual seconds")
    paths = [folder / "report.png", folder / "report.svg"]
    for path in paths:
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return paths
