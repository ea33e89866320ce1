"""One round of reconciling: what shall be, what was remembered, what was seen → what is remembered now.

Level-triggered: a round looks at states, never at messages, so that it may run twice, late, or after a restart. It
decides; nothing happens until the shell has written the result (one transaction, compared against the leader's term),
and agents act on `desired` alone. Order of a round:

    brake → hear (what agents see) → returned nodes → wanted numbers → edits → drains → lost nodes → retries → place

While settling after a start of the server, and while the brake is on, it only hears: nothing is placed, moved or removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from llmgw.control import drain as drains
from llmgw.control.catalog import ModelSpec, fingerprint
from llmgw.control.launch import launch
from llmgw.control.nodes import brake, lost_for
from llmgw.control.observed import Desired, Fetch, Run, RunState, endpoint
from llmgw.control.state import (
    COMING,
    LEAVING,
    TRANSITIONS,
    Cluster,
    Event,
    Fault,
    Nomination,
    Replica,
    Seen,
    Settings,
    State,
)
from llmgw.endpoint import Endpoint, Model
from llmgw.placement import explain
from llmgw.placement.demand import Pending, natural
from llmgw.placement.inventory import GIB, Inventory
from llmgw.placement.snapshot import Exclusion, Learned, Node, Reservation, Snapshot
from llmgw.placement.solver import held, plan
from llmgw.placement.verdict import Record

if TYPE_CHECKING:
    import random

FAULTS = 12  # kept of a replica: three nodes with three failures each, and some
ROWS = 64  # of a stored decision: enough to see why, small enough for the store
VANISHED = "vanished"
REBOOTED = "node_rebooted"

_HEARD: dict[RunState, State] = {
    "fetching": "fetching",
    "starting": "starting",
    "canary": "canary",
    "ready": "ready",
}


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """Leases go by *now* and *started* (the server's monotonic clock), what is stored by *wall*."""

    now: float
    wall: float
    started: float


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a round."""

    cluster: Cluster
    events: tuple[Event, ...] = ()
    settled: bool = True


def step(
    cluster: Cluster,
    specs: Mapping[str, ModelSpec],
    seen: Mapping[str, Seen],
    clock: Clock,
    rng: random.Random,
    settings: Settings,
    *,
    inflight: Mapping[str, int] | None = None,
    template: Snapshot | None = None,
) -> Step:
    """One round. *inflight*: requests by replica, as the gateway counts them; *template*: what placement knows besides
    nodes and reservations (measurements, prices, probes)."""
    lost = lost_for(cluster, seen, clock.now, clock.started, settings)
    before = cluster.frozen
    cluster = brake(cluster, lost, settings)
    if before and not cluster.frozen:
        cluster = msgspec.structs.replace(cluster, thawed=clock.wall)
    work = _Round(cluster, specs, seen, clock, rng, settings, lost, inflight or {}, template or Snapshot())
    if cluster.frozen != before:
        work.event("brake", "cluster", cluster.frozen or "released: almost all nodes are back")
    work.generations()
    work.hear()
    settled = clock.now - clock.started >= settings.settle
    if settled and not cluster.frozen:
        work.returned()
        work.numbers()
        work.edits()
        work.drain()
        work.replace_lost()
        work.retries()
        work.place()
    return Step(cluster=work.result(), events=tuple(work.events), settled=settled)


def desired(cluster: Cluster, node: str) -> tuple[Desired, ...]:
    """All that *node* shall run. What it runs besides, it stops."""
    found = []
    for replica in cluster.replicas.values():
        if replica.assignment is None or node not in replica.assignment.nodes:
            continue
        order = replica.desired[replica.assignment.nodes.index(node)]
        goal = "stop" if replica.state in ("stopping", "failed") else "run"
        found.append(msgspec.structs.replace(order, epoch=replica.epoch, goal=goal, grace=replica.grace))
    return tuple(sorted(found, key=lambda d: natural(d.replica)))


def reservations(cluster: Cluster, specs: Mapping[str, ModelSpec], inflight: Mapping[str, int]) -> list[Reservation]:
    """What all replicas hold, in whatever state: a reservation ends with the assignment alone."""
    found = []
    for replica in cluster.replicas.values():
        if replica.assignment is None:
            continue
        spec = specs.get(replica.model)
        state = "ready" if replica.state == "ready" else "starting" if replica.state in COMING else "draining"
        pending = Pending(replica=replica.id, demand=spec or ModelSpec(name=replica.model, engine=""))
        for one in held(replica.assignment, pending, replica.since):
            found.append(
                msgspec.structs.replace(
                    one, state=state, surge=bool(replica.replaces), inflight=inflight.get(replica.id, 0)
                )
            )
    return found


def strays(cluster: Cluster, seen: Mapping[str, Seen]) -> list[Reservation]:
    """What runs somewhere and is remembered nowhere (or elsewhere): its GPUs are not free before its agent ended it."""
    found = []
    for name, known in seen.items():
        for run in known.observed.runs if known.observed else ():
            replica = cluster.replicas.get(run.replica)
            if run.state in ("gone", "failed") or (replica is not None and name in _nodes(replica)):
                continue
            ports = (run.ports.base, run.ports.count) if run.ports else (0, 0)
            found.append(
                Reservation(
                    replica=run.replica, model=run.model, node=name, gpus=run.gpus, ports=ports, state="draining"
                )
            )
    return found


def learned(cluster: Cluster, seen: Mapping[str, Seen]) -> list[Learned]:
    """What ready engines reported of their memory: the next placement of the same shape on the same type goes by it."""
    found: dict[tuple[str, str, str], int] = {}
    for name, known in seen.items():
        if known.observed is None:
            continue
        types = {d.uuid: d.name for d in known.observed.inventory.devices}
        for run in known.observed.runs:
            replica = cluster.replicas.get(run.replica)
            if (
                replica is None
                or replica.assignment is None
                or run.epoch != replica.epoch
                or name not in _nodes(replica)
            ):
                continue
            if run.measured is None or run.measured.weights is None or not run.gpus or run.gpus[0] not in types:
                continue
            key = (run.model, replica.assignment.shape, types[run.gpus[0]])
            most = max(run.measured.weights, found.get(key, 0))  # the heaviest rank counts
            found[key] = most
    return [Learned(model=m, shape=s, gpu=g, weights=w) for (m, s, g), w in sorted(found.items())]


def snapshot(
    cluster: Cluster,
    specs: Mapping[str, ModelSpec],
    seen: Mapping[str, Seen],
    lost: Mapping[str, float],
    wall: float,
    *,
    inflight: Mapping[str, int] | None = None,
    template: Snapshot | None = None,
) -> Snapshot:
    """What placement decides by; also for `ctl plan` and `explain-placement --now`."""
    nodes = []
    for name, record in cluster.nodes.items():
        known = seen.get(name)
        inventory = known.observed.inventory if known and known.observed else Inventory(node=name, checking=True)
        nodes.append(
            Node(
                inventory=inventory,
                version=known.version if known else 0,
                lost=lost.get(name),
                cordon=record.cordon,
                draining=record.draining,
                flaps=len(known.lapses) if known else 0,
            )
        )
    mix: dict[int, float] = {}
    for spec in specs.values():
        for shape in spec.shapes:
            if shape.share:
                mix[shape.share] = mix.get(shape.share, 0.0) + spec.replicas / len(spec.shapes)
    return msgspec.structs.replace(
        template or Snapshot(),
        at=wall,
        nodes=tuple(nodes),
        reservations=(*reservations(cluster, specs, inflight or {}), *strays(cluster, seen)),
        exclusions=tuple(e for e in cluster.exclusions.values() if e.until is None or e.until > wall),
        learned=(*(template.learned if template else ()), *learned(cluster, seen)),
        mix=tuple(sorted(mix.items())),
    )


def retry(cluster: Cluster, model: str) -> Cluster:
    """The operator says that the cause is cured: failures and exclusions of *model* are forgotten."""
    replicas = {
        r.id: msgspec.structs.replace(r, faults=(), retry_at=0.0) if r.model == model and r.state == "failed" else r
        for r in cluster.replicas.values()
    }
    kept = {k: e for k, e in cluster.exclusions.items() if e.model != model}
    return msgspec.structs.replace(cluster, replicas=replicas, exclusions=kept)


def release(cluster: Cluster) -> Cluster:
    """The operator says that the lost nodes are really lost: reschedule."""
    return msgspec.structs.replace(cluster, frozen="")


def forget(cluster: Cluster, node: str) -> Cluster:
    """*node* will not come back: what was there is gone, and replicas are made elsewhere."""
    replicas = {r.id: r for r in cluster.replicas.values() if node not in _nodes(r)}
    replicas = {
        r.id: r if r.replaces in replicas else msgspec.structs.replace(r, replaces="", why="")
        for r in replicas.values()
    }
    drop = {n: r for n, r in cluster.nodes.items() if n != node}
    drains_ = {n: d for n, d in cluster.drains.items() if n != node}
    return msgspec.structs.replace(cluster, replicas=replicas, nodes=drop, drains=drains_)


def endpoints(cluster: Cluster, seen: Mapping[str, Seen], models: Mapping[str, Model]) -> tuple[Endpoint, ...]:
    """What routing gets: every ready replica, and those of lost nodes, whose engines may well serve (routing probes them)."""
    found = []
    for replica in cluster.replicas.values():
        if replica.assignment is None or replica.state not in ("ready", "unknown"):
            continue
        known = seen.get(replica.assignment.nodes[0])
        if known is None or known.observed is None:
            continue
        model = models.get(replica.model) or Model(name=replica.model)
        for run in known.observed.runs:
            if (run.replica, run.epoch) == (replica.id, replica.epoch):
                made = endpoint(run, model, known.observed.inventory)
                found += [made] if made else []
    return tuple(sorted(found, key=lambda e: natural(e.name)))


class _Round:
    """The cluster while a round works on it."""

    def __init__(
        self,
        cluster: Cluster,
        specs: Mapping[str, ModelSpec],
        seen: Mapping[str, Seen],
        clock: Clock,
        rng: random.Random,
        settings: Settings,
        lost: Mapping[str, float],
        inflight: Mapping[str, int],
        template: Snapshot,
    ) -> None:
        self.cluster = cluster
        self.replicas = dict(cluster.replicas)
        self.nominations = {k: n for k, n in cluster.nominations.items() if n.until > clock.wall}
        self.exclusions = dict(cluster.exclusions)
        self.inputs = dict(cluster.inputs)
        self.serial = dict(cluster.serial)
        self.gens, self.built = dict(cluster.generations), dict(cluster.built)
        self.nodes, self.orders = dict(cluster.nodes), dict(cluster.drains)
        self.epoch = cluster.epoch
        self.specs, self.seen, self.settings = specs, seen, settings
        self.now, self.wall, self.rng = clock.now, clock.wall, rng
        self.lost, self.inflight, self.template = lost, inflight, template
        self.events: list[Event] = []

    def result(self) -> Cluster:
        return msgspec.structs.replace(
            self.cluster,
            replicas=self.replicas,
            nodes=self.nodes,
            drains=self.orders,
            nominations={k: n for k, n in self.nominations.items() if k in self.replicas},
            exclusions=self.exclusions,
            inputs=self.inputs,
            epoch=self.epoch,
            serial=self.serial,
            generations=self.gens,
            built=self.built,
        )

    # -- moves -------------------------------------------------------------------------------------------------------

    def event(self, kind: str, subject: str, text: str) -> None:
        self.events.append(Event(kind=kind, subject=subject, text=text, at=self.wall))

    def move(self, replica: Replica, state: State, reason: str = "", **changes: object) -> Replica:
        """*replica* in another state (or the same one with *changes*)."""
        if state != replica.state:
            assert state in TRANSITIONS[replica.state], f"{replica.id}: {replica.state} -> {state}"
            changes["since"] = self.wall
            self.event("replica", replica.id, f"{replica.state} -> {state}" + (f": {reason}" if reason else ""))
        made = msgspec.structs.replace(replica, state=state, reason=reason, **changes)
        self.replicas[replica.id] = made
        return made

    def remove(self, replica: Replica, why: str) -> None:
        del self.replicas[replica.id]
        self.nominations.pop(replica.id, None)
        self.event("replica", replica.id, f"{replica.state} -> gone" + (f": {why}" if why else ""))
        for other in list(self.replicas.values()):
            if other.replaces == replica.id:  # it stands for itself from now on
                self.replicas[other.id] = msgspec.structs.replace(other, replaces="", why="")

    def stop(self, replica: Replica, why: str) -> None:
        """It is not wanted any more: by way of drain if it serves."""
        if replica.state == "pending":
            self.remove(replica, why)
        elif replica.state in ("ready", "unknown"):
            self.move(replica, "draining", why)
        elif replica.state not in LEAVING:
            self.move(replica, "stopping", why)

    def create(self, spec: ModelSpec, *, replaces: str = "", why: str = "") -> Replica:
        number = self.serial[spec.name] = self.serial.get(spec.name, 0) + 1
        made = Replica(
            id=f"{spec.name}-{number}",
            model=spec.name,
            since=self.wall,
            created=self.wall,
            replaces=replaces,
            why=why,
            grace=spec.grace,
        )
        self.replicas[made.id] = made
        self.event("replica", made.id, "created" + (f" to replace {replaces}: {why}" if replaces else ""))
        return made

    def of(self, model: str) -> list[Replica]:
        return sorted((r for r in self.replicas.values() if r.model == model), key=lambda r: natural(r.id))

    def copy_of(self, replica: str) -> Replica | None:
        return next((r for r in self.replicas.values() if r.replaces == replica), None)

    # -- what was edited and what was seen ---------------------------------------------------------------------------

    def generations(self) -> None:
        for name, spec in self.specs.items():
            digest = "".join(fingerprint(spec, shape) for shape in spec.shapes)
            if self.built.get(name) != digest:
                self.built[name] = digest
                self.gens[name] = self.gens.get(name, 0) + 1
        for name in [n for n in self.gens if n not in self.specs and not self.of(n)]:
            self.gens.pop(name), self.built.pop(name, None), self.serial.pop(name, None)
        for key, exclusion in list(self.exclusions.items()):
            ended = exclusion.until is not None and exclusion.until <= self.wall
            changed = exclusion.until is None and self.inputs.get(key) != self.input(exclusion.model, exclusion.node)
            if ended or (changed and exclusion.node not in self.lost):
                del self.exclusions[key]
                self.inputs.pop(key, None)

    def input(self, model: str, node: str) -> str:
        """What a deterministic failure depends on: the model's specification, and what its node has to run it with."""
        known = self.seen.get(node)
        spec = self.specs.get(model)
        if known is None or known.observed is None:
            return self.inputs.get(f"{model} {node}", "")  # nothing new is known
        inventory = known.observed.inventory
        refs = {spec.weights_of(s) for s in spec.shapes} if spec else set()
        parts = (
            self.built.get(model, ""),
            inventory.driver,
            repr(sorted(inventory.engines, key=lambda e: e.name)),
            repr(sorted((w.ref, w.digest, w.problem) for w in inventory.weights if w.ref in refs)),
            repr(sorted(c.id for c in inventory.checks if not c.ok)),
        )
        return "|".join(parts)

    def hear(self) -> None:
        """Bring every placed replica to what its agents see."""
        for replica in list(self.replicas.values()):
            if replica.assignment is None:
                continue
            nodes = replica.assignment.nodes
            away = [n for n in nodes if n in self.lost]
            if away:
                if replica.state in COMING or replica.state == "ready":
                    self.move(replica, "unknown", f"no heartbeat from {', '.join(away)}")
                continue
            known = [self.seen.get(n) for n in nodes]
            if any(k is None or k.observed is None for k in known):
                continue  # joined, but has not told yet
            self.heard(replica, [k for k in known if k is not None])

    def heard(self, replica: Replica, known: list[Seen]) -> None:
        runs = [self.run(k, replica.id) for k in known]
        current = [r for r in runs if r is not None and r.epoch == replica.epoch]
        boots = tuple(k.boot for k in known)
        if replica.state in LEAVING:
            self.leaving(replica, runs)
        elif replica.state == "failed":
            return
        elif len(current) == len(runs):
            self.alive(replica, current, boots)
        elif replica.seen:  # it was there
            node = next(n for n, r in zip(_nodes(replica), runs, strict=True) if r is None or r.epoch != replica.epoch)
            rebooted = bool(replica.boots) and boots != replica.boots
            cause, text = (REBOOTED, "its node has rebooted") if rebooted else (VANISHED, "its process is gone")
            self.fault(replica, node, cause, f"{text} ({node})", deterministic=False)
        elif replica.state == "unknown":
            self.move(replica, "placed", "its node is back")

    def run(self, known: Seen, replica: str) -> Run | None:
        runs = known.observed.runs if known.observed else ()
        return next((r for r in runs if r.replica == replica), None)

    def alive(self, replica: Replica, runs: list[Run], boots: tuple[str, ...]) -> None:
        for run, node in zip(runs, _nodes(replica), strict=True):
            if run.state in ("failed", "gone", "stopping"):
                failure = run.failure
                if failure is None:
                    self.fault(replica, node, "ended", f"its process has ended ({node})", deterministic=False)
                else:
                    text = f"{failure.cause}: {failure.message} ({node})"
                    self.fault(replica, node, failure.cause, text, deterministic=failure.deterministic)
                return
        slowest = min(runs, key=lambda r: _ORDER.index(r.state))
        state = _HEARD[slowest.state]
        reason = _progress(slowest.fetch) if slowest.fetch and state == "fetching" else slowest.detail
        if state == "ready":
            reason = ""
        faults = replica.faults
        if state == "ready" and replica.state == "ready" and self.wall - replica.since >= self.settings.healthy_after:
            faults = ()
        if (state, reason, boots, True, faults) != (
            replica.state, replica.reason, replica.boots, replica.seen, replica.faults,
        ):  # fmt: skip
            replica = self.move(replica, state, reason, boots=boots, seen=True, faults=faults, retry_at=None)
        if state == "ready" and replica.replaces:
            self.relieve(replica)

    def relieve(self, copy: Replica) -> None:
        """The copy is ready: the one that it stands in for may go."""
        old = self.replicas.get(copy.replaces)
        self.replicas[copy.id] = msgspec.structs.replace(copy, replaces="", why="")
        if old is not None:
            self.stop(old, f"{copy.id} is ready in its place")

    def leaving(self, replica: Replica, runs: list[Run | None]) -> None:
        if all(r is None or r.state in ("gone", "failed") for r in runs):
            self.remove(replica, "")
        elif replica.state == "draining":
            left = self.inflight.get(replica.id, 0)
            waited = self.wall - replica.since
            if left == 0 or waited >= replica.grace:
                cut = f"{left} requests still in flight after {waited:.0f} s" if left else ""
                self.move(replica, "stopping", cut or replica.reason)
            else:
                self.move(replica, "draining", replica.reason)

    def fault(self, replica: Replica, node: str, cause: str, text: str, *, deterministic: bool) -> None:
        """It has failed on *node*: again there, elsewhere, or not at all."""
        settings = self.settings
        faults = (*replica.faults, Fault(node=node, cause=cause, deterministic=deterministic, at=self.wall))[-FAULTS:]
        if cause == REBOOTED:
            self.move(replica, "failed", text, retry_at=self.wall)
            return
        here = [f for f in faults if f.node == node]
        same = 0
        for one in reversed(here):
            if one.cause != cause:
                break
            same += 1
        key = f"{replica.model} {node}"
        retry_at: float | None = None
        if deterministic:
            self.exclusions[key] = Exclusion(model=replica.model, node=node, until=None, why=text)
            self.inputs[key] = self.input(replica.model, node)
        elif same >= settings.same_cause:
            until = self.wall + settings.exclude
            self.exclusions[key] = Exclusion(model=replica.model, node=node, until=until, why=f"{same} times {text}")
        else:
            delay = min(settings.backoff * 2 ** (len(here) - 1), settings.backoff_cap)
            retry_at = self.wall + delay * (1 + settings.jitter * self.rng.uniform(-1, 1))
        if len({f.node for f in faults}) >= settings.failing_nodes and retry_at is None:
            text = (
                f"failing: on {settings.failing_nodes} nodes, last {text}; `llmgw ctl retry {replica.model}` when cured"
            )
            self.event("model", replica.model, text)
        elif retry_at is None:
            retry_at = self.wall  # elsewhere, at once
        self.move(replica, "failed", text, faults=faults, retry_at=retry_at)

    # -- what shall be -----------------------------------------------------------------------------------------------

    def returned(self) -> None:
        """A node is back whose replica had a copy made: if the old one serves, or is about to, the copy goes; else it does."""
        for copy in list(self.replicas.values()):
            old = self.replicas.get(copy.replaces)
            if not copy.why.endswith(" lost") or old is None:
                continue
            if old.state in COMING or old.state == "ready":
                self.stop(copy, f"{old.id} is back")
            elif old.state == "failed":
                self.stop(old, f"{copy.id} comes in its place")

    def numbers(self) -> None:
        """As many replicas as the catalogue says; copies and those that leave are not counted."""
        for name in sorted({r.model for r in self.replicas.values()} | set(self.specs)):
            spec = self.specs.get(name)
            standing = [r for r in self.of(name) if not r.replaces and r.state not in LEAVING]
            want = spec.replicas if spec else 0
            for _ in range(want - len(standing)):
                assert spec is not None
                self.create(spec)
            for replica in sorted(standing, key=self.worth)[: max(0, len(standing) - want)]:
                copy = self.copy_of(replica.id)
                if copy is not None:
                    self.stop(copy, "not wanted any more")
                self.stop(replica, "more than the catalogue says" if spec else "the model is not in the catalogue")

    def worth(self, replica: Replica) -> tuple[int, int, float]:
        """Whom to lose first: what does not run, what is not ready, old builds, the youngest."""
        order = ("pending", "failed", "unknown", "placed", "fetching", "starting", "canary", "ready")
        spec = self.specs.get(replica.model)
        return (order.index(replica.state), 0 if spec and self.outdated(replica, spec) else 1, -replica.created)

    def outdated(self, replica: Replica, spec: ModelSpec) -> bool:
        if replica.assignment is None:
            return False
        shape = spec.shape(replica.assignment.shape)
        return shape is None or fingerprint(spec, shape) != replica.fingerprint

    def edits(self) -> None:
        """Replicas that were started with something else are replaced: what does not serve at once, the rest in turn."""
        for name, spec in self.specs.items():
            for replica in self.of(name):
                if replica.state in LEAVING or not self.outdated(replica, spec):
                    continue
                if replica.state in COMING:
                    self.stop(replica, "the model was edited")
                elif replica.state == "failed":
                    self.replicas[replica.id] = msgspec.structs.replace(replica, faults=(), retry_at=self.wall)
                elif replica.state == "ready" and not self.surging(name):
                    self.create(spec, replaces=replica.id, why="edit")

    def surging(self, model: str) -> bool:
        return any(r.replaces for r in self.of(model))

    def drain(self) -> None:
        for node in sorted(self.orders):
            order = self.orders[node]
            if order.finished:
                continue
            here = [r for r in self.replicas.values() if r.assignment and node in r.assignment.nodes]
            order, moves = drains.advance(order, here, self.replicas.values(), self.specs)
            for move in moves:
                replica = self.replicas[move.replica]
                spec = self.specs.get(replica.model)
                if move.surge and spec is not None:
                    self.create(spec, replaces=replica.id, why=f"drain {node}")
                else:
                    self.stop(replica, f"drain {node}")
            if order != self.orders[node] and (order.finished or order.blocked != self.orders[node].blocked):
                self.event("drain", node, order.blocked or f"done: {', '.join(order.done) or 'nothing to move'}")
            self.orders[node] = order
            if order.finished and node in self.nodes:
                self.nodes[node] = msgspec.structs.replace(self.nodes[node], draining=False)

    def replace_lost(self) -> None:
        if self.wall - self.cluster.thawed < self.settings.settle:
            return
        for replica in list(self.replicas.values()):
            spec = self.specs.get(replica.model)
            if replica.state != "unknown" or spec is None or self.copy_of(replica.id) or replica.assignment is None:
                continue
            away = [(self.lost[n], n) for n in replica.assignment.nodes if n in self.lost]
            if away and max(away)[0] + self.settings.lost_after >= self.settings.reschedule_after:
                self.create(spec, replaces=replica.id, why=f"{max(away)[1]} lost")

    def retries(self) -> None:
        """Failed ones whose time has come: again on the same GPUs, or elsewhere. First everything of them must be gone."""
        for replica in list(self.replicas.values()):
            if replica.state != "failed" or replica.retry_at is None or replica.retry_at > self.wall:
                continue
            nodes = _nodes(replica)
            if any(n in self.lost or (n in self.seen and self.rest(n, replica.id)) for n in nodes):
                continue
            spec = self.specs.get(replica.model)
            there = [f"{replica.model} {n}" in self.exclusions or self.closed(n) for n in nodes]
            if any(there) or len(nodes) > 1 or spec is None or self.outdated(replica, spec):
                self.move(
                    replica,
                    "pending",
                    f"was: {replica.reason}",
                    assignment=None,
                    desired=(),
                    seen=False,
                    boots=(),
                    retry_at=None,
                )
            else:
                self.epoch += 1
                self.move(
                    replica, "placed", f"again after {replica.reason}", epoch=self.epoch, seen=False, retry_at=None
                )

    def rest(self, node: str, replica: str) -> bool:
        """Does anything of it still run there?"""
        run = self.run(self.seen[node], replica)
        return run is not None and run.state not in ("gone", "failed")

    def closed(self, node: str) -> bool:
        record = self.nodes.get(node)
        return record is None or record.cordon is not None or record.draining

    # -- placing -----------------------------------------------------------------------------------------------------

    def place(self) -> None:
        waiting = [r for r in self.replicas.values() if r.state == "pending" and r.model in self.specs]
        if not waiting:
            return
        shot = snapshot(
            self.result(), self.specs, self.seen, self.lost, self.wall, inflight=self.inflight, template=self.template
        )
        named = [r for r in waiting if r.id in self.nominations]
        for replica in sorted(named, key=lambda r: natural(r.id)):  # each sees the others' nominations, not its own
            shot = self.commit(shot, [replica])
        rest = [r for r in waiting if r.id not in self.nominations]
        rest.sort(
            key=lambda r: (-self.specs[r.model].priority, r.record.at if r.record else 0.0, r.created, natural(r.id))
        )
        if rest:
            self.commit(shot, rest[: self.settings.placements])

    def commit(self, shot: Snapshot, replicas: Iterable[Replica]) -> Snapshot:
        """Place *replicas*; the snapshot with what they hold then."""
        by = {r.id: r for r in replicas}
        others = [n for n in self.nominations.values() if n.replica not in by]
        nominated = tuple(
            Reservation(replica=n.replica, model=n.model, node=n.node, gpus=n.gpus, state="nominated") for n in others
        )
        wanted = [Pending(replica=r.id, demand=self.specs[r.model], created=r.created) for r in by.values()]
        seeing = msgspec.structs.replace(shot, reservations=shot.reservations + nominated)
        taken: list[Reservation] = []
        for record in plan(seeing, wanted):
            replica = by[record.replica]
            if record.assignment is None:
                self.refused(replica, record)
                continue
            taken += self.placed(replica, record)
        return msgspec.structs.replace(shot, reservations=(*shot.reservations, *taken))

    def placed(self, replica: Replica, record: Record) -> list[Reservation]:
        assignment = record.assignment
        assert assignment is not None
        spec = self.specs[replica.model]
        shape = spec.shape(assignment.shape)
        assert shape is not None
        self.epoch += 1
        self.nominations.pop(replica.id, None)
        generation = self.gens.get(spec.name, 1)
        inventories = [k.observed.inventory for n in assignment.nodes if (k := self.seen.get(n)) and k.observed]
        self.move(
            replica,
            "placed",
            explain.summary(record),
            epoch=self.epoch,
            generation=generation,
            fingerprint=fingerprint(spec, shape),
            assignment=assignment,
            desired=launch(spec, shape, assignment, self.epoch, generation, inventories),
            seen=False,
            boots=(),
            grace=spec.grace,
            record=record.trimmed(ROWS),
        )
        return held(assignment, Pending(replica=replica.id, demand=spec), self.wall)

    def refused(self, replica: Replica, record: Record) -> None:
        reason = explain.summary(record)
        if reason != replica.reason:
            self.event("replica", replica.id, f"pending: {reason}")
        self.move(replica, "pending", reason, record=record.trimmed(ROWS))
        found = record.preemption
        if found is None or not found.possible or replica.id in self.nominations:
            return
        self.nominations[replica.id] = Nomination(
            replica=replica.id,
            model=replica.model,
            node=found.node,
            gpus=found.gpus,
            until=self.wall + self.settings.nomination,
        )
        for victim in found.victims:
            if victim in self.replicas:
                self.preempt(self.replicas[victim], replica.id)

    def preempt(self, victim: Replica, by: str) -> None:
        """It leaves, and comes back as a pending one: the catalogue still wants it."""
        self.stop(victim, f"preempted by {by}")


_ORDER: tuple[RunState, ...] = ("fetching", "starting", "canary", "ready")


def _nodes(replica: Replica) -> tuple[str, ...]:
    return replica.assignment.nodes if replica.assignment else ()


def _progress(fetch: Fetch) -> str:
    total = f" of {fetch.total / GIB:.1f}" if fetch.total is not None else ""
    return f"fetched {fetch.done / GIB:.1f}{total} GiB"
