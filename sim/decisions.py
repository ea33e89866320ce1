"""The decisions level: engine cores and a policy, nothing else. See `sim` for how it is used.

One heap of events (arrival, end of a step, report, fault) in virtual time; ties are served in the order in which they
were made, so a run is a function of its arguments.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any, Protocol

import attrs

from llmgw.endpoint import Endpoint, EndpointView, Model, Report, Snapshot
from llmgw.kvcache.blocks import seed as block_seed
from llmgw.kvcache.blocks import token_blocks
from llmgw.reasons import BY_CODE as STATUS
from llmgw.request import PHASES, Head, InferenceRequest, Refusal
from llmgw.simengine.core import EngineCore, Job, Seq, State
from llmgw.simengine.options import Options
from llmgw.simengine.text import say

from .load import Session, Turn
from .records import Record, Result, Sample
from .scenario import Fault

Policy = Callable[[Snapshot, InferenceRequest], "str | Refusal | None"]

BLOCK_TOKENS = 128
"""Tokens a block of `InferenceRequest.blocks`: what 512 bytes of English are."""
ATTEMPTS = 3
"""Engines that one request is sent to, at most, while nobody listens there."""


@attrs.frozen
class EngineSpec:
    """One engine of the cluster. Its endpoint has *name* as id."""

    name: str
    options: Options
    fabrics: frozenset[str] = frozenset()


class Watcher(Protocol):
    """What a policy is told, as far as it has these methods. *now* is virtual time."""

    def sent(self, endpoint: str, request: InferenceRequest, now: float) -> None: ...

    def first(self, endpoint: str, request: InferenceRequest, now: float) -> None: ...

    def progress(self, endpoint: str, request: InferenceRequest, tokens: int, now: float) -> None:
        """At most once a second and request."""

    def settled(self, endpoint: str, request: InferenceRequest, record: Record, now: float) -> None: ...

    def reported(self, endpoint: str, report: Report, now: float) -> None: ...

    def release(self, now: float) -> Iterable[tuple[str, str | Refusal]]:
        """Called after every settlement, report and step: (request id, answer) for requests that were told to wait.

        A policy without it is asked anew for those that wait, oldest first, until it says None.
        """
        ...


@attrs.define(eq=False)
class _Live:
    """One engine under way."""

    spec: EngineSpec
    endpoint: Endpoint
    core: EngineCore
    asks: dict[str, _Ask] = attrs.Factory(dict)
    prefill: int = 0  # prompt tokens sent whose first token has not come
    decode: int = 0  # tokens still to come
    report: Report | None = None
    stepping: bool = False
    stalled: bool = False
    dead: bool = False
    known_dead: bool = False
    muted: bool = False
    epoch: int = 0  # events made before a restart are void


@attrs.define(eq=False)
class _Talk:
    """A session between two turns."""

    session: Session
    number: int = 0
    history: list[int] = attrs.Factory(list)


@attrs.define(eq=False)
class _Ask:
    """One request under way."""

    talk: _Talk
    turn: Turn
    tokens: list[int]
    output: list[int]
    request: InferenceRequest
    record: Record
    seq: Seq | None = None
    attempts: int = 0
    told: float = 0.0  # when progress was last told


def rehearse(
    engines: Sequence[EngineSpec],
    sessions: Iterable[Session],
    policy: Policy,
    *,
    faults: Sequence[Fault] = (),
    seed: int = 0,
    report_every: float = 1.0,
    until: float = inf,
) -> Result:
    """Run *sessions* against *engines*, each request where *policy* says. Ends when all is done, or at *until*.

    Of *faults*, those that need a network (link, skew) are left out.
    """
    return _Rehearsal(engines, sessions, policy, faults, seed, report_every, until).run()


class _Rehearsal:
    def __init__(
        self,
        engines: Sequence[EngineSpec],
        sessions: Iterable[Session],
        policy: Policy,
        faults: Sequence[Fault],
        seed: int,
        report_every: float,
        until: float,
    ) -> None:
        self.policy = policy
        self.seed = seed
        self.report_every = report_every
        self.until = until
        self.now = 0.0
        self.revision = 0
        self.result = Result()
        self.engines = {spec.name: _start(spec) for spec in engines}
        self.endpoints = tuple(live.endpoint for live in self.engines.values())
        self.waiting: dict[str, _Ask] = {}
        self.open = 0  # sessions that are not over
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        for session in sessions:
            self.open += 1
            self.at(session.at, self.turn, _Talk(session))
        for fault in faults:
            if fault.kind not in ("link", "skew"):
                self.at(fault.at, self.fault, fault)
        self.at(0.0, self.look)

    def at(self, when: float, what: Callable[..., None], *given: Any) -> None:
        self._number += 1
        heappush(self._events, (when, self._number, what, given))

    def run(self) -> Result:
        while self._events and self.open:
            when, _, what, given = heappop(self._events)
            if when > self.until:
                break
            self.now = when
            what(*given)
        result = self.result
        result.end = self.now
        for live in self.engines.values():
            telemetry = live.core.telemetry
            result.engines[live.spec.name] = {
                "prompt_tokens": telemetry.prompt_tokens,
                "cached_tokens": telemetry.prefix_hits,
                "generation_tokens": telemetry.generation_tokens,
                "preemptions": telemetry.preemptions,
                "busy": telemetry.busy,
                "steps": telemetry.steps,
            }
        return result

    # Requests

    def turn(self, talk: _Talk) -> None:
        """The session's next turn, or its end."""
        session = talk.session
        turn = next(session.turns, None) if self.now < session.until else None
        if turn is None:
            self.open -= 1
            return
        tokens = [*session.prefix, *talk.history, *turn.prompt]
        name = f"{session.id}.{talk.number}"
        talk.number += 1
        request = InferenceRequest(
            id=name,
            head=Head(route="/v1/chat/completions", client=""),
            model=session.model or self.endpoints[0].models[0].name,
            stream=session.stream,
            max_tokens=turn.output,
            prompt_tokens=len(tokens),
            body_bytes=4 * len(tokens),
            band=session.band,
            profile=session.profile,
            session=session.client or session.id,
            blocks=token_blocks(tokens, BLOCK_TOKENS, block_seed(session.model)),
            accepted=self.now,
        )
        load = session.id.rpartition("-")[0]
        record = Record(name, session.id, self.now, load, prompt_tokens=len(tokens), wanted=turn.output)
        self.result.records.append(record)
        output = say(random.Random(f"{self.seed}/{name}"), turn.output)
        ask = _Ask(talk, turn, tokens, output, request, record)
        if session.patience < inf:
            self.at(self.now + session.patience, self.give_up, ask)
        self.decide(ask)

    def decide(self, ask: _Ask) -> bool:
        """Ask the policy. False if the request has to wait."""
        return self.obey(ask, self.policy(self.snapshot(), ask.request))

    def obey(self, ask: _Ask, answer: str | Refusal | None) -> bool:
        if answer is None:
            if ask.request.id not in self.waiting:
                self.result.seen["queued"] += 1
                self.waiting[ask.request.id] = ask
            return False
        self.waiting.pop(ask.request.id, None)
        if isinstance(answer, Refusal):
            self.close(ask, answer.reason)
        else:
            self.send(ask, self.engines[answer])
        return True

    def send(self, ask: _Ask, live: _Live) -> None:
        ask.attempts += 1
        ask.record.endpoint = live.spec.name
        if live.dead:
            live.known_dead = True
            self.retry(ask)
            return
        job = Job(id=ask.request.id, prompt=ask.tokens, output=ask.output, max_tokens=ask.turn.output)
        if why := live.core.reject(job):
            self.result.problems.append(f"{ask.request.id}: {why}")
            self.close(ask, "bad_field")
            return
        live.asks[ask.request.id] = ask
        live.prefill += len(ask.tokens)
        live.decode += ask.turn.output
        ask.record.sent = self.now
        ask.told = self.now
        ask.seq = live.core.submit(job, self.now, ask)
        self.tell("sent", live.spec.name, ask.request, self.now)
        self.step(live)

    def retry(self, ask: _Ask) -> None:
        """Nobody listens where it was sent."""
        if ask.attempts >= ATTEMPTS:
            self.close(ask, "connect_failed")
            return
        self.result.seen["retried"] += 1
        self.decide(ask)

    def give_up(self, ask: _Ask) -> None:
        """The client has waited long enough."""
        if ask.record.end >= 0:
            return
        self.result.seen["hung_up"] += 1
        self.waiting.pop(ask.request.id, None)
        live = self.engines.get(ask.record.endpoint)
        if live is not None and ask.seq is not None:
            live.core.abort(ask.seq, self.now)
            self.leave(live, ask)
        self.close(ask, "client_gone")

    def leave(self, live: _Live, ask: _Ask) -> None:
        """*live* has nothing to do with *ask* any more."""
        if live.asks.pop(ask.request.id, None) is None:
            return
        live.decode -= ask.turn.output - ask.record.tokens
        if not ask.record.tokens:
            live.prefill -= len(ask.tokens)

    def close(self, ask: _Ask, reason: str = "") -> None:
        """The request is over, for good or ill; its session goes on."""
        record, talk = ask.record, ask.talk
        record.end = self.now
        record.reason = reason
        record.status = STATUS[reason].status if reason else 200
        self.tell("settled", record.endpoint, ask.request, record, self.now)
        if talk.session.history:
            talk.history += [*ask.turn.prompt, *ask.output[: record.tokens]]
        self.at(self.now + ask.turn.think, self.turn, talk)
        self.admit()

    def admit(self) -> None:
        """Something has changed: who waits may go now."""
        release = getattr(self.policy, "release", None)
        if release is not None:
            for name, answer in list(release(self.now)):
                self.obey(self.waiting[name], answer)
            return
        for ask in list(self.waiting.values()):
            if ask.request.id in self.waiting and not self.decide(ask):
                return

    def tell(self, what: str, *given: Any) -> None:
        method = getattr(self.policy, what, None)
        if method is not None:
            method(*given)

    # Engines

    def snapshot(self) -> Snapshot:
        self.revision += 1
        views = tuple(
            EndpointView(
                health="quarantined" if live.known_dead else "ready",
                inflight=len(live.asks),
                prefill_tokens=live.prefill,
                decode_tokens=live.decode,
                report=live.report,
            )
            for live in self.engines.values()
        )
        return Snapshot(self.revision, self.endpoints, views)

    def step(self, live: _Live) -> None:
        """Begin a step, unless one is under way."""
        if live.stepping or live.stalled or live.dead:
            return
        end = live.core.begin(self.now)
        for seq in live.core.silent:
            assert isinstance(seq.owner, _Ask)
            self.leave(live, seq.owner)
            self.close(seq.owner, "")
        live.core.silent.clear()
        if end is not None:
            live.stepping = True
            self.at(end, self.stepped, live, live.epoch)
        elif live.core.wake < inf:
            self.at(live.core.wake, self.woken, live, live.epoch)

    def woken(self, live: _Live, epoch: int) -> None:
        if epoch == live.epoch:
            self.step(live)

    def stepped(self, live: _Live, epoch: int) -> None:
        if epoch != live.epoch or live.stalled:
            return
        now = self.now
        name = live.spec.name
        live.stepping = False
        produced = live.core.end(now)
        live.decode -= len(produced)
        for seq in produced:
            ask = seq.owner
            assert isinstance(ask, _Ask)
            record = ask.record
            record.tokens = seq.produced
            if seq.produced == 1:
                record.first = now
                record.cached_tokens = max(seq.cached, 0)
                live.prefill -= len(ask.tokens)
                self.tell("first", name, ask.request, now)
            elif now - record.last > record.worst_gap:
                record.worst_gap = now - record.last
            record.last = now
            if seq.state is State.DONE:
                self.leave(live, ask)
                self.close(ask)
            elif now - ask.told >= 1.0:
                ask.told = now
                self.tell("progress", name, ask.request, seq.produced, now)
        if produced and hasattr(self.policy, "release"):
            self.admit()  # first tokens, and time, let others in as well
        self.step(live)

    def look(self) -> None:
        """Every engine's metrics are read, and its state is noted."""
        for live in self.engines.values():
            gauges = live.core.gauges()
            waiting = gauges.waiting + gauges.deferred
            self.result.samples.append(Sample(self.now, live.spec.name, gauges.running, waiting, gauges.kv_usage))
            if waiting:
                self.result.seen["engine_queue"] += 1
            if live.dead:
                live.known_dead = True
            elif not live.muted:
                live.known_dead = False
                live.report = Report(at=self.now, running=gauges.running, waiting=waiting, kv_usage=gauges.kv_usage)
                self.tell("reported", live.spec.name, live.report, self.now)
        self.admit()
        self.at(self.now + self.report_every, self.look)

    # Faults

    def fault(self, fault: Fault) -> None:
        live = self.engines[fault.target]
        self.result.seen[fault.kind] += 1
        if fault.kind in ("kill", "restart"):
            self.die(live)
        elif fault.kind == "stall":
            live.stalled = True
        elif fault.kind == "slow":
            live.core.slowdown = fault.factor
        elif fault.kind == "mute":
            live.muted = True
        if fault.lasts is not None:
            self.at(self.now + fault.lasts, self.heal, fault, live)

    def heal(self, fault: Fault, live: _Live) -> None:
        if fault.kind in ("kill", "restart"):
            live.dead = False
        elif fault.kind == "stall":
            live.stalled = False
            if live.stepping:
                self.at(self.now, self.stepped, live, live.epoch)
            else:
                self.step(live)
        elif fault.kind == "slow":
            live.core.slowdown = 1.0
        elif fault.kind == "mute":
            live.muted = False

    def die(self, live: _Live) -> None:
        """The engine is gone with all that it held."""
        asks = list(live.asks.values())
        live.core = EngineCore(live.spec.options.shape(), live.spec.options.step_model())
        live.epoch += 1
        live.dead, live.stepping, live.stalled = True, False, False
        live.known_dead = True
        for ask in asks:  # the engine may have begun: none of them may be sent again
            self.leave(live, ask)
            self.close(ask, "upstream_closed")


def _start(spec: EngineSpec) -> _Live:
    options = spec.options
    options.check()
    endpoint = Endpoint(
        id=spec.name,
        name=spec.name,
        url=f"http://{spec.name}:8000",
        engine="sim",
        models=tuple(Model(name=name, max_model_len=options.max_model_len) for name in options.names),
        phases=frozenset(phase for phase in PHASES if phase in options.phases),
        fabrics=spec.fabrics,
        block_size=options.block_size,
        blocks=options.shape().num_blocks,
        source="sim",
    )
    return _Live(spec, endpoint, EngineCore(options.shape(), options.step_model()))
