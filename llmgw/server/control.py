"""The control loop: hears agents, reconciles, writes what was decided, tells the router which replicas are ready.

    agents ──sync──► seen (memory) ─┐
    operators ──change──► store ────┼──► reconcile (pure) ──► store, compared ──► cluster ──► desired → agents
    time ───────────────────────────┘                                               └──► endpoints → router

    standby ──elected──► reading ──► leading ──term lost──► standby

Invariants: one writer (`_lock`), and nothing is acted upon before it is written; while leading, `cluster` is what the
store holds; heartbeats and load are never written; no request of a client waits for any of this, and when the store
does not answer the router keeps what it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs
import msgspec
import trio

from llmgw.catalogue import CatalogueModel
from llmgw.config import ModelPolicy
from llmgw.control.nodes import accept, lost_for
from llmgw.control.observed import Answer, Sync, digest
from llmgw.control.reconcile import Clock, desired, endpoints, snapshot, step
from llmgw.control.state import Cluster, Event, NodeRecord, Replica, Seen, Settings
from llmgw.endpoint import EndpointSink
from llmgw.errors import LlmgwError, Unavailable
from llmgw.logs import Log
from llmgw.net.world import World
from llmgw.placement.snapshot import Learned, Snapshot
from llmgw.server.control_rows import State, batches, load
from llmgw.stores.base import NotLeader, Store
from llmgw.stores.leader import LEADER, Fenced, lead

EVENTS = 2_000  # kept for `ctl events`: hours of a busy cluster
PAUSE = 0.25  # seconds between two rounds, however much agents have to say
RETRY = 1.0  # seconds while the store does not answer
TRIES = 5  # of a change that others overtake
WRITE_SECONDS = 15.0  # for a store to take a transaction: a leader's lease

Edit = Callable[[State], State]


class ControlError(LlmgwError):
    """Something asked of the control plane that it does not do now. *reason*: a code of `llmgw.reasons`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Overtaken(Exception):
    """Somebody else has written one of the rows."""


class Load(Protocol):
    """How much of ours an endpoint has to do."""

    def __call__(self, endpoint_id: str, /) -> int: ...


@attrs.frozen
class Told:
    """An event with its number; numbers rise by one."""

    number: int
    event: Event


class Control:
    """One server's control plane. *policies*: where it puts the routing policies of the catalogue's models."""

    def __init__(
        self,
        world: World,
        log: Log,
        sink: EndpointSink,
        load_of: Load,
        policies: dict[str, ModelPolicy],
        settings: Settings | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self.state = State(Cluster(), {})
        self.seen: dict[str, Seen] = {}
        self.term = 0  # 0 = not leading
        self.started = 0.0  # when this term began, monotonic
        self.settled = False
        self.leader = ""  # who leads, where it is known that it is somebody else
        self.revision = 0  # rises with every change of what the API shows
        self.events: deque[Told] = deque(maxlen=EVENTS)
        self.changed = trio.Event()  # set and replaced when `revision` rises
        self.keys: dict[str, str] = {}  # replica → the key that its engine asks for; in memory only
        self._world, self._log, self._sink, self._load = world, log, sink, load_of
        self._policies = policies
        self.own(frozenset(policies))
        self._digests: dict[str, str] = {}
        self._published: tuple[object, ...] | None = None
        self._served: dict[str, str] = {}  # endpoint id → replica, as long as the replica is known
        self._lock = trio.Lock()
        self._wake = trio.Event()
        self._store: Fenced | None = None
        self._rows: dict[str, Any] = {}
        self._revisions: dict[str, int] = {}
        self._silent = False  # the store does not answer
        self._refused: set[str] = set()  # replicas whose epoch their agent finds too low
        self._lifted: set[str] = set()  # of these, the ones that got a new epoch in this term: it is above all others

    # -- leading -----------------------------------------------------------------------------------------------------

    def own(self, names: frozenset[str]) -> None:
        """Models that the server's file defines: the catalogue's policies do not replace them."""
        self._own_policies = names

    async def run(self, store: Store, name: str) -> None:
        """Stand for election and lead, again and again, until cancelled. *name*: what standbys say of this server."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_leader, store)
            while True:
                try:
                    await lead(store, name, self._lead)
                except NotLeader as error:
                    self._log.event("control_lost", "warning", why=str(error))
                except Unavailable as error:
                    self._unreachable(error)
                    await trio.sleep(RETRY)

    async def _watch_leader(self, store: Store) -> None:
        """For standbys' answers; looked at as often as a leader can change."""
        while True:
            if not self.term:
                try:
                    entry = await store.get(LEADER)
                    self.leader = entry.value.decode() if entry else ""
                except Unavailable:
                    self.leader = ""
            await trio.sleep(self.settings.heartbeat)

    async def _lead(self, store: Fenced) -> None:
        self._store = store
        try:
            await self._read()
            self._refused, self._lifted = set(), set()
            now = trio.current_time()
            self.started, self.settled = now, False
            # Who was heard in an earlier term of ours has spoken to somebody else since.
            self.seen = {name: msgspec.structs.replace(s, at=now) for name, s in self.seen.items()}
            self.term = store.term
            self._log.event("control_leads", term=self.term, models=len(self.state.models))
            while True:
                await self.tick()
                with trio.move_on_after(self.settings.heartbeat):
                    await self._wake.wait()
                self._wake = trio.Event()
                await trio.sleep(PAUSE)
        except NotLeader:
            return  # `lead` tells
        finally:
            self.term, self._store = 0, None

    async def _read(self) -> None:
        while True:
            try:
                await self._reload()
            except Unavailable as error:
                self._unreachable(error)
                await trio.sleep(RETRY)
            else:
                return

    async def _reload(self) -> None:
        assert self._store is not None
        term = self._store.term
        found = await self._store.range("/")
        state, self._revisions = load(found.entries)
        self._rows = state.rows()
        # A store that was restored has an old epoch; revisions, of which terms are made, are never used twice.
        cluster = msgspec.structs.replace(state.cluster, epoch=max(state.cluster.epoch, term))
        self._adopt(State(cluster, state.models))

    def _unreachable(self, error: Unavailable) -> None:
        if not self._silent:
            self._silent = True
            self._log.event("store_unreachable", "error", why=str(error))

    # -- agents ------------------------------------------------------------------------------------------------------

    def sync(self, sync: Sync, address: str) -> Answer:
        """One heartbeat. Raises ControlError: not leading, or another machine under a living node's name."""
        received = self._world.wall()
        self._must_lead()
        before = self.seen.get(sync.node)
        found = accept(self.seen, sync, address, trio.current_time(), self.settings)
        if isinstance(found, str):
            if not any(t.event.text == found for t in list(self.events)[-50:]):
                self.note([Event(kind="node", subject=sync.node, text=found, at=received)])
            raise ControlError("conflict", found)
        self.seen[sync.node] = found
        if before is None or before.observed is not found.observed:
            self._digests[sync.node] = digest(found.observed) if found.observed else ""
            self._tell()
        if before is None or before.version != found.version or before.boot != found.boot:
            self._wake.set()
        if refused := set(sync.refused) - self._lifted:
            self._refused |= refused
            self._wake.set()
        return Answer(
            term=self.term,
            revision=self.revision,
            digest=self._digests[sync.node],
            desired=desired(self.state.cluster, sync.node),
            settled=self.settled,
            weights=self._weights(),
            heartbeat=self.settings.heartbeat,
            received=received,
            sent=self._world.wall(),
        )

    def _weights(self) -> tuple[str, ...]:
        refs = {m.weights_of(s) for m in self.state.models.values() for s in m.shapes}
        return tuple(sorted(refs - {""}))

    # -- rounds ------------------------------------------------------------------------------------------------------

    async def tick(self) -> None:
        """One round. A store that does not answer, or somebody who writes meanwhile, makes it come to nothing."""
        async with self._lock:
            lifted = set(self._refused)
            cluster = self._joined(self.state.cluster)
            result = step(
                cluster,
                self.state.models,
                self.seen,
                self.clock(),
                self._world.rng,
                self.settings,
                inflight=self.inflight(),
                template=self.template(),
            )
            try:
                await self._commit(State(result.cluster, self.state.models))
            except Unavailable as error:
                self._unreachable(error)
            except _Overtaken:
                await self._again()
            else:
                self._lifted |= lifted
                self._refused -= lifted
                self.settled = result.settled
                self.note(result.events)
        self._publish()

    async def _again(self) -> None:
        try:
            await self._reload()
        except Unavailable as error:
            self._unreachable(error)
        self._wake.set()

    def _joined(self, cluster: Cluster) -> Cluster:
        """With nodes that have reported for the first time, and with new epochs where agents have seen higher ones."""
        fresh = {n: NodeRecord(name=n) for n in self.seen if n not in cluster.nodes}
        if fresh:
            cluster = msgspec.structs.replace(cluster, nodes=cluster.nodes | fresh)
        for name in sorted(self._refused & cluster.replicas.keys()):
            epoch = cluster.epoch + 1
            made = msgspec.structs.replace(cluster.replicas[name], epoch=epoch)
            cluster = msgspec.structs.replace(cluster, replicas=cluster.replicas | {name: made}, epoch=epoch)
        return cluster

    def clock(self) -> Clock:
        return Clock(now=trio.current_time(), wall=self._world.wall(), started=self.started)

    async def change(self, edit: Edit, *events: Event) -> State:
        """Make *edit* and write it; the new state. *edit* may be made again on what somebody else has written.

        Raises ControlError, and what *edit* raises.
        """
        for _ in range(TRIES):
            async with self._lock:
                self._must_lead()
                made = edit(self.state)
                try:
                    await self._commit(made)
                except _Overtaken:
                    await self._again()
                    continue
                except NotLeader as error:
                    raise ControlError("control_unavailable", f"{error}; ask again") from error
                except Unavailable as error:
                    self._unreachable(error)
                    raise ControlError("control_unavailable", f"the store does not answer: {error}") from error
                self.note(events)
                self._wake.set()
                return made
        raise ControlError("conflict", "others are changing the same things; ask again")

    def _must_lead(self) -> None:
        if not self.term:
            who = f"; {self.leader} does" if self.leader else ""
            raise ControlError("control_unavailable", f"this server does not lead the control plane{who}")

    async def _commit(self, state: State) -> None:
        """Write the difference, compared row by row, under the leader's fence. Raises _Overtaken, Unavailable, NotLeader."""
        rows = state.rows()
        store = self._store
        if store is None:
            raise NotLeader("the term is over")
        for batch in batches(self._rows, rows, self._revisions):
            with trio.move_on_after(WRITE_SECONDS) as patience:
                done = await store.txn(batch.compares, batch.ops)
            if patience.cancelled_caught:
                raise _Overtaken  # nobody knows whether it was written: read
            if not done.succeeded:
                raise _Overtaken
            for op in batch.ops:
                if op.key in rows:
                    self._rows[op.key], self._revisions[op.key] = rows[op.key], done.revision
                else:
                    self._rows.pop(op.key), self._revisions.pop(op.key)
        self._silent = False
        self._adopt(state)

    def _adopt(self, state: State) -> None:
        before, self.state = self.state, state
        if state.models is not before.models:
            own = self._own_policies
            for name in [n for n in self._policies if n not in own]:
                del self._policies[name]
            self._policies.update({n: m.routing for n, m in state.models.items() if n not in own})
            self._published = None
        if state != before:
            self._tell()

    def note(self, events: Any) -> None:
        """Keep *events* for `ctl events`, and log them."""
        for event in events:
            number = self.events[-1].number + 1 if self.events else 1
            self.events.append(Told(number, event))
            self._log.event(f"control_{event.kind}", subject=event.subject, message=event.text)
        if events:
            self._tell()

    def _tell(self) -> None:
        self.revision += 1
        self.changed.set()
        self.changed = trio.Event()

    # -- the router --------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        made = endpoints(self.state.cluster, self.seen, {n: m.model() for n, m in self.state.models.items()})
        replicas = self.state.cluster.replicas
        self._served = {i: r for i, r in self._served.items() if r in replicas} | {e.id: e.replica for e in made}
        if made == self._published:
            return
        self._published = made
        self.keys = {
            run.replica: run.endpoint.api_key
            for known in self.seen.values()
            for run in (known.observed.runs if known.observed else ())
            if run.endpoint is not None and run.replica in replicas
        }
        self._sink.replace("catalogue", made)

    def inflight(self) -> dict[str, int]:
        """Requests by replica, also of those that get no more."""
        found: dict[str, int] = {}
        for endpoint, replica in self._served.items():
            found[replica] = found.get(replica, 0) + self._load(endpoint)
        return found

    # -- what placement sees -----------------------------------------------------------------------------------------

    def template(self) -> Snapshot:
        """What was learned from engines that run: their own figures replace estimates."""
        found = {}
        for known in self.seen.values():
            if known.observed is None:
                continue
            names = {d.uuid: d.name for d in known.observed.inventory.devices}
            for run in known.observed.runs:
                replica = self.state.cluster.replicas.get(run.replica)
                told = run.measured.weights if run.measured else None
                if replica is None or replica.assignment is None or told is None or not run.gpus:
                    continue
                gpu = names.get(run.gpus[0], "")
                key = (run.model, replica.assignment.shape, gpu)
                found[key] = Learned(model=run.model, shape=replica.assignment.shape, gpu=gpu, weights=told)
        return Snapshot(revision=self.revision, learned=tuple(found[k] for k in sorted(found)))

    def lost(self) -> dict[str, float]:
        """Nodes whose lease lapsed → seconds since."""
        return lost_for(self.state.cluster, self.seen, trio.current_time(), self.started, self.settings)

    def snapshot(self, models: Mapping[str, CatalogueModel] | None = None) -> Snapshot:
        """What a decision made now would see."""
        return snapshot(
            self.state.cluster,
            self.state.models if models is None else models,
            self.seen,
            self.lost(),
            self._world.wall(),
            inflight=self.inflight(),
            template=self.template(),
        )

    def replicas_of(self, model: str) -> list[Replica]:
        return [r for r in self.state.cluster.replicas.values() if r.model == model]
