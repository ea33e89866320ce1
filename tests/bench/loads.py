"""Processor time that a relay costs, beside HAProxy's on the same work in the same round."""

from __future__ import annotations

import statistics
import time
from typing import Any

import attrs

from tests.bench.page import spread, table
from tests.bench.programs import HAPROXY, Bench, cpu_seconds

WARM_SECONDS = 1.0


@attrs.frozen
class Load:
    """What is asked for. *must*: the most that it may cost, times HAProxy's."""

    connections: int
    stream: bool
    tokens: int
    gap_us: int
    body: int  # bytes
    must: float
    said: str


LOADS = {
    "json": Load(16, False, 64, 0, 64, 4.5, "a JSON request, 16 connections"),
    "prompt": Load(16, False, 64, 0, 32 << 10, 3.0, "the same with a prompt of 32 KiB"),
    "paced": Load(64, True, 128, 5_000, 64, 2.5, "a streamed event, 64 streams, 5 ms between tokens"),
    "many": Load(512, True, 64, 50_000, 64, 2.2, "a streamed event, 512 streams, 50 ms between tokens"),
    "burst": Load(16, True, 512, 0, 64, 2.0, "a streamed event, 16 streams, as fast as the engine can"),
}


@attrs.frozen
class Result:
    """One gateway in one round."""

    cpu_us: float  # a request, or an event
    rate: float  # of these a second
    ttft_p50: float  # ms, as the following
    ttft_p99: float
    gap_p99: float
    errors: int
    why: str


def once(programs: Bench, load: Load, name: str, seconds: float) -> Result:
    with programs.engine(load.tokens, load.gap_us) as engine, programs.gateway(name, engine) as (port, pid):
        programs.load(port, min(load.connections, 16), WARM_SECONDS, load.stream, load.body)
        time.sleep(0.2)
        before = cpu_seconds(pid)
        got: dict[str, Any] = programs.load(port, load.connections, seconds, load.stream, load.body)
        spent = cpu_seconds(pid) - before
    work = max(got["events"] if load.stream else got["requests"], 1)
    return Result(
        cpu_us=1e6 * spent / work,
        rate=work / got["seconds"],
        ttft_p50=got["ttft"]["p50"],
        ttft_p99=got["ttft"]["p99"],
        gap_p99=got["gap"]["p99"],
        errors=got["errors"],
        why=got["why"],
    )


def rounds(
    programs: Bench, names: list[str], which: list[str], count: int, seconds: float
) -> dict[str, dict[str, list[Result]]]:
    """By load, then by gateway. Within a round nobody is always first."""
    found: dict[str, dict[str, list[Result]]] = {load: {name: [] for name in names} for load in which}
    for turn in range(count):
        for load in which:
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                result = once(programs, LOADS[load], name, seconds)
                found[load][name].append(result)
                print(f"  round {turn + 1}: {load} {name}: {result.cpu_us:.1f} µs {result.why}", flush=True)
    return found


def measure(programs: Bench, which: list[str], count: int, seconds: float) -> str:
    """The table of loads."""
    if not HAPROXY:
        print("HAProxy is not installed: no ratios (Debian: apt-get install haproxy)")
        found = rounds(programs, ["llmgw"], which, count, seconds)
        rows = [
            [
                name,
                spread([r.cpu_us for r in found[name]["llmgw"]], 1),
                f"{statistics.median(r.rate for r in found[name]['llmgw']):.0f}",
                _errors(found[name]["llmgw"]),
            ]
            for name in which
        ]
        return table(["load", "llmgw µs", "units/s", "errors"], rows)
    found = rounds(programs, ["haproxy", "llmgw"], which, count, seconds)
    rows = []
    for name in which:
        theirs, ours = found[name]["haproxy"], found[name]["llmgw"]
        pairs = list(zip(ours, theirs, strict=True))
        beyond = [
            spread([getattr(a, key) - getattr(b, key) for a, b in pairs]) for key in ("ttft_p50", "ttft_p99", "gap_p99")
        ]
        ratios = [a.cpu_us / b.cpu_us for a, b in pairs]
        rows.append(
            [
                name,
                spread([r.cpu_us for r in theirs], 1),
                spread([r.cpu_us for r in ours], 1),
                spread(ratios),
                f"{LOADS[name].must:g}",
                f"{statistics.median(r.rate for r in ours):.0f}",
                *beyond[: 3 if LOADS[name].stream else 2],
                *([] if LOADS[name].stream else ["–"]),
                _errors(ours),
            ]
        )
    head = ["load", "HAProxy µs", "llmgw µs", "× HAProxy", "must", "units/s"]
    head += ["TTFT p50 + ms", "TTFT p99 + ms", "gap p99 + ms", "errors"]
    return table(head, rows)


def _errors(results: list[Result]) -> str:
    count = sum(r.errors for r in results)
    return str(count) if not count else f"{count}: {next(r.why for r in results if r.why)}"


def collector(programs: Bench, count: int, seconds: float) -> str:
    """What freezing the start-up's objects and a higher threshold do to the tail, at `paced`."""
    found = rounds(programs, ["llmgw", "llmgw, gc untouched"], ["paced"], count, seconds)["paced"]
    rows = [
        [
            name,
            spread([r.ttft_p99 for r in results]),
            spread([r.gap_p99 for r in results]),
            spread([r.cpu_us for r in results], 1),
        ]
        for name, results in found.items()
    ]
    return table(["at `paced`", "TTFT p99 ms", "gap p99 ms", "µs an event"], rows)
