"""What a flood of batch requests does to interactive ones, without sockets: `python -m tests.bench.batch_flood`.

Two engines (h100-8b, 64 sequences each, token budget 2,048), 8 interactive clients (200 tokens in, 32 out), 500 batch
clients (1,000 in, 256 out), all closed-loop without pauses: interactive alone, then both without admission, then with
admission at several values of `max_slowdown`. Virtual time; the gate, the ledger and the decision are the server's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import attrs

from llmgw.admission.bands import DEFAULTS, Band
from llmgw.simengine.options import Options
from llmgw.units import Duration
from sim.decisions import EngineSpec, Policy, rehearse
from sim.load import Load
from sim.records import percentile
from tests.admission.policy import Gated, Routed

SETTLE = 30.0  # seconds at the start that are not counted
BOUNDS = (1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.5, 2.0)


@attrs.frozen
class Measured:
    """One run. Seconds; batch throughput in generated tokens a second."""

    e2e: tuple[float, float]  # p50, p99
    ttft: tuple[float, float]
    batch: float
    count: int


def engines(count: int = 2) -> list[EngineSpec]:
    options = Options(model="m", hardware="h100-8b", max_num_seqs=64, max_num_batched_tokens=2048)
    return [EngineSpec(f"e{i}", options) for i in range(count)]


def run(policy: Policy, *, batch: int, seconds: float, late: float = 0.0) -> Measured:
    """*late*: when the interactive clients come."""
    loads = [
        Load(name="chat", kind="closed", clients=8, prompt_tokens=200, output_tokens=32, band="interactive",
             start=late, duration=seconds - late, model="m"),
    ]  # fmt: skip
    if batch:
        loads.append(
            Load(
                name="flood",
                kind="closed",
                clients=batch,
                prompt_tokens=1000,
                output_tokens=256,
                band="batch",
                duration=seconds,
                stream=False,
                model="m",
            )
        )
    sessions = [session for load in loads for session in load.sessions()]
    result = rehearse(engines(), sessions, policy, until=seconds)
    counted = [r for r in result.records if r.at >= late + SETTLE and r.end >= 0 and r.served]
    chat = [r for r in counted if r.load == "chat"]
    e2e, ttft = sorted(r.end - r.at for r in chat), sorted(r.ttft for r in chat)
    flood = [r for r in result.records if r.load == "flood" and r.end >= late + SETTLE and r.served]
    return Measured(
        (percentile(e2e, 50), percentile(e2e, 99)),
        (percentile(ttft, 50), percentile(ttft, 99)),
        sum(r.tokens for r in flood) / (seconds - late - SETTLE),
        len(chat),
    )


def bands(bound: float) -> tuple[Band, ...]:
    """The built-in ones. Batch waits as long as it must: a client that is refused would ask again in no time."""
    interactive, standard, batch = DEFAULTS
    return attrs.evolve(interactive, max_slowdown=bound), standard, attrs.evolve(batch, deadline=Duration(86400.0))


def rows(seconds: float, bounds: Iterable[float]) -> Iterable[tuple[str, Measured]]:
    yield "idle", run(Routed(), batch=0, seconds=seconds)
    yield "off", run(Routed(), batch=500, seconds=seconds)
    for bound in bounds:
        yield f"on, {bound:g}", run(Gated(bands(bound)), batch=500, seconds=seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="virtual, of which the first 30 are not counted")
    parser.add_argument("bounds", nargs="*", type=float, default=BOUNDS, help="values of max_slowdown")
    given = parser.parse_args()
    idle: Measured | None = None
    off: Measured | None = None
    print("| admission | e2e p50 | e2e p99 | p99 / idle | TTFT p50 | TTFT p99 | batch tokens/s | of off |")
    print("|---|---|---|---|---|---|---|---|")
    for name, found in rows(given.seconds, given.bounds):
        idle = idle or found
        if name == "off":
            off = found
        share = f"{found.batch / off.batch:.1%}" if off else "–"
        print(
            f"| {name} | {found.e2e[0] * 1e3:.0f} ms | {found.e2e[1] * 1e3:.0f} ms | {found.e2e[1] / idle.e2e[1]:.2f} |"
            f" {found.ttft[0] * 1e3:.0f} ms | {found.ttft[1] * 1e3:.0f} ms | {found.batch:.0f} | {share} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
