"""Routing profiles beside each other: one scenario at the decisions level, several profiles and seeds.

    python -m sim.compare SCENARIO [--profile auto --profile round-robin …] [--seeds 3]

A row a load (a stage of a ladder) and profile; of the seeds the worst is printed: the highest latency, the lowest rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs
import click

from . import scenario
from .policies import run
from .records import Record, Result, percentile

PROFILES = ("round-robin", "least-load", "session-hash", "chat", "auto")

LOWER = ("mean", "p50", "p90", "p99", "refused", "lost", "max/mean")  # better; of the rest more is better


def figures(records: Sequence[Record], result: Result, start: float, end: float, slo: scenario.Slo) -> dict[str, float]:
    """What a stage came to. Times in seconds, *tok/s* between *start* and *end*."""
    served = [r for r in records if r.served]
    ttft = sorted(r.ttft for r in served if r.first >= 0)
    good = [r for r in served if r.ttft <= slo.ttft and not r.itl > slo.itl]
    prompt = sum(r.prompt_tokens for r in served)
    count = Counter(r.endpoint for r in served)
    each = [count.get(name, 0) for name in result.engines]
    tokens = sum(produced(r, start, end) for r in result.records)
    return {
        "mean": sum(ttft) / len(ttft) if ttft else 0.0,
        **{f"p{p}": percentile(ttft, p) for p in (50, 90, 99)},
        "hit": sum(r.cached_tokens for r in served) / prompt if prompt else 0.0,
        "tok/s": tokens / (end - start),
        "good": len(good) / len(records) if records else 0.0,
        "jain": sum(each) ** 2 / (len(each) * sum(n * n for n in each)) if any(each) else 0.0,
        "max/mean": max(each) * len(each) / sum(each) if any(each) else 0.0,
        "refused": float(sum(not r.served and r.first < 0 for r in records)),
        "lost": float(sum(not r.served and r.first >= 0 for r in records)),
    }


def produced(record: Record, start: float, end: float) -> float:
    """Tokens that came in that time, if they came evenly."""
    if record.first < 0 or record.tokens < 1:
        return 0.0
    last = max(record.last, record.first + 1e-9)
    within = max(0.0, min(last, end) - max(record.first, start))
    return record.tokens * within / (last - record.first)


def worst(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: (max if name in LOWER else min)(one[name] for one in found) for name in found[0]}


def compare(chosen: scenario.Scenario, profile: str, seed: int) -> dict[str, dict[str, float]]:
    """Figures of every load, by its name."""
    routing = {**chosen.server.get("routing", {}), "profile": profile}
    result = run(attrs.evolve(chosen, server={**chosen.server, "routing": routing}), seed)
    found = {}
    for load in chosen.load:
        records = [r for r in result.records if r.load == load.name]
        last = max((r.at for r in records), default=0.0) if load.kind == "trace" else load.start + load.duration
        found[load.name] = figures(records, result, load.start, last, chosen.slo)
    return found


@click.command()
@click.argument("name", metavar="SCENARIO")
@click.option("--profile", "profiles", multiple=True, default=PROFILES, show_default=True)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1, 20))
def main(name: str, profiles: tuple[str, ...], seeds: int) -> None:
    """Rehearse SCENARIO for each profile with seeds 1, 2, …, and print the worst figures."""
    chosen = scenario.load(name)
    head = True
    for profile in profiles:
        runs = [compare(chosen, profile, seed) for seed in range(1, seeds + 1)]
        for load in chosen.load:
            row = worst([one[load.name] for one in runs])
            if head:
                click.echo(f"{'profile':13} {'load':10}" + "".join(f"{column:>10}" for column in row))
                head = False
            click.echo(f"{profile:13} {load.name:10}" + "".join(f"{value:10.3f}" for value in row.values()))


if __name__ == "__main__":
    main()
