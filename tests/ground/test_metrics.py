"""What is counted is shown, labels are bounded, and what is gone leaves no series."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from llmgw.metrics import ITL_BOUNDS, MODELS, Buckets, Metrics, page
from llmgw.request import Outcome


def shown(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """Sample name and label values → value."""
    text = page(metrics, process=False)[0].decode()
    return {
        (s.name, tuple(v for _, v in sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def outcome(**known: Any) -> Outcome:
    fields: dict[str, Any] = {"request_id": "r", "route": "/v1/completions", "status": 200, "accepted": 1.0}
    return Outcome(**(fields | known))


@given(st.lists(st.floats(0, 1000)))
def test_buckets_count_as_prometheus_says(values: list[float]) -> None:
    buckets = Buckets(ITL_BOUNDS)
    for value in values:
        buckets.observe(value)
    for bound, count in buckets.cumulative()[:-1]:
        assert count == sum(v <= float(bound) for v in values)
    assert buckets.cumulative()[-1] == ("+Inf", len(values))


@given(st.floats(0, 1000), st.integers(1, 50))
def test_many_are_as_many_single_ones(value: float, count: int) -> None:
    buckets = Buckets(ITL_BOUNDS)
    buckets.observe_many(value, count)
    assert buckets.counts[bisect_left(ITL_BOUNDS, value)] == count == sum(buckets.counts)


def test_a_served_and_a_refused_request() -> None:
    metrics = Metrics()
    metrics.keep_models(["m"])
    metrics.keep_endpoints(["e"])
    metrics.settled(
        outcome(admitted=1.5, first=2.0, last=3.0, bytes_in=5, bytes_out=7, prompt_tokens=3, completion_tokens=2), "m"
    )
    metrics.settled(outcome(status=499, reason="client_gone", aborted=True, first=2.0, last=2.5), "m")
    metrics.retried("connect_failed")
    metrics.endpoint("e").state = "ready"
    metrics.itl("m").observe(0.02)
    found = shown(metrics)
    assert found["llmgw_requests_total", ("m", "", "/v1/completions", "200")] == 1
    assert found["llmgw_requests_total", ("m", "client_gone", "/v1/completions", "499")] == 1
    assert found["llmgw_time_to_first_token_seconds_count", ("m",)] == 2
    assert found["llmgw_request_duration_seconds_sum", ("m",)] == 2.0
    assert found["llmgw_request_duration_seconds_count", ("m",)] == 1  # a cut answer has no duration
    assert found["llmgw_queue_seconds_bucket", ("0.5", "m")] == 1
    assert found["llmgw_inter_token_latency_seconds_bucket", ("0.025", "m")] == 1
    assert found["llmgw_prompt_tokens_total", ("m",)] == 3
    assert found["llmgw_completion_tokens_total", ("m",)] == 2
    assert found["llmgw_bytes_total", ("out",)] == 7
    assert found["llmgw_client_disconnects_total", ()] == 1
    assert found["llmgw_upstream_aborts_total", ()] == 1
    assert found["llmgw_retries_total", ("connect_failed",)] == 1
    assert found["llmgw_endpoint_state", ("e", "ready")] == 1
    assert found["llmgw_endpoint_state", ("e", "joining")] == 0


def test_clients_cannot_make_labels() -> None:
    metrics = Metrics()
    metrics.keep_models(["m"])
    for i in range(1000):
        metrics.settled(outcome(route=f"/x{i}", status=200 + i % 7, model=f"made-up-{i}"), f"made-up-{i}")
    requests = [labels for name, labels in shown(metrics) if name == "llmgw_requests_total"]
    assert requests == [("other", "", "other", "200")]


def test_what_is_gone_leaves_no_series() -> None:
    metrics = Metrics()
    metrics.keep_models(["m", "n"])
    metrics.keep_endpoints(["e", "f"])
    for model in ("m", "n"):
        metrics.settled(outcome(first=2.0), model)
    metrics.keep_models(["n"])
    metrics.keep_endpoints(["f"])
    metrics.settled(outcome(first=2.0), "n")
    found = shown(metrics)
    assert not [labels for _, labels in found if "m" in labels or "e" in labels]
    assert found["llmgw_requests_total", ("n", "", "/v1/completions", "200")] == 2  # what stays goes on counting
    metrics.keep_models(f"m{i}" for i in range(2 * MODELS))
    assert len(metrics._models) == MODELS


def test_gauges_are_read_when_scraped() -> None:
    metrics = Metrics()
    now = [1.0]
    metrics.gauges["llmgw_connections"] = ("Client connections.", lambda: now[0])
    metrics.counters["llmgw_log_lines_lost"] = ("Lines.", lambda: now[0])
    now[0] = 5.0
    assert shown(metrics)["llmgw_connections", ()] == 5.0
    assert shown(metrics)["llmgw_log_lines_lost_total", ()] == 5.0
