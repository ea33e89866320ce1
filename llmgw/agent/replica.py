"""One replica on this node, as a state machine: what happened in, what to do out. No process, no clock, no chance.

    waiting    it is to run, and starts when `next_try` comes (None: not before an input changes)
    starting   its process runs and loads
    canary     it answers; the smallest real request decides
    ready      it serves
    stopping   it is being ended, or what it left behind is being cleared away; `then` says what follows
    failed     it ended by itself; like waiting, with a reason
    gone       nothing of it is left on this node

    state                 event                      next      to do
    waiting, failed       Tick, next_try has come    starting  Start
    waiting               Adopted (ready?)           ready or starting
    failed, no next_try   InputsChanged              failed    (next_try = now)
    starting              Answers                    canary    AskCanary
    starting              Tick, no progress          stopping  End
    canary                CanaryPassed               ready
    canary                CanaryFailed, too often    stopping  End
    ready                 Hung                       stopping  End
    starting canary ready Ended                      stopping  Clear
    starting canary ready Stop                       stopping  End
    stopping              Ended                      stopping  Clear
    stopping              Stuck                      stopping  (told; nobody can do more)
    stopping              Released                   failed or gone
    waiting, failed       Stop                       gone

Invariants
    1. A process exists in starting, canary, ready, stopping only; `Start` is asked for in waiting and failed only, and
       never twice without a `Released` in between: so two lives of one replica never share its GPUs.
    2. Leaving starting, canary, ready goes through stopping: what is left of a life is cleared away before the next.
    3. Every end that nobody asked for is a failure with a reason, exit code 0 included.
    4. A failure that would repeat itself (`never`) is not tried again before an input changes.
    5. gone is final.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from llmgw.control.observed import LOG_LINES, Failure
from llmgw.engines.deaths import Retry

if TYPE_CHECKING:
    import random

State = Literal["waiting", "starting", "canary", "ready", "stopping", "failed", "gone"]

BACKOFF_FIRST = 10.0  # seconds; doubles with each failure in a row
BACKOFF_MOST = 300.0
JITTER = 0.2
FORGIVEN = 600.0  # seconds of being ready after which earlier failures no longer count
GPU_FREE_TRIES = 1  # how often a failure for want of GPU memory is tried again
CANARY_TRIES = 5  # in a row, before an engine that answers /health is given up
CANARY_PAUSE = 3.0  # seconds between two tries


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """The state. Times are of the caller's clock."""

    state: State = "waiting"
    since: float = 0.0
    detail: str = ""  # phase of the start, for people
    then: Literal["failed", "gone"] = "gone"  # what follows stopping
    failures: int = 0  # in a row
    gpu_failures: int = 0  # of these, for want of GPU memory
    canaries: int = 0  # failed in a row
    progress_at: float = 0.0
    next_try: float | None = 0.0
    retry: Retry = "backoff"  # of the failure that is being cleared away
    failure: Failure | None = None  # the last one; kept while the next try is under way


# -- what happens ------------------------------------------------------------------------------------------------------


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class Progress(msgspec.Struct, frozen=True):
    """The start gets on: a phase of the engine's log, bytes read, a new kind of log line."""

    detail: str = ""


class Answers(msgspec.Struct, frozen=True):
    """It is healthy and lists its model."""


class CanaryPassed(msgspec.Struct, frozen=True):
    """It served the smallest request."""


class CanaryFailed(msgspec.Struct, frozen=True):
    text: str


class Ended(msgspec.Struct, frozen=True):
    """Its process is no more, or never was (*failure* says why). *retry*: whether trying again can help."""

    failure: Failure
    retry: Retry


class Hung(msgspec.Struct, frozen=True):
    """It does not get on, and the canary failed."""

    text: str


class Stop(msgspec.Struct, frozen=True):
    """The server does not want it any more. *grace*: seconds for requests in flight."""

    grace: float


class Released(msgspec.Struct, frozen=True):
    """What it held has been cleared away; *problem*: what could not be."""

    problem: str = ""


class Stuck(msgspec.Struct, frozen=True):
    """It does not even end by SIGKILL: the kernel holds it."""

    text: str


class InputsChanged(msgspec.Struct, frozen=True):
    """The node is not as it was when the replica failed: hardware, engine, weights."""


class Adopted(msgspec.Struct, frozen=True):
    """A process of an earlier life of the agent still runs. *ready*: it was ready when that life ended."""

    ready: bool


Event = (
    Tick
    | Progress
    | Answers
    | CanaryPassed
    | CanaryFailed
    | Ended
    | Hung
    | Stop
    | Released
    | Stuck
    | InputsChanged
    | Adopted
)

# -- what to do --------------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True):
    """Check the ground, then start the engine."""


class AskCanary(msgspec.Struct, frozen=True):
    """Send it the smallest request, after *pause* seconds."""

    pause: float = 0.0


class End(msgspec.Struct, frozen=True):
    """Drain for *grace* seconds, then TERM, then KILL the whole session. An `Ended` follows."""

    grace: float


class Clear(msgspec.Struct, frozen=True):
    """The process is no more: end what it left behind, see its GPUs free. A `Released` follows."""


Effect = Start | AskCanary | End | Clear

ALIVE: frozenset[State] = frozenset({"starting", "canary", "ready"})


def advance(
    replica: Replica, event: Event, now: float, rng: random.Random, start_deadline: float
) -> tuple[Replica, tuple[Effect, ...]]:
    """The next state, and what to do. An event that means nothing in a state changes nothing."""
    state = replica.state
    match event:
        case Tick() | Progress() if state in ALIVE:
            return _still(replica, event, now, start_deadline)
        case Tick() if state in ("waiting", "failed") and replica.next_try is not None and now >= replica.next_try:
            return _to(replica, "starting", now, "checking the node", next_try=None, progress_at=now, canaries=0), (
                Start(),
            )
        case InputsChanged() if state == "failed" and replica.next_try is None:
            return msgspec.structs.replace(replica, next_try=now, failures=0, gpu_failures=0), ()
        case Adopted() if state == "waiting":
            if event.ready:
                return _to(replica, "ready", now, progress_at=now), ()
            return _to(replica, "starting", now, "adopted", progress_at=now), ()
        case Answers() if state == "starting":
            return _to(replica, "canary", now, "asked for one token", progress_at=now, canaries=0), (AskCanary(),)
        case CanaryPassed() if state == "canary":
            return _to(replica, "ready", now), ()
        case CanaryFailed() if state == "canary":
            if replica.canaries + 1 < CANARY_TRIES:
                return msgspec.structs.replace(replica, canaries=replica.canaries + 1), (AskCanary(CANARY_PAUSE),)
            return _fail(replica, "canary", f"healthy, but it cannot serve: {event.text}", now)
        case Hung() if state == "ready":
            return _fail(replica, "hung", event.text, now)
        case Ended() if state in ALIVE:
            forgiven = state == "ready" and now - replica.since >= FORGIVEN
            count = msgspec.structs.replace(replica, failures=0, gpu_failures=0) if forgiven else replica
            failed = msgspec.structs.replace(count, failure=event.failure, retry=event.retry, then="failed")
            return _to(failed, "stopping", now, "clearing away"), (Clear(),)
        case Ended() if state == "stopping":
            if replica.then == "failed" and replica.failure is not None:  # keep why, add how it ended
                ended, failure = event.failure, replica.failure
                told = msgspec.structs.replace(
                    failure, exit_code=ended.exit_code, signal=ended.signal, log=failure.log or ended.log
                )
                replica = msgspec.structs.replace(replica, failure=told)
            return msgspec.structs.replace(replica, detail="clearing away"), (Clear(),)
        case Stuck() if state == "stopping":
            return msgspec.structs.replace(replica, detail=event.text), ()
        case Released() if state == "stopping":
            return _released(replica, event, now, rng), ()
        case Stop() if state in ALIVE:
            return _to(replica, "stopping", now, "draining", then="gone"), (End(event.grace),)
        case Stop() if state == "stopping":
            return msgspec.structs.replace(replica, then="gone"), ()
        case Stop() if state in ("waiting", "failed"):
            return _to(replica, "gone", now, next_try=None), ()
        case _:
            return replica, ()


def _to(replica: Replica, state: State, now: float, detail: str = "", **more: object) -> Replica:
    return msgspec.structs.replace(replica, state=state, since=now, detail=detail, **more)


def _still(replica: Replica, event: Tick | Progress, now: float, deadline: float) -> tuple[Replica, tuple[Effect, ...]]:
    if isinstance(event, Progress):
        detail = event.detail if event.detail and replica.state == "starting" else replica.detail
        return msgspec.structs.replace(replica, progress_at=now, detail=detail), ()
    if replica.state == "starting" and now - replica.progress_at >= deadline:
        last = f"; last phase: {replica.detail}" if replica.detail else ""
        return _fail(replica, "no-progress", f"no progress for {deadline:g} s{last}", now)
    return replica, ()


def _fail(replica: Replica, cause: str, message: str, now: float) -> tuple[Replica, tuple[Effect, ...]]:
    """A failure whose process still runs: end it, without grace."""
    failed = msgspec.structs.replace(
        replica, failure=Failure(cause=cause, message=message), retry="backoff", then="failed"
    )
    return _to(failed, "stopping", now, "ending"), (End(0.0),)


def _released(replica: Replica, event: Released, now: float, rng: random.Random) -> Replica:
    if replica.then == "gone":
        return _to(replica, "gone", now, event.problem, next_try=None)
    failures = replica.failures + 1
    wants_gpu = replica.retry == "gpu-free"
    gpu_failures = replica.gpu_failures + wants_gpu
    never = replica.retry == "never" or (wants_gpu and gpu_failures > GPU_FREE_TRIES)
    failure = replica.failure
    if failure is not None:
        message = f"{failure.message}; {event.problem}" if event.problem else failure.message
        failure = msgspec.structs.replace(failure, message=message, deterministic=never)
    return _to(
        replica,
        "failed",
        now,
        failures=failures,
        gpu_failures=gpu_failures,
        failure=failure,
        next_try=None if never else now + backoff(failures, rng),
    )


def backoff(failures: int, rng: random.Random) -> float:
    """Seconds to wait after *failures* in a row: 10, 20, 40, 80, 160, 300, 300, … ± 20 %."""
    base = min(BACKOFF_FIRST * 2.0 ** min(failures - 1, 16), BACKOFF_MOST)
    return base * (1 + JITTER * (2 * rng.random() - 1))


def failure_of(
    cause: str, message: str, *, at: float, log: tuple[str, ...] = (), code: int | None = None, signal: int | None = None
) -> Failure:  # fmt: skip
    """With the last lines of the log, as many as travel."""
    return Failure(cause=cause, message=message, exit_code=code, signal=signal, log=log[-LOG_LINES:], at=at)
