"""Divisibility and capability: what engines refuse at start, refused before."""

from __future__ import annotations

import msgspec
import pytest

from llmgw.placement.geometry import Geometry
from llmgw.placement.rules import capability, divisible, driver_branch, driver_floor, runs_on

BASE = Geometry(layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, intermediate=25_600, vocab=151_937)


def model(**changes: object) -> Geometry:
    return msgspec.convert({**msgspec.to_builtins(BASE), **changes}, Geometry)


@pytest.mark.parametrize(
    ("geometry", "tp", "says"),
    [
        (model(), 3, "attention heads 64 % tp 3"),
        (model(), 16, ""),
        (model(kv_heads=6, heads=48), 4, "KV heads 6 and tp 4"),
        (model(kv_heads=6, heads=48, intermediate=24_576), 12, ""),
        (model(intermediate=29_569), 2, "MLP width 29569 % tp 2"),
        (model(vocab=151_937), 8, ""),
        (model(experts=128, expert_intermediate=1536, block=128), 8, "192 is not a multiple of the FP8 block 128"),
        (model(experts=128, expert_intermediate=1536, block=128), 4, ""),
        (model(experts=128, expert_intermediate=768, block=128), 4, "192 is not a multiple"),
        (model(experts=128, expert_intermediate=768, block=128), 2, ""),
        (model(quantisation="awq", group=128), 8, ""),
        (model(quantisation="awq", group=128, intermediate=25_664), 2, "not a multiple of the group 128"),
        (model(kv_heads=1, heads=128, latent=512, rope_dim=64), 8, ""),
    ],
)
def test_tensor_parallel(geometry: Geometry, tp: int, says: str) -> None:
    found = divisible(geometry, tp)
    assert (says in "; ".join(found)) if says else not found


def test_expert_parallelism_lifts_the_block_rule_and_has_its_own() -> None:
    experts = model(experts=128, expert_intermediate=768, block=128)
    assert not divisible(experts, 8, expert_parallel=True)
    assert divisible(experts, 2, dp=3, expert_parallel=True) == ["experts 128 % (tp 2 x dp 3) != 0"]


def test_every_reason_is_told() -> None:
    assert len(divisible(model(intermediate=25_601), 3, pp=65)) == 3


@pytest.mark.parametrize(
    ("dtype", "quantisation", "least"),
    [
        ("bfloat16", "", (80, "bfloat16")),
        ("float16", "gptq", (60, "gptq")),
        ("bfloat16", "w4a8-fp8", (90, "w4a8-fp8")),
        ("", "", (0, "")),
        ("", "something-new", (0, "something-new")),
    ],
)
def test_capability(dtype: str, quantisation: str, least: tuple[int, str]) -> None:
    assert capability(dtype, quantisation) == least


@pytest.mark.parametrize(
    ("arches", "gpu", "starts"),
    [
        (("sm_75", "sm_80", "sm_90"), (6, 1), False),
        (("sm_75", "sm_80"), (8, 9), True),
        (("sm_80",), (9, 0), False),
        (("sm_80", "compute_80"), (9, 0), True),
        (("compute_90",), (8, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_100a",), (10, 3), False),
        (("sm_100f",), (10, 3), True),
        (("sm_120",), (10, 0), False),
        ((), (6, 1), True),
        (("all-major", "sm_x"), (8, 0), False),
    ],
)
def test_builds_and_gpus(arches: tuple[str, ...], gpu: tuple[int, int], starts: bool) -> None:
    assert runs_on(arches, gpu) is starts


def test_drivers() -> None:
    assert [driver_floor(c) for c in ("13.0", "12.4", "11.8", "", "99")] == [580, 525, 450, 0, 0]
    assert [driver_branch(d) for d in ("580.95.05", "550.90", "")] == [580, 550, 0]
