"""The gateway's own account of what every endpoint has to do, and how fast it has been seen to do it.

A *leg* is one request on one endpoint: opened when it is sent, `first` at its first token, `progress` while it streams,
closed once. What a leg adds is taken away again by the same leg, so counters cannot go below zero, and neither health, nor a
metrics page, nor a reload touches them: an endpoint that stays (same id) keeps its account, one that goes keeps it
until its last leg is closed.

Speed is learned from first tokens. An engine prefills in order, so from one first token to the next (or from the request, if
that came later) it was at work on that request alone: tokens ÷ that time is a sample of its prefill rate, and the
upper quartile of the samples is taken, since all that disturbs a sample makes it slower. What the rate does not explain is
*overhead*: seconds a request costs whatever its length (tokenising, waiting for a step, waiting for a slot). The time a
token takes is fitted, over the last `DECODE_WINDOW` seconds, as a line over the number of sequences that decode together, so
that the speed which one more would find is known at once, not when the engine has shown it. An engine that gives no first token
although some are due is blocked (no slot, no room in its cache, hung): the time it has been silent is its overhead then. What has not been observed for a while drifts to the
fleet's median with half-life `DRIFT`: an engine that was slow once gets another chance.

    engine report, while fresh (`fresh` seconds): requests that it counts and we do not know are *foreign* load
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from heapq import heappop, heappush
from itertools import count
from math import exp, log

import msgspec

from llmgw.endpoint import Endpoint, EndpointView, Health, Report, Snapshot

FRESH = 5.0  # seconds that a report is believed: five scrapes of the default interval
MERGE = 0.005  # first tokens that come so close were prefilled in one step
SAMPLE_TOKENS = 256  # a prefill sample with fewer tokens says more of the overhead than of the rate
QUANTILE = 0.75
PREFILL_STEP = 0.2  # of log rate, a sample: a fourfold change of speed is found within some 30 requests
OVERHEAD_STEP = 0.1  # weight of a new sample
DECODE_WINDOW = 20.0  # seconds
CONTENTION = 0.01  # how much of a token's time another sequence adds, before it has been seen (0.005 to 0.04 measured)
PACE = 0.02  # seconds a token, before it has been seen
CONTENTION_WEIGHT = 9.0  # variance of the batch size (sequences²) at which what was seen counts as much as that
FOREIGN_TOKENS = 500  # uncached prompt tokens that a request of another gateway is taken for
DRIFT = 120.0  # seconds
REFRESH = 1.0  # seconds between two looks at what changes by time alone


class _Leg(msgspec.Struct, gc=False):
    account: _Account
    sent: float
    prefill: int  # uncached prompt tokens, while no token has come; then 0
    decode: int  # tokens still expected
    queued: bool = True
    learn: bool = True  # its first token tells the speed of its prefill
    tokens: int = 0  # that have come
    seen: float = 0.0  # when they had


class _Account:
    """One endpoint's. Plain attributes: it is read and written several times a request."""

    __slots__ = (
        "decode_at", "decode_batch", "decode_batch2", "decode_both", "decode_pace", "decode_tokens", "decode_weight",
        "dirty", "end", "foreign", "health", "inflight",
        "learned", "log_prefill", "overhead", "prefill_tokens", "queued", "report", "sample_n", "sample_start",
        "sample_tokens", "since", "slot", "waiting_since",
    )  # fmt: skip

    def __init__(self, now: float) -> None:
        self.slot: int | None = None  # where its view stands in the snapshot; None: it is gone, legs remain
        self.dirty = True
        self.health: Health = "joining"
        self.since = now
        self.inflight = self.queued = self.prefill_tokens = self.decode_tokens = 0
        self.report: Report | None = None
        self.foreign = 0.0
        self.log_prefill: float | None = None
        self.overhead: float | None = None
        self.waiting_since = now  # when the queue was last empty
        self.learned = now  # when a sample came last
        self.sample_start = self.end = now  # the sample that is being made
        self.sample_tokens = self.sample_n = 0
        self.decode_weight = self.decode_pace = self.decode_batch = self.decode_batch2 = self.decode_both = 0.0
        self.decode_at = now

    def first_token(self, leg: _Leg, now: float) -> None:
        """A prefill has ended: the sample before it is complete, unless both ended in one step."""
        if self.sample_n and now - self.end > MERGE:
            self._learn(self.sample_tokens, self.sample_n, self.end - self.sample_start)
            self.learned = now
            self.sample_n = 0
        if not self.sample_n:
            self.sample_start = max(leg.sent, self.end)
            self.sample_tokens = 0
        self.sample_tokens += leg.prefill
        self.sample_n += 1
        self.end = now

    def _learn(self, tokens: int, requests: int, seconds: float) -> None:
        if seconds <= 0:
            return
        if tokens >= SAMPLE_TOKENS * requests:
            sample = log(tokens / seconds)
            rate = self.log_prefill
            if rate is None:
                self.log_prefill = sample
            else:
                up, down = PREFILL_STEP * QUANTILE, PREFILL_STEP * (QUANTILE - 1)
                self.log_prefill = rate + min(max(sample - rate, down), up)
        if self.log_prefill is not None:
            extra = max(0.0, seconds - tokens / exp(self.log_prefill)) / requests
            self.overhead = extra if self.overhead is None else self.overhead + OVERHEAD_STEP * (extra - self.overhead)

    def decoded(self, tokens: int, seconds: float, now: float) -> None:
        """*tokens* of one sequence came within *seconds*: one sample of (batch size, seconds a token)."""
        keep = exp((self.decode_at - now) / DECODE_WINDOW)
        self.decode_at = now
        pace, batch = seconds / tokens, self.inflight - self.queued
        weight = min(seconds, 1.0)
        self.decode_weight = self.decode_weight * keep + weight
        self.decode_pace = self.decode_pace * keep + weight * pace
        self.decode_batch = self.decode_batch * keep + weight * batch
        self.decode_batch2 = self.decode_batch2 * keep + weight * batch * batch
        self.decode_both = self.decode_both * keep + weight * batch * pace

    def decoding(self) -> tuple[float | None, float]:
        """Tokens a second that one more sequence would get (None: unknown), and seconds that it adds to a step."""
        weight = self.decode_weight
        if weight < 1e-3 or self.decode_pace <= 0:
            return None, CONTENTION * PACE
        pace, batch = self.decode_pace / weight, self.decode_batch / weight
        variance = max(0.0, self.decode_batch2 / weight - batch * batch)
        together = self.decode_both / weight - pace * batch
        slope = (together + CONTENTION_WEIGHT * CONTENTION * pace) / (variance + CONTENTION_WEIGHT)
        slope = min(max(slope, 0.0), pace / max(batch, 1.0))  # more than proportional would be no batching at all
        return 1.0 / max(pace + slope * (self.inflight - self.queued + 1 - batch), pace / 10), slope


class Ledger:
    """All accounts. `snapshot` is what decisions see."""

    def __init__(self, now: float = 0.0, fresh: float = FRESH) -> None:
        self._fresh = fresh
        self._accounts: dict[str, _Account] = {}
        self._legs: dict[Hashable, _Leg] = {}
        self._endpoints: tuple[Endpoint, ...] = ()
        self._by_slot: list[_Account] = []
        self._views: list[EndpointView] = []
        self._dirty: list[_Account] = []
        self._revision = 0
        self._refreshed = now
        self._due: list[tuple[float, int, Hashable]] = []
        self._numbers = count()

    def replace(self, endpoints: Iterable[Endpoint], now: float) -> None:
        """The full set. Accounts go by id: who stays keeps everything."""
        self._endpoints = tuple(endpoints)
        for account in self._accounts.values():
            account.slot = None
        self._by_slot = []
        for slot, endpoint in enumerate(self._endpoints):
            account = self._accounts.setdefault(endpoint.id, _Account(now))
            account.slot = slot
            self._by_slot.append(account)
        self._accounts = {k: a for k, a in self._accounts.items() if a.slot is not None or a.inflight}
        self._views = [EndpointView()] * len(self._endpoints)
        self._dirty = []
        for account in self._by_slot:
            account.dirty = False
            self._mark(account)

    def open(
        self, leg: Hashable, endpoint: str, *, prefill: int, decode: int, now: float, due: float | None = None
    ) -> None:
        """*leg* was sent: *prefill* uncached prompt tokens to compute (0 for a decode-only leg), *decode* tokens expected.
        *due*: when its prompt should be computed, for an answer that comes in one piece and cannot tell.

        Raises ValueError if it is open already: a request counted twice would never be closed twice.
        """
        if leg in self._legs:
            raise ValueError(f"leg {leg!r} is open already")
        account = self._accounts.get(endpoint)
        if account is None:  # decided on a snapshot that has been replaced since
            account = self._accounts[endpoint] = _Account(now)
        self._legs[leg] = _Leg(account, now, prefill, decode, learn=due is None)
        if due is not None:
            heappush(self._due, (due, next(self._numbers), leg))
        account.inflight += 1
        if not account.queued:
            account.waiting_since = now
        account.queued += 1
        account.prefill_tokens += prefill
        account.decode_tokens += decode
        self._mark(account)

    def first(self, leg: Hashable, now: float) -> None:
        """Its first token has come. Later calls change nothing."""
        found = self._legs.get(leg)
        if found is not None and found.queued:
            account = found.account
            if found.learn:
                account.first_token(found, now)
            else:
                account.end = max(account.end, now)
            account.queued -= 1
            account.prefill_tokens -= found.prefill
            found.queued = False
            found.prefill = 0
            found.tokens = 1
            found.seen = now
            done = min(found.decode, 1)
            found.decode -= done
            account.decode_tokens -= done
            self._mark(account)

    def progress(self, leg: Hashable, tokens: int, now: float) -> None:
        """It has *tokens* by now."""
        found = self._legs.get(leg)
        if found is None:
            return
        self.first(leg, now)
        more = tokens - found.tokens
        if more <= 0:
            return
        account = found.account
        account.decoded(more, now - found.seen, now)
        found.tokens = tokens
        found.seen = now
        done = min(found.decode, more)
        found.decode -= done
        account.decode_tokens -= done
        self._mark(account)

    def close(self, leg: Hashable) -> bool:
        """It has ended, however it ended. False: it was not open (closed before)."""
        found = self._legs.pop(leg, None)
        if found is None:
            return False
        account = found.account
        account.inflight -= 1
        account.queued -= found.queued
        account.prefill_tokens -= found.prefill
        account.decode_tokens -= found.decode
        if account.slot is None and not account.inflight:
            self._accounts = {k: a for k, a in self._accounts.items() if a is not account}
        self._mark(account)
        return True

    def report(self, endpoint: str, report: Report) -> None:
        """What its metrics page says. A page that could not be had is not reported: the last one ages."""
        account = self._accounts.get(endpoint)
        if account is None:
            return
        account.report = report
        if report.running is not None or report.waiting is not None:
            known = account.inflight
            foreign = max(0.0, (report.running or 0.0) + (report.waiting or 0.0) - known)
            # Ours that end between the engine's last step and the scrape look foreign for one scrape: halve the step.
            account.foreign = (account.foreign + foreign) / 2
        self._mark(account)

    def health(self, endpoint: str, health: Health, since: float) -> None:
        account = self._accounts.get(endpoint)
        if account is not None:
            account.health = health
            account.since = since
            self._mark(account)

    def snapshot(self, now: float) -> Snapshot:
        """What decisions see. The tuple of endpoints is the same object as long as the set is."""
        while self._due and self._due[0][0] <= now:
            due, _, leg = heappop(self._due)
            self.first(leg, due)
        if now - self._refreshed >= REFRESH:
            self._refresh(now)
        if self._dirty:
            for account in self._dirty:
                account.dirty = False
                if account.slot is not None:
                    self._views[account.slot] = self._view(account, now)
            self._dirty = []
            self._revision += 1
        return Snapshot(self._revision, self._endpoints, tuple(self._views))

    def counts(self, endpoint: str) -> tuple[int, int, int]:
        """Requests, uncached prompt tokens and answer tokens that *endpoint* has of ours at this moment."""
        account = self._accounts.get(endpoint)
        return (account.inflight, account.prefill_tokens, account.decode_tokens) if account is not None else (0, 0, 0)

    def view(self, endpoint: str, now: float) -> EndpointView | None:
        """As a decision would see it; None: unknown, or gone."""
        snapshot = self.snapshot(now)
        account = self._accounts.get(endpoint)
        return snapshot.views[account.slot] if account is not None and account.slot is not None else None

    def _mark(self, account: _Account) -> None:
        if not account.dirty:
            account.dirty = True
            self._dirty.append(account)

    def _refresh(self, now: float) -> None:
        """Ages: what was learned long ago drifts to the median, a stale report loses its foreign load."""
        keep = 0.5 ** ((now - self._refreshed) / DRIFT)
        self._refreshed = now
        known = sorted(a.log_prefill for a in self._by_slot if a.log_prefill is not None)
        middle = known[len(known) // 2] if known else None
        for account in self._by_slot:
            if account.log_prefill is not None and middle is not None and now - account.learned > DRIFT / 2:
                account.log_prefill = middle + (account.log_prefill - middle) * keep
                account.overhead = (account.overhead or 0.0) * keep
                self._mark(account)
            if account.queued:
                self._mark(account)
            if account.foreign and (account.report is None or now - account.report.at > self._fresh):
                account.foreign = 0.0
                self._mark(account)

    def _view(self, account: _Account, now: float) -> EndpointView:
        rate = None if account.log_prefill is None else exp(account.log_prefill)
        overhead = account.overhead
        decode_rate, contention = account.decoding()
        ahead = None
        head = begun = 0.0
        if rate is not None:
            overhead = overhead or 0.0
            if account.queued:
                due = account.prefill_tokens / account.queued / rate
                begun = max(account.waiting_since, account.end)
                overhead = max(overhead, now - begun - due)
                head = due + overhead
            ahead = (account.prefill_tokens + account.foreign * FOREIGN_TOKENS) / rate + account.queued * overhead
        return EndpointView(
            health=account.health,
            since=account.since,
            inflight=account.inflight,
            queued=account.queued,
            prefill_tokens=account.prefill_tokens,
            decode_tokens=account.decode_tokens,
            report=account.report,
            prefill_rate=rate,
            decode_rate=decode_rate,
            contention=contention,
            overhead=overhead,
            foreign=account.foreign,
            ahead=ahead,
            head=head,
            begun=begun,
        )
