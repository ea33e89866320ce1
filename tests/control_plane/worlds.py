"""The real control loop on the memory store in virtual time, and a hundred agents that speak to it as agents do."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import msgspec
import trio

from llmgw.catalogue import CatalogueModel
from llmgw.config import ModelPolicy
from llmgw.control.observed import Observed, Sync, digest
from llmgw.control.reconcile import desired
from llmgw.control.state import LEAVING, Event, Settings
from llmgw.endpoint import Endpoint
from llmgw.logs import Log
from llmgw.placement.demand import Shape
from llmgw.placement.inventory import Inventory
from llmgw.server.control import Control, ControlError
from llmgw.server.control_rows import State
from llmgw.stores.base import Store
from llmgw.stores.memory import MemoryStore
from tests.control.world import WALL, Agent
from tests.placement.clusters import A100, H100, H200, RTX4090, inventory, qwen, small
from tests.server.worlds import Lines

HEARTBEAT = 5.0


class Wall:
    """What a control loop takes from its surroundings: chance and wall time, which follows the virtual clock."""

    def __init__(self) -> None:
        self.rng = random.Random(7)

    def wall(self) -> float:
        return WALL + trio.current_time()

    async def listen(self, address: object) -> Any:
        raise AssertionError("a control loop does not listen")

    async def dial(self, address: object) -> Any:
        raise AssertionError("a control loop does not dial")

    async def resolve(self, host: str, port: int) -> Any:
        raise AssertionError("a control loop does not resolve")


@attrs.define
class Router:
    """What the router was told, and what it has under way."""

    endpoints: tuple[Endpoint, ...] = ()
    calls: int = 0
    load: dict[str, int] = attrs.Factory(dict)

    def replace(self, source: str, endpoints: tuple[Endpoint, ...]) -> None:
        assert source == "catalogue"
        self.endpoints = endpoints
        self.calls += 1

    def names(self) -> list[str]:
        return [e.name for e in self.endpoints]


@attrs.define
class Process:
    """One life of a server's process."""

    control: Control
    router: Router
    scope: trio.CancelScope
    policies: dict[str, ModelPolicy]


@attrs.define
class Site:
    """Agents in tasks, one server (or several) on one store. Every instant is checked where an agent hears something."""

    nursery: trio.Nursery
    store: Store
    agents: dict[str, Agent]
    settings: Settings
    servers: list[Process] = attrs.Factory(list)
    digests: dict[str, tuple[Observed, str]] = attrs.Factory(dict)
    floors: dict[str, int] = attrs.Factory(dict)  # model → ready replicas that must be there now
    past: list[Event] = attrs.Factory(list)  # of servers that have ended

    async def start(self, store: Store | None = None, name: str = "server") -> Process:
        router, policies = Router(), {"static": ModelPolicy()}
        control = Control(
            Wall(), Log(Lines(), lambda: 0.0), router, lambda e: router.load.get(e, 0), policies, self.settings
        )
        process = Process(control, router, trio.CancelScope(), policies)

        async def live() -> None:
            with process.scope:
                await control.run(store or self.store, name)

        self.nursery.start_soon(live)
        self.servers.append(process)
        return process

    def stop(self, process: Process) -> None:
        """As by kill -9: nothing of it is left but what it has written."""
        process.scope.cancel("killed")
        self.servers.remove(process)
        self.past += [t.event for t in process.control.events]

    @property
    def control(self) -> Control:
        return next((p.control for p in self.servers if p.control.term), self.servers[0].control)

    @property
    def router(self) -> Router:
        return next(p.router for p in self.servers if p.control is self.control)

    async def live(self, agent: Agent, phase: float) -> None:
        """An agent: syncs once a heartbeat, tries servers in turn, obeys."""
        await trio.sleep(phase)
        confirmed = ""
        while True:
            agent.tick(HEARTBEAT)  # engines take the same number of heartbeats, however long these are
            if agent.connected:
                confirmed = self.sync(agent, confirmed)
            self.check_gpus(agent)
            await trio.sleep(self.settings.heartbeat)

    def sync(self, agent: Agent, confirmed: str) -> str:
        body = agent.observed()
        kept = self.digests.get(agent.inventory.node)
        if kept is None or kept[0] != body:
            kept = self.digests[agent.inventory.node] = body, digest(body)
        for process in self.servers:
            for sent in ((None,) if kept[1] == confirmed else ()) + (body,):
                sync = Sync(
                    node=agent.inventory.node, boot=agent.boot, agent=agent.life, term=agent.term, digest=kept[1],
                    observed=sent, refused=tuple(agent.refused),
                )  # fmt: skip
                try:
                    answer = process.control.sync(sync, agent.address)
                except ControlError:
                    break
                if answer.digest == kept[1]:
                    agent.obey(answer)
                    return answer.digest
        return ""

    # -- checkers ----------------------------------------------------------------------------------------------------

    def check_gpus(self, agent: Agent) -> None:
        """Never two replicas on one GPU."""
        users: dict[str, str] = {}
        for gpu, replica in agent.using():
            assert users.setdefault(gpu, replica) == replica, f"{gpu} runs {users[gpu]} and {replica}"

    def check_cluster(self) -> None:
        """Nothing assigned twice; refused ⇒ code; never fewer ready than the floor."""
        cluster = self.control.state.cluster
        held: dict[str, str] = {}
        for replica in cluster.replicas.values():
            for gpu in (g for gpus in (replica.assignment.gpus if replica.assignment else ()) for g in gpus):
                assert held.setdefault(gpu, replica.id) == replica.id, f"{gpu}: {held[gpu]} and {replica.id}"
            if replica.state == "pending" and replica.record is not None:
                rows = [r for r in replica.record.rows if not r.group and not r.feasible]
                assert all(r.findings or any(v.ok is None for v in r.verdicts.values()) for r in rows)
                assert replica.record.rejected_by or not rows
        for model, floor in self.floors.items():
            assert self.serving(model) >= floor, f"{model} has fewer than {floor}"

    async def watch(self) -> None:
        """`check_cluster` at every round of the server."""
        while True:
            if not self.servers:
                await trio.sleep(1.0)
                continue
            self.check_cluster()
            with trio.move_on_after(1.0):
                await self.control.changed.wait()

    def serving(self, model: str) -> int:
        """Engines that the router may send requests to and that answer."""
        ready = {e.order.replica for a in self.agents.values() for e in a.engines.values() if e.state == "ready"}
        return sum(1 for e in self.router.endpoints if e.models[0].name == model and e.name in ready)

    def states(self, model: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        for replica in self.control.state.cluster.replicas.values():
            if model in ("", replica.model):
                found[replica.state] = found.get(replica.state, 0) + 1
        return found

    def quiet(self) -> bool:
        """Desired equals observed, on every node."""
        cluster = self.control.state.cluster
        for name, agent in self.agents.items():
            want = {(d.replica, d.epoch) for d in desired(cluster, name) if d.goal == "run"}
            have = {(e.order.replica, e.order.epoch) for e in agent.engines.values() if e.state == "ready"}
            if want != have:
                return False
        return not any(r.state in LEAVING for r in cluster.replicas.values())

    async def until(self, condition: Callable[[], bool], within: float) -> None:
        """Virtual seconds."""
        with trio.fail_after(within):
            while not condition():  # noqa: ASYNC110 -- looked at when agents have spoken, not when an event says so
                await trio.sleep(1.0)

    async def converged(self, within: float = 300.0) -> None:
        await self.until(lambda: bool(self.control.settled) and self.quiet() and self.satisfied(), within)

    def satisfied(self) -> bool:
        models = self.control.state.models
        return all(self.states(m.name).get("ready", 0) == m.replicas for m in models.values())

    # -- operators ---------------------------------------------------------------------------------------------------

    async def apply(self, *models: CatalogueModel) -> None:
        await self.control.change(lambda s: State(s.cluster, {m.name: m for m in models}))

    async def edit(self, name: str, **changes: Any) -> None:
        def made(state: State) -> State:
            return State(state.cluster, {**state.models, name: attrs.evolve(state.models[name], **changes)})

        await self.control.change(made)

    async def cluster(self, edit: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        await self.control.change(lambda s: State(edit(s.cluster, *arguments, **named), s.models))

    def told(self, part: str) -> list[str]:
        events = [*self.past, *(t.event for p in self.servers for t in p.control.events)]
        return [f"{e.subject}: {e.text}" for e in events if part in e.text or part in (e.subject, e.kind)]

    def lives(self) -> int:
        """Engines that were ever started."""
        return sum(a.lives for a in self.agents.values())


@asynccontextmanager
async def site(agents: Iterable[Agent], store: Store | None = None, **settings: Any) -> AsyncIterator[Site]:
    """Agents that live, spread over a heartbeat; no server yet."""
    listed = list(agents)
    async with trio.open_nursery() as nursery:
        made = Site(nursery, store or MemoryStore(), {a.inventory.node: a for a in listed}, Settings(**settings))
        for i, agent in enumerate(listed):
            nursery.start_soon(made.live, agent, made.settings.heartbeat * i / len(listed))
        try:
            yield made
        finally:
            nursery.cancel_scope.cancel("the test is over")


def mixed(count: int = 100) -> list[Agent]:
    """Four types of GPU, two fabrics and nodes without one."""
    found = []
    for i in range(count):
        kind, gpus = ((H100, 8), (H200, 8), (A100, 4), (RTX4090, 2))[i % 4]
        fabric = ("ib-a", "ib-b", "", "")[i % 4] if i % 8 < 6 else ""
        node: Inventory = inventory(f"gpu-{i:03}", kind, gpus, fabric=fabric)
        node = msgspec.structs.replace(node, weights=(qwen(), small()), labels={"rack": f"r{i // 10}"})
        found.append(Agent(node, address=f"10.0.{i // 250}.{i % 250 + 1}"))
    return found


def big(replicas: int = 1, **more: Any) -> CatalogueModel:
    base: dict[str, Any] = {
        "name": "qwen", "engine": "vllm", "weights": "/models/qwen2.5-72b", "max_model_len": 32_768, "grace": 60.0,
        "shapes": (Shape(tp=2, gpus=("H200",)), Shape(tp=4, gpus=("H100",))),
    }  # fmt: skip
    return CatalogueModel(**{**base, "replicas": replicas, **more})


def little(replicas: int = 1, **more: Any) -> CatalogueModel:
    base: dict[str, Any] = {
        "name": "small", "engine": "vllm", "weights": "/models/small", "max_model_len": 8_192, "grace": 60.0,
        "shapes": (Shape(),),
    }  # fmt: skip
    return CatalogueModel(**{**base, "replicas": replicas, **more})
