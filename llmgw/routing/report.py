"""What an engine says of itself on its metrics page, without parsing the page.

A real page is 50 to 100 KB and some ten lines of it matter here. They are found by searching for the family names at the start of
a line: a few passes at memory speed instead of a parse of everything (65 KB: 0.2 ms instead of 10 ms).

Of several series of a family (data-parallel ranks are an `engine` label) requests, blocks and progress are added, and for the KV cache the
fullest counts. Missing, NaN and negative are None: unknown, never zero.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable

import msgspec

from llmgw.endpoint import Report
from llmgw.engines import ENGINES
from llmgw.engines.base import MetricNames

PAGE = 4 << 20  # bytes; forty times the largest page seen. More is not read

SERIES = 256  # series of one family that are read: the most data-parallel ranks of a replica, several times over

BY_HAND: dict[str, MetricNames] = {
    "tgi": MetricNames(
        running=("tgi_batch_current_size",),
        waiting=("tgi_queue_size",),
        progress=("tgi_batch_inference_count", "tgi_request_count"),
    ),
    "trtllm": MetricNames(
        running=("trtllm_num_requests_running", "trtllm:num_requests_running", "nv_trt_llm_request_metrics{request_type=scheduled}"),
        waiting=("trtllm_num_requests_waiting", "trtllm:num_requests_waiting", "nv_trt_llm_request_metrics{request_type=waiting}"),
        kv_usage=("trtllm_kv_cache_utilization", "trtllm:kv_cache_utilization", "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}"),
        block_size=("trtllm_kv_cache_tokens_per_block", "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}"),
        blocks=("trtllm_kv_cache_max_blocks", "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}"),
        progress=("trtllm_generation_tokens_total", "trtllm_prompt_tokens_total"),
        path="/prometheus/metrics",  # /metrics is a JSON queue that reading empties
    ),
}  # fmt: skip
"""Names of the kinds that no agent starts, but that people run."""

_SIGNS = (
    (b"\nvllm:", "vllm"),
    (b"\nsglang:", "sglang"),
    (b"\nllamacpp:", "llama-server"),
    (b"\ntgi_", "tgi"),
    (b"\ntrtllm_", "trtllm"),
    (b"\nnv_trt_llm_", "trtllm"),
)

_AFTER_NAME = (b"{", b" ", b"\t")
_SPEC = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>[^{}]*)\})?(?:@(?P<label>[A-Za-z_]\w*))?")
_LABEL = re.compile(rb'([A-Za-z_]\w*)="((?:[^"\\\n]|\\.)*)"')
_SAMPLE = re.compile(rb'(\{(?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*+")*+\})?+[ \t]++([^\s#]++)')


@functools.cache
def kinds() -> dict[str, MetricNames]:
    """Metric names by engine kind."""
    return {name: kind.metrics for name, kind in ENGINES.all().items()} | BY_HAND


class Reading(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One page, as far as it matters."""

    report: Report
    block_size: int | None = None  # tokens
    blocks: int | None = None
    progress: float | None = None  # rises while the engine works; compare with the reading before

    @property
    def empty(self) -> bool:
        """It said nothing of what was looked for: not a metrics page, or of another engine."""
        return self == Reading(report=Report(at=self.report.at))


class _Spec:
    """One candidate: ``name``, ``name{label=value,…}`` or ``name@label``. Raises ValueError for anything else."""

    def __init__(self, text: str) -> None:
        found = _SPEC.fullmatch(text)
        if found is None:
            raise ValueError(f"metric {text!r} is none of NAME, NAME{{LABEL=VALUE,…}}, NAME@LABEL")
        self.start = b"\n" + found["name"].encode()
        self.label = (found["label"] or "").encode()
        self.wanted: list[tuple[bytes, bytes]] = []
        for pair in filter(None, (found["labels"] or "").split(",")):
            name, equals, value = pair.partition("=")
            if not equals:
                raise ValueError(f"metric {text!r}: {pair!r} is not LABEL=VALUE")
            self.wanted.append((name.strip().encode(), value.strip().strip('"').encode()))

    def values(self, page: bytes) -> list[float]:
        """The figures of all series that match; those that are no numbers of this world are left out.

        The series of a family stand together (the format demands it), so the search ends with the first group.
        """
        found: list[float] = []
        start, size = self.start, len(self.start)
        at = page.find(start)
        for _ in range(SERIES):
            if at < 0:
                break
            at += size
            if page[at : at + 1] not in _AFTER_NAME:
                at = page.find(start, at)  # a longer name
                continue
            if (value := self._value(_SAMPLE.match(page, at))) is not None:
                found.append(value)
            at = page.find(b"\n", at)
            if not page.startswith(start, at):
                break
        return found

    def _value(self, sample: re.Match[bytes] | None) -> float | None:
        if sample is None:
            return None
        text = sample[2]
        if self.label or self.wanted:
            labels = dict(_LABEL.findall(sample[1] or b""))
            if any(labels.get(name) != value for name, value in self.wanted):
                return None
            if self.label:
                text = labels.get(self.label, b"")
        try:
            value = float(text)
        except ValueError:
            return None
        return value if math.isfinite(value) and value >= 0 else None


def _first(specs: list[_Spec], page: bytes, join: Callable[[list[float]], float]) -> float | None:
    """The first candidate that is on the page, its series joined."""
    for spec in specs:
        if values := spec.values(page):
            return join(values)
    return None


class Reader:
    """Reads the pages of one kind of engine. Raises ValueError for a mapping that is none."""

    def __init__(self, names: MetricNames) -> None:
        self.path = names.path
        self._running = [_Spec(text) for text in names.running]
        self._waiting = [_Spec(text) for text in names.waiting]
        self._kv_usage = [_Spec(text) for text in names.kv_usage]
        self._block_size = [_Spec(text) for text in names.block_size]
        self._blocks = [_Spec(text) for text in names.blocks]
        self._progress = [_Spec(text) for text in names.progress]

    def read(self, page: bytes, now: float) -> Reading:
        """What *page* says. A page that is none gives a reading that is `empty`: keep the last one then."""
        page = b"\n" + page[:PAGE]
        kv_usage = _first(self._kv_usage, page, max)
        block_size = _first(self._block_size, page, max)
        blocks = _first(self._blocks, page, sum)
        progress = [value for spec in self._progress for value in spec.values(page)]
        return Reading(
            report=Report(
                at=now,
                running=_first(self._running, page, sum),
                waiting=_first(self._waiting, page, sum),
                kv_usage=None if kv_usage is None else min(1.0, kv_usage),
            ),
            block_size=int(block_size) if block_size else None,
            blocks=int(blocks) if blocks else None,
            progress=sum(progress) if progress else None,
        )


def detect(page: bytes) -> str | None:
    """The kind of engine whose page this is; None for none that is known. (A sim engine calls itself vllm here.)"""
    page = b"\n" + page[:PAGE]
    return next((kind for sign, kind in _SIGNS if sign in page), None)
