"""The reconciler in virtual time: every row of its behaviour matrix, back-off, edits, scale, preemption, the brake."""

from __future__ import annotations

from itertools import pairwise

import attrs
import msgspec
import pytest

from llmgw.control.nodes import accept
from llmgw.control.observed import Failure, Measured, Sync
from llmgw.control.reconcile import desired, endpoints, forget, release, retry, snapshot
from llmgw.control.state import TRANSITIONS, NodeRecord, Seen, Settings
from llmgw.endpoint import Model
from llmgw.placement.demand import Pending, Shape
from llmgw.placement.solver import plan
from tests.control.world import Agent, Sim, agents, model
from tests.placement.clusters import H100, inventory

OOM = Failure(cause="cuda_oom", message="CUDA out of memory")
LIB = Failure(cause="ENG-2", message="libgomp.so.1 missing", deterministic=True)


def settled(sim: Sim) -> Sim:
    sim.run(120)
    assert sim.quiet()
    sim.events.clear()
    return sim


def moves(sim: Sim) -> list[str]:
    return [f"{e.subject}: {e.text.split(':', 1)[0]}" for e in sim.events if e.kind == "replica"]


def where(sim: Sim, replica: str) -> tuple[str, ...]:
    assignment = sim.cluster.replicas[replica].assignment
    return assignment.nodes if assignment else ()


def test_from_nothing_to_ready() -> None:
    sim = Sim(agents(2), [model(replicas=2)])
    sim.run(35)
    assert sim.cluster.replicas == {}, "the settle window: nothing is placed"
    sim.run(5)
    assert sim.states() == ["placed", "placed"]
    sim.run(30)
    assert sim.states() == ["ready", "ready"]
    assert sim.quiet()
    assert {where(sim, f"m-{i}") for i in (1, 2)} == {("n0",), ("n1",)}
    order = desired(sim.cluster, "n0")[0]
    assert (order.engine, order.tp, len(order.gpus), order.epoch > 0, order.memory_fraction) == (
        "vllm",
        4,
        4,
        True,
        0.92,
    )


def test_it_may_run_twice() -> None:
    sim = settled(Sim(agents(2), [model()]))
    before = sim.cluster
    sim.tick(0.0)
    sim.tick(0.0)
    assert sim.cluster == before
    assert sim.events == []


def test_every_replica_says_why_it_is_pending() -> None:
    sim = Sim(agents(1), [model(replicas=2)])
    sim.run(120)
    assert sim.states() == ["pending", "ready"]
    (stuck,) = [r for r in sim.cluster.replicas.values() if r.state == "pending"]
    assert stuck.reason.startswith("0 of 1 candidates feasible: count 1; nearest n0")
    assert stuck.record is not None
    sim.agents["n1"] = Agent(inventory("n1", H100, 4))
    sim.cluster = msgspec.structs.replace(sim.cluster, nodes=sim.cluster.nodes | {"n1": NodeRecord(name="n1")})
    sim.run(60)
    assert sim.states() == ["ready", "ready"]


# -- the matrix ------------------------------------------------------------------------------------------------------


def test_agent_restarts_and_adopts() -> None:
    sim = settled(Sim(agents(1), [model()]))
    sim.agents["n0"].life = "agent-1"
    sim.run(30)
    assert sim.events == [], "the replica never leaves ready"


def test_agent_restarts_and_the_engine_died_meanwhile() -> None:
    sim = settled(Sim(agents(1), [model()]))
    sim.agents["n0"].life = "agent-1"
    sim.agents["n0"].engines.clear()
    sim.run(5)
    assert sim.states() == ["failed"]
    assert "its process is gone" in sim.cluster.replicas["m-1"].reason
    sim.run(45)
    assert sim.states() == ["ready"], "by way of back-off, on the same GPUs"


def test_node_reboots() -> None:
    sim = settled(Sim(agents(2), [model()]))
    (node,) = where(sim, "m-1")
    agent, epoch = sim.agents[node], sim.cluster.epoch
    agent.boot = "boot-1"
    agent.engines.clear()
    sim.run(5)
    assert sim.cluster.replicas["m-1"].state == "placed", "at once: a reboot is no failure of the engine"
    assert sim.cluster.epoch == epoch + 1
    assert where(sim, "m-1") == (node,), "its reservation was kept"
    sim.run(30)
    assert sim.states() == ["ready"]
    assert sim.cluster.replicas["m-1"].faults == ()


def test_server_restart_moves_nothing() -> None:
    sim = settled(Sim(agents(3), [model(replicas=2)]))
    before = sim.cluster
    sim.restart()
    sim.run(120)
    assert sim.events == []
    assert sim.cluster == before


def test_server_restart_while_starting() -> None:
    sim = Sim(agents(1), [model()])
    sim.run(40)
    assert sim.states() == ["placed"]
    sim.restart()
    sim.run(60)
    assert sim.states() == ["ready"]
    assert sim.agents["n0"].lives == 1


def test_a_fresh_server_does_not_collect_what_it_does_not_know_yet() -> None:
    sim = settled(Sim(agents(1), [model()]))
    sim.cluster = msgspec.structs.replace(sim.cluster, replicas={})
    sim.restart()
    sim.run(30)
    assert [e.state for e in sim.agents["n0"].engines.values()] == ["ready"]
    sim.run(60)
    assert [e.order.epoch for e in sim.agents["n0"].engines.values()] != [1], "after settling it is replaced"


def test_partition_shorter_than_patience() -> None:
    sim = settled(Sim(agents(3), [model()]))
    (node,) = where(sim, "m-1")
    sim.agents[node].connected = False
    sim.run(60)
    assert sim.states() == ["unknown"]
    assert [e.name for e in endpoints(sim.cluster, sim.seen, {})] == ["m-1"], "its engine may well serve"
    sim.agents[node].connected = True
    sim.run(10)
    assert sim.states() == ["ready"]
    assert moves(sim) == ["m-1: ready -> unknown", "m-1: unknown -> ready"]


def test_partition_and_the_copy_is_ready_first() -> None:
    sim = settled(Sim(agents(3), [model()]))
    (node,) = where(sim, "m-1")
    sim.agents[node].connected = False
    sim.run(115)
    assert sim.states() == ["unknown"]
    sim.run(50)
    assert sim.states() == ["draining", "ready"]
    assert where(sim, "m-2") != (node,)
    sim.agents[node].connected = True
    sim.run(20)
    assert list(sim.cluster.replicas) == ["m-2"], "the older is stopped now that it can be reached"
    assert sim.quiet()


def test_partition_heals_before_the_copy_is_ready() -> None:
    sim = Sim(agents(3), [model()])
    for agent in sim.agents.values():
        agent.start = 60.0
    sim.run(150)
    assert sim.quiet()
    (node,) = where(sim, "m-1")
    sim.agents[node].connected = False
    sim.run(140)
    assert sim.states() == ["starting", "unknown"]
    sim.agents[node].connected = True
    sim.run(30)
    assert list(sim.cluster.replicas) == ["m-1"]
    assert sim.states() == ["ready"]
    assert sim.agents[node].lives == 1, "re-adopted, not restarted"


def test_a_lost_node_without_room_elsewhere() -> None:
    sim = settled(Sim(agents(1), [model()]))
    sim.agents["n0"].connected = False
    sim.run(300)
    assert sim.states() == ["pending", "unknown"]
    sim.agents["n0"].connected = True
    sim.run(10)
    assert sim.states() == ["ready"]


def test_the_address_changes() -> None:
    sim = settled(Sim(agents(1), [model()]))
    sim.agents["n0"].address = "10.0.0.99"
    sim.run(5)
    (found,) = endpoints(sim.cluster, sim.seen, {"m": Model(name="m", aliases=("x",))})
    assert found.url == "http://10.0.0.99:20000"
    assert found.models[0].aliases == ("x",)
    assert sim.events == []


def test_a_second_machine_under_the_same_name_is_refused() -> None:
    sim = settled(Sim(agents(1), [model()]))
    twin = Agent(inventory("n0", H100, 2), boot="boot-9")
    found = accept(sim.seen, twin.sync(""), "10.0.0.8", sim.now + 1, sim.settings)
    assert isinstance(found, str)
    assert "node id 'n0' already active from 10.0.0.1" in found
    later = accept(sim.seen, twin.sync(""), "10.0.0.8", sim.now + 60, sim.settings)
    assert isinstance(later, Seen), "once the first is silent, it may be its successor"
    silent = accept(sim.seen, msgspec.structs.replace(twin.sync(""), observed=None), "x", sim.now, sim.settings)
    assert isinstance(silent, str)


def test_leases_do_not_look_at_the_wall_clock() -> None:
    sim = settled(Sim(agents(1), [model()]))
    sim.wall += 86_400.0
    sim.run(10)
    assert sim.states() == ["ready"]
    assert moves(sim) == []


def test_a_new_agent_that_sees_the_same_need_not_repeat_it() -> None:
    agent = agents(1)[0]
    sync = agent.sync("")
    seen = {"n0": Seen(at=0.0, boot="boot-0", agent="old", observed=agent.observed())}
    short = Sync(node="n0", boot="boot-0", agent="new", digest=sync.digest)
    kept = accept(seen, short, "", 1.0, Settings())
    assert isinstance(kept, Seen)
    assert kept.observed == agent.observed()
    other = accept(seen, msgspec.structs.replace(short, digest="else"), "", 1.0, Settings())
    assert isinstance(other, Seen)
    assert other.observed is None


def test_mass_failure() -> None:
    sim = settled(Sim(agents(10), [model(replicas=5)]))
    for i in range(6):
        sim.agents[f"n{i}"].connected = False
    sim.run(600)
    assert sim.told("suspecting this server")
    assert sim.cluster.frozen
    assert len(sim.cluster.replicas) == 5, "nothing is moved"
    assert set(sim.states()) <= {"ready", "unknown"}
    for i in range(6):
        sim.agents[f"n{i}"].connected = True
    sim.run(10)
    assert sim.states() == ["ready"] * 5
    assert not sim.cluster.frozen
    assert sim.told("released")


def test_the_operator_releases_the_brake() -> None:
    sim = settled(Sim(agents(10), [model(replicas=5)]))
    for i in range(6):
        sim.agents[f"n{i}"].connected = False
    sim.run(300)
    sim.cluster = release(sim.cluster)
    sim.run(60)
    assert not sim.cluster.frozen
    assert sim.states().count("ready") == 4, "as many as there are nodes left"


def test_two_nodes_of_ten_are_no_mass_failure() -> None:
    sim = settled(Sim(agents(10), [model(replicas=5)]))
    for i in range(2):
        sim.agents[f"n{i}"].connected = False
    sim.run(300)
    assert not sim.cluster.frozen
    assert sim.states().count("ready") == 5


def test_a_node_that_will_not_come_back() -> None:
    sim = settled(Sim(agents(2), [model()]))
    (node,) = where(sim, "m-1")
    sim.agents[node].connected = False
    sim.run(60)
    sim.cluster = forget(sim.cluster, node)
    sim.run(60)
    assert list(sim.cluster.replicas) == ["m-2"]
    assert sim.states() == ["ready"]


# -- failures ----------------------------------------------------------------------------------------------------------


def test_back_off_grows_and_then_another_node() -> None:
    sim = Sim(agents(2), [model()], jitter=0.0)
    for agent in sim.agents.values():
        agent.start = 0.0
    sim.agents["n0"].dies = OOM
    sim.run(45)
    assert where(sim, "m-1") == ("n0",)
    sim.run(60)
    fails = [e.at for e in sim.events if e.text.startswith("placed -> failed: cuda_oom")]
    gaps = [b - a for a, b in pairwise(fails)]
    assert gaps == [15.0, 25.0], "10 and 20 s, and a heartbeat to be seen"
    sim.run(60)
    assert where(sim, "m-1") == ("n1",), "three times the same on one node"
    assert sim.states() == ["ready"]
    assert "3 times cuda_oom" in sim.cluster.exclusions["m n0"].why
    sim.wall += 1800
    sim.run(5)
    assert sim.cluster.exclusions == {}


def test_a_deterministic_failure_is_not_retried_until_an_input_changes() -> None:
    sim = Sim(agents(1), [model()])
    agent = sim.agents["n0"]
    agent.dies = LIB
    sim.run(1200)
    assert agent.lives == 1
    (stuck,) = sim.cluster.replicas.values()
    assert stuck.state == "pending"
    assert "backoff 1" in stuck.reason
    agent.dies = None
    sim.run(60)
    assert agent.lives == 1, "nobody knows yet"
    newer = tuple(msgspec.structs.replace(e, version="0.33.1") for e in agent.inventory.engines)
    agent.inventory = msgspec.structs.replace(agent.inventory, engines=newer)
    sim.run(60)
    assert sim.states() == ["ready"]


def test_an_edit_is_an_input_too() -> None:
    sim = Sim(agents(1), [model()])
    sim.agents["n0"].dies = LIB
    sim.run(200)
    sim.agents["n0"].dies = None
    sim.specs["m"] = model(dtype="float16")
    sim.run(60)
    assert sim.states() == ["ready"]


def test_failing_on_three_nodes_is_told_and_stops() -> None:
    sim = Sim(agents(5), [model()])
    for agent in sim.agents.values():
        agent.dies = LIB
        agent.start = 0.0
    sim.run(3000)
    assert sum(a.lives for a in sim.agents.values()) == 3
    assert sim.states() == ["failed"]
    assert sim.told("failing: on 3 nodes")
    for agent in sim.agents.values():
        agent.dies = None
    sim.cluster = retry(sim.cluster, "m")
    sim.run(60)
    assert sim.states() == ["ready"]


def test_ready_for_long_forgives() -> None:
    sim = Sim(agents(1), [model()])
    sim.agents["n0"].dies = OOM
    sim.run(80)
    sim.agents["n0"].dies = None
    sim.run(120)
    assert sim.states() == ["ready"]
    assert len(sim.cluster.replicas["m-1"].faults) >= 1
    sim.run(610)
    assert sim.cluster.replicas["m-1"].faults == ()


def test_a_crash_after_ready() -> None:
    sim = settled(Sim(agents(1), [model()]))
    engine = sim.agents["n0"].engines["m-1"]
    engine.state, engine.failure = "failed", OOM
    sim.run(5)
    assert sim.states() == ["failed"]
    assert endpoints(sim.cluster, sim.seen, {}) == ()
    sim.run(50)
    assert sim.states() == ["ready"]


# -- edits, numbers, groups --------------------------------------------------------------------------------------------


def test_an_edit_replaces_one_at_a_time_and_never_loses_one() -> None:
    sim = settled(Sim(agents(3), [model(replicas=2)]))
    sim.specs["m"] = model(replicas=2, flags=("--x",))
    least = 9
    for _ in range(60):
        sim.tick()
        states = sim.states()
        least = min(least, states.count("ready"))
        assert len([r for r in sim.cluster.replicas.values() if r.replaces]) <= 1
    assert least >= 2
    assert sim.states() == ["ready", "ready"]
    assert all(d.flags == ("--x",) for n in sim.agents for d in desired(sim.cluster, n))
    assert {r.generation for r in sim.cluster.replicas.values()} == {2}


def test_what_runs_keeps_what_it_was_started_with_until_replaced() -> None:
    sim = settled(Sim(agents(1), [model()]))
    sim.specs["m"] = model(flags=("--x",))
    sim.run(60)
    assert sim.states() == ["pending", "ready"], "no room for the copy: blocked, never deleted first"
    (order,) = desired(sim.cluster, "n0")
    assert order.flags == ()


def test_an_edit_that_needs_no_restart_restarts_nothing() -> None:
    sim = settled(Sim(agents(2), [model()]))
    sim.specs["m"] = model(priority=5, labels={"zone": "x"}, min_available=1)
    sim.run(60)
    assert sim.events == []


def test_an_edit_while_starting_begins_anew() -> None:
    sim = Sim(agents(1), [model()])
    sim.run(50)
    assert sim.states() == ["starting"]
    sim.specs["m"] = model(flags=("--x",))
    sim.run(60)
    assert sim.states() == ["ready"]
    assert desired(sim.cluster, "n0")[0].flags == ("--x",)


def test_scale_up_and_down() -> None:
    sim = settled(Sim(agents(4), [model(replicas=1)]))
    sim.specs["m"] = model(replicas=3)
    sim.run(60)
    assert sim.states() == ["ready"] * 3
    sim.inflight = {"m-3": 2}
    sim.specs["m"] = model(replicas=1)
    sim.run(10)
    assert sim.cluster.replicas["m-3"].state == "draining", "requests in flight may finish"
    assert [e.name for e in endpoints(sim.cluster, sim.seen, {})] == ["m-1"], "no new ones come"
    sim.run(30)
    assert sim.cluster.replicas["m-3"].state == "draining"
    sim.run(60)
    assert list(sim.cluster.replicas) == ["m-1"], "the youngest go first; grace has an end"
    assert sim.told("2 requests still in flight after 60 s")
    assert sim.quiet()


def test_a_model_that_is_taken_out() -> None:
    sim = settled(Sim(agents(2), [model(), model("other")]))
    del sim.specs["m"]
    sim.run(30)
    assert [r.model for r in sim.cluster.replicas.values()] == ["other"]
    assert sim.quiet()
    assert "m" not in sim.cluster.serial


def test_a_group_fails_and_is_placed_as_one() -> None:
    nodes = agents(3, 8, fabric="ib")
    sim = settled(Sim(nodes, [model(shapes=(Shape(tp=8, pp=2, nodes=2),))]))
    pair = where(sim, "m-1")
    assert len(pair) == 2
    orders = [desired(sim.cluster, n)[0] for n in pair]
    assert [o.group.rank for o in orders if o.group] == [0, 1]
    assert {(o.group.leader, o.group.port, o.group.fabric) for o in orders if o.group} == {("10.0.0.1", 20_001, "ib")}
    assert orders[0].group is not None
    assert orders[0].group.hcas == ("mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1")
    engine = sim.agents[pair[1]].engines["m-1"]
    engine.state, engine.failure = "failed", OOM
    sim.run(5)
    assert sim.states() == ["failed"]
    assert all(d.goal == "stop" for n in pair for d in desired(sim.cluster, n)), "all ranks go"
    sim.run(80)
    assert sim.states() == ["ready"]
    assert sim.quiet()


def test_preemption_drains_and_nobody_slips_in() -> None:
    sim = settled(Sim(agents(1), [model("low")]))
    sim.inflight = {"low-1": 1}
    sim.specs["vip"] = model("vip", priority=9, preemption="lower")
    sim.specs["third"] = model("third", priority=1)
    sim.run(5)
    assert sim.cluster.replicas["low-1"].state == "draining"
    assert sim.cluster.nominations["vip-1"].node == "n0"
    sim.inflight = {}
    sim.run(60)
    assert sim.cluster.replicas["vip-1"].state == "ready"
    assert sim.states("third") == sim.states("low") == ["pending"]
    assert sim.cluster.nominations == {}


def test_priority_decides_who_is_placed() -> None:
    sim = Sim(agents(1), [model("a"), model("b", priority=1)])
    sim.run(120)
    assert (sim.states("a"), sim.states("b")) == (["pending"], ["ready"])


def test_an_order_with_a_lower_term_or_epoch_is_refused() -> None:
    """What the fakes do is what the protocol asks of agents; here, that the server's numbers make it work."""
    sim = settled(Sim(agents(1), [model()]))
    agent = sim.agents["n0"]
    sim.term = 5
    sim.run(5)
    sim.term = 4
    sim.specs.clear()
    sim.run(60)
    assert list(agent.engines) == ["m-1"], "a server that was replaced stops nothing"


@pytest.mark.parametrize("state", sorted(TRANSITIONS))
def test_the_table_is_closed(state: str) -> None:
    for there in TRANSITIONS[state]:  # type: ignore[index]
        assert there in TRANSITIONS


def test_a_model_edited_on_a_node_that_is_away() -> None:
    sim = settled(Sim(agents(2), [model()]))
    (node,) = where(sim, "m-1")
    sim.agents[node].connected = False
    sim.run(60)
    sim.specs["m"] = attrs.evolve(model(), flags=("--x",))
    sim.run(300)
    sim.agents[node].connected = True
    sim.run(120)
    assert sim.states() == ["ready"]
    assert [d.flags for n in sim.agents for d in desired(sim.cluster, n)] == [("--x",)]
    assert sim.quiet()


def test_what_engines_report_is_used_for_the_next_one() -> None:
    sim = settled(Sim(agents(2), [model()]))
    (node,) = where(sim, "m-1")
    agent = sim.agents[node]
    run = msgspec.structs.replace(agent.run(agent.engines["m-1"]), measured=Measured(weights=30 << 30))
    observed = msgspec.structs.replace(agent.observed(), runs=(run,))
    sim.seen[node] = msgspec.structs.replace(sim.seen[node], observed=observed)
    shot = snapshot(sim.cluster, sim.specs, sim.seen, {}, sim.wall)
    assert [(n.model, n.shape, n.gpu, n.weights) for n in shot.learned] == [("m", "tp4", H100[0], 30 << 30)]
    (record,) = plan(shot, [Pending(replica="m-9", demand=model())])
    (bill,) = {r.need for r in record.rows}
    assert bill is not None
    assert (bill.source, bill.weights) == ("measured", 30.0)
