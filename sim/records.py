"""What came of every request, and of the whole: the common ground of both levels, the checkers and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil, isnan, nan
from typing import Any

import attrs


@attrs.define
class Record:
    """One request as its client saw it. Times are virtual seconds; -1: it never came to that."""

    id: str
    session: str
    at: float
    load: str = ""
    endpoint: str = ""
    status: int = 0  # HTTP status, 499: the client hung up, 0: no answer
    reason: str = ""  # code of llmgw.reasons, or what went wrong; "": served
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    wanted: int = 0
    sent: float = -1.0  # when the engine got it (decisions level)
    first: float = -1.0
    last: float = -1.0
    end: float = -1.0
    worst_gap: float = 0.0  # longest time between two tokens
    digest: str = ""  # of what was said

    @property
    def served(self) -> bool:
        return not self.reason

    @property
    def ttft(self) -> float:
        return self.first - self.at if self.first >= 0 else nan

    @property
    def itl(self) -> float:
        """Mean gap between tokens; nan with fewer than two."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else nan


@attrs.define
class Sample:
    """The state of one engine at one instant."""

    at: float
    engine: str
    running: int
    waiting: int
    kv_usage: float


@attrs.define
class Result:
    """A finished rehearsal."""

    records: list[Record] = attrs.Factory(list)
    samples: list[Sample] = attrs.Factory(list)
    engines: dict[str, dict[str, float]] = attrs.Factory(dict)  # counters of each engine at the end
    end: float = 0.0  # virtual seconds
    problems: list[str] = attrs.Factory(list)  # what a checker found
    seen: Counter[str] = attrs.Factory(Counter)  # interesting states that were reached, and how often

    def served(self) -> list[Record]:
        return [record for record in self.records if record.served]

    def summary(self, slo_ttft: float = 2.0, slo_itl: float = 0.1) -> dict[str, Any]:
        """The figures that rehearsals are compared by. Seconds; shares from 0 to 1."""
        served = self.served()
        ttft = sorted(record.ttft for record in served if record.first >= 0)
        itl = sorted(record.itl for record in served if record.tokens > 1)
        e2e = sorted(record.end - record.at for record in served)
        good = [r for r in served if r.ttft <= slo_ttft and not r.itl > slo_itl]
        span = self.end or 1.0
        prompt = sum(record.prompt_tokens for record in served)
        load = Counter(record.endpoint for record in served if record.endpoint)
        busy = sorted(load.get(name, 0) for name in self.engines) or [0]
        return {
            "requests": len(self.records),
            "served": len(served),
            "refused": dict(sorted(Counter(record.reason for record in self.records if record.reason).items())),
            "tokens": sum(record.tokens for record in self.records),
            "tokens_per_second": sum(record.tokens for record in self.records) / span,
            "virtual_seconds": self.end,
            **{f"ttft_p{p}": percentile(ttft, p) for p in (50, 90, 99)},
            **{f"itl_p{p}": percentile(itl, p) for p in (50, 90, 99)},
            **{f"e2e_p{p}": percentile(e2e, p) for p in (50, 90, 99)},
            "worst_gap": max((record.worst_gap for record in served), default=0.0),
            "goodput": len(good) / len(self.records) if self.records else nan,
            "hit_rate": sum(record.cached_tokens for record in served) / prompt if prompt else nan,
            "imbalance": busy[-1] / (sum(busy) / len(busy)) if sum(busy) else nan,
            "preemptions": sum(int(engine.get("preemptions", 0)) for engine in self.engines.values()),
        }


def percentile(ordered: Sequence[float], p: float) -> float:
    """Nearest rank of sorted values; nan if there are none."""
    return ordered[max(0, ceil(len(ordered) * p / 100) - 1)] if ordered else nan


def window(
    records: Sequence[Record], width: float, value: Callable[[Record], float]
) -> list[tuple[float, list[float]]]:
    """*value* of the records by the time they came, in windows of *width* seconds; nan is left out."""
    found: dict[int, list[float]] = {}
    for record in records:
        one = value(record)
        if not isnan(one):
            found.setdefault(int(record.at // width), []).append(one)
    return [(number * width, sorted(values)) for number, values in sorted(found.items())]
