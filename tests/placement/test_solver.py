"""The solver as a whole: never gives anything twice, same answer for the same snapshot, groups, scores, preemption."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.placement import explain
from llmgw.placement.demand import Pending, Shape, natural
from llmgw.placement.inventory import GIB, Inventory, Weights
from llmgw.placement.snapshot import Node, Reservation, Snapshot
from llmgw.placement.solver import constraints, held, plan, rankers
from llmgw.placement.verdict import Record
from tests.placement.clusters import A100, H100, H200, RTX4090, SMALL, demand, node, pending, qwen, snapshot
from tests.placement.clusters import held as holds

SHAPES = [
    Shape(tp=1),
    Shape(tp=2),
    Shape(tp=4, gpus=("H100",)),
    Shape(tp=8, max_model_len=4096),
    Shape(tp=2, pp=2, island="node"),
    Shape(name="shared", tp=1, shared=True, memory_fraction=0.45),
    Shape(tp=4, pp=2, nodes=2),
]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Snapshot, list[Pending]]:
    """A few odd nodes, some of them in use, and replicas that want places."""
    nodes, reservations = [], []
    for i in range(draw(st.integers(1, 5))):
        gpu = draw(st.sampled_from([H100, H200, A100, RTX4090]))
        count = draw(st.sampled_from([0, 1, 2, 4, 8]))
        made = node(
            f"n{i}",
            gpu,
            count,
            island=draw(st.sampled_from([2, 4, 8])),
            kind=draw(st.sampled_from(["nvswitch", "phb"])),
            fabric=draw(st.sampled_from(["", "a", "b"])),
            engine_ports=(20_000, draw(st.sampled_from([20_063, 29_999]))),
            flaps=draw(st.integers(0, 3)),
        )
        sick = draw(st.sets(st.integers(0, 7), max_size=2))
        devices = tuple(
            msgspec.structs.replace(d, health="blocked", reason="Xid 79") if d.index in sick else d
            for d in made.inventory.devices
        )
        nodes.append(msgspec.structs.replace(made, inventory=msgspec.structs.replace(made.inventory, devices=devices)))
        taken = draw(st.integers(0, count))
        if taken:
            priority = draw(st.integers(0, 2))
            one = holds(f"old-{i}", f"n{i}", *range(taken), priority=priority, since=float(i))
            reservations.append(one)
    wanted = []
    for k in range(draw(st.integers(1, 6))):
        shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3, unique=True))
        weights, length = draw(st.sampled_from([(SMALL, 8192), ("/models/qwen2.5-72b", 32_768)]))
        model = demand(
            f"m{k % 3}",
            *shapes,
            weights=weights,
            max_model_len=length,
            prefer=draw(st.sampled_from(["order", "score"])),
            spread=draw(st.sampled_from(["soft", "hard"])),
            node_cap=draw(st.sampled_from([None, 1])),
            priority=draw(st.integers(0, 3)),
            preemption=draw(st.sampled_from(["never", "lower"])),
        )
        wanted.append(pending(f"m{k % 3}-{k}", model, float(draw(st.integers(0, 3)))))
    mix = ((1, 1.0), (4, 2.0))
    return snapshot(*nodes, reservations=tuple(reservations), mix=mix), wanted


def everything(shot: Snapshot, wanted: list[Pending], records: list[Record]) -> list[Reservation]:
    """What is reserved when the whole plan is committed."""
    by = {p.replica: p for p in wanted}
    made = [r for x in records if x.assignment for r in held(x.assignment, by[x.replica], 0.0)]
    return [*shot.reservations, *made]


@given(clusters())
@settings(max_examples=30, deadline=None)
def test_nothing_is_given_twice(drawn: tuple[Snapshot, list[Pending]]) -> None:
    shot, wanted = drawn
    records = plan(shot, wanted)
    reservations = everything(shot, wanted, records)
    nodes = {n.inventory.node: n.inventory for n in shot.nodes}
    by: dict[tuple[str, str], list[Reservation]] = {}
    for r in reservations:
        for uuid in r.gpus:
            by.setdefault((r.node, uuid), []).append(r)
    for (name, uuid), holders in by.items():
        (device,) = [d for d in nodes[name].devices if d.uuid == uuid]
        assert len(holders) == 1 or all(h.shared for h in holders), f"{uuid} is given to {holders}"
        if any(h.state == "starting" for h in holders):
            assert device.health != "blocked"
            assert sum(h.vram for h in holders) <= device.memory
    for name in nodes:
        ports = sorted(r.ports for r in reservations if r.node == name)
        assert all(a[0] + a[1] <= b[0] for a, b in pairwise(ports))


@given(clusters())
@settings(max_examples=30, deadline=None)
def test_what_is_assigned_is_what_was_asked(drawn: tuple[Snapshot, list[Pending]]) -> None:
    shot, wanted = drawn
    by = {p.replica: p for p in wanted}
    nodes = {n.inventory.node: n for n in shot.nodes}
    for record in plan(shot, wanted):
        found = record.assignment
        if found is None:
            continue
        (shape,) = [s for s in by[record.replica].demand.shapes if s.label == found.shape]
        assert len(found.nodes) == len(set(found.nodes)) == shape.nodes
        for name, gpus in zip(found.nodes, found.gpus, strict=True):
            assert len(set(gpus)) == shape.share
            devices = [d for d in nodes[name].inventory.devices if d.uuid in gpus]
            assert len({(d.name, d.memory) for d in devices}) == 1, "all alike"
            if shape.island == "any" and shape.pp == 1:
                assert len({d.island for d in devices}) == 1, "a tensor-parallel group is in one island"
        if shape.nodes > 1:
            assert found.fabric
            assert all(any(p.fabric == found.fabric for p in nodes[n].inventory.ports) for n in found.nodes)


@given(clusters(), st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_order_does_not_matter(drawn: tuple[Snapshot, list[Pending]], rng: random.Random) -> None:
    shot, wanted = drawn
    first = plan(shot, wanted)

    def mixed(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(rng.sample(values, len(values)))

    def turned(n: Node) -> Node:
        inventory = n.inventory
        changed = msgspec.structs.replace(
            inventory,
            devices=mixed(inventory.devices),
            weights=mixed(inventory.weights),
            ports=mixed(inventory.ports),
            engines=mixed(inventory.engines),
        )
        return msgspec.structs.replace(n, inventory=changed)

    nodes = mixed(tuple(turned(n) for n in shot.nodes))
    other = msgspec.structs.replace(shot, nodes=nodes, reservations=mixed(shot.reservations))
    assert plan(other, rng.sample(wanted, len(wanted))) == first
    assert plan(shot, wanted) == first


@given(clusters())
@settings(max_examples=30, deadline=None)
def test_the_record_says_what_was_decided(drawn: tuple[Snapshot, list[Pending]]) -> None:
    shot, wanted = drawn
    codes = {code for _, code, _, _ in explain.reasons()}
    columns = {c.name for c in constraints()}
    by = {p.replica: p for p in wanted}
    for record in plan(shot, wanted):
        rows = [r for r in record.rows if not r.group]
        shapes = by[record.replica].demand.shapes
        for n in shot.nodes:
            for shape in shapes:
                assert any(n.inventory.node in r.nodes and r.shape == shape.label for r in record.rows)
        assert all(columns <= set(r.verdicts) for r in record.rows), "every constraint for every candidate"
        assert all((v.ok is False) == bool(v.findings) for r in record.rows for v in r.verdicts.values())
        assert {f.code for r in record.rows for f in r.findings} <= codes
        assert record.feasible == sum(r.feasible for r in rows)
        assert all((r.score is not None) == r.feasible for r in rows)
        for name in [*columns, "pin", "backoff"]:
            rejected = sum(1 for r in rows if name in r.verdicts and r.verdicts[name].ok is False)
            assert record.rejected_by.get(name, 0) == rejected
        if record.chosen is not None:
            assert record.rows[record.chosen].feasible
            assert record.assignment is not None
            assert record.rows[record.chosen].nodes == record.assignment.nodes
            assert record.rows[record.chosen].gpus == record.assignment.gpus
            assert record.nearest is None
        else:
            assert record.assignment is None
            assert record.feasible == 0
            assert record.nearest is not None or not rows
        assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record, "it is stored with the replica"


@given(clusters())
@settings(max_examples=20, deadline=None)
def test_the_winner_has_the_best_score_of_its_shape_and_type(drawn: tuple[Snapshot, list[Pending]]) -> None:
    shot, wanted = drawn
    by = {p.replica: p for p in wanted}
    for record in plan(shot, wanted):
        if record.chosen is None:
            continue
        best = record.rows[record.chosen]
        rivals = [r for r in record.rows if r.feasible and r.gpu_type == best.gpu_type]
        demand = by[record.replica].demand
        if demand.prefer == "order":
            order = [s.label for s in demand.shapes]
            assert order.index(best.shape) == min(order.index(r.shape) for r in record.rows if r.feasible)
            rivals = [r for r in rivals if r.shape == best.shape]
        elif any(s.gpus for s in demand.shapes):
            continue  # preferences of types are another order
        assert best.score == max(r.score for r in rivals if r.score is not None)


@given(clusters())
@settings(max_examples=20, deadline=None)
def test_preemption_takes_lower_priority_only_and_helps(drawn: tuple[Snapshot, list[Pending]]) -> None:
    shot, wanted = drawn
    one = next((p for p in wanted if p.demand.preemption == "lower"), None)
    if one is None:
        return
    (record,) = plan(shot, [one])
    found = record.preemption
    assert (found is None) == (record.assignment is not None)
    if found is not None and found.possible:
        victims = [r for r in shot.reservations if r.replica in found.victims]
        assert victims
        assert all(v.priority < one.demand.priority for v in victims)
        rest = tuple(r for r in shot.reservations if r.replica not in found.victims)
        (after,) = plan(msgspec.structs.replace(shot, reservations=rest), [one])
        assert after.assignment is not None
        for spared in found.victims:
            fewer = tuple(r for r in shot.reservations if r.replica == spared or r.replica not in found.victims)
            (still,) = plan(msgspec.structs.replace(shot, reservations=fewer), [one])
            assert still.assignment is None or found.node not in still.assignment.nodes, "each victim is needed"


def test_large_islands_stay_whole() -> None:
    odd = holds("x-1", "b", 0)
    shot = snapshot(node("a"), node("b"), reservations=(odd,), mix=((8, 1.0), (1, 1.0)))
    (record,) = plan(shot, [pending("s-1", demand("s", Shape(), weights=SMALL, max_model_len=8192))])
    assert record.assignment is not None
    assert record.assignment.nodes == ("b",)


def test_replicas_of_a_model_spread() -> None:
    shot = snapshot(node("a"), node("b"), node("c"))
    records = plan(shot, [pending(f"qwen-{i}", demand()) for i in range(3)])
    assert sorted(r.assignment.nodes[0] for r in records if r.assignment) == ["a", "b", "c"]


def test_weights_that_are_there_save_minutes() -> None:
    ref = "Qwen/Qwen2.5-72B"
    with_weights, without = node("b", weights=(qwen(ref=ref),)), node("a", weights=())
    (record,) = plan(snapshot(with_weights, without), [pending("q-1", demand(weights=ref, fetch=True))])
    assert record.assignment is not None
    assert record.assignment.nodes == ("b",)


def test_a_small_model_does_not_burn_a_large_gpu() -> None:
    wanted = demand("s", Shape(), weights=SMALL, max_model_len=8192)
    (record,) = plan(snapshot(node("a", H200, 1), node("b", RTX4090, 1)), [pending("s-1", wanted)])
    assert record.assignment is not None
    assert record.assignment.nodes == ("b",)
    (record,) = plan(
        snapshot(node("a", H200, 1), node("b", RTX4090, 1), prices={"H200": 1.0, "4090": 2.0}), [pending("s-1", wanted)]
    )
    assert record.assignment is not None
    assert record.assignment.nodes == ("a",)


def test_measured_speed_and_stability_count() -> None:
    wanted = demand("s", Shape(), weights=SMALL, max_model_len=8192)
    shot = snapshot(node("a", flaps=2), node("b"))
    (record,) = plan(shot, [pending("s-1", wanted)])
    assert record.assignment is not None
    assert record.assignment.nodes == ("b",)
    fast = snapshot(node("a", H100, 8), node("b", A100, 8), speeds={"s": {A100[0]: 10.0, H100[0]: 90.0}})
    (record,) = plan(fast, [pending("s-1", wanted)])
    speed = [n for n, _ in record.rankers].index("speed")
    assert [round(r.terms[speed], 2) for r in record.rows] == [1.0, 0.11]


def test_types_are_taken_in_order_of_preference() -> None:
    shape = Shape(tp=4, gpus=("H200", "H100"))
    (record,) = plan(snapshot(node("a"), node("b", H200)), [pending("q-1", demand("q", shape))])
    assert record.assignment is not None
    assert record.assignment.nodes == ("b",)


def test_shapes_in_order_or_by_score() -> None:
    shapes = (Shape(tp=8), Shape(tp=4))
    (first,) = plan(snapshot(node("a")), [pending("q-1", demand("q", *shapes))])
    assert first.assignment is not None
    assert first.assignment.shape == "tp8"
    (best,) = plan(snapshot(node("a")), [pending("q-1", demand("q", *shapes, prefer="score"))])
    assert best.assignment is not None
    assert best.assignment.shape == "tp4", "half the price"


def test_numa_and_the_smallest_island() -> None:
    shot = snapshot(node("a", island=4), reservations=(holds("x-1", "a", 0, 1),))
    (record,) = plan(shot, [pending("s-1", demand("s", Shape(tp=2), weights=SMALL, max_model_len=8192))])
    assert record.assignment is not None
    assert record.assignment.gpus == (("GPU-a-2", "GPU-a-3"),)
    assert record.rows[0].alternatives == 1
    numa = snapshot(node("a", island=8), reservations=(holds("x-1", "a", 0, 1, 2),))
    (record,) = plan(numa, [pending("s-1", demand("s", Shape(tp=2), weights=SMALL, max_model_len=8192))])
    assert record.rows[0].indices == ((4, 5),), "GPU 3 is alone on its NUMA node"


def test_precedence() -> None:
    wanted = [
        pending("late", demand("late", Shape(tp=4)), 9.0),
        pending("early", demand("early", Shape(tp=4)), 1.0),
        pending("large", demand("large", Shape(tp=8)), 9.0),
        pending("vip", demand("vip", Shape(tp=4), priority=5), 9.0),
    ]
    assert [r.replica for r in plan(snapshot(node("a")), wanted)] == ["vip", "large", "early", "late"]


GROUP = Shape(tp=8, pp=2, nodes=2)


def group(*nodes: Node, shape: Shape = GROUP, **more: Any) -> Record:
    (record,) = plan(snapshot(*nodes, **more), [pending("q-1", demand("q", shape))])
    return record


def test_a_group_is_on_one_fabric() -> None:
    record = group(node("a", fabric="x"), node("b", fabric="y"), node("c", fabric="x"), node("d", fabric="y"))
    assert record.assignment is not None
    assert (record.assignment.nodes, record.assignment.fabric) == (("a", "c"), "x")
    assert len(record.assignment.gpus[0]) == 8


@pytest.mark.parametrize(
    ("nodes", "shape", "more", "codes"),
    [
        ([node("a", fabric="x"), node("b", fabric="y")], GROUP, {}, {"fabric.size", "fabric.split"}),
        ([node("a", fabric="x"), node("b")], GROUP, {}, {"fabric.size", "fabric.none"}),
        ([node("a", fabric="x"), node("b", fabric="x")], Shape(tp=8, pp=2, nodes=2, fabric="z"), {}, {"fabric.none"}),
        ([node("a", fabric="x", rails=2), node("b", fabric="x")], Shape(tp=8, pp=2, nodes=2, min_rails=4), {},
         {"fabric.rails", "fabric.size"}),
        ([node("a", fabric="x", rails=2), node("b", fabric="x")], Shape(tp=8, pp=2, nodes=2, strict_rails=True), {},
         {"fabric.rails"}),
        ([node("a", fabric="x"), node("b", fabric="x")], GROUP, {"probes_failed": (("b", "a"),)}, {"fabric.probe-failed"}),
    ],
)  # fmt: skip
def test_groups_that_cannot_be(nodes: list[Node], shape: Shape, more: dict[str, Any], codes: set[str]) -> None:
    record = group(*nodes, shape=shape, **more)
    assert record.assignment is None
    assert {f.code for r in record.rows if not r.group for f in r.findings} == codes


def port_of(made: Node, **changes: Any) -> Node:
    ports = tuple(msgspec.structs.replace(p, **changes) for p in made.inventory.ports)
    return msgspec.structs.replace(made, inventory=msgspec.structs.replace(made.inventory, ports=ports))


def test_ports_that_are_down_unresolved_or_may_not_lock_memory() -> None:
    down = port_of(node("a", fabric="x"), state="down", reason="no cable or switch port down")
    loose = port_of(node("b", fabric="x"), fabric="", prefix="fe80000000000000")
    locked = node("c", fabric="x")
    host = msgspec.structs.replace(locked.inventory.host, memlock=8 << 20)
    locked = msgspec.structs.replace(locked, inventory=msgspec.structs.replace(locked.inventory, host=host))
    record = group(down, loose, locked, node("d", fabric="x"))
    codes = {r.nodes[0]: {f.code for f in r.findings} for r in record.rows if len(r.nodes) == 1}
    assert codes == {"a": {"fabric.down"}, "b": {"fabric.unresolved"}, "c": {"fabric.memlock"}, "d": set()}


def test_a_group_prefers_an_nvlink_domain() -> None:
    def domain(made: Node) -> Node:
        devices = tuple(msgspec.structs.replace(d, nvlink_domain="u.1") for d in made.inventory.devices)
        return msgspec.structs.replace(made, inventory=msgspec.structs.replace(made.inventory, devices=devices))

    record = group(domain(node("a", fabric="x")), domain(node("b", fabric="x")))
    assert record.assignment is not None
    assert record.assignment.fabric == "nvl:u.1"


def test_a_group_keeps_to_a_rack() -> None:
    nodes = [
        node(n, fabric="x", labels={"rack": r}) for n, r in (("a", "1"), ("b", "2"), ("c", "2"), ("d", "1"), ("e", "3"))
    ]
    record = group(*nodes, reservations=(holds("x-1", "a", 0),))
    assert record.assignment is not None
    assert record.assignment.nodes == ("b", "c")


def test_a_group_that_is_short_tells_why_each_node_dropped_out() -> None:
    record = group(node("a", fabric="x"), node("b", fabric="x", lost=60.0), node("c", A100, fabric="x"))
    assert record.assignment is None
    text = explain.text(record)
    assert "node.lost: b: no heartbeat for 1m" in text
    assert any(r.group and r.nodes == ("b",) for r in record.rows)


def test_victims_never_fall_below_their_floor() -> None:
    def preempt(**more: Any) -> Record:
        low = [holds(f"low-{i}", "a", 4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3, **more) for i in range(2)]
        wanted = demand("vip", Shape(tp=4), priority=5, preemption="lower")
        (record,) = plan(snapshot(node("a"), reservations=tuple(low)), [pending("vip-1", wanted)])
        return record

    found = preempt().preemption
    assert found is not None
    assert (found.possible, found.victims, found.node) == (True, ("low-0",), "a")
    for kept in ({"floor": 2}, {"surge": True}, {"state": "draining"}, {"priority": 5}):
        found = preempt(**kept).preemption
        assert found is not None
        assert not found.possible
        assert "no replica of lower priority" in found.why
    one = preempt(floor=1).preemption
    assert one is not None
    assert len(one.victims) == 1


def test_preemption_is_off_unless_asked_for() -> None:
    low = holds("low-1", "a", *range(8))
    (record,) = plan(
        snapshot(node("a"), reservations=(low,)), [pending("vip-1", demand("vip", Shape(tp=4), priority=5))]
    )
    assert record.preemption is None


def test_preemption_does_not_help_where_something_else_is_in_the_way() -> None:
    low = holds("low-1", "a", *range(8))
    wanted = demand("vip", Shape(tp=4), priority=5, preemption="lower")
    lost = node("a", lost=60.0)
    (record,) = plan(snapshot(lost, reservations=(low,)), [pending("vip-1", wanted)])
    assert record.preemption is not None
    assert record.preemption.why == "no node fails by occupied GPUs, memory or ports alone"
    short = node("a", count=2)
    (record,) = plan(snapshot(short, reservations=(holds("low-1", "a", 0),)), [pending("vip-1", wanted)])
    assert record.preemption is not None
    assert record.preemption.why == "no set of replicas of lower priority frees enough on one node"


def test_names_sort_as_people_count() -> None:
    assert sorted(["gpu-10", "gpu-2", "a", "gpu-2b", "10"], key=natural) == ["10", "a", "gpu-2", "gpu-2b", "gpu-10"]


def test_a_stored_record_is_bounded_and_keeps_what_matters() -> None:
    nodes = [node(f"n{i}") for i in range(30)]
    (record,) = plan(snapshot(*nodes, reservations=(holds("x-1", "n29", 0),)), [pending("q-1", demand())])
    short = record.trimmed(10)
    assert (len(short.rows), short.omitted) == (10, 20)
    assert record.chosen is not None
    assert short.chosen is not None
    assert short.rows[short.chosen] == record.rows[record.chosen]
    assert "20 more candidates" in explain.text(short)
    assert "30 of 30 candidates feasible" in explain.text(short)
    assert record.trimmed(100) is record


def test_every_ranker_stays_within_bounds() -> None:
    weights = Weights(ref="/w", path="/w")
    bare = Node(inventory=Inventory(node="z", weights=(weights,)))
    shot = snapshot(node("a", flaps=3), node("b", A100), bare, mix=((1, 1.0),), speeds={"qwen": {H100[0]: 1.0}})
    (record,) = plan(shot, [pending("qwen-1", attrs.evolve(demand("qwen", Shape(tp=8)), max_model_len=1024))])
    scored = [r for r in record.rows if r.score is not None]
    assert scored
    assert all(0.0 <= v <= 1.0 for r in scored for v in r.terms)
    assert all(len(r.terms) == len(rankers()) for r in scored)
    assert all(0.0 <= (r.score or 0.0) <= 100.0 for r in scored)
    assert GIB == 2**30
