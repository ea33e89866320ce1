"""What people and programs read: the table, the JSON, the summary; and the reference page made from the same codes."""

from __future__ import annotations

from llmgw.placement import explain
from llmgw.placement.demand import Shape
from llmgw.placement.snapshot import Cordon
from llmgw.placement.solver import plan
from llmgw.placement.verdict import Record, span
from tests.placement.clusters import A100, check, demand, held, node, pending, snapshot


def hopeless() -> Record:
    nodes = (
        node("gpu-01"),
        node("gpu-02", cordon=Cordon(by="alice", at=992_800.0, why="fan")),
        node("gpu-03", A100, 2, kind="phb", checks=(check("CUDA-1", "engine:vllm", "needs driver >= 580"),)),
        node("gpu-05", count=0, lost=252.0),
    )
    wanted = demand("qwen2.5-72b", Shape(tp=2), priority=1, preemption="lower")
    (record,) = plan(snapshot(*nodes), [pending("qwen2.5-72b-2", wanted)])
    return record


def test_the_table() -> None:
    assert explain.text(hopeless(), desired=2, running=1, pending=1).splitlines() == [
        "model qwen2.5-72b  replica qwen2.5-72b-2  desired 2  running 1  pending 1",
        "need of tp2 (2 GPUs): per GPU 75.75 GiB = weights 67.71 + overhead 3.04 + kv 5.00 (estimated)",
        "CANDIDATE              SHAPE  node gpu count memory engine fabric  SCORE  REASON",
        "gpu-01 [0,1] nvswitch  tp2     ok  ok   ok     NO     ok     -         -  memory.vram: need 75.75, have 73.28 GiB,"
        " short 2.47; fits if max_model_len <= 16512 or tp4",
        'gpu-02 [0,1] nvswitch  tp2     NO  ok   ok     NO     ok     -         -  node.cordoned: by alice, 2h ago: "fan";'
        " memory.vram: need 75.75, have 73.28 GiB, short 2.47; fits if max_model_len <= 16512 or tp4",
        "gpu-03 [0,1] phb       tp2     ok  ok   ok     NO     NO     -         -  memory.vram: need 75.75, have 36.80 GiB,"
        " short 38.95; engine.preflight: CUDA-1: needs driver >= 580",
        "gpu-05                 tp2     NO  NO   NO     -      ok     -         -  node.lost: no heartbeat for 4m12s;"
        " gpu.none; count.free: need 2, have 0 GPUs, short 2; 0 of 0 free; memory not evaluated: no GPU to measure against",
        "0 of 4 candidates feasible: node 2, gpu 1, count 1, memory 3, engine 1",
        "nearest: gpu-01 [0,1] nvswitch (tp2) fails only memory; would be placed with max_model_len <= 16512 or tp4",
        "preemption: not possible: no replica of lower priority that may go is on those nodes",
    ]


def test_exit_codes() -> None:
    assert explain.exit_code(hopeless()) == 3
    (record,) = plan(snapshot(node("a")), [pending("q-1", demand())])
    assert explain.exit_code(record) == 0


def test_json_has_both_numbers() -> None:
    found = explain.json(hopeless(), desired=2, running=1)
    assert found["need"] == {
        "gpus": 2, "vram_gib": 75.75, "weights_gib": 67.71, "overhead_gib": 3.04, "kv_gib": 5.0, "kv_tokens": 16525,
        "source": "estimated",
    }  # fmt: skip
    assert (found["model"], found["desired"], found["running"], found["feasible"]) == ("qwen2.5-72b", 2, 1, 0)
    assert found["rejected_by"] == {"node": 2, "gpu": 1, "count": 1, "memory": 3, "engine": 1}
    assert (found["nearest"], found["chosen"]) == (0, None)
    first = found["candidates"][0]
    assert (first["nodes"], first["feasible"], first["score"], first["terms"]) == (["gpu-01"], False, None, None)
    memory = first["constraints"]["memory"]
    assert (memory["ok"], memory["code"]) == (False, "memory.vram")
    (finding,) = memory["findings"]
    assert {k: v for k, v in finding.items() if k != "text"} == {
        "code": "memory.vram", "need_gib": 75.75, "have_gib": 73.28, "short_gib": 2.47,
        "hint": {"max_model_len": 16512, "shape": "tp4"},
    }  # fmt: skip
    assert first["constraints"]["fabric"] == {"ok": True, "note": "n/a"}
    assert found["candidates"][3]["constraints"]["memory"] == {"ok": None, "note": "no GPU to measure against"}
    assert found["preemption"]["possible"] is False


def test_a_success_shows_its_terms() -> None:
    (record,) = plan(snapshot(node("a")), [pending("q-1", demand())])
    text = explain.text(record)
    assert "1 of 1 candidates feasible" in text
    assert "chosen: a [0-3] nvswitch as tp4" in text
    assert "fragmentation 1.00 x 30" in text
    assert explain.json(record)["candidates"][0]["terms"]["fragmentation"] == 1.0
    assert explain.summary(record) == "a [0-3] nvswitch: 1 of 1 candidates feasible"


def test_a_summary_is_one_line() -> None:
    assert explain.summary(hopeless()).startswith("0 of 4 candidates feasible: node 2, gpu 1")
    assert "\n" not in explain.summary(hopeless())


def test_victims_are_named() -> None:
    low = held("low-1", "a", *range(8))
    wanted = demand("vip", Shape(tp=4), priority=5, preemption="lower")
    (record,) = plan(snapshot(node("a"), reservations=(low,)), [pending("vip-1", wanted)])
    assert "preemption: on a, low-1 would be drained" in explain.text(record)
    assert explain.json(record)["preemption"]["victims"] == ["low-1"]


def test_spans_of_time() -> None:
    assert [span(s) for s in (0, 59.9, 60, 252, 7200, 7500, 86400, 90000)] == [
        "0s", "59s", "1m", "4m12s", "2h", "2h5m", "1d", "1d1h",
    ]  # fmt: skip
