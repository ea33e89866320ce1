"""How much lower bands slow a band that is promised a bound, and what of them an engine may take under that bound.

One engine runs all its sequences in steps that they share. A lower-band request slows the others twice: its prompt is
computed in a step (or several) that everybody waits for, and while it decodes, every step reads its KV as well.

    extra = stalls that fall into the request · prompt / prefill rate   +   sequences · CONTENTION · duration

What the estimate allows is corrected by what is measured: an engine's `scale`, a factor on the pause, rises when requests
of the bounded band take longer than their bound and sinks when they stay well below. What "without lower bands" means is
measured too: `Unloaded` learns from requests that had the engine to themselves.

From the estimate follow, for an engine that the bounded band is on, the pause between two lower-band admissions
(`pause`: evenly spaced, since it is the request that meets two stalls that misses the bound) and the number of lower-band
sequences (`most`). An engine that the bounded band is *not* on may be filled. So the number of engines that the bounded
band needs (`engines_needed`) decides how much throughput lower bands keep: concentrating them costs nothing but the
bounded band's own crowding, for which half of its allowance is set aside.
"""

from __future__ import annotations

from math import ceil, inf

CONTENTION = 0.01
"""How much of a token's time another sequence adds (0.005 to 0.04 measured on 8B to 70B models)."""

WINDOW = 64
"""Measured requests between two corrections: enough to see one in a hundred often enough to react."""

WORSE, BETTER = 1.25, 0.98
"""Factors of a correction. One up takes eleven down: after a missed bound some 700 requests keep it, so that it is missed
by one in a hundred although the bound is always sought from below."""

SEARCH = 0.8  # down, until the bound has been missed for the first time
SCALES = (0.25, 64.0)
ROOM = 0.8
"""The scale sinks only while the slowest of a window used less than this part of its allowance."""

MOST_STALLS = 8
"""Stalls a request that are thought of: more of them are so short that the number of sequences is the bound."""

OUTLIERS = WINDOW // 50
"""Requests of a window that may miss the bound without a correction: the bound is on the 99th percentile, and one in a
window of 64 is noise."""


class Unloaded:
    """What a request of the bounded band takes on one engine without lower bands: overhead + prompt + tokens."""

    __slots__ = ("_samples", "first", "pace")

    def __init__(self) -> None:
        self.first: float | None = None  # seconds to the first token, besides the prompt's own
        self.pace: float | None = None  # seconds a further token
        self._samples = 0  # of an undisturbed engine

    def seconds(self, prompt: float, tokens: int) -> float | None:
        """*prompt*: seconds that it takes to compute. None: not known yet."""
        if self.first is None or self.pace is None:
            return None
        return self.first + prompt + max(tokens - 1, 0) * self.pace

    def learn(self, first: float, pace: float, clean: bool) -> None:
        """*clean*: no lower-band work was on the engine. Others may only show that it is faster than was thought."""
        if self.first is None or self.pace is None:
            self.first, self.pace = first, pace
            self._samples = int(clean)
        elif clean:
            self._samples += 1
            step = max(1.0 / self._samples, 0.05)
            self.first += step * (first - self.first)
            self.pace += step * (pace - self.pace)
        elif not self._samples:
            self.first = min(first, self.first)
            self.pace = min(pace, self.pace)


class Interference:
    """One engine's estimate."""

    __slots__ = ("_count", "_found", "_missed", "_worst", "epoch", "scale", "slowdown", "unloaded")

    def __init__(self) -> None:
        self.unloaded = Unloaded()
        self.scale = 1.0
        self.slowdown: float | None = None  # measured, moving mean
        self.epoch = 0  # corrections upwards: who was sent before the last one says nothing about what holds now
        self._found = False  # the bound has been missed once
        self._count = self._missed = 0
        self._worst = 0.0

    def measured(self, slowdown: float, allowance: float) -> None:
        """A request of the bounded band, on an engine kept for it, took *slowdown* times its unloaded time."""
        self.slowdown = slowdown if self.slowdown is None else self.slowdown + 0.05 * (slowdown - self.slowdown)
        self._count += 1
        self._missed += slowdown > 1 + allowance
        self._worst = max(self._worst, slowdown)
        if self._missed > OUTLIERS:
            self._found = True
            self.epoch += 1
            self._correct(WORSE)
        elif self._count >= WINDOW:
            better = BETTER if self._found else SEARCH
            self._correct(better if self._worst - 1 < ROOM * allowance else 1.0)

    def _correct(self, factor: float) -> None:
        self.scale = min(max(self.scale * factor, SCALES[0]), SCALES[1])
        self._count = self._missed = 0
        self._worst = 0.0

    def pause(self, allowance: float, duration: float, stall: float, life: float) -> float:
        """Seconds from one lower-band admission to the next; inf: this one never fits.

        *allowance*: share by which the bounded band may be slowed. *duration*: of one of its requests, unloaded.
        *stall*: seconds that this admission's prompt takes. *life*: seconds that it will run.

        A request that takes `duration · (1 + allowance)` meets at most *count* stalls if they are that ÷ *count* apart.
        """
        extra = allowance * duration
        contention = life * CONTENTION * duration  # that one admission a second would cost a request
        best = inf
        for count in range(1, MOST_STALLS + 1):
            left = extra - count * stall
            if left <= 0:
                break
            best = min(best, max(duration * (1 + allowance) / count, contention / left))
        return best * self.scale

    def most(self, allowance: float) -> int:
        """Lower-band sequences beside which decoding alone stays within *allowance*."""
        return max(1, int(allowance / CONTENTION))


def crowding(sequences: float, spread: float, engines: int) -> float:
    """How much slower *sequences* of one band are on *spread* engines than on all *engines* of a pool."""
    return (1 + CONTENTION * sequences / spread) / (1 + CONTENTION * sequences / engines)


def engines_needed(sequences: float, limits: list[int], bound: float) -> int:
    """On how many engines *sequences* of the bounded band belong together, so that others may have the rest.

    *limits*: what the engines of the pool can have in hand. Half of the bound is for crowding, half of an engine is kept
    free for what comes next.
    """
    count = len(limits)
    typical = sorted(limits)[count // 2]
    for spread in range(max(1, ceil(2 * sequences / typical)), count):
        if crowding(sequences, spread, count) <= 1 + (bound - 1) / 2:
            return spread
    return count
