"""What the gateway counts, and how it is exposed.

The hot path touches plain lists, dicts and integers (a settled request costs 3 µs); a `prometheus_client` collector
turns them into families when somebody scrapes. Labels are bounded: models that are configured or served, known routes,
the closed set of reasons; all else is ``other``. A model or an endpoint that disappears takes its series with it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from llmgw import __version__
from llmgw.openai import routes
from llmgw.request import Outcome

TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
ITL_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
E2E_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
"""vLLM's bounds, so that a gateway's and an engine's histogram can be laid over each other. Queue uses TTFT's: a gateway's
queue is mostly shorter than the 0.3 s with which E2E's begin."""

OTHER = "other"
MODELS = 1024  # series by model; a catalogue of more is cut, not refused

ROUTES = {route.path for route in routes.TABLE}
STATUSES = frozenset({200, 400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 431, 499, 500, 502, 503, 504})


class Buckets:
    """A histogram: counts between bounds, and the sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """*value* in seconds."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_many(self, value: float, count: int) -> None:
        """*count* equal values: the gaps of events that came in one piece."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus wants it: (upper bound, how many at most so large)."""
        total, found = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class ModelSlot:
    """All that is counted of one model."""

    __slots__ = ("cached", "completion", "e2e", "itl", "prompt", "queue", "ttft")

    def __init__(self) -> None:
        self.ttft = Buckets(TTFT_BOUNDS)
        self.itl = Buckets(ITL_BOUNDS)
        self.e2e = Buckets(E2E_BOUNDS)
        self.queue = Buckets(TTFT_BOUNDS)
        self.prompt = 0
        self.cached = 0
        self.completion = 0


class EndpointSlot:
    """All that is counted of one endpoint, by its name: a restart of the engine goes on counting."""

    __slots__ = (
        "failures",
        "inflight",
        "probes_failed",
        "probes_ok",
        "reported",
        "requests",
        "scrapes_failed",
        "state",
    )

    def __init__(self) -> None:
        self.inflight = 0
        self.requests = 0
        self.failures = 0
        self.probes_ok = 0
        self.probes_failed = 0
        self.scrapes_failed = 0
        self.reported: float | None = None  # when its metrics page was read last
        self.state = "joining"


HEALTH = ("joining", "ready", "degraded", "quarantined", "draining", "gone")


class Metrics(Collector):
    """Everything that `/metrics` shows. *gauges* are read when scraped: name → (help, value now)."""

    def __init__(self) -> None:
        self._models: dict[str, ModelSlot] = {OTHER: ModelSlot()}
        self._endpoints: dict[str, EndpointSlot] = {}
        self._outcomes: dict[tuple[str, str, int, str], int] = {}  # route, model, status, reason
        self._retries: dict[str, int] = {}
        self.bytes_in = 0
        self.bytes_out = 0
        self.disconnects = 0
        self.aborts = 0
        self.bugs = 0
        self.clock: Callable[[], float] = float  # the loop's time, for ages
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self.counters: dict[str, tuple[str, Callable[[], float]]] = {}
        self.more: list[Callable[[], Iterable[Metric]]] = []  # families of parts that not every server has

    # -- what there is -------------------------------------------------------------------------------------------

    def keep_models(self, names: Iterable[str]) -> None:
        """From now on exactly *names* have series of their own; of those that are gone nothing stays."""
        wanted = dict.fromkeys(list(names)[: MODELS - 1])
        wanted[OTHER] = None
        self._models = {name: self._models.get(name) or ModelSlot() for name in wanted}
        self._outcomes = {labels: count for labels, count in self._outcomes.items() if labels[1] in wanted}

    def keep_endpoints(self, names: Iterable[str]) -> None:
        """From now on exactly *names* have series."""
        self._endpoints = {name: self._endpoints.get(name) or EndpointSlot() for name in names}

    def model(self, name: str) -> ModelSlot:
        """The slot of *name*; an unknown one shares ``other``."""
        return self._models.get(name) or self._models[OTHER]

    def endpoint(self, name: str) -> EndpointSlot:
        """The slot of *name*; of one that is gone, a slot that nobody reads."""
        return self._endpoints.get(name) or EndpointSlot()

    def itl(self, model: str) -> Buckets:
        """Where the gaps of a stream of *model* are observed. Fetch it once a stream."""
        return self.model(model).itl

    # -- what happens --------------------------------------------------------------------------------------------

    def retried(self, reason: str) -> None:
        """An attempt ended with *reason* and another follows."""
        self._retries[reason] = self._retries.get(reason, 0) + 1

    def settled(self, outcome: Outcome, model: str) -> None:
        """A request has ended. *model*: the one that its name stands for."""
        slot = self._models.get(model)
        if slot is None:
            model = OTHER
            slot = self._models[OTHER]
        status = outcome.status if outcome.status in STATUSES else outcome.status // 100 * 100
        route = outcome.route
        if route not in ROUTES:
            found = routes.find(route)
            route = found.path if found else OTHER
        labels = (route, model, status, outcome.reason)
        self._outcomes[labels] = self._outcomes.get(labels, 0) + 1
        self.bytes_in += outcome.bytes_in
        self.bytes_out += outcome.bytes_out
        if outcome.reason == "client_gone":
            self.disconnects += 1
        if outcome.aborted:
            self.aborts += 1
        start = outcome.accepted
        if outcome.admitted is not None:
            slot.queue.observe(outcome.admitted - start)
        if outcome.first is not None:
            slot.ttft.observe(outcome.first - start)
            if outcome.last is not None and not outcome.reason:
                slot.e2e.observe(outcome.last - start)
        slot.prompt += outcome.prompt_tokens or 0
        slot.cached += outcome.cached_tokens or 0
        slot.completion += outcome.completion_tokens or 0

    # -- what is shown -------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        yield _one(GaugeMetricFamily, "llmgw_info", "Version of this gateway.", {(__version__,): 1}, "version")
        outcomes = {
            (route, model, str(status), reason): n for (route, model, status, reason), n in self._outcomes.items()
        }
        yield _one(
            CounterMetricFamily, "llmgw_requests", "Requests that have ended; reason is empty where one was served.",
            outcomes, "route", "model", "status", "reason",
        )  # fmt: skip
        slots = self._models
        for name, text, pick in (
            ("llmgw_time_to_first_token_seconds", "First byte of a request to first byte of its answer.", "ttft"),
            ("llmgw_inter_token_latency_seconds", "Gap between two events of a stream.", "itl"),
            ("llmgw_request_duration_seconds", "First byte of a request to the end of its answer, if served.", "e2e"),
            ("llmgw_queue_seconds", "First byte of a request to its admission.", "queue"),
        ):
            family = HistogramMetricFamily(name, text, labels=["model"])
            for model, slot in slots.items():
                buckets: Buckets = getattr(slot, pick)
                family.add_metric([model], buckets.cumulative(), buckets.sum)
            yield family
        for name, text, pick in (
            ("llmgw_prompt_tokens", "Tokens of prompts, as far as known.", "prompt"),
            ("llmgw_cached_tokens", "Prompt tokens that engines found in their cache.", "cached"),
            ("llmgw_completion_tokens", "Tokens of answers, as far as known.", "completion"),
        ):
            counts = {(model,): getattr(slot, pick) for model, slot in slots.items()}
            yield _one(CounterMetricFamily, name, text, counts, "model")
        yield _one(
            CounterMetricFamily, "llmgw_bytes", "Bytes of bodies, from and to clients.",
            {("in",): self.bytes_in, ("out",): self.bytes_out}, "direction",
        )  # fmt: skip
        retries = {(reason,): n for reason, n in self._retries.items()}
        yield _one(CounterMetricFamily, "llmgw_retries", "Attempts that another followed.", retries, "reason")
        for name, text, count in (
            ("llmgw_client_disconnects", "Clients that left before the end.", self.disconnects),
            ("llmgw_upstream_aborts", "Engines stopped at work, since nobody waited any more.", self.aborts),
            ("llmgw_internal_errors", "Faults of the gateway itself; each is in the log.", self.bugs),
        ):
            yield _one(CounterMetricFamily, name, text, {(): count})
        yield from self._of_endpoints()
        for name, (text, value) in self.gauges.items():
            yield _one(GaugeMetricFamily, name, text, {(): value()})
        for name, (text, value) in self.counters.items():
            yield _one(CounterMetricFamily, name, text, {(): value()})
        for part in self.more:
            yield from part()

    def _of_endpoints(self) -> Iterator[Metric]:
        slots = self._endpoints
        for name, text, pick in (
            ("llmgw_endpoint_requests", "Attempts sent to an endpoint.", "requests"),
            ("llmgw_endpoint_failures", "Attempts that an endpoint failed.", "failures"),
        ):
            yield _one(CounterMetricFamily, name, text, {(n,): getattr(s, pick) for n, s in slots.items()}, "endpoint")
        probes = {(n, "ok"): s.probes_ok for n, s in slots.items()}
        probes |= {(n, "failed"): s.probes_failed for n, s in slots.items()}
        yield _one(CounterMetricFamily, "llmgw_endpoint_probes", "Health probes.", probes, "endpoint", "result")
        inflight = {(n,): s.inflight for n, s in slots.items()}
        yield _one(
            GaugeMetricFamily, "llmgw_endpoint_inflight", "Requests an endpoint has of ours.", inflight, "endpoint"
        )
        failed = {(n,): s.scrapes_failed for n, s in slots.items()}
        yield _one(
            CounterMetricFamily, "llmgw_endpoint_scrapes_failed", "Metrics pages that could not be had.",
            failed, "endpoint",
        )  # fmt: skip
        now = self.clock()
        ages = {(n,): now - s.reported for n, s in slots.items() if s.reported is not None}
        yield _one(
            GaugeMetricFamily, "llmgw_endpoint_report_age_seconds", "Since its metrics page was read last.",
            ages, "endpoint",
        )  # fmt: skip
        states = {(n, h): int(s.state == h) for n, s in slots.items() for h in HEALTH}
        yield _one(
            GaugeMetricFamily, "llmgw_endpoint_state", "1 for the state that an endpoint is in.",
            states, "endpoint", "state",
        )  # fmt: skip


def _one(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    values: Mapping[Any, float],
    *labels: str,
) -> Metric:
    """*values*: by tuple of label values."""
    made = family(name, text, labels=labels)
    for label, value in values.items():
        made.add_metric(list(label), value)
    return made


def page(metrics: Metrics, *, process: bool = True) -> tuple[bytes, str]:
    """The text of `/metrics` and its content type."""
    registry = CollectorRegistry()
    registry.register(metrics)
    if process:
        for one in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            registry.register(one)
    return generate_latest(registry), CONTENT_TYPE_LATEST
