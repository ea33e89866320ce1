"""All endpoints: who they are, how they are doing, what they have of ours. Makes the snapshots that decisions see.

    sources ──replace(full set)──► places, by id ──► snapshot (endpoints, views)     routing reads
    probes, brain ──health──────► place.health            ▲
    brain ──take, release───────► place's ledger ─────────┘

Invariants: names are unique (the first source to use one keeps it); a place keeps its ledger and health as long as its
id is in some source's set; views[i] is always the view of endpoints[i]; ledgers never go below zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import attrs
import msgspec

from llmgw.config import ModelPolicy
from llmgw.endpoint import Endpoint, EndpointView, Model, Snapshot
from llmgw.logs import Level, Log
from llmgw.metrics import EndpointSlot, Metrics
from llmgw.request import Target
from llmgw.server.health import Event, Health, step
from llmgw.server.targets import target


@attrs.define(eq=False, slots=True)
class Place:
    """One endpoint, with all that changes about it."""

    endpoint: Endpoint
    health: Health
    slot: EndpointSlot
    index: int = -1  # in the snapshot; -1 = gone
    inflight: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    alive: float | None = None  # when it last gave a token or a good answer
    key: str = ""  # its API key
    targets: dict[str, Target] = attrs.field(factory=dict)  # by the model's name as asked
    configured: Endpoint | None = None  # as its source told it, before the probe learned more
    changed: Callable[[], None] | None = None  # wakes its probe


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
    ) -> None:
        """*failures*: see `health.step`. *policies*: by model; their aliases become aliases of every endpoint's model.
        *read_key*: what `Endpoint.auth` refers to; raises OSError."""
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._failures = failures
        self._policies = policies
        self._read_key = read_key
        self._sources: dict[str, tuple[Endpoint, ...]] = {}
        self.places: dict[str, Place] = {}
        self.revision = 0
        self._endpoints: tuple[Endpoint, ...] = ()
        self._views: list[EndpointView] = []
        self._old: set[int] = set()  # indexes of views that are not current
        self._order: list[Place] = []
        self.models: dict[str, str] = {}  # every name that a request may use → the model that it means
        self.on_failed_probe: Callable[[Place], None] = lambda _: None
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
                self._log.event("endpoint_gone", endpoint=place.endpoint.name, inflight=place.inflight)
        self.places = kept
        self._metrics.keep_endpoints(place.endpoint.name for place in kept.values())
        for place in kept.values():
            place.slot = self._metrics.endpoint(place.endpoint.name)
            place.slot.state = place.health.state
            place.slot.inflight = place.inflight
        self._renew()

    def _keep(self, endpoint: Endpoint) -> Place:
        place = self.places.get(endpoint.id)
        if place is None:
            self._log.event("endpoint_added", endpoint=endpoint.name, url=endpoint.url)
            place = Place(self._named(endpoint), Health(self._clock()), EndpointSlot())
        elif place.configured != endpoint:
            place.endpoint = self._named(endpoint)  # what was learned is learned again by the next probe
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
        self._views = [self._view(p) for p in self._order]
        self._old.clear()
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
        place.health = step(before, event, now, self._failures, why)
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
        self._touch(place)
        if place.changed and before.serving and not place.health.serving:
            place.changed()  # ask at once whether it is back

    # -- what they have of ours ----------------------------------------------------------------------------------

    def take(self, place: Place, prefill: int, decode: int) -> None:
        """One more request, with so many tokens expected of it."""
        place.inflight += 1
        place.prefill_tokens += prefill
        place.decode_tokens += decode
        place.slot.inflight = place.inflight
        place.slot.requests += 1
        self._touch(place)

    def change(self, place: Place, prefill: int, decode: int) -> None:
        """Its expected tokens change by so many."""
        place.prefill_tokens += prefill
        place.decode_tokens += decode
        self._touch(place)

    def release(self, place: Place, prefill: int, decode: int) -> None:
        """One request less; what is left of its expected tokens goes with it."""
        place.inflight -= 1
        place.prefill_tokens -= prefill
        place.decode_tokens -= decode
        place.slot.inflight = place.inflight
        self._touch(place)

    def target(self, place: Place, asked: str) -> Target:
        """Where a request that asks for *asked* goes, with the model's name that this endpoint knows."""
        found = place.targets.get(asked)
        if found is None:
            known = asked
            for model in place.endpoint.models:
                if asked in model.aliases:
                    known = model.name
            found = target(place.endpoint, place.key, known if known != asked else "")
            if asked in self.models:  # else a client could fill the memory with names
                place.targets[asked] = found
        return found

    # -- what decisions see --------------------------------------------------------------------------------------

    def _view(self, place: Place) -> EndpointView:
        return EndpointView(
            health=place.health.state,
            since=place.health.since,
            inflight=place.inflight,
            prefill_tokens=place.prefill_tokens,
            decode_tokens=place.decode_tokens,
        )

    def _touch(self, place: Place) -> None:
        if place.index >= 0:
            self._old.add(place.index)

    def snapshot(self) -> Snapshot:
        """As of now."""
        for index in self._old:
            self._views[index] = self._view(self._order[index])
        self._old.clear()
        return Snapshot(self.revision, self._endpoints, tuple(self._views))

    def serving(self) -> Iterable[Place]:
        """Those that may get requests."""
        return (p for p in self._order if p.health.serving)
