"""The catalogue: from YAML to models with all problems listed, and what an edit changes."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from llmgw.config import Document
from llmgw.control.catalog import (
    BUILT,
    OWN_FLAGS,
    PLACED,
    Catalogue,
    ModelSpec,
    diff,
    fingerprint,
    plainly,
    problems,
    replaces,
    switches,
)
from llmgw.placement.demand import Demand, Shape

GOOD = """
version: 1
models:
  - name: qwen2.5-72b
    engine: vllm
    weights: /models/qwen2.5-72b
    max_model_len: 32768
    replicas: 2
    priority: 10
    min_available: 1
    labels: {zone: a}
    shapes:
      - {gpus: [H200], tp: 2}
      - {gpus: [H100], tp: 4, flags: [--enable-prefix-caching]}
      - {name: big, tp: 8, pp: 2, nodes: 2, min_rails: 4, vram: 60GiB}
    grace: 15m
  - {name: tiny, engine: sim}
"""


def load(text: str, engines: tuple[str, ...] = ()) -> tuple[Catalogue | None, list[str]]:
    document = Document(text, "cluster.yaml")
    catalogue, found = document.structure(Catalogue)
    if catalogue is not None:
        found = found + problems(catalogue.models, document.problem, engines)
    return catalogue, [str(p) for p in found]


def test_a_good_file() -> None:
    catalogue, found = load(GOOD, ("vllm", "sim"))
    assert not found
    assert catalogue is not None
    qwen, tiny = catalogue.models
    assert isinstance(qwen, Demand)
    assert [s.label for s in qwen.shapes] == ["tp2", "tp4", "big"]
    assert (qwen.grace, qwen.shapes[2].vram, qwen.shapes[2].share) == (900.0, 60 << 30, 8)
    assert (tiny.replicas, tiny.phases, tiny.shapes) == (1, ("prefill", "decode"), (Shape(),))
    assert qwen.shape("tp4") == qwen.shapes[1]
    assert qwen.flags_of(qwen.shapes[1]) == ("--enable-prefix-caching",)


def test_all_problems_with_file_line_and_path() -> None:
    _, found = load(
        """version: 1
models:
  - name: a
    engine: vlm
    weights: /w
    replicas: 1
    min_available: 2
    flags: [--port=1]
    env: {CUDA_VISIBLE_DEVICES: "0"}
    shapes:
      - {tp: 3, nodes: 2}
      - {tp: 2}
      - {tp: 2, gpus: [H100]}
  - {name: a, engine: vllm}
""",
        ("vllm", "sim"),
    )
    assert found == [
        "cluster.yaml:7: models[0].min_available: 2 is more than replicas 1: no drain could ever begin",
        "cluster.yaml:8: models[0].flags[0]: --port is set from the shape and the assignment; leave it out",
        "cluster.yaml:9: models[0].env.CUDA_VISIBLE_DEVICES: is set by the agent; leave it out",
        "cluster.yaml:11: models[0].shapes[0].engine: unknown engine 'vlm'; known: sim, vllm",
        "cluster.yaml:11: models[0].shapes[0].nodes: tp 3 x pp 1 x dp 1 = 3 GPUs are not divisible by 2 nodes",
        "cluster.yaml:12: models[0].shapes[1].engine: unknown engine 'vlm'; known: sim, vllm",
        "cluster.yaml:13: models[0].shapes[2]: is called 'tp2', like shapes[1]; give one of them a name",
        "cluster.yaml:13: models[0].shapes[2].engine: unknown engine 'vlm'; known: sim, vllm",
        "cluster.yaml:14: models[1].name: model 'a' is defined twice (first as models[0])",
        "cluster.yaml:14: models[1].shapes[0].weights: engine vllm needs weights: a path on the nodes or a repository id",
    ]


def test_keys_are_checked_as_everywhere() -> None:
    _, found = load(
        "version: 1\nmodels:\n  - {name: 'a b', engine: vllm, shape: 1, shapes: [{tp: 0, memory_fraction: 2.0}]}\n"
    )
    assert any("did you mean 'shapes'" in f for f in found)
    assert any("'a b' is not a name" in f for f in found)
    assert any("shapes[0].tp: must be more than 0" in f for f in found)
    assert any("shapes[0].memory_fraction: must be more than 0 and at most 1" in f for f in found)


def spec(shape: dict[str, Any] | None = None, **more: Any) -> ModelSpec:
    base: dict[str, Any] = {"name": "m", "engine": "vllm", "weights": "/w", "shapes": (Shape(**(shape or {})),)}
    return ModelSpec(**{**base, **more})


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (spec({"tp": 16, "nodes": 2}), "tp 16 would span nodes of 8 GPUs: use tp 8 and pp for the nodes"),
        (spec({"tp": 4, "pp": 3, "nodes": 2}), "6 GPUs on a node do not hold whole groups of tp 4"),
        (spec({"cpu": True}), "engine vllm is not run on the CPU; llama-server is"),
        (spec({"cpu": True, "gpus": ("H100",)}, engine="sim"), "names no GPUs"),
        (spec({"cpu": True, "tp": 2}, engine="sim"), "tp, pp, dp and nodes of 1"),
        (spec({"shared": True}), "must say which part"),
        (spec({"shared": True, "memory_fraction": 0.4, "pp": 2, "nodes": 2}), "has its GPUs for itself"),
        (spec({"fabric": "ib-a"}), "only a shape over several nodes"),
        (spec({"pp": 2, "nodes": 2}, engine="llama-server"), "does not run over several nodes"),
        (spec({"dp": 2}, engine="llama-server"), "use more replicas"),
        (spec(fetch=True), "'/w' is a path"),
        (spec(spread="hard", node_cap=2), "contradicts `spread: hard`"),
        (spec(phases=("decode", "decode")), "names a phase twice"),
        (spec({"env": {"LLMGW_X": "1"}}), "is set by the agent"),
        (spec({"flags": ("-tp",)}), "-tp is set from the shape"),
        (spec({"eager": True}, engine="sim"), "engine sim has no such switch; sglang and vllm have"),
    ],
)
def test_each_rule(model: ModelSpec, says: str) -> None:
    (found,) = problems([model], plainly)
    assert says in str(found)


@pytest.mark.parametrize(
    "model",
    [
        spec({"tp": 8, "pp": 2, "nodes": 2}),
        spec({"tp": 4, "dp": 4, "nodes": 2}),
        spec({"cpu": True}, engine="llama-server"),
        spec({"shared": True, "memory_fraction": 0.4}),
        spec(fetch=True, weights="Qwen/Qwen3-8B"),
        spec(engine="sim", weights=""),
        spec(replicas=0),
    ],
)
def test_what_is_allowed(model: ModelSpec) -> None:
    assert problems([model], plainly) == []


def test_flags_with_a_value_are_seen_too() -> None:
    assert {"--host", "--port"} <= OWN_FLAGS
    (found,) = problems([spec(flags=("--host=::",))], plainly)
    assert found.where == "models[0].flags[0]"


def test_switches_are_spelt_as_the_engine_does() -> None:
    shape = Shape(tp=4, dp=2, kv_dtype="fp8", eager=True, expert_parallel=True)
    assert switches("vllm", shape) == ("--kv-cache-dtype", "fp8", "--enforce-eager", "--enable-expert-parallel")
    assert switches("sglang", shape) == ("--kv-cache-dtype", "fp8", "--disable-cuda-graph", "--ep-size", "8")
    assert switches("vllm", Shape()) == ()


def test_diff() -> None:
    old = [spec(), spec(name="gone"), spec(name="same")]
    new = [
        spec({"name": "tp1", "flags": ("--x",)}, replicas=3),
        spec(name="new"),
        spec(name="same"),
    ]
    assert [str(c) for c in diff(old, new)] == [
        "- gone",
        "~ m: shapes[tp1].name: unset -> tp1, shapes[tp1].flags: unset -> ['--x'], replicas: 1 -> 3"
        " (replicas are replaced one at a time)",
        "+ new",
    ]
    assert diff(old, old) == []


def test_scaling_and_placement_keys_restart_nothing() -> None:
    for quiet in (
        spec(replicas=5), spec(priority=9), spec(labels={"a": "b"}), spec({"gpus": ("H100",)}), spec(band="bulk"),
        spec(pin=("n",)), spec(min_available=1), spec(grace=1.0),
        attrs.evolve(spec(), shapes=(Shape(), Shape(tp=2))),
    ):  # fmt: skip
        (change,) = diff([spec()], [quiet])
        assert not change.restarts, change
    assert "shapes[tp2]: unset -> tp2" in str(diff([spec()], [attrs.evolve(spec(), shapes=(Shape(), Shape(tp=2)))])[0])
    for loud in (
        spec(engine="sim"),
        spec(max_model_len=1),
        spec({"eager": True}),
        spec({"tp": 2}),
        spec(env={"A": "1"}),
    ):
        (change,) = diff([spec()], [loud])
        assert change.restarts, change


def test_every_key_is_either_built_in_or_known_not_to_be() -> None:
    """A new key of a model or shape must be put on one of the lists, after thinking what an edit of it means."""
    quiet = {
        "name", "fetch", "shapes", "prefer", "engine_version", "labels", "tolerations", "pin", "degraded", "spread",
        "spread_by", "node_cap", "priority", "preemption", "min_available", "replicas", "band", "grace",
    }  # fmt: skip
    assert {a.name for a in attrs.fields(ModelSpec)} == quiet | set(BUILT)
    assert {a.name for a in attrs.fields(Shape)} >= PLACED


def test_a_fingerprint_is_of_what_runs() -> None:
    assert fingerprint(spec(), Shape()) == fingerprint(spec(replicas=9), Shape(name="other", gpus=("H100",)))
    assert fingerprint(spec(), Shape()) != fingerprint(spec(), Shape(tp=2))
    assert replaces(spec(), spec(dtype="float16"))
