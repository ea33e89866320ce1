"""Every sub-code of every constraint, each alone, with its numbers; and that curing the named cause cures the candidate."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from llmgw.placement.constraints.engine import version_key
from llmgw.placement.demand import Demand, Shape
from llmgw.placement.inventory import GIB, Check, EngineInstall, Host, Inventory, Process
from llmgw.placement.snapshot import Cordon, Exclusion, Node, Snapshot
from llmgw.placement.solver import constraints, plan
from llmgw.placement.verdict import Finding, Record, Row
from llmgw.units import Size
from tests.placement.clusters import (
    A100,
    H100,
    H200,
    MIB,
    QWEN72,
    RTX4090,
    SMALL,
    V100,
    check,
    demand,
    held,
    node,
    pending,
    qwen,
    snapshot,
)

ROOMY = Host(memory=1024 * GIB, memory_available=1000 * GIB, shm=64 * GIB)


def decide(wanted: Demand, *nodes: Node, **more: Any) -> Record:
    (record,) = plan(snapshot(*nodes, **more), [pending("qwen-1", wanted)])
    return record


def only(record: Record) -> Row:
    (row,) = [r for r in record.rows if not r.group]
    return row


def found(record: Record) -> dict[str, Finding]:
    return {f.code: f for f in only(record).findings}


def gpu(node: Node, index: int, **changes: Any) -> Node:
    """*node* with one GPU changed."""
    inventory = node.inventory
    devices = tuple(msgspec.structs.replace(d, **changes) if d.index == index else d for d in inventory.devices)
    return msgspec.structs.replace(node, inventory=msgspec.structs.replace(inventory, devices=devices))


def small(*shapes: Shape, **more: Any) -> Demand:
    return demand("small", *(shapes or (Shape(),)), weights=SMALL, max_model_len=8192, **more)


FITS = demand()

CASES: list[tuple[str, Demand, Node, str]] = [
    ("node.lost", FITS, node("a", lost=252.0), "no heartbeat for 4m12s"),
    ("node.not-ready", FITS, node("a", checks=(check("CLK-1", "node", "clock is 92 s behind"),)), "CLK-1: clock is 92 s"),
    ("node.not-ready", FITS, node("a", checking=True), "first round"),
    ("node.cordoned", FITS, node("a", cordon=Cordon(by="alice", at=992_800.0, why="fan")), 'by alice, 2h ago: "fan"'),
    ("node.draining", FITS, node("a", draining=True), ""),
    ("node.taint", FITS, node("a", taints=("lab",)), "lab"),
    ("node.label", demand(labels={"zone": "a"}), node("a", labels={"zone": "b"}), "want zone=a, is b"),
    ("node.label", demand(labels={"zone": "a"}), node("a"), "want zone=a, is absent"),
    ("node.degraded", demand(degraded=False), node("a", gpu_problem="one is missing"), ""),
    ("gpu.type", demand("q", Shape(tp=4, gpus=("H200",))), node("a"), "want H200, has NVIDIA H100"),
    ("gpu.capability", small(), node("a", V100), "bfloat16 needs capability 8.0, Tesla V100-SXM2-32GB has 7.0; dtype float16"),
    ("gpu.capability", FITS,
     node("a", engines=(EngineInstall(name="vllm", version="0.33.0", gpu_arches=("sm_80", "sm_100")),)), "code for sm_80"),
    ("gpu.driver", FITS, node("a", driver="550.90"), "needs driver >= 580, has 550.90"),
    ("count.free", demand("q", Shape(tp=8)), node("a", count=4), "4 of 4 free"),
    ("count.island", demand("q", Shape(tp=4)), node("a", island=2), ""),
    ("count.island", demand("q", Shape(tp=4, island="nvlink")), node("a", island=4, kind="phb"), ""),
    ("count.divisible", demand("q", Shape(tp=6)), node("a"), "attention heads 64 % tp 6"),
    ("memory.vram", demand("q", Shape(tp=2)), node("a"), "fits if max_model_len <= 16512 or tp4"),
    ("memory.foreign", FITS,
     gpu(node("a", count=4), 1, memory_free=9 * GIB, processes=(Process(pid=4121, name="python3", user="bob"),)),
     "GPU 1: held by pid 4121 (python3, user bob)"),
    ("memory.host", FITS, node("a", host=msgspec.structs.replace(ROOMY, memory_available=14 * GIB)), ""),
    ("memory.shm", FITS, node("a", host=msgspec.structs.replace(ROOMY, shm=64 * MIB)), ""),
    ("engine.missing", FITS, node("a", engines=()), "want vllm, has none"),
    ("engine.missing", FITS, node("a", engines=(EngineInstall(name="vllm", gpu=False),)), "no GPU support"),
    ("engine.preflight", FITS, node("a", checks=(check("ENG-2", "engine:vllm", "libgomp.so.1 missing", fix="apt install libgomp1"),)),
     "ENG-2: libgomp.so.1 missing (apt install libgomp1)"),
    ("engine.version", demand(engine_version="0.34"), node("a"), "vllm 0.33.0 < 0.34"),
    ("engine.arch", FITS, node("a", engines=(EngineInstall(name="vllm", architectures=("LlamaForCausalLM",)),)),
     "does not know Qwen2ForCausalLM"),
    ("weights.invalid", FITS, node("a", weights=(qwen(problem="3 of 4 shards present"),)), "3 of 4 shards present"),
    ("weights.invalid", FITS, node("a", checks=(check("WGT-3", f"weights:{QWEN72}", "truncated"),)), "WGT-3: truncated"),
    ("ports", FITS, node("a", engine_ports=(20_000, 20_010)), "no 32 free ports in a row in 20000-20010"),
    ("ports", FITS, node("a", engine_ports=(20_000, 20_040), ports_taken=(20_007,)), ""),
    ("pin", demand(pin=("b",)), node("a"), "to b"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "wanted", "where", "says"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_each_code_alone(code: str, wanted: Demand, where: Node, says: str) -> None:
    record = decide(wanted, where)
    assert set(found(record)) == {code}
    assert says in str(found(record)[code])
    assert record.chosen is None
    assert record.feasible == 0
    assert record.rejected_by == {code.partition(".")[0].replace("weights", "engine").replace("ports", "engine"): 1}


def test_the_cases_leave_out_no_code_but_those_of_groups() -> None:
    elsewhere = {  # need reservations, partitions or several kinds of GPU: below
        "gpu.none", "node.spread", "node.cap", "gpu.mig", "gpu.mixed", "count.unhealthy", "count.reserved",
        "weights.missing", "weights.disk",
    }  # fmt: skip
    known = {code.code for c in constraints() for code in c.codes if not c.groups}
    assert known - elsewhere == {code for code, *_ in CASES} - {"pin"}


def test_what_is_not_in_the_way_fits() -> None:
    record = decide(FITS, node("a"))
    assert record.chosen == 0
    assert record.assignment is not None
    assert record.assignment.gpus == (("GPU-a-0", "GPU-a-1", "GPU-a-2", "GPU-a-3"),)
    assert (record.assignment.ports, record.assignment.nodes) == ((20_000,), ("a",))


def test_nothing_is_left_out_of_a_hopeless_node() -> None:
    hopeless = node(
        "a", RTX4090, 2, kind="phb", lost=1.0, cordon=Cordon(by="x", at=0.0), driver="550.90", engine_ports=(1, 2),
        taints=("lab",), host=Host(memory=8 * GIB, memory_available=GIB, shm=MIB), weights=(qwen(problem="gone"),),
    )  # fmt: skip
    record = decide(demand("q", Shape(tp=4, gpus=("H100",))), hopeless)
    assert set(found(record)) == {
        "node.lost", "node.cordoned", "node.taint", "gpu.type", "gpu.driver", "count.free", "memory.vram", "memory.host",
        "memory.shm", "weights.invalid", "ports",
    }  # fmt: skip
    assert record.rejected_by == {"node": 1, "gpu": 1, "count": 1, "memory": 1, "engine": 1}


def test_spread_and_cap() -> None:
    there = held("qwen-0", "a", 0, 1, 2, 3)
    assert set(found(decide(demand(spread="hard"), node("a"), reservations=(there,)))) == {"node.spread"}
    assert set(found(decide(demand(node_cap=1), node("a"), reservations=(there,)))) == {"node.cap"}
    racks = (node("a", labels={"rack": "1"}), node("b", labels={"rack": "1"}), node("c", labels={"rack": "2"}))
    record = decide(demand(spread="hard", spread_by="rack"), *racks, reservations=(there,))
    assert record.assignment is not None
    assert record.assignment.nodes == ("c",)
    assert "rack 1 has 1 of qwen" in str(record.rows[1].findings[0])


def test_no_gpu_at_all() -> None:
    record = decide(FITS, node("a", count=0, gpu_problem="NVIDIA kernel module not loaded"))
    assert str(found(record)["gpu.none"]) == "gpu.none: NVIDIA kernel module not loaded"
    assert found(record)["count.free"].have == 0
    assert only(record).verdicts["memory"].note == "no GPU to measure against"


def test_a_taint_that_is_tolerated_is_none() -> None:
    assert decide(demand(tolerations=("lab",)), node("a", taints=("lab",))).chosen == 0


def test_partitions() -> None:
    parts = node("a", count=1)
    parts = gpu(parts, 0, uuid="MIG-1", mig="1g.10gb", memory=80 * GIB, memory_free=80 * GIB)
    assert set(found(decide(small(Shape(gpus=("H100",))), parts))) == {"gpu.mig"}
    assert decide(small(Shape(gpus=("H100 1g.10gb",))), parts).chosen == 0
    assert set(found(decide(small(Shape(gpus=("H100 1g.10gb",))), node("a")))) == {"gpu.type"}


def test_mixed_types() -> None:
    mixed = node("a", count=4, island=2)
    for i in (2, 3):
        mixed = gpu(mixed, i, name=A100[0], memory=A100[1], memory_free=A100[1], capability=A100[2])
    record = decide(demand("q", Shape(tp=4, max_model_len=1024)), mixed)
    assert {"gpu.mixed"} < set(found(record))
    assert found(record)["gpu.mixed"].have == 2
    assert decide(small(Shape(tp=2, gpus=("A100-40G", "H100"))), mixed).rows[0].gpu_type == A100[0], (
        "first in the order"
    )


def test_unhealthy_and_reserved_gpus_are_named_where_they_are_missed() -> None:
    sick = gpu(node("a", count=4), 3, health="blocked", reason="Xid 79: reboot needed")
    record = decide(FITS, sick)
    assert set(found(record)) == {"count.free", "count.unhealthy"}
    assert str(found(record)["count.unhealthy"]).endswith("GPU 3 (GPU-a-3): Xid 79: reboot needed")
    assert decide(demand("q", Shape(tp=2, max_model_len=1024)), sick).assignment is not None, "others are enough"
    kept = held("vip", "a", 0, state="nominated", vram=0)
    record = decide(FITS, node("a", count=4), reservations=(kept,))
    assert set(found(record)) == {"count.free", "count.reserved"}
    assert "GPU 0 for vip (nominated)" in str(found(record)["count.reserved"])


def test_weights_that_are_absent() -> None:
    bare = node("a", weights=())
    record = decide(FITS, bare)
    assert set(found(record)) == {"weights.missing"}
    assert only(record).verdicts["memory"].ok is None, "nobody knows their size"
    record = decide(FITS, bare, node("b", count=0))
    assert found_at(record, "a") == {"weights.missing"}
    assert record.rows[0].verdicts["memory"].ok is True, "another node knows"
    assert decide(demand("q", Shape(tp=4, vram=Size(60 * GIB))), bare).rows[0].verdicts["memory"].ok is True, "declared"


def found_at(record: Record, name: str) -> set[str]:
    return {f.code for row in record.rows if row.nodes == (name,) for f in row.findings}


def test_weights_that_can_be_fetched_need_room() -> None:
    ref = "Qwen/Qwen2.5-72B-Instruct"
    knows = node("b", count=0, weights=(qwen(ref=ref),))
    wanted = demand(weights=ref, fetch=True)
    assert decide(wanted, node("a", weights=()), knows).assignment is not None
    tight = node("a", weights=())
    disks = tuple(msgspec.structs.replace(d, free=41 * GIB) for d in tight.inventory.disks)
    tight = msgspec.structs.replace(tight, inventory=msgspec.structs.replace(tight.inventory, disks=disks))
    record = decide(wanted, tight, knows)
    assert found_at(record, "a") == {"weights.disk"}
    (row,) = [r for r in record.rows if r.nodes == ("a",)]
    assert row.findings[0].have == 41
    assert row.findings[0].need == pytest.approx(135.43 * 1.05 + 5, abs=0.01)
    assert found_at(decide(demand(weights=ref), tight, knows), "a") == {"weights.missing"}, "fetching must be allowed"


def test_backoff_has_a_key_of_its_own() -> None:
    waits = (
        Exclusion(model="qwen", node="a", until=1_000_060.0, why="failed 3 times: cuda_oom"),
        Exclusion(model="qwen", node="a", until=None, why="ENG-2: libgomp.so.1 missing"),
        Exclusion(model="qwen", node="a", until=999_999.0, why="over"),
        Exclusion(model="other", node="", until=None, why="not ours"),
    )
    record = decide(FITS, node("a"), exclusions=waits)
    assert record.rejected_by == {"backoff": 1}
    assert [f.text for f in only(record).findings] == [
        "ENG-2: libgomp.so.1 missing; until an input changes", "failed 3 times: cuda_oom; for another 1m",
    ]  # fmt: skip


def test_shared_gpus_fill_up_and_no_further() -> None:
    third = Shape(shared=True, memory_fraction=0.4)
    wanted = small(third)
    records = plan(snapshot(node("a", H200, 1)), [pending(f"small-{i}", wanted) for i in range(3)])
    assert [r.assignment is not None for r in records] == [True, True, False]
    assert {f.code for f in only(records[2]).findings} == {"count.free", "count.reserved"}
    exclusive = plan(snapshot(node("a", H200, 1), reservations=(held("x-1", "a", 0),)), [pending("small-1", wanted)])
    assert exclusive[0].assignment is None, "not beside a replica that wants its GPU alone"


def test_on_the_cpu() -> None:
    wanted = small(Shape(cpu=True), engine="llama-server")
    llama = (EngineInstall(name="llama-server", version="b4500", gpu=False),)
    record = decide(wanted, node("a", count=0, engines=llama))
    assert record.assignment is not None
    assert record.assignment.gpus == ((),)
    assert record.assignment.host > 15 * GIB
    tight = node("a", count=0, engines=llama, host=Host(memory=16 * GIB, memory_available=15 * GIB))
    assert set(found(decide(wanted, tight))) == {"memory.host"}


def test_the_simulated_engine_needs_a_gpu_and_nothing_else() -> None:
    wanted = demand("q", Shape(tp=1), engine="sim", weights="", max_model_len=None)
    assert decide(wanted, node("a", V100, 1, driver="", weights=())).assignment is not None


def test_what_an_engine_reported_replaces_the_estimate() -> None:
    from llmgw.placement.snapshot import Learned

    tight = demand("q", Shape(tp=2))
    learned = (Learned(model="q", shape="tp2", gpu=H100[0], weights=65 * GIB),)
    record = decide(tight, node("a"), learned=learned)
    assert record.chosen == 0
    assert record.rows[0].need is not None
    assert (record.rows[0].need.source, record.rows[0].need.weights) == ("measured", 65.0)
    other = decide(tight, node("a", A100, 2), learned=learned)
    assert other.rows[0].need is not None
    assert other.rows[0].need.source == "estimated", "on another type nobody has measured"


@pytest.mark.parametrize(
    ("text", "key"),
    [("0.33.0", (0, 33, 0)), ("0.11.1rc2", (0, 11, 1)), ("v0.5", (0, 5)), ("b4500", (4500,)), ("", ()), ("dev", ())],
)
def test_versions(text: str, key: tuple[int, ...]) -> None:
    assert version_key(text) == key


def test_curing_the_named_cause_cures_the_candidate() -> None:
    """Metamorphic: what explain names, and only that, stood in the way."""
    record = decide(demand("q", Shape(tp=2)), node("a"))
    hint = found(record)["memory.vram"].max_model_len
    assert decide(demand("q", Shape(tp=2), max_model_len=hint), node("a")).chosen == 0
    assert decide(demand("q", Shape(tp=4)), node("a")).chosen == 0, "the other hint, tp4"
    cordoned = node("a", cordon=Cordon(by="x", at=0.0))
    assert decide(FITS, msgspec.structs.replace(cordoned, cordon=None)).chosen == 0


def test_a_node_without_anything_is_told_not_left_out() -> None:
    record = decide(FITS, Node(inventory=Inventory(node="a")), node("b"))
    assert [r.nodes for r in record.rows] == [("a",), ("b",)]
    assert record.assignment is not None
    empty = Snapshot()
    (record,) = plan(empty, [pending("q-1", FITS)])
    assert (record.rows, record.nearest, record.rejected_by) == ((), None, {})


def test_an_info_check_rejects_nothing() -> None:
    note = Check(id="ENG-5", scope="engine:vllm", level="degrade", ok=False, message="torch pin differs")
    assert decide(FITS, node("a", checks=(note,))).chosen == 0
