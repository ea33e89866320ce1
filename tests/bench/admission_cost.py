"""What admission costs: a request that need not wait, one that does, and memory. `python -m tests.bench.admission_cost`.

Prints the median and the spread over rounds; each round is the mean of many requests.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable

from llmgw.admission.gate import Gate, Grant, State, Ticket
from llmgw.endpoint import Endpoint, EndpointView, Model, Snapshot
from llmgw.request import Refusal

ROUNDS = 7
REQUESTS = 5_000
BATCH = 4  # in flight at once
QUEUED = 10_000


def gate(engines: int, cap: int = 64) -> Gate:
    made = Gate()
    endpoints = tuple(
        Endpoint(id=f"e{i}", name=f"e{i}", url=f"http://e{i}", models=(Model(name="m"),), max_concurrency=cap)
        for i in range(engines)
    )
    made.replace(Snapshot(1, endpoints, (EndpointView(health="ready", prefill_rate=1e5),) * engines), 0.0)
    return made


def uncontended(engines: int, rank: int) -> Callable[[], tuple[float, float]]:
    """One request after another, a few in flight: seconds to admit (offer, place) and to end (first token, release)."""
    made = gate(engines)

    def round_() -> tuple[float, float]:
        flying: list[Ticket] = []
        admitting = ending = now = 0.0
        clock = time.perf_counter
        for number in range(0, REQUESTS, BATCH):
            now += 0.01
            began = clock()
            for each in range(BATCH):
                ticket = made.offer("m", rank, "flow", 200, 100, now, size=1000)
                assert not isinstance(ticket, Refusal)
                made.place(ticket, f"e{(number + each) % engines}", now)
                flying.append(ticket)
            middle = clock()
            for ticket in flying:
                made.first(ticket, now + 0.1)
                made.release(ticket, now + 0.3, first=now + 0.1, last=now + 0.3, tokens=20)
                made.next(now + 0.3)
            ending += clock() - middle
            admitting += middle - began
            assert all(t.state is State.ENDED for t in flying)
            flying.clear()
        return admitting / REQUESTS, ending / REQUESTS

    return round_


def contended(flows: int) -> Callable[[], tuple[float, float]]:
    """With `QUEUED` waiting: one is released, one joins, one gets its turn: seconds for all three."""
    made = gate(2)
    fill(made, flows)

    def round_() -> tuple[float, float]:
        began = time.perf_counter()
        for number in range(REQUESTS):
            ticket = next(iter(made.rooms["e0"].running))
            made.first(ticket, 1.0)
            made.release(ticket, 1.0)
            made.offer("m", 2, f"flow-{number % flows}", 200, 100, 1.0, size=1000)
            drain(made, 1.0)
        return (time.perf_counter() - began) / REQUESTS, 0.0

    return round_


def fill(made: Gate, flows: int) -> None:
    names = [f"flow-{n}" for n in range(flows)]
    for number in range(QUEUED):
        ticket = made.offer("m", 2, names[number % flows], 200, 100, 0.0, size=1000)
        assert not isinstance(ticket, Refusal)
        if ticket.state is State.GRANTED:
            made.place(ticket, min(ticket.allowed or made.rooms), 0.0)
        drain(made, 0.0)


def drain(made: Gate, now: float) -> None:
    while (effect := made.next(now)) is not None:
        assert isinstance(effect, Grant)
        assert effect.allowed
        made.place(effect.ticket, min(effect.allowed), now)


def memory(flows: int) -> float:
    """Bytes a queued request, the gate's own."""
    made = gate(1, cap=1)
    tracemalloc.start()
    fill(made, flows)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / QUEUED


def show(name: str, one: Callable[[], tuple[float, float]], second: str = "") -> None:
    one()
    found = [one() for _ in range(ROUNDS)]
    for label, values in ((name, [f[0] for f in found]), (second, [f[1] for f in found])):
        if label:
            low, middle, high = min(values) * 1e6, statistics.median(values) * 1e6, max(values) * 1e6
            print(f"{label:52} {middle:7.2f} µs  ({low:.2f} to {high:.2f})")


def main() -> None:
    for engines in (2, 8, 64):
        for rank, band in enumerate(("interactive", "standard")):
            name = f"{engines} engines, {band}"
            show(f"admitted at once: {name}", uncontended(engines, rank), f"  its first token and its end: {name}")
    for flows in (1, 1000):
        show(f"an end, a turn, a join beside {QUEUED} queued, {flows} flows", contended(flows))
        print(f"{f'memory of a queued request, {flows} flows':52} {memory(flows):7.0f} bytes")


if __name__ == "__main__":
    main()
