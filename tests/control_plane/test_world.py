"""A hundred agents with four types of GPU on two fabrics, and the real control loop, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import trio
from trio.testing import MockClock

from llmgw.control.drain import abort, begin, uncordon
from llmgw.control.observed import Failure
from llmgw.control.reconcile import release
from llmgw.endpoint import Model
from llmgw.placement.demand import Shape
from llmgw.server.control import ControlError
from llmgw.stores.base import Compare, Op, OutcomeUnknown, Put, Txn, put
from llmgw.stores.memory import MemoryStore
from tests.control_plane.worlds import Site, big, little, mixed, site

OOM = Failure(cause="cuda_oom", message="CUDA out of memory")
LIBRARY = Failure(cause="ENG-2", message="libgomp.so.1 missing", deterministic=True)


async def running(world: Site, *, qwen: int = 2, small: int = 6) -> None:
    """A server that leads, and models that run."""
    await world.start()
    world.nursery.start_soon(world.watch)
    await world.until(lambda: world.control.term > 0, 5)
    await world.apply(big(qwen), little(small))
    await world.converged()


def where(world: Site, replica: str) -> str:
    assignment = world.control.state.cluster.replicas[replica].assignment
    assert assignment is not None
    return assignment.nodes[0]


async def test_from_nothing_to_ready(autojump_clock: MockClock) -> None:
    async with site(mixed()) as world:
        process = await world.start()
        world.nursery.start_soon(world.watch)
        await world.until(lambda: world.control.term > 0, 5)
        await world.apply(big(10), little(40))
        await trio.sleep(38)
        assert world.states() == {}, "the settle window: nothing is placed"
        await world.converged()
        assert world.states() == {"ready": 50}
        assert len(process.router.names()) == 50
        nodes = {where(world, r.id) for r in world.control.replicas_of("qwen")}
        assert {world.agents[n].inventory.devices[0].name for n in nodes} == {"NVIDIA H200"}, "the first shape fits"
        assert process.router.endpoints[0].models == (Model(name="qwen", max_model_len=32_768),)
        epochs = [r.epoch for r in world.control.state.cluster.replicas.values()]
        assert len(set(epochs)) == 50


async def test_policies_of_the_catalogue_are_in_force_and_go(autojump_clock: MockClock) -> None:
    async with site(mixed(4)) as world:
        await running(world, qwen=0, small=1)
        assert set(world.servers[0].policies) == {"static", "qwen", "small"}
        await world.apply(little(1))
        assert set(world.servers[0].policies) == {"static", "small"}


async def test_a_restart_of_the_server_moves_nothing(autojump_clock: MockClock) -> None:
    async with site(mixed(24)) as world:
        await running(world)
        before, lives = world.control.state, world.lives()
        for _ in range(3):
            world.stop(world.servers[0])
            await trio.sleep(7)
            await world.start()
            await trio.sleep(20)
            assert len(world.router.names()) == 8, "routed again before the settle window is over"
            await trio.sleep(60)
            after = world.control.state
            assert (after.models, after.cluster.replicas) == (before.models, before.cluster.replicas)
        assert world.lives() == lives


async def test_a_server_that_dies_while_replicas_start(autojump_clock: MockClock) -> None:
    async with site(mixed(24)) as world:
        await world.start()
        await world.until(lambda: world.control.term > 0, 5)
        await world.apply(big(2), little(6))
        await world.until(lambda: "placed" in world.states() or "starting" in world.states(), 60)
        world.stop(world.servers[0])
        await trio.sleep(40)
        await world.start()
        await world.converged()
        assert world.lives() == 8, "what was begun is adopted, not begun anew"


async def test_the_term_passes_to_a_standby(autojump_clock: MockClock) -> None:
    async with site(mixed(24)) as world:
        await running(world)
        first, lives = world.servers[0], world.lives()
        second = await world.start(name="second")
        await trio.sleep(10)
        assert (second.control.term, second.control.leader) == (0, "server")
        with pytest.raises(ControlError, match="does not lead the control plane; server does"):
            await second.control.change(lambda s: s)
        term = first.control.term
        world.stop(first)
        await world.until(lambda: second.control.term > term, 20)
        await trio.sleep(90)
        assert world.quiet()
        assert world.satisfied()
        assert len(second.router.names()) == 8
        assert world.lives() == lives, "a new leader moves nothing"


class Frozen(MemoryStore):
    """The store as a process sees it that is stopped for a while: its calls come late."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__()
        self._core, self._inner = inner._core, inner
        self.stopped = False

    async def txn(
        self, compares: Sequence[Compare] = (), success: Sequence[Op] = (), failure: Sequence[Op] = ()
    ) -> Txn:
        while self.stopped:  # noqa: ASYNC110 -- a process that does not run waits for no event
            await trio.sleep(0.5)
        return await self._inner.txn(compares, success, failure)

    async def keepalive(self, lease: int) -> int:
        while self.stopped:  # noqa: ASYNC110
            await trio.sleep(0.5)
        return await self._inner.keepalive(lease)


async def test_a_leader_that_was_asleep_writes_nothing(autojump_clock: MockClock) -> None:
    shared = MemoryStore()
    async with site(mixed(24), shared) as world:
        frozen = Frozen(shared)
        first = await world.start(frozen, "first")
        await world.until(lambda: first.control.term > 0, 5)
        second = await world.start(shared, "second")
        await world.apply(big(1))
        await world.converged()
        frozen.stopped = True
        await world.until(lambda: second.control.term > 0, 30)
        assert first.control.term == 0, "it stopped acting before its lease could lapse"
        await world.apply(big(1), little(2))
        await trio.sleep(60)
        frozen.stopped = False
        await trio.sleep(60)
        assert second.control.term > 0
        assert world.satisfied()
        assert world.quiet()


async def test_a_partition_shorter_than_patience(autojump_clock: MockClock) -> None:
    async with site(mixed(24)) as world:
        await running(world)
        node = where(world, "qwen-1")
        lives = world.lives()
        world.agents[node].connected = False
        await trio.sleep(60)
        assert world.control.state.cluster.replicas["qwen-1"].state == "unknown"
        assert "qwen-1" in world.router.names(), "its engine may well serve: routing asks it"
        world.agents[node].connected = True
        await world.converged()
        assert world.lives() == lives


async def test_a_partition_is_bridged_by_copies(autojump_clock: MockClock) -> None:
    async with site(mixed(24)) as world:
        await running(world)
        world.floors = {"qwen": 2, "small": 6}  # the engines of a node that is cut off go on, and stay routed
        node = where(world, "qwen-1")
        world.agents[node].connected = False
        await trio.sleep(200)
        assert world.control.state.cluster.replicas["qwen-1"].state in ("draining", "stopping")
        assert world.states("qwen")["ready"] == 2
        world.agents[node].connected = True
        await world.converged()
        assert "qwen-1" not in world.control.state.cluster.replicas


async def test_flapping(autojump_clock: MockClock) -> None:
    """A node that comes and goes every minute starts nothing anew, and is not liked for new replicas."""
    async with site(mixed(24)) as world:
        await running(world)
        node = where(world, "qwen-1")
        lives = world.lives()
        for _ in range(5):
            world.agents[node].connected = False
            await trio.sleep(50)
            world.agents[node].connected = True
            await trio.sleep(30)
        assert world.lives() == lives
        assert len(world.control.seen[node].lapses) == 5
        await world.edit("qwen", replicas=5)
        await world.converged()
        fresh = {where(world, f"qwen-{i}") for i in (3, 4, 5)}
        assert node not in fresh


async def test_mass_failure_moves_nothing(autojump_clock: MockClock) -> None:
    async with site(mixed()) as world:
        await running(world, qwen=10, small=40)
        lives = world.lives()
        away = [a for i, a in enumerate(world.agents.values()) if i % 5 != 0]
        for agent in away:
            agent.connected = False
        await trio.sleep(300)
        assert world.control.state.cluster.frozen.startswith("80 of 100 nodes lapsed")
        assert world.lives() == lives, "nothing is made elsewhere"
        assert len(world.router.names()) == 50, "and everything stays routed"
        for agent in away:
            agent.connected = True
        await world.converged()
        assert world.control.state.cluster.frozen == ""
        assert world.lives() == lives
        assert [t for t in world.told("brake") if "released" in t]


async def test_the_operator_releases_the_brake(autojump_clock: MockClock) -> None:
    async with site(mixed(24)) as world:
        await running(world)
        for agent in list(world.agents.values())[:12]:
            agent.connected = False
        await trio.sleep(200)
        assert world.control.state.cluster.frozen
        await world.cluster(release)
        await world.until(world.satisfied, 200)


async def test_an_edit_replaces_one_at_a_time(autojump_clock: MockClock) -> None:
    async with site(mixed(24)) as world:
        await running(world)
        world.floors = {"small": 6, "qwen": 2}
        before = set(world.control.state.cluster.replicas)
        await world.edit("small", flags=("--enable-prefix-caching",))
        await world.until(
            lambda: (
                world.quiet()
                and world.states("small") == {"ready": 6}
                and not before & {r.id for r in world.control.replicas_of("small")}
            ),
            900,
        )
        orders = {
            f
            for a in world.agents.values()
            for e in a.engines.values()
            if e.order.model == "small"
            for f in e.order.flags
        }
        assert orders == {"--enable-prefix-caching"}
        assert {r.id for r in world.control.replicas_of("qwen")} <= before


async def test_a_drain_under_load_keeps_the_floor(autojump_clock: MockClock) -> None:
    async with site(mixed(24)) as world:
        await running(world)
        node = where(world, "qwen-1")
        world.floors = {"qwen": 2, "small": 6}
        place = next(e for e in world.router.endpoints if e.name == "qwen-1")
        world.router.load[place.id] = 3
        await world.cluster(begin, node, "alice", 0.0)
        await world.until(lambda: world.control.state.cluster.replicas["qwen-1"].state == "draining", 120)
        await trio.sleep(20)
        assert world.control.state.cluster.replicas["qwen-1"].state == "draining", "its streams go on"
        assert "qwen-1" not in world.router.names(), "and new ones go elsewhere"
        assert world.agents[node].engines["qwen-1"].state == "ready"
        world.router.load[place.id] = 0
        await world.until(lambda: world.control.state.cluster.drains[node].finished, 300)
        await world.converged()
        assert not world.agents[node].using()
        assert world.control.state.cluster.nodes[node].cordon is not None


async def test_a_drain_survives_a_restart_and_an_abort_undoes_it(autojump_clock: MockClock) -> None:
    async with site(mixed(24)) as world:
        await running(world)
        node = where(world, "qwen-1")
        world.floors = {"qwen": 2}
        await world.cluster(begin, node, "alice", 0.0)
        await trio.sleep(3)
        world.floors = {}  # a router that has just started knows no endpoints until agents have spoken
        world.stop(world.servers[0])
        await world.start()
        await world.until(
            lambda: node in world.control.state.cluster.drains and world.control.state.cluster.drains[node].finished,
            400,
        )
        other = where(world, "qwen-2")
        await world.cluster(begin, other, "alice", 0.0)
        await trio.sleep(2)
        await world.cluster(abort, other)
        await world.cluster(uncordon, node)
        await world.converged()
        assert world.control.state.cluster.nodes[other].cordon is None
        assert world.control.state.cluster.nodes[node].cordon is None


async def test_somebody_else_writes_meanwhile(autojump_clock: MockClock) -> None:
    """Every write is compared with what was read: on a conflict it is read anew and decided anew."""
    async with site(mixed(24)) as world:
        await running(world)
        for round_ in range(5):
            row = await world.store.get("/replicas/qwen-1")
            assert row is not None
            replica = msgspec.json.decode(row.value)
            replica["reason"] = f"written by another {round_}"
            await put(world.store, row.key, msgspec.json.encode(replica))
            await world.edit("small", replicas=6 - round_ % 2)
            await trio.sleep(2)
        await world.edit("small", replicas=6)
        await world.converged()
        state = world.control.state
        stored = {e.key: e.value for e in (await world.store.range("/replicas/")).entries}
        assert set(stored) == {f"/replicas/{r}" for r in state.cluster.replicas}
        kept = msgspec.json.decode(stored["/replicas/qwen-1"])
        assert kept["epoch"] == state.cluster.replicas["qwen-1"].epoch


class Lossy(MemoryStore):
    """Its answers get lost now and then: the write has happened, and nobody is told."""

    lost = 0
    every = 3

    async def txn(
        self, compares: Sequence[Compare] = (), success: Sequence[Op] = (), failure: Sequence[Op] = ()
    ) -> Txn:
        done = await super().txn(compares, success, failure)
        if any(isinstance(op, Put) and op.key.startswith("/replicas/") for op in success):
            self.lost += 1
            if self.lost % self.every == 0:
                raise OutcomeUnknown("the answer got lost")
        return done


async def test_answers_of_the_store_get_lost(autojump_clock: MockClock) -> None:
    store = Lossy()
    async with site(mixed(24), store) as world:
        await running(world)
        assert store.lost > store.every
        epochs = [r.epoch for r in world.control.state.cluster.replicas.values()]
        assert len(set(epochs)) == len(epochs)
        await world.edit("small", replicas=3)
        await world.converged()
        assert world.states("small") == {"ready": 3}


async def test_engines_that_die(autojump_clock: MockClock) -> None:
    async with site(mixed(24)) as world:
        await running(world)
        node = where(world, "qwen-1")
        engine = world.agents[node].engines["qwen-1"]
        engine.state, engine.failure = "failed", OOM
        await world.until(lambda: world.control.state.cluster.replicas["qwen-1"].state == "failed", 10)
        assert "qwen-1" not in world.router.names()
        await world.converged()
        assert world.control.state.cluster.replicas["qwen-1"].faults[0].cause == "cuda_oom"


async def test_a_node_that_cannot_start_an_engine_is_passed_over(autojump_clock: MockClock) -> None:
    async with site(mixed(24)) as world:
        for agent in list(world.agents.values())[::2]:
            agent.dies = LIBRARY
        await world.start()
        await world.until(lambda: world.control.term > 0, 5)
        await world.apply(little(4))
        await world.until(lambda: world.states() == {"ready": 4}, 900)
        assert all(e.node in world.agents for e in world.control.state.cluster.exclusions.values())


async def test_what_fits_nowhere_says_why(autojump_clock: MockClock) -> None:
    async with site(mixed(24)) as world:
        await running(world)
        huge = big(1, name="huge", shapes=(Shape(tp=2, gpus=("H100",)),))
        await world.apply(big(2), little(6), huge)
        await trio.sleep(30)
        (waiting,) = world.control.replicas_of("huge")
        assert waiting.state == "pending"
        assert waiting.reason.startswith("0 of 24 candidates feasible: gpu 18, ")
        assert waiting.reason.endswith("fails only memory; would be placed with max_model_len <= 16512 or tp4")


async def test_a_restored_store_gives_new_epochs(autojump_clock: MockClock) -> None:
    """An older copy comes back: agents have seen higher epochs, refuse, and are given higher ones still."""
    store = MemoryStore()
    async with site(mixed(24), store) as world:
        await running(world, qwen=1, small=2)
        copy = [e for e in (await store.range("/")).entries if e.key != "/leader"]
        for _ in range(2):
            await world.edit("qwen", flags=(*world.control.state.models["qwen"].flags, "--x"))
            await world.until(lambda: world.quiet() and world.states("qwen") == {"ready": 1}, 300)
        engine = next(a.engines["small-1"] for a in world.agents.values() if "small-1" in a.engines)
        engine.state, engine.failure = "failed", OOM
        await world.converged()
        world.stop(world.servers[0])
        for entry in (await store.range("/")).entries:
            if entry.key not in {e.key for e in copy}:
                await store.txn(success=[_gone(entry.key)])
        for entry in copy:
            await put(store, entry.key, entry.value)
        await world.start()
        await world.converged(600)
        assert world.states() == {"ready": 3}
        seen = {name: epoch for a in world.agents.values() for name, epoch in a.epochs.items()}
        assert all(r.epoch == seen[r.id] for r in world.control.state.cluster.replicas.values())


def _gone(key: str) -> Op:
    from llmgw.stores.base import Delete

    return Delete(key)


async def test_two_machines_under_one_name(autojump_clock: MockClock) -> None:
    async with site(mixed(4)) as world:
        await running(world, qwen=0, small=1)
        twin = msgspec.structs.replace(world.agents["gpu-001"].inventory, node="gpu-000")
        from llmgw.control.observed import Observed, Sync

        sync = Sync(node="gpu-000", boot="other", agent="a", digest="x", observed=Observed(inventory=twin))
        with pytest.raises(ControlError, match=r"node id 'gpu-000' already active from 10\.0\.0\.1"):
            world.control.sync(sync, "10.0.0.99")
        assert world.told("already active")
