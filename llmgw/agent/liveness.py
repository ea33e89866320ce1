"""Whether a ready engine still lives. It must not kill a busy one, and must find a hung one in under two minutes.

`/health` says little: vLLM answers 200 with a hung collective, and a saturated engine misses a probe. What counts is
*progress*: counters that rise with every step of the engine. Only when nothing has risen for `STALL` seconds is it
asked to serve one token, for `CANARY` seconds; and it is hung only if that fails too and nothing rose meanwhile. An
engine that works hard without counting (a long prefill in one piece) shows by the power its GPUs draw, or the
processor time it takes: then it has `PATIENCE`.
"""

from __future__ import annotations

import math

import attrs

STALL = 75.0  # seconds
CANARY = 30.0  # seconds; STALL + CANARY and a few probes stay under two minutes
PATIENCE = 600.0  # seconds for an engine that is visibly at work
REFUSALS = 3  # connections refused in a row, while its process lives
WORKING = 0.5  # share of the most power (or processor time) seen in this replica at work that means work
CONTRAST = 2.0  # how many times its rest the work of this replica must take before the two can be told apart
PROBE_EVERY = 5.0


@attrs.frozen
class Sample:
    """One look. *progress*: sum of the engine's counters, None = it did not say. *effort*: power in W or processors in
    use; None = not known. *refused*: the connection was refused."""

    at: float
    progress: float | None = None
    effort: float | None = None
    refused: bool = False


@attrs.define
class Liveness:
    """Judges samples. `verdict` is what to do: "", "canary", or the reason for which it is given up."""

    moved_at: float
    progress: float | None = None
    most_effort: float = 0.0  # while it moved
    least_effort: float = math.inf
    refusals: int = 0
    asked_at: float | None = None  # when the canary was sent whose answer is awaited

    def verdict(self, sample: Sample) -> str:
        self.refusals = self.refusals + 1 if sample.refused else 0
        if self.refusals >= REFUSALS:
            return f"its port refused {self.refusals} connections in a row"
        moved = sample.progress is not None and self.progress is not None and sample.progress != self.progress
        if moved:
            self._moves(sample.at)
        if sample.progress is not None:
            self.progress = sample.progress
        if sample.effort is not None:
            self.least_effort = min(self.least_effort, sample.effort)
            if moved:
                self.most_effort = max(self.most_effort, sample.effort)
        stalled = sample.at - self.moved_at
        if self.asked_at is not None or stalled < STALL:
            return ""
        if self._at_work(sample) and stalled < PATIENCE:
            return ""
        self.asked_at = sample.at
        return "canary"

    def _at_work(self, sample: Sample) -> bool:
        """Only where work and rest have been seen to differ: else a figure says nothing."""
        told = self.most_effort >= CONTRAST * self.least_effort and self.most_effort > 0
        return told and sample.effort is not None and sample.effort >= WORKING * self.most_effort

    def _moves(self, now: float) -> None:
        self.moved_at, self.asked_at = now, None

    def answered(self, passed: bool, text: str, now: float) -> str:
        """The canary's outcome. "" = it lives, else why it is given up."""
        if self.asked_at is None:  # it moved meanwhile: busy, not hung
            return ""
        self.asked_at = None
        if passed:
            self._moves(now)
            return ""
        return f"no progress for {now - self.moved_at:.0f} s, and one token was not served: {text}"
