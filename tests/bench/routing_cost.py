"""What routing costs: one decision, a prompt's blocks, a metrics page. Run by hand: `python -m tests.bench.routing_cost`.

Prints the median and the spread over rounds; each round is the mean of many calls.
"""

from __future__ import annotations

import json
import random
import statistics
import time
import timeit
from collections.abc import Callable

from llmgw.endpoint import Endpoint, Model, Report, Snapshot
from llmgw.kvcache.blocks import blocks
from llmgw.request import Head, InferenceRequest
from llmgw.routing.affinity import Affinity
from llmgw.routing.decide import decide
from llmgw.routing.field import Query
from llmgw.routing.ledger import Ledger
from llmgw.routing.profiles import profiles
from llmgw.routing.report import Reader, kinds

ROUNDS = 7


def fleet(count: int, seed: int = 1) -> tuple[Ledger, Affinity, tuple[Endpoint, ...]]:
    """*count* endpoints that have been measured, with requests on all of them."""
    rng = random.Random(seed)
    endpoints = tuple(
        Endpoint(id=f"e{i}", name=f"e{i}", url=f"http://e{i}", models=(Model(name="m"),), block_size=16, blocks=8192)
        for i in range(count)
    )
    ledger, affinity = Ledger(), Affinity()
    ledger.replace(endpoints, 0.0)
    affinity.replace(endpoints)
    leg = 0
    for endpoint in endpoints:
        ledger.health(endpoint.id, "ready", -1000.0)
        ledger.report(endpoint.id, Report(at=0.0, running=4.0, waiting=1.0, kv_usage=rng.random()))
        for at in range(8):
            leg += 1
            ledger.open(leg, endpoint.id, prefill=rng.randrange(300, 4000), decode=256, now=at * 1.0)
            if at < 6:
                ledger.first(leg, at + 0.3)
                ledger.progress(leg, 40, at + 1.3)
    return ledger, affinity, endpoints


def request(length: int) -> InferenceRequest:
    body = json.dumps([{"role": "user", "content": "all work and no play " * (length // 21)}]).encode()
    return InferenceRequest(
        id="r",
        head=Head("/v1/chat/completions", ""),
        model="m",
        prompt_tokens=length // 4,
        blocks=blocks({"messages": body}),
    )


def measure(name: str, call: Callable[[], object], number: int, limit: float | None = None) -> float:
    call()
    found = [t / number * 1e6 for t in timeit.repeat(call, number=number, repeat=ROUNDS, timer=time.process_time)]
    middle = statistics.median(found)
    print(
        f"{name:46} {middle:9.1f} µs  ({min(found):.1f} to {max(found):.1f})" + (f"   must {limit:g}" if limit else "")
    )
    return middle


def main() -> None:
    known = profiles()
    asked = request(32 << 10)
    for profile in ("auto", "chat", "round-robin"):
        for count, limit, number in ((8, 12.0, 500), (64, 60.0, 200), (1000, 1000.0, 20)):
            ledger, affinity, endpoints = fleet(count)
            for endpoint in endpoints[:3]:
                affinity.sent(endpoint.id, asked, 0.0)
            snapshot = ledger.snapshot(10.0)
            query = Query(request=asked, model="m")
            matched = affinity.matched(asked)
            rng = random.Random(3)
            measure(
                f"decide, {profile}, {count} endpoints",
                lambda s=snapshot, q=query, m=matched, p=known[profile], r=rng: decide(s, q, p, m, r.random, 10.0),  # type: ignore[misc]
                number,
                limit if profile == "auto" else None,
            )
    ledger, affinity, endpoints = fleet(64)
    turn = iter(range(10**9))

    def account() -> Snapshot:
        leg = -next(turn) - 1
        ledger.open(leg, "e5", prefill=900, decode=256, now=10.0)
        ledger.first(leg, 10.0)
        ledger.close(leg)
        return ledger.snapshot(10.0)

    measure("ledger: open, first, close, snapshot of 64", account, 200)

    def find_and_record() -> None:
        affinity.matched(asked)
        affinity.sent("e1", asked, 0.0)

    measure("affinity: match and record, 32 KiB", find_and_record, 200)
    for size in (2 << 10, 32 << 10, 1 << 20):
        body = json.dumps([{"role": "user", "content": "all work and no play " * (size // 21)}]).encode()
        measure(
            f"blocks of a prompt of {size >> 10} KiB", lambda b=body: blocks({"messages": b}, "m"), 50 if size < 1 << 20 else 3,  # type: ignore[misc]
            1.7 * size / 1024,
        )  # fmt: skip
    line = 'vllm:request_prefill_time_seconds_bucket{engine="0",le="%d",model_name="a/b"} %d.0\n'
    page = "".join(line % (i, i) for i in range(800)) + 'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
    reader = Reader(kinds()["vllm"])
    measure(f"metrics page of {len(page) >> 10} KB", lambda: reader.read(page.encode(), 0.0), 50, 1000.0)


if __name__ == "__main__":
    main()
