"""What an inventory amounts to, and which names of GPUs mean the same."""

from __future__ import annotations

import msgspec
import pytest

from llmgw.placement.inventory import Check, Device, Inventory, Island, Weights, is_type, node_state

MIB = 1 << 20


@pytest.mark.parametrize(
    ("wanted", "name", "mib", "same"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", 81559, True),
        ("h100-80g", "NVIDIA H100 80GB HBM3", 81559, True),
        ("H100", "NVIDIA H200", 143771, False),
        ("A100-40G", "NVIDIA A100-SXM4-40GB", 40960, True),
        ("A100-40G", "NVIDIA A100-SXM4-80GB", 81920, False),
        ("A100-80G", "NVIDIA A100-SXM", 81920, True),
        ("L40", "NVIDIA L40S", 46068, False),
        ("RTX 4090", "NVIDIA GeForce RTX 4090", 24564, True),
        ("4090", "NVIDIA GeForce RTX 4090", 24564, True),
    ],
)
def test_names_of_gpus(wanted: str, name: str, mib: int, same: bool) -> None:
    assert is_type(wanted, name, mib * MIB) is same


def check(level: str, scope: str = "node", ok: bool = False) -> Check:
    return msgspec.convert({"id": "X-1", "scope": scope, "level": level, "ok": ok}, Check)


@pytest.mark.parametrize(
    ("inventory", "state"),
    [
        (Inventory(node="a"), "ready"),
        (Inventory(node="a", checking=True), "joining"),
        (Inventory(node="a", checking=True, checks=(check("block"),)), "not-ready"),
        (Inventory(node="a", checks=(check("block", ok=True),)), "ready"),
        (Inventory(node="a", checks=(check("degrade"),)), "degraded"),
        (Inventory(node="a", checks=(check("block", "engine:vllm"),)), "ready"),
        (Inventory(node="a", gpu_problem="NVIDIA kernel module not loaded"), "degraded"),
        (Inventory(node="a", devices=(Device(uuid="G", index=0, name="n", memory=1, health="blocked"),)), "degraded"),
    ],
)
def test_state_is_the_worst_of_the_node_s_own_checks(inventory: Inventory, state: str) -> None:
    assert node_state(inventory) == state


def test_it_is_plain_json() -> None:
    full = Inventory(
        node="gpu-01",
        devices=(Device(uuid="GPU-1", index=0, name="NVIDIA H200", memory=143771 * MIB, capability=(9, 0)),),
        islands=(Island(id="0", kind="nvswitch", gpus=("GPU-1",)),),
        weights=(Weights(ref="m", config="{}"),),
        checks=(check("info"),),
    )
    assert msgspec.json.decode(msgspec.json.encode(full), type=Inventory) == full
