"""Emptying nodes: surge first, one at a time, resumable, blocked with a reason, never below the floor."""

from __future__ import annotations

from llmgw.control.drain import abort, begin, cordon, progress, uncordon
from llmgw.control.state import Cluster, NodeRecord
from tests.control.world import Sim, agents, model


def start(sim: Sim, node: str, **more: bool | int) -> None:
    sim.cluster = begin(sim.cluster, node, "alice", sim.wall, why="fan", **more)  # type: ignore[arg-type]


def ready(sim: Sim, name: str) -> int:
    return sim.states(name).count("ready")


def here(sim: Sim, node: str) -> list[str]:
    return sorted(r.id for r in sim.cluster.replicas.values() if r.assignment and node in r.assignment.nodes)


def roomy(replicas: int = 2, nodes: int = 3, gpus: int = 8) -> Sim:
    sim = Sim(agents(nodes, gpus), [model("m", replicas, tp=4), model("single", tp=4)])
    sim.run(120)
    assert sim.quiet()
    sim.events.clear()
    return sim


def test_a_cordon_is_kept_and_the_first_word_stands() -> None:
    cluster = Cluster(nodes={"n0": NodeRecord(name="n0")})
    closed = cordon(cluster, "n0", "alice", 5.0, "fan")
    assert cordon(closed, "n0", "bob", 6.0, "dust") == closed
    assert closed.nodes["n0"].cordon is not None
    assert closed.nodes["n0"].cordon.by == "alice"
    assert uncordon(closed, "n0").nodes["n0"].cordon is None
    assert uncordon(cluster, "n9") == cluster


def test_nothing_is_missed_while_a_node_is_emptied() -> None:
    sim = roomy()
    node = max(sim.agents, key=lambda n: len(here(sim, n)))
    before = here(sim, node)
    assert before
    start(sim, node)
    for _ in range(100):
        sim.tick()
        assert ready(sim, "m") >= 2
        assert ready(sim, "single") >= 1
        leaving = [r for r in sim.cluster.replicas.values() if r.why == f"drain {node}"]
        assert len(leaving) <= 1, "one at a time"
    assert here(sim, node) == []
    order = sim.cluster.drains[node]
    assert order.finished
    assert sorted(order.done) == before
    assert progress(order, []) == f"done: {len(before)} replicas left {node}"
    record = sim.cluster.nodes[node]
    assert (record.draining, record.cordon is not None) == (False, True), "closed until somebody opens it"
    assert sim.quiet()


def test_requests_in_flight_may_finish() -> None:
    sim = roomy(replicas=1)
    (victim,) = [r for r in sim.cluster.replicas.values() if r.model == "m"]
    assert victim.assignment is not None
    (node,) = victim.assignment.nodes
    sim.inflight = {victim.id: 3}
    start(sim, node)
    sim.run(60)
    assert sim.cluster.replicas[victim.id].state == "draining"
    assert sim.agents[node].engines[victim.id].state == "ready", "it goes on answering"
    sim.inflight = {}
    sim.run(15)
    assert victim.id not in sim.cluster.replicas


def test_no_room_is_blocked_with_the_reason_and_goes_on_when_there_is() -> None:
    sim = Sim(agents(2), [model("m", 1), model("n", 1)])
    sim.run(120)
    (node,) = sim.cluster.replicas["m-1"].assignment.nodes  # type: ignore[union-attr]
    start(sim, node)
    sim.run(60)
    order = sim.cluster.drains[node]
    assert "m-2 has no place: 0 of 2 candidates feasible" in order.blocked
    assert "blocked" in progress(order, [sim.cluster.replicas["m-1"]])
    assert sim.cluster.replicas["m-1"].state == "ready", "never deleted first and hoped"
    del sim.specs["n"]
    sim.run(120)
    assert sim.cluster.drains[node].finished
    assert sim.states() == ["ready"]


def test_without_surge_only_where_the_floor_allows() -> None:
    sim = Sim(agents(2), [model("m", 2, min_available=2)])
    sim.run(120)
    start(sim, "n0", surge=False)
    sim.run(60)
    assert sim.states() == ["ready", "ready"]
    assert "2 ready, min_available 2" in sim.cluster.drains["n0"].blocked
    sim.specs["m"] = model("m", 2, min_available=1)
    sim.run(60)
    assert sim.cluster.drains["n0"].finished
    assert sim.states() == ["pending", "ready"], "downtime that was accepted"


def test_a_restart_of_the_server_continues_it() -> None:
    sim = roomy()
    node = max(sim.agents, key=lambda n: len(here(sim, n)))
    start(sim, node)
    for _ in range(14):
        sim.run(15)
        sim.restart()
        sim.run(60)
    assert sim.cluster.drains[node].finished
    assert sorted(sim.states()) == ["ready"] * 3


def test_a_second_order_joins_the_first() -> None:
    sim = roomy()
    start(sim, "n0")
    first = sim.cluster
    start(sim, "n0", surge=False)
    assert sim.cluster == first
    assert uncordon(sim.cluster, "n0") == sim.cluster, "abort it instead"


def test_abort_opens_the_node_unless_it_was_closed_before() -> None:
    sim = Sim(agents(2), [model("m", 1), model("n", 1)])
    sim.run(120)
    start(sim, "n0")
    sim.run(30)
    sim.cluster = abort(sim.cluster, "n0")
    sim.run(60)
    assert sim.cluster.nodes["n0"].cordon is None
    assert sim.states() == ["ready", "ready"], "the copy that had no place is gone"
    sim.cluster = cordon(sim.cluster, "n0", "alice", sim.wall)
    start(sim, "n0")
    sim.cluster = abort(sim.cluster, "n0")
    assert sim.cluster.nodes["n0"].cordon is not None
    assert abort(sim.cluster, "n0") == sim.cluster


def test_what_serves_nobody_is_made_anew_elsewhere() -> None:
    sim = Sim(agents(2), [model("m", 1)])
    sim.run(50)
    assert sim.states() == ["starting"]
    (node,) = sim.cluster.replicas["m-1"].assignment.nodes  # type: ignore[union-attr]
    start(sim, node)
    sim.run(60)
    assert here(sim, node) == []
    assert sim.states() == ["ready"]


def test_a_group_leaves_as_one() -> None:
    from llmgw.placement.demand import Shape

    sim = Sim(agents(4, 8, fabric="ib"), [model("g", shapes=(Shape(tp=8, pp=2, nodes=2),))])
    sim.run(120)
    first, second = sim.cluster.replicas["g-1"].assignment.nodes  # type: ignore[union-attr]
    start(sim, second)
    for _ in range(30):
        sim.tick()
        assert ready(sim, "g") >= 1
    assert here(sim, first) == here(sim, second) == []


def test_drain_of_an_empty_node_is_done_at_once() -> None:
    sim = Sim(agents(2), [])
    sim.run(60)
    start(sim, "n1")
    sim.tick()
    assert sim.cluster.drains["n1"].finished
