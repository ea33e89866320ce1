"""The gate: which request may go to which engines now, which waits, which is refused. A state machine without a clock.

    offer ──room──────────────────────────► GRANTED ──place──► RUNNING ──release──► ENDED
      │                                        ▲  └──cancel──► ENDED     │  ▲
      └──none──► QUEUED ──next: its turn───────┘                         │  └─place (another attempt)
                   │  ▲                                                  │
                   │  └───────────requeue (preempted, or to try again)───┘
                   ├──next: deadline──► ENDED    effect Refuse
                   └──cancel──────────► ENDED

The caller tells what happens (`offer`, `place`, `first`, `release`, `cancel`, `requeue`, `replace`, `wake`) and then takes
effects from `next` until there are none. A `Grant` is answered by `place` or `cancel` before `next` is called again:
where it goes decides what is left for the others. `wake_at` says when to call `wake` although nothing happened.

A *pool* is a model: its queues (one a band) and its *rooms*, the engines that serve it. A room may be in many pools.

Invariants
- Permits: a room's `used` is the number of RUNNING tickets on it; with a cap and grants obeyed, never above the cap.
- Every ticket ends exactly once: by `release`, `cancel` or a `Refuse`.
- No lower band is granted while a higher one of the pool may go, unless it is *owed*: a band with work gathers its share
  of all that is granted, and is owed as soon as that pays for its next ticket.
- Work conserving: after `next` gave None, no ticket whose turn it is could go to any room.
- Nothing waits longer than its band's deadline.
- Where a band with a bound is at home, lower bands get what `interference` leaves them, or what they are owed.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import exp, inf

import attrs
import msgspec

from llmgw.admission.bands import Bands
from llmgw.admission.flows import Flows
from llmgw.admission.interference import Interference, crowding, engines_needed
from llmgw.admission.saturation import FRESH, Limit, late
from llmgw.endpoint import Snapshot
from llmgw.request import Refusal

HOLD = 5.0
"""Seconds after the last request of a bounded band during which its engines stay kept for it: a conversation's pause."""

PLAN = 1.0
"""Seconds between two looks at which engines a bounded band needs, and at what is overdue."""

SHRINK = 10.0
"""Seconds of less demand before a bounded band's engines become fewer: moving it costs more than keeping one."""

UNTRIED = 256
"""Requests that an engine is believed to take while it has not been seen full: vLLM's default on smaller GPUs."""

AHEAD = 0.25
"""Seconds of prompts that an engine may have before it from all but the highest band: enough to keep it busy, little enough
that who comes next does not find a queue inside the engine, where no band counts."""

PREFILL_RATE = 8_000.0  # tokens a second of an engine that has not been measured
RATE_STEP = 0.1  # a second: single samples of the rate scatter, and pauses hang on it
PACE = 0.025  # seconds a token, likewise
MEMORY = 10.0  # seconds that the drain rate looks back
LONGEST_RETRY = 600.0  # seconds; nobody waits longer for a queue
NOBODY = 1 << 30  # rank below all others


class State(enum.Enum):
    QUEUED = "queued"
    GRANTED = "granted"
    RUNNING = "running"
    ENDED = "ended"


class Ticket(msgspec.Struct, eq=False):
    """One request at the gate. The caller reads it, and may hang something on `owner`."""

    id: int
    pool: _Pool
    rank: int
    flow: str
    prompt: int
    prefill: int  # the prompt, less what the engine has cached
    decode: int
    size: int
    stream: bool
    at: float
    until: float = inf
    state: State = State.GRANTED
    waiting: bool = False
    allowed: frozenset[str] | None = None  # endpoint ids of the grant; None: any
    granted: float = 0.0
    room: Room | None = None
    placed: float = 0.0
    entered: int = 0  # lower-band admissions of the room when it came
    clean: bool = False  # no lower band was on its engine when it came
    judged: int = -1  # epoch of the estimate that it tests: its engine is kept for its band, and was cleared
    started: bool = False
    preempted: int = 0
    bound: bool = False  # it can go to one engine only
    owner: object = None

    @property
    def cost(self) -> int:
        """Tokens."""
        return self.prompt + self.decode

    @property
    def bare(self) -> bool:
        """Nothing of it can have reached its client."""
        return not (self.started and self.stream)


@attrs.frozen
class Grant:
    """*ticket* may go to one of *allowed* (endpoint ids; None: any of its model). Answer with `place` or `cancel`."""

    ticket: Ticket
    allowed: frozenset[str] | None


@attrs.frozen
class Refuse:
    """*ticket* has ended."""

    ticket: Ticket
    refusal: Refusal


@attrs.frozen
class Preempt:
    """End the attempt of *ticket* and `requeue` it; if it cannot be ended without the client noticing, let it run."""

    ticket: Ticket


Effect = Grant | Refuse | Preempt


class Room:
    """One engine, as the gate knows it."""

    __slots__ = (
        "allowance",
        "busy",
        "counts",
        "duration",
        "estimate",
        "full",
        "id",
        "limit",
        "low_entries",
        "name",
        "pace_at",
        "pools",
        "protected",
        "rate",
        "rated",
        "report_at",
        "reported",
        "running",
        "serving",
        "tokens",
        "unstarted",
        "unstarted_tokens",
        "used",
    )  # fmt: skip

    def __init__(self, id_: str, bands: int) -> None:
        self.id = self.name = id_
        self.pools: list[_Pool] = []
        self.limit = Limit()
        self.serving = False
        self.rate = PREFILL_RATE  # tokens a second
        self.rated = False  # it has been measured
        self.used = 0
        self.tokens = 0  # that its tickets may come to hold
        self.counts = [0] * bands  # tickets by rank
        self.running: dict[Ticket, None] = {}
        self.unstarted: dict[Ticket, None] = {}  # no token yet, oldest first
        self.unstarted_tokens = 0
        self.full = True  # takes nobody
        self.busy = False  # has prompts enough before it: takes nobody but the highest band
        self.protected = NOBODY  # the bounded band that it is kept for
        self.allowance = 0.0  # what lower bands may slow that one by
        self.duration: float | None = None  # of a request of it, unloaded
        self.estimate = Interference()
        self.pace_at = 0.0  # earliest time of the next lower-band admission
        self.low_entries = 0
        self.reported: float | None = None  # what it last said that it runs of ours
        self.report_at = -inf

    def below(self, rank: int) -> int:
        """Tickets of bands lower than *rank*."""
        return sum(self.counts[rank + 1 :])


class _Drain:
    """How fast a queue is served: tokens a second while it had work."""

    __slots__ = ("_at", "_seconds", "_tokens", "count")

    def __init__(self) -> None:
        self.count = 0
        self._at = 0.0
        self._seconds = self._tokens = 0.0

    def resume(self, now: float) -> None:
        """It has work again: time before does not count."""
        self._at = now

    def add(self, tokens: int, now: float) -> None:
        self.count += 1
        self._pass(now)
        self._tokens += tokens

    def rate(self, now: float) -> float | None:
        """None: too little is known."""
        self._pass(now)
        if self.count < 8 or self._seconds < 0.5:
            return None
        return self._tokens / self._seconds

    def _pass(self, now: float) -> None:
        keep = exp((self._at - now) / MEMORY)
        self._at = now
        self._seconds = self._seconds * keep + MEMORY * (1 - keep)
        self._tokens *= keep


class _Pool:
    """One model."""

    __slots__ = (
        "drains",
        "guard",
        "inflight",
        "lags",
        "name",
        "need",
        "need_at",
        "peak",
        "queued",
        "queues",
        "rooms",
        "seen",
        "shut",
        "slow",
    )

    def __init__(self, name: str, bands: int) -> None:
        self.name = name
        self.rooms: list[Room] = []
        self.queues = [Flows() for _ in range(bands)]
        self.drains = [_Drain() for _ in range(bands)]
        self.lags = [0.0] * bands  # tokens that the band's share has gathered
        self.inflight = [0] * bands
        self.queued = 0
        self.shut = 0  # rooms that are full
        self.slow = 0  # rooms that are busy
        self.guard = NOBODY  # rank of the bounded band that has work
        self.peak = 0.0  # requests of it at once, lately
        self.seen = -inf  # when one last ended
        self.need = 0  # rooms that it needs
        self.need_at = -inf  # when it last needed so many


class Gate:
    """See the module. One a brain."""

    def __init__(self, bands: Bands | None = None) -> None:
        self.bands = bands or Bands()
        self.rooms: dict[str, Room] = {}
        self.preemptions = 0
        self._gone: list[Room] = []  # no longer in the set, with tickets that still run there
        self._pools: dict[str, _Pool] = {}
        self._bounded = self._find_bounded()
        self._ids = 0
        self._queued = [0] * len(self.bands.order)
        self._bytes = [0] * len(self.bands.order)
        self._lines: list[tuple[float, int, Ticket]] = []  # heap of deadlines; some have ended otherwise
        self._dues: list[tuple[float, int, Ticket]] = []  # heap: first tokens that nobody will see
        self._dirty: dict[_Pool, None] = {}
        self._preempts: dict[Ticket, None] = {}
        self._home = 0  # tickets of bounded bands that run, anywhere
        self._kept = 0  # rooms that are kept for one
        self._seen = -inf  # when one last ended
        self._plan_at = 0.0  # when `wake` looks again

    def _find_bounded(self) -> tuple[int, ...]:
        return tuple(r for r, b in enumerate(self.bands.order) if b.max_slowdown is not None or b.max_itl is not None)

    # -- what there is -------------------------------------------------------------------------------------------

    def replace(self, snapshot: Snapshot, now: float) -> None:
        """The endpoints and how they do: the full set, whenever it changed and about once a second."""
        bands = len(self.bands.order)
        rooms: dict[str, Room] = {}
        pools: dict[str, list[Room]] = {}
        halves: dict[str, list[Room]] = {}
        known = sorted(view.prefill_rate for view in snapshot.views if view.prefill_rate)
        usual = known[len(known) // 2] if known else PREFILL_RATE
        for endpoint, view in zip(snapshot.endpoints, snapshot.views, strict=True):
            room = self.rooms.get(endpoint.id) or next((r for r in self._gone if r.id == endpoint.id), None)
            room = room or Room(endpoint.id, bands)
            room.name = endpoint.name
            rooms[endpoint.id] = room
            held = endpoint.blocks * endpoint.block_size if endpoint.blocks and endpoint.block_size else None
            room.limit.configure(endpoint.max_concurrency, held)
            room.serving = view.health in ("ready", "degraded")
            room.rate += (RATE_STEP if room.rated else 1.0) * ((view.prefill_rate or usual) - room.rate)
            room.rated = view.prefill_rate is not None
            report = view.report
            if report is not None and report.running is not None and report.at > room.report_at:
                room.report_at = report.at
                waiting = report.waiting or 0.0
                room.reported = max(0.0, report.running - max(0.0, view.foreign - waiting))
                room.limit.reported(room.used, room.reported, waiting, now)
            place = pools if "decode" in endpoint.phases else halves
            for model in endpoint.models:
                for name in (model.name, *model.loras):
                    place.setdefault(name, []).append(room)
        for name, found in halves.items():
            pools.setdefault(name, found)
        for room in (*self.rooms.values(), *rooms.values()):
            room.pools = []
        self._gone = [r for r in (*self._gone, *self.rooms.values()) if r.used and r.id not in rooms]
        self._kept = sum(r.protected != NOBODY for r in rooms.values())
        self.rooms = rooms
        for name, found in pools.items():
            self._pool(name).rooms = found
        for name, pool in list(self._pools.items()):
            pool.rooms = pools.get(name, [])
            for room in pool.rooms:
                room.pools.append(pool)
            if not pool.rooms and not pool.queued and not any(pool.inflight):
                del self._pools[name]
        for room in rooms.values():
            self._judge(room)
        for pool in self._pools.values():
            pool.shut = sum(r.full for r in pool.rooms)
            pool.slow = sum(r.busy for r in pool.rooms)
            if pool.queued:
                self._dirty[pool] = None

    def reconfigure(self, bands: Bands) -> None:
        """Other bands from now on. Who waits keeps waiting: in the band of the same name, else in the new default."""
        old = self.bands
        moves = [bands.by_name.get(b.name, bands.default) for b in old.order]
        self.bands = bands
        self._bounded = self._find_bounded()
        count = len(bands.order)
        self._queued, self._bytes = [0] * count, [0] * count
        rooms = (*self.rooms.values(), *self._gone)
        for room in rooms:
            room.counts = [0] * count
            room.protected = NOBODY
        self._home = self._kept = 0
        for pool in self._pools.values():
            waiting = sorted((t for q in pool.queues for t in q), key=lambda t: t.id)
            fresh = _Pool(pool.name, count)
            pool.queues, pool.drains, pool.lags, pool.inflight = fresh.queues, fresh.drains, fresh.lags, fresh.inflight
            pool.guard, pool.peak = NOBODY, 0.0
            for ticket in waiting:
                ticket.rank = moves[ticket.rank]
                pool.queues[ticket.rank].push(ticket)
                self._queued[ticket.rank] += 1
                self._bytes[ticket.rank] += ticket.size
            if waiting:
                self._dirty[pool] = None
        for room in rooms:
            for ticket in room.running:
                ticket.rank = moves[ticket.rank]
                room.counts[ticket.rank] += 1
                self._home += ticket.rank in self._bounded
                ticket.pool.inflight[ticket.rank] += 1
            self._judge(room)

    def _pool(self, name: str) -> _Pool:
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = _Pool(name, len(self.bands.order))
        return pool

    # -- events --------------------------------------------------------------------------------------------------

    def offer(
        self,
        pool: str,
        rank: int,
        flow: str,
        prompt: int,
        decode: int,
        now: float,
        *,
        size: int = 0,
        stream: bool = False,
        bound: bool = False,
    ) -> Ticket | Refusal:
        """A request for model *pool*: *prompt* tokens, *decode* expected, *size* bytes of body. *bound*: it can go to one
        engine only, or is a leg of one that runs already: it is counted, and never waits.

        The ticket is GRANTED (answer with `place` or `cancel`), or QUEUED: take effects, one may grant it at once.
        """
        place = self._pools.get(pool) or self._pool(pool)
        self._ids += 1
        ticket = Ticket(self._ids, place, rank, flow, prompt, prompt, decode, size, stream, now, granted=now)
        if bound:
            ticket.bound = True
            return ticket
        if not place.queued:
            if place.guard == NOBODY and not place.shut:
                if not rank:
                    if not any(place.inflight[1:]):
                        return ticket
                elif not place.slow and not self._home and not self._kept and now - self._seen > HOLD:
                    return ticket
            if not place.rooms:
                return ticket  # nothing to wait for: routing says why
            self._replan(place, rank, now)
            ticket.allowed = self._open(ticket, now, owed=False) or None
            if ticket.allowed or not any(r.serving for r in place.rooms):
                return ticket
        elif place.shut == len(place.rooms) and not any(r.serving for r in place.rooms):
            return ticket
        refusal = self._too_much(ticket, now)
        if refusal is not None:
            ticket.state = State.ENDED
            return refusal
        if not place.queues[rank].count:
            place.drains[rank].resume(now)
        ticket.until = now + self.bands.order[rank].deadline
        planned = place.queued == 0
        self._enqueue(ticket, front=False)
        if not planned:
            self._replan(place, rank, now)
        return ticket

    def _replan(self, pool: _Pool, rank: int, now: float) -> None:
        """A request of band *rank* has come: does it change what rooms are kept for whom?"""
        if rank in self._bounded:
            if pool.guard > rank or pool.peak < pool.inflight[rank] + pool.queues[rank].count + (not pool.queued):
                self._plan(pool, now, coming=-1 if pool.queued else rank)
        elif pool.guard == NOBODY and (self._home or now - self._seen <= HOLD):
            self._plan(pool, now, coming=-1 if pool.queued else rank)

    def _too_much(self, ticket: Ticket, now: float) -> Refusal | None:
        rank, pool = ticket.rank, ticket.pool
        band = self.bands.order[rank]
        wait = self.predicted_wait(pool.name, rank, ticket.flow, now)
        full = ""
        if self._queued[rank] >= band.max_queue:
            full = f"{self._queued[rank]} requests wait"
        elif self._bytes[rank] + ticket.size > band.max_queue_bytes and self._queued[rank]:
            full = f"bodies of {self._bytes[rank]} bytes wait"
        if full:
            return Refusal(
                reason="queue_full",
                message=f"The queue of band {band.name!r} is full: {full}.",
                retry_after=_soon(wait),
            )
        if wait:
            rate = max((r.rate for r in pool.rooms), default=PREFILL_RATE)
            first = wait + ticket.prompt / rate
            if first > band.deadline:
                return Refusal(
                    reason="deadline_unmeetable",
                    message=f"The first token would come in some {first:.0f} s; band {band.name!r} allows {band.deadline:g} s.",
                    retry_after=_soon(first - band.deadline),
                )
        return None

    def _enqueue(self, ticket: Ticket, *, front: bool) -> None:
        ticket.state = State.QUEUED
        ticket.waiting = True
        pool, rank = ticket.pool, ticket.rank
        pool.queues[rank].push(ticket, front)
        pool.queued += 1
        self._queued[rank] += 1
        self._bytes[rank] += ticket.size
        if len(self._lines) > 2 * sum(self._queued) + 64:
            self._lines = [line for line in self._lines if line[2].waiting]
            heapify(self._lines)
        heappush(self._lines, (ticket.until, ticket.id, ticket))
        self._dirty[pool] = None

    def _leave(self, ticket: Ticket, *, served: bool) -> None:
        """*ticket* waits no longer."""
        pool, rank = ticket.pool, ticket.rank
        ticket.waiting = False
        queue = pool.queues[rank]
        if served:
            queue.take(ticket)
        else:
            queue.discard(ticket)
        pool.queued -= 1
        self._queued[rank] -= 1
        self._bytes[rank] -= ticket.size
        if not queue.count:
            pool.lags[rank] = 0.0

    def place(
        self, ticket: Ticket, endpoint: str, now: float, *, prefill: int | None = None, due: float | None = None
    ) -> None:
        """*ticket* goes to *endpoint*: a permit is taken there. *prefill*: prompt tokens that it has not cached. *due*:
        when its first token is expected, for one that shows no token before its end.

        Another attempt of a RUNNING ticket moves its permit.
        """
        if ticket.room is not None:
            self._vacate(ticket, ticket.room)
        room = self.rooms.get(endpoint)
        if room is None:  # it went between decision and now: counted where nobody looks
            room = Room(endpoint, len(self.bands.order))
            self._gone.append(room)
        rank = ticket.rank
        ticket.state = State.RUNNING
        ticket.room = room
        ticket.placed = now
        ticket.started = False
        if prefill is not None:
            ticket.prefill = prefill
        ticket.pool.inflight[rank] += 1
        counts = room.counts
        if rank and (self._home or self._kept):
            guard = self._guard_of(room)
            if guard < rank:
                duration = room.duration or 0.0
                pause = room.estimate.pause(room.allowance, duration, *self._burden(room, ticket))
                room.pace_at = max(room.pace_at, now) + (pause if pause < inf else duration)
        if rank in self._bounded:
            self._home += 1
            below = sum(counts[rank + 1 :])
            ticket.clean = not below
            ticket.entered = room.low_entries
            cleared = room.protected == rank and below <= room.estimate.most(room.allowance)
            ticket.judged = room.estimate.epoch if cleared else -1
        if rank:
            room.low_entries += 1
        room.used += 1
        room.tokens += ticket.prompt + ticket.decode
        counts[rank] += 1
        room.running[ticket] = None
        room.unstarted[ticket] = None
        room.unstarted_tokens += ticket.prefill
        if due is not None:
            heappush(self._dues, (due, ticket.id, ticket))
        limit = room.limit
        if (
            (room.used >= limit.seqs and not room.full)
            or (limit.tokens is not None and room.tokens >= limit.tokens)
            or room.unstarted_tokens > AHEAD * room.rate
        ):
            self._judge(room)

    def first(self, ticket: Ticket, now: float) -> None:
        """The first token of *ticket*'s attempt has come."""
        room = ticket.room
        if room is None or ticket.started:
            return
        if not late(now - ticket.placed, room.unstarted_tokens, room.rate):
            room.limit.in_time(room.used, now)
        self._start(ticket, room)

    def _start(self, ticket: Ticket, room: Room) -> None:
        """Its prompt is computed."""
        ticket.started = True
        del room.unstarted[ticket]
        room.unstarted_tokens -= ticket.prefill
        if room.full or room.busy:
            self._judge(room)
            self._stir(room)

    def release(
        self, ticket: Ticket, now: float, *, first: float | None = None, last: float | None = None, tokens: int = 0
    ) -> None:
        """*ticket* has ended. *first*, *last*: when its first and last token came, None where nobody saw it, or it failed;
        *tokens*: how many."""
        room = ticket.room
        assert room is not None
        rank, pool = ticket.rank, ticket.pool
        if rank in self._bounded:
            pool.seen = self._seen = now
            if last is not None and tokens > 1:
                if first is None:  # it showed nothing before its end: its prompt took what it should
                    first = min(ticket.placed + ticket.prefill / room.rate, last)
                self._measure(ticket, room, first, last, tokens)
        if not ticket.stream and room.report_at == -inf and room.limit.seqs < UNTRIED:
            room.limit.in_time(room.used, now)  # neither tokens nor reports tell more
        self._vacate(ticket, room)
        ticket.room = None
        ticket.state = State.ENDED

    def _vacate(self, ticket: Ticket, room: Room) -> None:
        rank = ticket.rank
        ticket.pool.inflight[rank] -= 1
        room.counts[rank] -= 1
        if rank in self._bounded:
            self._home -= 1
        room.used -= 1
        room.tokens -= ticket.prompt + ticket.decode
        del room.running[ticket]
        if not ticket.started:
            del room.unstarted[ticket]
            room.unstarted_tokens -= ticket.prefill
        if room.full or room.busy:
            self._judge(room)
        self._stir(room)

    def cancel(self, ticket: Ticket) -> None:
        """Its client has gone, or it was granted and nobody could serve it."""
        if ticket.state is State.QUEUED:
            self._leave(ticket, served=False)
            self._dirty[ticket.pool] = None
        elif ticket.state is State.GRANTED:
            if ticket.pool.queued:
                self._dirty[ticket.pool] = None
        else:
            raise ValueError(f"ticket {ticket.id} is {ticket.state.value}: only who waits can be cancelled")
        ticket.state = State.ENDED

    def requeue(self, ticket: Ticket, now: float) -> None:
        """Its attempt has ended without the client having seen anything: it waits again, at the head of its flow.

        Its deadline counts from now: what it waited before was answered by a grant.
        """
        room = ticket.room
        if room is None:
            raise ValueError(f"ticket {ticket.id} is {ticket.state.value}: only who runs can be queued again")
        self._vacate(ticket, room)
        ticket.room = None
        ticket.prefill = ticket.prompt
        ticket.until = now + self.bands.order[ticket.rank].deadline
        if not ticket.pool.queues[ticket.rank].count:
            ticket.pool.drains[ticket.rank].resume(now)
        self._enqueue(ticket, front=True)

    def again(self, ticket: Ticket) -> frozenset[str]:
        """Where another attempt of a RUNNING *ticket* may go besides where it is. Its permit stays until `place`."""
        return self._open(ticket, inf, owed=True)

    def wake(self, now: float) -> None:
        """Time has passed: deadlines, pauses, plans."""
        if now >= self._plan_at:
            self._plan_at = now + PLAN
            for room in self.rooms.values():
                self._overdue(room, now)
            for pool in self._pools.values():
                if pool.guard != NOBODY:
                    self._plan(pool, now)
        for pool in self._pools.values():
            if pool.queued:
                self._dirty[pool] = None

    def wake_at(self, now: float) -> float:
        """When to call `wake` at the latest; inf: not before something happens."""
        soonest = inf
        lines = self._lines
        while lines and not lines[0][2].waiting:
            heappop(lines)
        if lines:
            soonest = lines[0][0]
        for pool in self._pools.values():
            if pool.guard != NOBODY or pool.queued:
                soonest = min(soonest, self._plan_at)
            if pool.queued:
                if self._dues:
                    soonest = min(soonest, self._dues[0][0])
                for room in pool.rooms:
                    if not room.full and room.pace_at > now:
                        soonest = min(soonest, room.pace_at)
        return soonest

    # -- effects -------------------------------------------------------------------------------------------------

    def next(self, now: float) -> Effect | None:
        """What follows from all that was told; None: nothing more."""
        dues = self._dues
        while dues and dues[0][0] <= now:
            due, _, silent = heappop(dues)
            if silent.room is not None and not silent.started and silent.placed <= due:
                self._start(silent, silent.room)
        lines = self._lines
        while lines and (lines[0][0] <= now or not lines[0][2].waiting):
            ticket = heappop(lines)[2]
            if ticket.waiting and ticket.until <= now:
                self._leave(ticket, served=False)
                ticket.state = State.ENDED
                return Refuse(ticket, self._timeout(ticket, now))
        while self._preempts:
            ticket = self._preempts.popitem()[0]
            if ticket.state is State.RUNNING and self._preemptible(ticket):
                self.preemptions += 1
                ticket.preempted += 1
                return Preempt(ticket)
        dirty = self._dirty
        while dirty:
            pool = next(iter(dirty))
            if pool.queued:
                grant = self._turn(pool, now)
                if grant is not None:
                    return grant
            del dirty[pool]
        return None

    def _timeout(self, ticket: Ticket, now: float) -> Refusal:
        band = self.bands.order[ticket.rank]
        return Refusal(
            reason="queue_timeout",
            message=f"It waited {now - ticket.at:.0f} s, as long as band {band.name!r} allows; {self._queued[ticket.rank]} wait.",
            retry_after=_soon(self.predicted_wait(ticket.pool.name, ticket.rank, ticket.flow, now)),
        )

    def _turn(self, pool: _Pool, now: float) -> Grant | None:
        """The next one of *pool* that may go."""
        queues = pool.queues
        if self.bands.shares:
            for rank, queue in enumerate(queues):
                if queue.count and pool.lags[rank] > 0:
                    ticket = queue.head()
                    assert ticket is not None
                    if pool.lags[rank] >= ticket.cost:
                        allowed = self._open(ticket, now, owed=True)
                        if allowed:
                            return self._grant(ticket, allowed, now)
        for queue in queues:
            if queue.count:
                ticket = queue.head()
                assert ticket is not None
                allowed = self._open(ticket, now, owed=False)
                if allowed:
                    return self._grant(ticket, allowed, now)
        return None

    def _grant(self, ticket: Ticket, allowed: frozenset[str], now: float) -> Grant:
        pool, rank, cost = ticket.pool, ticket.rank, ticket.cost
        self._leave(ticket, served=True)
        ticket.state = State.GRANTED
        ticket.granted = now
        ticket.allowed = allowed
        pool.drains[rank].add(cost, now)
        if self.bands.shares:
            lags = pool.lags
            for other, band in enumerate(self.bands.order):
                if band.share and pool.queues[other].count:
                    lags[other] += band.share * cost
            lags[rank] = max(0.0, lags[rank] - cost)
        return Grant(ticket, allowed)

    def _open(self, ticket: Ticket, now: float, *, owed: bool) -> frozenset[str]:
        """Rooms that *ticket* may enter, those that suit it best if there are any."""
        rank, pool = ticket.rank, ticket.pool
        best: list[str] = []
        rest: list[str] = []
        for room in pool.rooms:
            if room.full or room is ticket.room:
                continue
            guard = self._guard_of(room)
            suits = self._shares(room, guard, ticket, now) if guard < rank else not (rank and room.busy)
            if not suits:
                if owed:
                    rest.append(room.id)
            elif rank == pool.guard and room.protected != rank:
                rest.append(room.id)
            else:
                best.append(room.id)
        return frozenset(best or rest)

    def _shares(self, room: Room, guard: int, ticket: Ticket, now: float) -> bool:
        """Whether a lower-band *ticket* may join *room*, where band *guard* is at home."""
        if room.duration is None:
            return not room.used  # nothing is known of it yet: one at a time, while nobody is there
        if room.busy or (room.used and now < room.pace_at):
            return False
        estimate, allowance = room.estimate, room.allowance
        if room.below(guard) >= estimate.most(allowance):
            return False
        return estimate.pause(allowance, room.duration, *self._burden(room, ticket)) < inf

    def _burden(self, room: Room, ticket: Ticket) -> tuple[float, float]:
        """Seconds that the prompt of *ticket* takes there, and seconds that it runs."""
        return ticket.prefill / room.rate, ticket.decode * (room.estimate.unloaded.pace or PACE)

    # -- what is known of rooms ----------------------------------------------------------------------------------

    def _guard_of(self, room: Room) -> int:
        """The bounded band that is at home in *room*: it is kept for it, or has its requests."""
        for rank in self._bounded:
            if room.protected == rank or room.counts[rank]:
                return rank
        return NOBODY

    def _judge(self, room: Room) -> None:
        """Whether it takes anybody."""
        limit = room.limit
        full = not room.serving or room.used >= limit.seqs or bool(limit.tokens and room.tokens >= limit.tokens)
        busy = room.unstarted_tokens > AHEAD * room.rate
        if full != room.full:
            room.full = full
            for pool in room.pools:
                pool.shut += 1 if full else -1
        if busy != room.busy:
            room.busy = busy
            for pool in room.pools:
                pool.slow += 1 if busy else -1

    def _stir(self, room: Room) -> None:
        for pool in room.pools:
            if pool.queued:
                self._dirty[pool] = None

    def _overdue(self, room: Room, now: float) -> None:
        """Look whether the engine lets requests wait inside."""
        if not room.unstarted:
            return
        oldest = next(iter(room.unstarted))
        if late(now - oldest.placed, room.unstarted_tokens, room.rate):
            fresh = room.reported if now - room.report_at < FRESH else None
            room.limit.overdue(room.used - len(room.unstarted), fresh, now)
            self._judge(room)

    def _measure(self, ticket: Ticket, room: Room, first: float, last: float, tokens: int) -> None:
        """What a request of a bounded band took, against what it would have taken alone."""
        estimate = room.estimate
        prompt = ticket.prefill / room.rate
        pace = (last - first) / (tokens - 1)
        clean = ticket.clean and room.low_entries == ticket.entered
        alone = estimate.unloaded.seconds(prompt, tokens)
        estimate.unloaded.learn(max(0.0, first - ticket.placed - prompt), pace, clean)
        if alone is None:
            alone = estimate.unloaded.seconds(prompt, tokens)
            assert alone is not None
        room.duration = alone if room.duration is None else room.duration + 0.1 * (alone - room.duration)
        if ticket.judged == estimate.epoch and alone > 0:
            estimate.measured((last - ticket.placed) / alone, room.allowance)

    def _plan(self, pool: _Pool, now: float, coming: int = -1) -> None:
        """Which rooms are kept for the bounded band that has work, and what others may do there. *coming*: the band of a
        request that is neither queued nor running yet."""
        before, guard = pool.guard, NOBODY
        for rank in self._bounded:
            if pool.inflight[rank] or pool.queues[rank].count or rank == coming or now - pool.seen <= HOLD:
                guard = rank
                break
        lower = guard != NOBODY and any(
            pool.inflight[r] or pool.queues[r].count or r == coming for r in range(guard + 1, len(pool.inflight))
        )
        if not lower:
            guard = NOBODY
        pool.guard = guard
        rooms = [r for r in pool.rooms if r.serving]
        if guard == NOBODY or not rooms:
            for room in pool.rooms:
                if room.protected == before != NOBODY:
                    room.protected = NOBODY
                    self._kept -= 1
            return
        demand = float(pool.inflight[guard] + pool.queues[guard].count + (coming == guard))
        pool.peak = max(demand, pool.peak * 0.9)
        bound = self._bound(guard, rooms)
        need = engines_needed(pool.peak, [r.limit.seqs if r.limit.known else UNTRIED for r in rooms], bound)
        if need >= pool.need or now - pool.need_at > SHRINK:
            pool.need, pool.need_at = need, now
        need = min(pool.need, len(rooms))
        allowance = bound / crowding(pool.peak, need, len(rooms)) - 1
        rooms.sort(key=lambda r: (r.protected != guard, r.below(guard), -r.counts[guard], r.id))
        for at, room in enumerate(rooms):
            was = room.protected
            room.protected = guard if at < need else NOBODY if was == guard else was
            self._kept += (room.protected != NOBODY) - (was != NOBODY)
            room.allowance = max(allowance, 0.01)
            if at < need:
                self._make_way(room, guard)
        if pool.queued:
            self._dirty[pool] = None

    def _bound(self, rank: int, rooms: Sequence[Room]) -> float:
        band = self.bands.order[rank]
        if band.max_slowdown is not None:
            return band.max_slowdown
        assert band.max_itl is not None
        paces = [r.estimate.unloaded.pace for r in rooms if r.estimate.unloaded.pace]
        return max(band.max_itl / max(paces), 1.01) if paces else 1.01

    def _make_way(self, room: Room, guard: int) -> None:
        """End lower-band work that *room* has too much of, the youngest first, as far as its band allows that."""
        surplus = room.below(guard) - room.estimate.most(room.allowance)
        if surplus <= 0:
            return
        found = [t for t in reversed(room.running) if t.rank > guard and self._preemptible(t)]
        self._preempts |= dict.fromkeys(found[:surplus])

    def _preemptible(self, ticket: Ticket) -> bool:
        how = "never" if ticket.bound else self.bands.order[ticket.rank].preempt
        return (how == "requeue" and ticket.bare) or (how == "before_first_token" and not ticket.started)

    # -- what people ask -----------------------------------------------------------------------------------------

    def predicted_wait(self, pool: str, rank: int, flow: str, now: float) -> float | None:
        """Seconds that one more request would wait; 0 if nothing does; None: nobody knows yet."""
        found = self._pools.get(pool)
        if found is None or not found.queues[rank].count:
            return 0.0
        rate = found.drains[rank].rate(now)
        return found.queues[rank].ahead(flow) / rate if rate else None

    @property
    def depth(self) -> list[tuple[str, int, int]]:
        """(band, requests that wait, bytes of their bodies)."""
        return [(b.name, n, size) for b, n, size in zip(self.bands.order, self._queued, self._bytes, strict=True)]

    def queue(self, now: float) -> list[dict[str, object]]:
        """A row a model and band: what waits and runs, and how it moves."""
        rows: list[dict[str, object]] = []
        for name, pool in sorted(self._pools.items()):
            for rank, band in enumerate(self.bands.order):
                queue = pool.queues[rank]
                oldest = min((t.at for t in queue), default=None)
                rate = pool.drains[rank].rate(now) if queue.count else None
                rows.append(
                    {
                        "model": name,
                        "band": band.name,
                        "waiting": queue.count,
                        "tokens": queue.tokens,
                        "oldest": None if oldest is None else round(now - oldest, 3),
                        "running": pool.inflight[rank],
                        "tokens_per_second": None if rate is None else round(rate, 1),
                        "predicted_wait": self.predicted_wait(name, rank, "", now),
                    }
                )
        return rows

    def engines(self) -> list[dict[str, object]]:
        """A row an engine: what it may have in hand, and what lower bands cost there."""
        return [
            {
                "endpoint": room.name,
                "running": dict(zip((b.name for b in self.bands.order), room.counts, strict=True)),
                "limit": room.limit.seqs,
                "limit_known": room.limit.known,
                "tokens": room.tokens,
                "token_limit": room.limit.tokens,
                "kept_for": None if room.protected == NOBODY else self.bands.order[room.protected].name,
                "slowdown": room.estimate.slowdown,
                "interference": room.estimate.scale,
                "unloaded_itl": room.estimate.unloaded.pace,
            }
            for room in self.rooms.values()
        ]

    def explain(self, ticket: Ticket, now: float) -> dict[str, object]:
        """Why a QUEUED *ticket* waits: what is before it, and what each engine says."""
        pool, rank = ticket.pool, ticket.rank
        return {
            "band": self.bands.order[rank].name,
            "flow": ticket.flow,
            "state": ticket.state.value,
            "tokens": ticket.cost,
            "waited": round((now if ticket.waiting else ticket.granted) - ticket.at, 6),
            "until_deadline": None if ticket.until == inf else round(ticket.until - now, 3),
            "before_it": {
                b.name: q.count for b, q in zip(self.bands.order[: rank + 1], pool.queues, strict=False) if q.count
            },
            "preempted": ticket.preempted,
            "engines": {room.name: self._says(room, ticket, now) for room in pool.rooms} if ticket.waiting else {},
        }

    def _says(self, room: Room, ticket: Ticket, now: float) -> str:
        guard = self._guard_of(room)
        if not room.serving:
            return "not healthy"
        if room.full:
            return f"full: {room.used} of {room.limit.seqs} requests, {room.tokens} tokens"
        if guard < ticket.rank:
            name = self.bands.order[guard].name
            if now < room.pace_at:
                return f"kept for {name}: the next lower request in {room.pace_at - now:.2f} s"
            if not self._shares(room, guard, ticket, now):
                return f"kept for {name}: {room.below(guard)} lower requests are there"
        if ticket.rank and room.busy:
            return f"busy with prompts: {room.unstarted_tokens} tokens"
        return "open: others are before it"


def _soon(seconds: float | None) -> float:
    """A Retry-After."""
    return min(max(seconds or 1.0, 1.0), LONGEST_RETRY)
