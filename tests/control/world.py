"""A cluster in virtual time: agents that start and stop engines as they are told, and a server that reconciles.

No tasks and no clock: `Sim.run(seconds)` steps everything once a heartbeat. Engines take a while to start, and to stop.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import attrs
import msgspec

from llmgw.control.catalog import ModelSpec
from llmgw.control.nodes import accept
from llmgw.control.observed import (
    Answer,
    Desired,
    EndpointFacts,
    Failure,
    Observed,
    Run,
    RunState,
    Sync,
    digest,
)
from llmgw.control.reconcile import Clock, Step, desired, step
from llmgw.control.state import Cluster, Event, NodeRecord, Seen, Settings
from llmgw.placement.demand import Shape
from llmgw.placement.inventory import Inventory
from tests.placement.clusters import H100, QWEN72, inventory

WALL = 1_700_000_000.0


@attrs.define
class Engine:
    """A process on a node."""

    order: Desired
    state: RunState = "starting"
    age: float = 0.0
    failure: Failure | None = None
    life: int = 0


@attrs.define
class Agent:
    """What a node's agent does, without any I/O."""

    inventory: Inventory
    boot: str = "boot-0"
    life: str = "agent-0"
    start: float = 20.0
    stop: float = 5.0
    address: str = "10.0.0.1"
    engines: dict[str, Engine] = attrs.Factory(dict)
    connected: bool = True
    term: int = 0
    epochs: dict[str, int] = attrs.Factory(dict)
    refused: set[str] = attrs.Factory(set)
    dies: Failure | None = None  # every start ends like this
    sent: str = ""
    lives: int = 0

    def observed(self) -> Observed:
        return Observed(inventory=self.inventory, runs=tuple(self.run(e) for e in self.engines.values()))

    def run(self, e: Engine) -> Run:
        ready = EndpointFacts(url=f"http://{self.address}:{e.order.ports.base}") if e.state == "ready" else None
        return Run(
            replica=e.order.replica,
            model=e.order.model,
            epoch=e.order.epoch,
            generation=e.order.generation,
            state=e.state,
            engine=e.order.engine,
            start_id=str(e.life),
            gpus=e.order.gpus,
            endpoint=ready,
            failure=e.failure,
        )

    def sync(self, confirmed: str) -> Sync:
        body = self.observed()
        return Sync(
            node=self.inventory.node,
            boot=self.boot,
            agent=self.life,
            term=self.term,
            refused=tuple(sorted(self.refused)),
            digest=digest(body),
            observed=body if digest(body) != confirmed else None,
        )

    def obey(self, answer: Answer) -> None:
        if answer.term < self.term:
            return
        self.term = answer.term
        wanted = {}
        self.refused = set()
        for order in answer.desired:
            if order.epoch < self.epochs.get(order.replica, 0):
                self.refused.add(order.replica)
                continue
            self.epochs[order.replica] = order.epoch
            wanted[order.replica] = order
        for name, engine in list(self.engines.items()):
            if name not in wanted:
                if answer.settled and name not in self.refused:
                    self.end(name, engine)
                continue
            order = wanted[name]
            if order.goal == "stop":
                self.end(name, engine, keep=True)
            elif order.epoch > engine.order.epoch and self.end(name, engine):
                self.begin(order)
        for name, order in wanted.items():
            if name not in self.engines and order.goal == "run":
                self.begin(order)

    def begin(self, order: Desired) -> None:
        self.lives += 1
        self.engines[order.replica] = Engine(order, life=self.lives)

    def end(self, name: str, engine: Engine, *, keep: bool = False) -> bool:
        """True when nothing of it is left."""
        if engine.state in ("failed", "gone"):
            if not keep:
                del self.engines[name]
            return True
        if engine.state != "stopping":
            engine.state, engine.age = "stopping", 0.0
        return False

    def tick(self, seconds: float) -> None:
        for engine in self.engines.values():
            engine.age += seconds
            if engine.state == "starting" and engine.age >= self.start:
                engine.state, engine.failure = ("failed", self.dies) if self.dies else ("ready", None)
            elif engine.state == "stopping" and engine.age >= self.stop:
                engine.state = "gone"

    def using(self) -> list[tuple[str, str]]:
        """(GPU, replica) of every living process."""
        return [
            (gpu, e.order.replica)
            for e in self.engines.values()
            if e.state not in ("failed", "gone")
            for gpu in e.order.gpus
        ]


class Sim:
    """The server and its agents."""

    def __init__(self, agents: Iterable[Agent], specs: Iterable[ModelSpec] = (), **settings: Any) -> None:
        self.agents = {a.inventory.node: a for a in agents}
        self.specs = {s.name: s for s in specs}
        self.settings = Settings(**settings)
        self.cluster = Cluster(nodes={n: NodeRecord(name=n) for n in self.agents})
        self.now = 1000.0
        self.wall = WALL
        self.started = self.now
        self.term = 1
        self.seen: dict[str, Seen] = {}
        self.confirmed: dict[tuple[str, str, str], str] = {}
        self.rng = random.Random(7)
        self.inflight: dict[str, int] = {}
        self.events: list[Event] = []
        self.steps: list[Step] = []
        self.up = True

    def restart(self) -> None:
        """The server's process ends and another begins: only what was stored is left."""
        stored = msgspec.json.encode(self.cluster)
        self.cluster = msgspec.json.decode(stored, type=Cluster)
        self.seen, self.confirmed = {}, {}
        self.started = self.now

    def tick(self, seconds: float = 5.0) -> Step | None:
        self.now += seconds
        self.wall += seconds
        for agent in self.agents.values():
            agent.tick(seconds)
        if not self.up:
            return None
        for name, agent in self.agents.items():
            if agent.connected:
                sync = agent.sync(self.confirmed.get((name, agent.boot, agent.life), ""))
                found = accept(self.seen, sync, agent.address, self.now, self.settings)
                assert isinstance(found, Seen), found
                self.seen[name] = found
                self.confirmed[name, agent.boot, agent.life] = digest(found.observed) if found.observed else ""
        clock = Clock(now=self.now, wall=self.wall, started=self.started)
        result = step(self.cluster, self.specs, self.seen, clock, self.rng, self.settings, inflight=self.inflight)
        self.cluster = result.cluster
        self.events += result.events
        for name, agent in self.agents.items():
            if agent.connected:
                answer = Answer(term=self.term, revision=0, desired=desired(self.cluster, name), settled=result.settled)
                agent.obey(answer)
        self.check()
        return result

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / 5)):
            self.tick()

    def check(self) -> None:
        """What must hold at every instant."""
        held: dict[tuple[str, str], str] = {}
        for replica in self.cluster.replicas.values():
            if replica.assignment is None:
                assert replica.state == "pending"
                continue
            for node, gpus in zip(replica.assignment.nodes, replica.assignment.gpus, strict=True):
                for gpu in gpus:
                    assert held.setdefault((node, gpu), replica.id) == replica.id, f"{gpu} is assigned twice"
        for agent in self.agents.values():
            users: dict[str, str] = {}
            for gpu, replica_id in agent.using():
                assert users.setdefault(gpu, replica_id) == replica_id, f"{gpu} runs {users[gpu]} and {replica_id}"
        epochs = [r.epoch for r in self.cluster.replicas.values() if r.epoch]
        assert len(epochs) == len(set(epochs))
        assert all(r.state != "failed" or r.reason for r in self.cluster.replicas.values()), "refused without a reason"
        pending = [r for r in self.cluster.replicas.values() if r.state == "pending" and r.record is not None]
        for replica in pending:
            assert replica.record is not None
            rejected = [row for row in replica.record.rows if not row.group and not row.feasible]
            assert all(row.findings or any(v.ok is None for v in row.verdicts.values()) for row in rejected)

    def states(self, model: str = "") -> list[str]:
        return sorted(r.state for r in self.cluster.replicas.values() if model in ("", r.model))

    def quiet(self) -> bool:
        """Desired equals observed."""
        for name, agent in self.agents.items():
            want = {(d.replica, d.epoch) for d in desired(self.cluster, name) if d.goal == "run"}
            have = {(e.order.replica, e.order.epoch) for e in agent.engines.values() if e.state == "ready"}
            if want != have:
                return False
        return True

    def told(self, part: str) -> list[str]:
        return [f"{e.subject}: {e.text}" for e in self.events if part in e.text or part == e.subject]


def agents(count: int, gpus: int = 4, **more: Any) -> list[Agent]:
    return [Agent(inventory(f"n{i}", H100, gpus, **more)) for i in range(count)]


def model(name: str = "m", replicas: int = 1, tp: int = 4, **more: Any) -> ModelSpec:
    base: dict[str, Any] = {
        "engine": "vllm", "weights": QWEN72, "max_model_len": 32_768, "shapes": (Shape(tp=tp),), "grace": 60.0,
    }  # fmt: skip
    return ModelSpec(name=name, replicas=replicas, **{**base, **more})
