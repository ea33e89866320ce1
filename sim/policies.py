"""A scenario at the decisions level, chosen for by the gateway's own brain.

The brain is the real one, with its fleet, retries and admission; what it would learn from sockets (probes, first tokens, ends)
it is told by the rehearsal.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import attrs

from llmgw.config import Server
from llmgw.endpoint import Report, Snapshot
from llmgw.errors import ConfigError, Problem
from llmgw.logs import Log
from llmgw.metrics import Metrics
from llmgw.request import Failure, InferenceRequest, Lease, Outcome, Page, Refusal, Wait
from llmgw.routing.report import Reading
from llmgw.routing.router import Router
from llmgw.server.brain import Brain
from llmgw.server.fleet import Fleet

from .cluster import MemoryLog, server_of, sessions_of
from .decisions import EngineSpec, rehearse
from .network import EPOCH
from .records import Record, Result
from .scenario import Scenario


class BrainPolicy:
    """`llmgw.server.brain` as a policy. Also the mover's end of it: what was told to wait is granted here."""

    def __init__(self, config: Server, seed: int, sizes: Mapping[str, tuple[int, int]]) -> None:
        """*sizes*: by endpoint, tokens a block and blocks, as its metrics page would say."""
        self._sizes = sizes
        self.now = 0.0
        self.log = Log(MemoryLog(), lambda: EPOCH + self.now, requests=False)
        metrics = Metrics()
        router = Router(random.Random(f"{seed}/gateway").random, 0.0, config.routing.profiles)
        self.fleet = Fleet(
            metrics,
            self.log,
            lambda: self.now,
            failures=config.probe.failures,
            policies=config.models,
            router=router,
        )
        self.brain = Brain(config, self.fleet, metrics, self.log, lambda: self.now, created=EPOCH)
        self.brain.movers = [self]
        self.fleet.replace("static", tuple(one.endpoint() for one in config.endpoints))
        self._places = {place.endpoint.name: place for place in self.fleet.places.values()}
        for place in self._places.values():
            self.fleet.happened(place, "probe_ok")
        self._leases: dict[str, Lease] = {}
        self._tickets: dict[int, str] = {}
        self._granted: list[tuple[str, str | Refusal]] = []

    # The policy

    def __call__(self, snapshot: Snapshot, request: InferenceRequest) -> str | Refusal | None:
        self.now = max(self.now, request.accepted)
        before = self._leases.get(request.id)
        if before is not None:
            answer: object = self.brain.retry(before.id, Failure(reason="connect_failed", started=False))
        else:
            answer = self.brain.admit(request)
        if isinstance(answer, Wait):
            self._tickets[answer.ticket] = request.id
            return None
        return self._take(request.id, answer)

    def _take(self, name: str, answer: object) -> str | Refusal:
        if isinstance(answer, Refusal):
            return answer
        assert isinstance(answer, Lease)
        self._leases[name] = answer
        return answer.target.name

    def first(self, endpoint: str, request: InferenceRequest, now: float) -> None:
        self.progress(endpoint, request, 1, now)

    def progress(self, endpoint: str, request: InferenceRequest, tokens: int, now: float) -> None:
        self.now = now
        self.brain.progress(self._leases[request.id].id, tokens)

    def settled(self, endpoint: str, request: InferenceRequest, record: Record, now: float) -> None:
        self.now = now
        lease = self._leases.pop(request.id, None)
        outcome = Outcome(
            request_id=request.id,
            route=request.head.route,
            status=record.status,
            reason=record.reason,
            stream=request.stream,
            model=request.model,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            completion_tokens=record.tokens,
            usage="engine",
            accepted=record.at,
            sent=record.sent if record.sent >= 0 else None,
            first=record.first if record.first >= 0 else None,
            last=record.last if record.last >= 0 else None,
        )
        if lease is not None:
            self.brain.settle(lease.id, outcome)
            return
        ticket = next((ticket for ticket, name in self._tickets.items() if name == request.id), None)
        if ticket is not None:  # its client left while it waited
            del self._tickets[ticket]
            self.brain.withdraw(ticket, outcome)

    def reported(self, endpoint: str, report: Report, now: float) -> None:
        self.now = now
        place = self._places[endpoint]
        self.fleet.happened(place, "probe_ok")
        self.fleet.learned(
            place, Reading(report=report, block_size=self._sizes[endpoint][0], blocks=self._sizes[endpoint][1])
        )

    def release(self, now: float) -> Iterable[tuple[str, str | Refusal]]:
        self.now = now
        self.brain.admission.tick()
        granted, self._granted = self._granted, []
        return granted

    # The mover

    def granted(self, ticket: int, answer: Lease | Refusal | Page) -> None:
        name = self._tickets.pop(ticket)
        self._granted.append((name, self._take(name, answer)))

    def abandon(self, lease: int, refusal: Refusal) -> None:
        """The brain gives up on an engine: nothing to do here, where an engine that is dead has no connections."""


def run(scenario: Scenario, seed: int) -> Result:
    """Rehearse *scenario* at the decisions level. Raises ConfigError for pipelines: their legs need the network."""
    config = server_of(scenario)
    if config.pipelines:
        raise ConfigError(
            [Problem("pipelines run at the http level only: leave out --level decisions", where="server.pipelines")]
        )
    engines = [
        EngineSpec(name, attrs.evolve(group.options(seed), listen=(name,)), frozenset(group.fabrics))
        for name, group in scenario.groups()
    ]
    shapes = {spec.name: spec.options.shape() for spec in engines}
    sizes = {name: (shape.block_size, shape.num_blocks) for name, shape in shapes.items()}
    return rehearse(
        engines,
        sessions_of(scenario, seed),
        BrainPolicy(server_of(scenario), seed, sizes),
        faults=scenario.faults,
        seed=seed,
        report_every=scenario.sample,
    )
