"""What a simulated engine counts, and its metrics page in the exact shape of the engine that it stands in for.

Names, help texts, label sets, bucket bounds and the `_total` / `_created` habits are those of vLLM's Prometheus page, so
that whatever reads that page reads this one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from math import inf

import attrs

Labels = tuple[tuple[str, str], ...]

TTFT = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)  # fmt: skip
ITL = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
LATENCY = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
HTTP_FINE = (.01, .025, .05, .075, .1, .25, .5, .75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)  # fmt: skip
HTTP_COARSE = (.1, .5, 1)  # fmt: skip


def decades(top: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, … up to *top*."""
    found: list[float] = []
    unit = 1
    while unit <= top:
        found += [m * unit for m in (1, 2, 5) if m * unit <= top]
        unit *= 10
    return tuple(found)


class Histogram:
    """Counts by bucket, sum and count. Not cumulative inside."""

    __slots__ = ("bounds", "count", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.count = 0
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.count += times
        self.total += value * times

    def lines(self, name: str, labels: Labels) -> Iterator[str]:
        running = 0
        for bound, count in zip((*self.bounds, inf), self.counts, strict=True):
            running += count
            yield sample(name + "_bucket", tuple(sorted((*labels, ("le", number(bound))))), running)
        yield sample(name + "_count", labels, running)
        yield sample(name + "_sum", labels, self.total)


@attrs.define
class Telemetry:
    """Counters and histograms of one engine. The core writes them; the page and tests read them."""

    max_model_len: int = 4096
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    external_queries: int = 0
    external_hits: int = 0
    media_queries: int = 0  # items
    media_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = attrs.Factory(
        lambda: dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
    )
    rejections: dict[str, int] = attrs.Factory(
        lambda: dict.fromkeys(("max_num_queued_reqs", "max_num_queued_tokens"), 0)
    )
    transfer_failures: dict[str, int] = attrs.Factory(lambda: dict.fromkeys(("lost", "wrong"), 0))
    steps: int = 0
    busy: float = 0.0  # seconds spent in steps
    ttft: Histogram = attrs.Factory(lambda: Histogram(TTFT))
    itl: Histogram = attrs.Factory(lambda: Histogram(ITL))
    tpot: Histogram = attrs.Factory(lambda: Histogram(ITL))
    e2e: Histogram = attrs.Factory(lambda: Histogram(LATENCY))
    queued: Histogram = attrs.Factory(lambda: Histogram(LATENCY))
    inference: Histogram = attrs.Factory(lambda: Histogram(LATENCY))
    prefill: Histogram = attrs.Factory(lambda: Histogram(LATENCY))
    decode: Histogram = attrs.Factory(lambda: Histogram(LATENCY))
    step_tokens: Histogram = attrs.Factory(lambda: Histogram(STEP_TOKENS))
    params_n: Histogram = attrs.Factory(lambda: Histogram(CHOICES))
    request_preemptions: Histogram = attrs.Factory(lambda: Histogram(PREEMPTIONS))
    request_prompt: Histogram = attrs.field(init=False)
    request_generation: Histogram = attrs.field(init=False)
    request_max: Histogram = attrs.field(init=False)
    params_max: Histogram = attrs.field(init=False)
    request_computed: Histogram = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        bounds = decades(self.max_model_len)
        self.request_prompt = Histogram(bounds)
        self.request_generation = Histogram(bounds)
        self.request_max = Histogram(bounds)
        self.params_max = Histogram(bounds)
        self.request_computed = Histogram(bounds)


@attrs.define
class HttpCounts:
    """What the HTTP layer of an engine counts, by handler."""

    requests: dict[tuple[str, str, str], int] = attrs.Factory(dict)  # handler, method, "2xx"
    created: dict[tuple[str, ...], float] = attrs.Factory(dict)
    size_in: dict[str, tuple[int, int]] = attrs.Factory(dict)  # handler: count, bytes
    size_out: dict[str, tuple[int, int]] = attrs.Factory(dict)
    fine: Histogram = attrs.Factory(lambda: Histogram(HTTP_FINE))
    coarse: dict[tuple[str, str], Histogram] = attrs.Factory(dict)

    def note(self, handler: str, method: str, status: int, size: int, answer: int, seconds: float, wall: float) -> None:
        key = (handler, method, f"{status // 100}xx")
        self.requests[key] = self.requests.get(key, 0) + 1
        self.created.setdefault(key, wall)
        self.created.setdefault((handler,), wall)
        for sizes, count in ((self.size_in, size), (self.size_out, answer)):
            before = sizes.get(handler, (0, 0))
            sizes[handler] = (before[0] + 1, before[1] + count)
        self.fine.observe(seconds)
        coarse = self.coarse.get((handler, method))
        if coarse is None:
            coarse = self.coarse[handler, method] = Histogram(HTTP_COARSE)
            self.created.setdefault((handler, method), wall)
        coarse.observe(seconds)


@attrs.frozen
class Gauges:
    """The state of an engine at the moment of a scrape."""

    running: int
    waiting: int
    deferred: int
    kv_usage: float
    awake: bool = True
    running_loras: tuple[str, ...] = ()
    waiting_loras: tuple[str, ...] = ()
    max_loras: int = 0


def number(value: float) -> str:
    """As the Prometheus client prints a float: 1e+06 and above in exponent form."""
    if value == inf:
        return "+Inf"
    text = repr(float(value))
    dot = text.find(".")
    if value > 0 and dot > 6:
        mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{mantissa}e+0{dot - 1}"
    return text


def sample(name: str, labels: Labels, value: float) -> str:
    if not labels:
        return f"{name} {number(value)}\n"
    inner = ",".join(f'{key}="{escape(text)}"' for key, text in labels)
    return f"{name}{{{inner}}} {number(value)}\n"


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def head(name: str, kind: str, about: str) -> str:
    return f"# HELP {name} {about}\n# TYPE {name} {kind}\n"


FLOPS_NOTE = "(for Model Flops Utilization calculations)."
BY_TIER = (
    "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to DRAM), disk, "
    "p2p (transferred from another vLLM instance) or external_unspecified. Counted at admission; sums to "
    "vllm:prefix_cache_hits + vllm:external_prefix_cache_hits."
)
BY_REASON = (
    "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; 'deferred' = "
    "deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals "
    "vllm:num_requests_waiting."
)
SLEEP = (
    "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; weights_offloaded = 1 "
    "means sleep level 1; discard_all = 1 means sleep level 2."
)


def page(
    telemetry: Telemetry, gauges: Gauges, model: str, cache: Mapping[str, str], created: float, http: HttpCounts
) -> str:
    """The whole metrics page. *created*: wall time of the start; *cache*: labels of `vllm:cache_config_info`."""
    t = telemetry
    base: Labels = (("engine", "0"), ("model_name", model))
    out: list[str] = []

    def labelled(label: str, value: str) -> Labels:
        return tuple(sorted((*base, (label, value))))

    def counter(name: str, about: str, series: Mapping[Labels, float]) -> None:
        out.append(head(f"{name}_total", "counter", about))
        out.extend(sample(f"{name}_total", labels, value) for labels, value in series.items())
        out.append(head(f"{name}_created", "gauge", about))
        out.extend(sample(f"{name}_created", labels, created) for labels in series)

    def gauge(name: str, about: str, series: Mapping[Labels, float]) -> None:
        out.append(head(name, "gauge", about))
        out.extend(sample(name, labels, value) for labels, value in series.items())

    def histogram(name: str, about: str, values: Histogram) -> None:
        out.append(head(name, "histogram", about))
        out.extend(values.lines(name, base))
        out.append(head(f"{name}_created", "gauge", about))
        out.append(sample(f"{name}_created", base, created))

    for what, about in (
        ("flops", "floating point operations"),
        ("read_bytes", "bytes read from memory"),
        ("write_bytes", "bytes written to memory"),
    ):
        counter(f"vllm:estimated_{what}_per_gpu", f"Estimated number of {about} per GPU {FLOPS_NOTE}", {base: 0.0})
    gauge("vllm:num_requests_running", "Number of requests in model execution batches.", {base: gauges.running})
    gauge(
        "vllm:num_requests_waiting",
        "Number of requests waiting to be processed.",
        {base: gauges.waiting + gauges.deferred},
    )
    gauge(
        "vllm:num_requests_waiting_by_reason",
        BY_REASON,
        {labelled("reason", "capacity"): gauges.waiting, labelled("reason", "deferred"): gauges.deferred},
    )
    gauge(
        "vllm:engine_sleep_state",
        SLEEP,
        {
            labelled("sleep_state", "awake"): float(gauges.awake),
            labelled("sleep_state", "weights_offloaded"): float(not gauges.awake),
            labelled("sleep_state", "discard_all"): 0.0,
        },
    )
    gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", {base: gauges.kv_usage})
    counter(
        "vllm:prefix_cache_queries",
        "Prefix cache queries, in terms of number of queried tokens.",
        {base: t.prefix_queries},
    )
    counter("vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", {base: t.prefix_hits})
    for what, value in (("queries", t.external_queries), ("hits", t.external_hits)):
        counted = "queried" if what == "queries" else "cached"
        counter(
            f"vllm:external_prefix_cache_{what}",
            f"External prefix cache {what} from KV connector cross-instance cache sharing, "
            f"in terms of number of {counted} tokens.",
            {base: value},
        )
    counter(
        "vllm:mm_cache_queries", "Multi-modal cache queries, in terms of number of queried items.",
        {base: t.media_queries},
    )  # fmt: skip
    counter("vllm:mm_cache_hits", "Multi-modal cache hits, in terms of number of cached items.", {base: t.media_hits})
    counter("vllm:num_preemptions", "Cumulative number of preemption from the engine.", {base: t.preemptions})
    counter("vllm:prompt_tokens", "Number of prefill tokens processed.", {base: t.prompt_tokens})
    counter(
        "vllm:prompt_tokens_by_source",
        "Number of prompt tokens by source.",
        {
            labelled("source", "local_compute"): t.prompt_tokens - t.prefix_hits - t.external_hits,
            labelled("source", "local_cache_hit"): t.prefix_hits,
            labelled("source", "external_kv_transfer"): t.external_hits,
        },
    )
    counter(
        "vllm:prompt_tokens_cached",
        "Number of cached prompt tokens (local + external).",
        {base: t.prefix_hits + t.external_hits},
    )
    counter(
        "vllm:prompt_tokens_cached_by_source",
        BY_TIER,
        {
            labelled("source", source): value
            for source, value in (
                ("device", t.prefix_hits),
                ("host", 0),
                ("p2p", t.external_hits),
                ("disk", 0),
                ("external_unspecified", 0),
            )
        },
    )
    counter("vllm:generation_tokens", "Number of generation tokens processed.", {base: t.generation_tokens})
    counter(
        "vllm:request_success",
        "Count of successfully processed requests.",
        {labelled("finished_reason", reason): value for reason, value in t.finished.items()},
    )
    counter(
        "vllm:admission_rejections",
        "Number of admission attempts rejected by a queue limit, by reason.",
        {(("model_name", model), ("reason", reason)): value for reason, value in t.rejections.items()},
    )
    prefill = "Number of prefill tokens processed."
    histogram("vllm:request_prompt_tokens", prefill, t.request_prompt)
    histogram("vllm:request_generation_tokens", "Number of generation tokens processed.", t.request_generation)
    histogram("vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.", t.step_tokens)
    histogram(
        "vllm:request_max_num_generation_tokens",
        "Histogram of maximum number of requested generation tokens.",
        t.request_max,
    )
    histogram("vllm:request_params_n", "Histogram of the n request parameter.", t.params_n)
    histogram("vllm:request_params_max_tokens", "Histogram of the max_tokens request parameter.", t.params_max)
    histogram("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", t.ttft)
    histogram("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", t.itl)
    histogram(
        "vllm:request_time_per_output_token_seconds",
        "Histogram of time_per_output_token_seconds per request.",
        t.tpot,
    )
    histogram("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", t.e2e)
    for what, phase, values in (
        ("queue", "WAITING", t.queued),
        ("inference", "RUNNING", t.inference),
        ("prefill", "PREFILL", t.prefill),
        ("decode", "DECODE", t.decode),
    ):
        histogram(f"vllm:request_{what}_time_seconds", f"Histogram of time spent in {phase} phase for request.", values)
    histogram(
        "vllm:request_num_preemptions",
        "Histogram of the number of times a request was preempted.",
        t.request_preemptions,
    )
    histogram(
        "vllm:request_prefill_kv_computed_tokens",
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        t.request_computed,
    )
    if gauges.max_loras:
        gauge(
            "vllm:lora_requests_info",
            "Running stats on lora requests.",
            {
                (
                    ("max_lora", str(gauges.max_loras)),
                    ("running_lora_adapters", ",".join(gauges.running_loras)),
                    ("waiting_lora_adapters", ",".join(gauges.waiting_loras)),
                ): created
            },
        )
    gauge(
        "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", {tuple(sorted({**cache, "engine": "0"}.items())): 1.0}
    )  # fmt: skip
    if any(t.transfer_failures.values()):
        counter(
            "vllm:nixl_num_failed_transfers",
            "Number of failed NIXL KV Cache transfers.",
            {labelled("reason", reason): value for reason, value in t.transfer_failures.items()},
        )
    out.extend(_http(http))
    return "".join(out)


def _http(http: HttpCounts) -> Iterator[str]:
    """The families of the HTTP middleware, which has no `engine` label."""
    if not http.requests:
        return
    about = "Total number of requests by method, status and handler."
    series = {key: tuple(zip(("handler", "method", "status"), key, strict=True)) for key in http.requests}
    yield head("http_requests_total", "counter", about)
    yield from (sample("http_requests_total", labels, http.requests[key]) for key, labels in series.items())
    yield head("http_requests_created", "gauge", about)
    yield from (sample("http_requests_created", labels, http.created[key]) for key, labels in series.items())
    for name, which, sizes in (
        ("http_request_size_bytes", "incoming requests", http.size_in),
        ("http_response_size_bytes", "outgoing responses", http.size_out),
    ):
        about = (
            f"Content length of {which} by handler. Only value of header is respected. "
            "Otherwise ignored. No percentile calculated. "
        )
        yield head(name, "summary", about)
        for handler, (count, total) in sizes.items():
            yield sample(f"{name}_count", (("handler", handler),), count)
            yield sample(f"{name}_sum", (("handler", handler),), total)
        yield head(f"{name}_created", "gauge", about)
        yield from (sample(f"{name}_created", (("handler", h),), http.created[(h,)]) for h in sizes)
    name = "http_request_duration_highr_seconds"
    about = "Latency with many buckets but no API specific labels. Made for more accurate percentile calculations. "
    yield head(name, "histogram", about)
    yield from http.fine.lines(name, ())
    yield head(f"{name}_created", "gauge", about)
    yield sample(f"{name}_created", (), min(http.created.values()))
    name = "http_request_duration_seconds"
    about = "Latency with only few buckets by handler. Made to be only used if aggregation by handler is important. "
    by_route = {key: tuple(zip(("handler", "method"), key, strict=True)) for key in http.coarse}
    yield head(name, "histogram", about)
    for route, values in http.coarse.items():
        yield from values.lines(name, by_route[route])
    yield head(f"{name}_created", "gauge", about)
    yield from (sample(f"{name}_created", labels, http.created[route]) for route, labels in by_route.items())
