"""The decisions level: engine cores and a policy."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from llmgw.endpoint import Report, Snapshot
from llmgw.request import InferenceRequest, Refusal
from llmgw.simengine.options import Options
from sim import EngineSpec, Load, Policy, Record, Result, rehearse
from sim.scenario import Fault

FAST = Options(prefill_tps=10_000.0, decode_tps=100.0, batch_contention=0.02, max_num_seqs=8)


def cluster(count: int, options: Options = FAST) -> list[EngineSpec]:
    return [EngineSpec(f"e{i}", options) for i in range(count)]


def shortest(snapshot: Snapshot, request: InferenceRequest) -> str:
    ready = [i for i, view in enumerate(snapshot.views) if view.health == "ready"]
    return snapshot.endpoints[min(ready, key=lambda i: snapshot.views[i].inflight)].id


def first(snapshot: Snapshot, request: InferenceRequest) -> str:
    return snapshot.endpoints[0].id


def run(policy: Policy, load: Load, count: int = 4, **more: object) -> Result:
    return rehearse(cluster(count), load.sessions(1), policy, **more)  # type: ignore[arg-type]


STEADY = Load(rate=20.0, duration=20.0, prompt_tokens=200, output_tokens=50, output_spread=0.3)


def test_all_are_served_and_every_token_is_accounted_for() -> None:
    result = run(shortest, STEADY)

    assert result.records
    assert all(record.served and record.tokens == record.wanted for record in result.records)
    produced = sum(engine["generation_tokens"] for engine in result.engines.values())
    assert produced == sum(record.tokens for record in result.records)
    assert result.problems == []


def test_the_shortest_queue_beats_one_engine_for_all() -> None:
    spread, heaped = run(shortest, STEADY).summary(), run(first, STEADY).summary()

    assert spread["ttft_p99"] < heaped["ttft_p99"] / 10
    assert spread["imbalance"] < 1.2
    assert heaped["imbalance"] == 4.0


def test_the_same_arguments_give_the_same_result() -> None:
    assert run(shortest, STEADY) == run(shortest, STEADY)
    assert run(shortest, STEADY) != rehearse(cluster(4), STEADY.sessions(2), shortest)


def test_conversations_hit_the_cache_where_they_were_before() -> None:
    talks = Load(rate=2.0, duration=20.0, turns=4, think=1.0, prompt_tokens=300, output_tokens=40)

    def sticky(snapshot: Snapshot, request: InferenceRequest) -> str:
        return snapshot.endpoints[int(request.session.rpartition("-")[2]) % 4].id

    def wandering(snapshot: Snapshot, request: InferenceRequest) -> str:
        number = int(request.session.rpartition("-")[2]) + int(request.id.rpartition(".")[2])
        return snapshot.endpoints[number % 4].id

    assert run(sticky, talks).summary()["hit_rate"] > 0.5
    assert run(wandering, talks).summary()["hit_rate"] == 0.0


def test_groups_share_a_prefix() -> None:
    load = Load(rate=10.0, duration=10.0, prompt_tokens=100, output_tokens=5, prefix_groups=2, prefix_tokens=800)

    hit = run(first, load, 1).summary()["hit_rate"]

    assert hit == pytest.approx(800 / 900, abs=0.05)


class Gate:
    """A policy with a queue of its own: at most two requests an engine, newest first."""

    def __init__(self) -> None:
        self.free = {"e0": 2, "e1": 2}
        self.queue: list[str] = []
        self.firsts: list[str] = []
        self.most = 0

    def __call__(self, snapshot: Snapshot, request: InferenceRequest) -> str | None:
        endpoint = max(self.free, key=lambda name: self.free[name])
        if not self.free[endpoint]:
            self.queue.append(request.id)
            return None
        self.free[endpoint] -= 1
        return endpoint

    def settled(self, endpoint: str, request: InferenceRequest, record: Record, now: float) -> None:
        self.free[endpoint] += 1

    def first(self, endpoint: str, request: InferenceRequest, now: float) -> None:
        self.firsts.append(request.id)

    def reported(self, endpoint: str, report: Report, now: float) -> None:
        self.most = max(self.most, int(report.running or 0))

    def release(self, now: float) -> Iterable[tuple[str, str | Refusal]]:
        for endpoint in self.free:
            while self.queue and self.free[endpoint]:
                self.free[endpoint] -= 1
                yield self.queue.pop(), endpoint


def test_a_policy_may_keep_a_queue_of_its_own() -> None:
    gate = Gate()
    load = Load(kind="bursts", rate=20.0, burst=20, duration=3.0, prompt_tokens=10, output_tokens=30)

    result = run(gate, load, 2)

    assert all(record.served for record in result.records)
    assert gate.most == 2
    assert gate.firsts[-1] != result.records[-1].id
    assert result.seen["queued"] > 0


def test_a_policy_without_one_is_asked_again() -> None:
    def two_each(snapshot: Snapshot, request: InferenceRequest) -> str | None:
        at = min(range(2), key=lambda i: snapshot.views[i].inflight)
        return snapshot.endpoints[at].id if snapshot.views[at].inflight < 2 else None

    result = run(two_each, Load(kind="closed", clients=9, duration=10.0, prompt_tokens=10, output_tokens=30), 2)

    assert all(record.served for record in result.records)
    assert max(sample.running for sample in result.samples) == 2


def test_refusals_keep_their_reason() -> None:
    result = run(lambda snapshot, request: Refusal(reason="queue_full", message="no"), STEADY)

    assert result.summary()["refused"] == {"queue_full": len(result.records)}
    assert {record.status for record in result.records} == {429}


def test_an_engine_that_dies_takes_its_requests_with_it_and_new_ones_go_elsewhere() -> None:
    faults = [Fault(at=5.3, kind="restart", target="e0", lasts=5.0)]
    load = Load(rate=40.0, duration=15.0, prompt_tokens=2000, output_tokens=50)

    result = run(shortest, load, 2, faults=faults)

    lost = [record for record in result.records if not record.served]
    assert lost
    assert all(record.reason == "upstream_closed" and record.at <= 5.3 == record.end for record in lost)
    assert any(record.endpoint == "e0" and record.at > 11 for record in result.records)
    assert not any(record.endpoint == "e0" and 5.3 < record.at < 10.3 for record in result.records)


def test_a_policy_that_insists_on_a_dead_engine_is_asked_three_times() -> None:
    load = Load(rate=5.0, duration=5.0, prompt_tokens=10, output_tokens=5)

    result = run(first, load, 2, faults=[Fault(at=0.0, kind="kill", target="e0")])

    assert result.summary()["refused"] == {"connect_failed": len(result.records)}
    assert result.seen["retried"] == 2 * len(result.records)


def test_a_stalled_and_a_slow_engine() -> None:
    load = Load(rate=5.0, duration=10.0, prompt_tokens=10, output_tokens=50)
    calm = run(first, load, 1).summary()["itl_p99"]

    slow = run(first, load, 1, faults=[Fault(at=0.0, kind="slow", target="e0", factor=3.0)]).summary()
    stalled = run(first, load, 1, faults=[Fault(at=2.0, kind="stall", target="e0", lasts=4.0)])

    assert slow["itl_p99"] > 2 * calm
    assert max(record.worst_gap for record in stalled.records) == pytest.approx(4.0, abs=0.1)
    assert all(record.served for record in stalled.records)


def test_clients_with_little_patience_hang_up() -> None:
    load = Load(kind="bursts", rate=100.0, burst=100, duration=1.5, prompt_tokens=10, output_tokens=100, patience=2.0)

    result = run(first, load, 1)

    gone = [record for record in result.records if record.reason == "client_gone"]
    assert gone
    assert all(record.end - record.at == pytest.approx(2.0) for record in gone)
    assert result.summary()["served"] + len(gone) == len(result.records)
