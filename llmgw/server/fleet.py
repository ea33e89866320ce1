"""All endpoints: who they are, how they are doing, what they have of ours. Makes the snapshots that decisions see.

    sources ──replace(full set)──► places, by id ──► router: snapshot (endpoints, views)
    probes, brain ──health──────► place.health            ▲
    brain ──sent, ended─────────► router: ledger ─────────┘

Invariants: names are unique (the first source to use one keeps it); a place keeps its health as long as its id is in some
source's set, and its account in the router's ledger until its last request has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import attrs
import msgspec

from llmgw.config import ModelPolicy
from llmgw.endpoint import Endpoint, Model
from llmgw.logs import Level, Log
from llmgw.metrics import EndpointSlot, Metrics
from llmgw.request import InferenceRequest, Outcome, Target
from llmgw.routing.decision import Decision
from llmgw.routing.health import Event, Health, may_eject, step
from llmgw.routing.report import Reading
from llmgw.routing.router import Router
from llmgw.server.targets import target


@attrs.define(eq=False, slots=True)
class Place:
    """One endpoint, with all that changes about it."""

    endpoint: Endpoint
    health: Health
    slot: EndpointSlot
    index: int = -1  # in the snapshot; -1 = gone
    alive: float | None = None  # when it last gave a token or a good answer
    key: str = ""  # its API key
    targets: dict[tuple[str, str], Target] = attrs.field(factory=dict)  # by the model's name as asked and as served
    configured: Endpoint | None = None  # as its source told it, before the probe learned more
    changed: Callable[[], None] | None = None  # wakes its probe
    progress: float | None = None  # what its metrics page said of its own progress last


class Fleet:
    """Implements `llmgw.endpoint.EndpointSink`."""

    def __init__(
        self,
        metrics: Metrics,
        log: Log,
        clock: Callable[[], float],
        *,
        failures: int = 3,
        policies: Mapping[str, ModelPolicy] = MappingProxyType({}),
        read_key: Callable[[str], str] = lambda _: "",
        router: Router,
    ) -> None:
        """*failures*: see `health.step`. *policies*: by model; their aliases become aliases of every endpoint's model.
        *read_key*: what `Endpoint.auth` refers to; raises OSError."""
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._failures = failures
        self._policies = policies
        self._read_key = read_key
        self.router = router
        self._sources: dict[str, tuple[Endpoint, ...]] = {}
        self.places: dict[str, Place] = {}
        self.revision = 0
        self._endpoints: tuple[Endpoint, ...] = ()
        self._order: list[Place] = []
        self.models: dict[str, str] = {}  # every name that a request may use → the model that it means
        self.on_failed_probe: Callable[[Place], None] = lambda _: None
        self.on_state: Callable[[], None] = lambda: None  # an endpoint's health is another
        self.listeners: list[Callable[[], None]] = []  # called after the set or its models changed

    # -- who they are --------------------------------------------------------------------------------------------

    def replace(self, source: str, endpoints: tuple[Endpoint, ...]) -> None:
        """*source* now knows exactly *endpoints*."""
        self._sources[source] = endpoints
        names: set[str] = set()
        kept: dict[str, Place] = {}
        for one in (e for name in sorted(self._sources) for e in self._sources[name]):
            if one.name in names:
                self._log.event("endpoint_refused", "error", endpoint=one.name, why="another endpoint has this name")
                continue
            names.add(one.name)
            kept[one.id] = self._keep(one)
        for place in self.places.values():
            if place.endpoint.id not in kept:
                place.index = -1
                if place.changed:
                    place.changed()
                self._log.event("endpoint_gone", endpoint=place.endpoint.name, inflight=self.inflight(place))
        self.places = kept
        self._metrics.keep_endpoints(place.endpoint.name for place in kept.values())
        for place in kept.values():
            place.slot = self._metrics.endpoint(place.endpoint.name)
            place.slot.state = place.health.state
            place.slot.inflight = self.inflight(place)
        self._renew()

    def _keep(self, endpoint: Endpoint) -> Place:
        place = self.places.get(endpoint.id)
        if place is None:
            self._log.event("endpoint_added", endpoint=endpoint.name, url=endpoint.url)
            place = Place(self._named(endpoint), Health(self._clock()), EndpointSlot())
        else:
            place.endpoint = self._named(_with_learned(endpoint, place.endpoint))
        place.configured = endpoint
        place.targets.clear()
        place.key = self._key(endpoint)
        return place

    def _named(self, endpoint: Endpoint) -> Endpoint:
        """With the aliases of the policies."""
        models = tuple(
            msgspec.structs.replace(m, aliases=tuple(dict.fromkeys((*m.aliases, *self._policies[m.name].aliases))))
            if m.name in self._policies
            else m
            for m in endpoint.models
        )
        return endpoint if models == endpoint.models else msgspec.structs.replace(endpoint, models=models)

    def _key(self, endpoint: Endpoint) -> str:
        if not endpoint.auth:
            return ""
        try:
            return self._read_key(endpoint.auth)
        except OSError as error:
            self._log.event(
                "key_unreadable", "error", endpoint=endpoint.name, file=endpoint.auth, why=error.strerror or str(error)
            )
            return ""

    def learn(self, place: Place, models: tuple[Model, ...], engine: str) -> None:
        """What the probe found out: the models where none are configured, context lengths, the kind of engine."""
        told = place.configured or place.endpoint
        lengths = {m.name: m.max_model_len for m in models}
        now = msgspec.structs.replace(
            told,
            engine=engine if told.engine == "auto" and engine else told.engine,
            models=tuple(
                m if m.max_model_len else msgspec.structs.replace(m, max_model_len=lengths.get(m.name))
                for m in told.models
            )
            or models,
        )
        now = self._named(now)
        if now != place.endpoint and place.index >= 0:
            place.endpoint = now
            place.targets.clear()
            self._log.event("endpoint_learned", endpoint=now.name, models=[m.name for m in now.models])
            self._renew()

    def _renew(self) -> None:
        self.revision += 1
        self._order = list(self.places.values())
        self._endpoints = tuple(p.endpoint for p in self._order)
        for index, place in enumerate(self._order):
            place.index = index
        self.router.replace(self._endpoints, self._clock())
        for place in self._order:
            self._tell(place)
        self.models = {}
        for endpoint in self._endpoints:
            for model in endpoint.models:
                for name in (model.name, *model.loras):
                    self.models[name] = name
        for endpoint in self._endpoints:
            for model in endpoint.models:
                for name in model.aliases:
                    self.models.setdefault(name, model.name)
        for listener in self.listeners:
            listener()

    def learned(self, place: Place, reading: Reading) -> None:
        """What its metrics page says: its load, and, where its counters rise, that it lives."""
        self.router.learned(place.endpoint.id, reading)
        place.slot.reported = reading.report.at
        if reading.progress is not None:
            if place.progress is not None and reading.progress > place.progress:
                place.alive = reading.report.at
            place.progress = reading.progress

    # -- how they are doing --------------------------------------------------------------------------------------

    def happened(self, place: Place, event: Event, why: str = "") -> None:
        """Something that says how it is doing."""
        if place.index < 0:
            return  # gone: nobody cares any more
        before = place.health
        now = self._clock()
        if event in ("probe_ok", "served"):
            place.alive = now
            if before.state == "ready":
                return
        eject = before.state != "degraded" or event == "connect_failed" or self._may_eject(place)
        place.health = step(before, event, now, self._failures, why, eject=eject)
        if event == "probe_failed":
            self.on_failed_probe(place)
        if place.health.state == before.state:
            return
        place.slot.state = place.health.state
        level: Level = "warning" if place.health.state in ("degraded", "quarantined") else "info"
        fields = {"why": why} if why else {}
        self._log.event(
            "endpoint_" + place.health.state,
            level,
            endpoint=place.endpoint.name,
            was=before.state,
            seconds=round(now - before.since, 3),
            **fields,
        )
        self.revision += 1
        self._tell(place)
        self.on_state()
        if place.changed and before.serving and not place.health.serving:
            place.changed()  # ask at once whether it is back

    def _may_eject(self, place: Place) -> bool:
        mine = {m.name for m in place.endpoint.models}
        pool = [p for p in self._order if mine & {m.name for m in p.endpoint.models}]
        return may_eject(len(pool), sum(p.health.state == "quarantined" for p in pool))

    # -- what they have of ours ----------------------------------------------------------------------------------

    def sent(
        self, place: Place, leg: int, request: InferenceRequest, decision: Decision, *, again: bool = False
    ) -> None:
        """*request* goes there, as *decision* says. *again*: an attempt of it failed before."""
        self.router.sent(leg, request, decision, self._clock(), again=again)
        place.slot.requests += 1
        place.slot.inflight = self.inflight(place)

    def ended(self, place: Place, leg: int, outcome: Outcome | None = None) -> None:
        """*leg* is over. *outcome*: of its request; None: another attempt follows."""
        self.router.ended(leg, self._clock(), outcome)
        place.slot.inflight = self.inflight(place)

    def inflight(self, place: Place) -> int:
        return self.router.ledger.counts(place.endpoint.id)[0]

    def target(self, place: Place, asked: str, model: str) -> Target:
        """Where a request that asks for *asked* and is served as *model* goes, with the name that this endpoint knows."""
        found = place.targets.get((asked, model))
        if found is None:
            known = "" if not asked else _known(place.endpoint, asked) or _known(place.endpoint, model) or model
            found = target(place.endpoint, place.key, known if known != asked else "")
            if asked in self.models:  # else a client could fill the memory with names
                place.targets[asked, model] = found
        return found

    # -- what decisions see --------------------------------------------------------------------------------------

    def _tell(self, place: Place) -> None:
        self.router.ledger.health(place.endpoint.id, place.health.state, place.health.since)

    def serving(self) -> Iterable[Place]:
        """Those that may get requests."""
        return (p for p in self._order if p.health.serving)


def _with_learned(told: Endpoint, known: Endpoint) -> Endpoint:
    """*told* anew by its source, with what the probe has found out meanwhile: nobody waits for the next one."""
    lengths = {m.name: m.max_model_len for m in known.models}
    models = told.models or tuple(msgspec.structs.replace(m, aliases=()) for m in known.models)
    return msgspec.structs.replace(
        told,
        engine=known.engine if told.engine == "auto" else told.engine,
        models=tuple(
            m if m.max_model_len else msgspec.structs.replace(m, max_model_len=lengths.get(m.name)) for m in models
        ),
    )


def _known(endpoint: Endpoint, name: str) -> str:
    """What *endpoint* calls the model that clients call *name*; "" = it has none."""
    for model in endpoint.models:
        if name == model.name or name in model.loras:
            return name
        if name in model.aliases:
            return model.name
    return ""
