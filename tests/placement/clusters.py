"""Clusters to decide about: nodes with GPUs, engines, weights and ports, as an agent would describe them."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from llmgw.placement.demand import Demand, Pending, Shape
from llmgw.placement.inventory import (
    GIB,
    Check,
    Device,
    Disk,
    EngineInstall,
    Host,
    Inventory,
    Island,
    IslandKind,
    Port,
    Weights,
)
from llmgw.placement.snapshot import Node, Reservation, Snapshot

MIB = 1 << 20
H100 = ("NVIDIA H100 80GB HBM3", 81_559 * MIB, (9, 0))
H200 = ("NVIDIA H200", 143_771 * MIB, (9, 0))
A100 = ("NVIDIA A100-SXM4-40GB", 40_960 * MIB, (8, 0))
RTX4090 = ("NVIDIA GeForce RTX 4090", 24_564 * MIB, (8, 9))
V100 = ("Tesla V100-SXM2-32GB", 32_768 * MIB, (7, 0))

QWEN72 = "/models/qwen2.5-72b"
QWEN72_BYTES = 145_412_407_296
CONFIG = (
    '{"architectures":["Qwen2ForCausalLM"],"num_hidden_layers":80,"hidden_size":8192,"num_attention_heads":64,'
    '"num_key_value_heads":8,"intermediate_size":29568,"vocab_size":152064,"torch_dtype":"bfloat16",'
    '"max_position_embeddings":32768}'
)
SMALL = "/models/small"
SMALL_CONFIG = (
    '{"architectures":["LlamaForCausalLM"],"num_hidden_layers":32,"hidden_size":4096,"num_attention_heads":32,'
    '"num_key_value_heads":8,"intermediate_size":14336,"vocab_size":128256,"torch_dtype":"bfloat16",'
    '"max_position_embeddings":8192}'
)


def qwen(**more: Any) -> Weights:
    base = Weights(
        ref=QWEN72,
        path=QWEN72,
        format="safetensors",
        bytes=QWEN72_BYTES,
        bytes_total=QWEN72_BYTES,
        largest_file=4 * GIB,
        config=CONFIG,
    )
    return msgspec.structs.replace(base, **more)


def small(**more: Any) -> Weights:
    base = qwen(ref=SMALL, path=SMALL, bytes=15 * GIB, bytes_total=15 * GIB, config=SMALL_CONFIG)
    return msgspec.structs.replace(base, **more)


def inventory(
    name: str,
    gpu: tuple[str, int, tuple[int, int]] = H100,
    count: int = 8,
    *,
    kind: IslandKind = "nvswitch",
    island: int = 8,
    fabric: str = "",
    rails: int = 4,
    **more: Any,
) -> Inventory:
    """*count* GPUs in islands of *island*; with *rails* ports on *fabric*."""
    devices = tuple(
        Device(
            uuid=f"GPU-{name}-{i}",
            index=i,
            name=gpu[0],
            memory=gpu[1],
            memory_free=gpu[1] - 600 * MIB,
            capability=gpu[2],
            island=str(i // island),
            numa=i * 2 // max(count, 1),
        )
        for i in range(count)
    )
    islands = tuple(
        Island(id=str(k), kind=kind, gpus=tuple(d.uuid for d in devices if d.island == str(k)))
        for k in range(-(-count // island))
    )
    ports = tuple(
        Port(device=f"mlx5_{i}", state="active", rate=400.0, fabric=fabric, bdf=f"0000:{i:02x}:00.0")
        for i in range(rails if fabric else 0)
    )
    base = Inventory(
        node=name,
        address="10.0.0.1",
        driver="580.95.05",
        cuda="13.0",
        devices=devices,
        islands=islands,
        ports=ports,
        host=Host(memory=1024 * GIB, memory_available=1000 * GIB, shm=64 * GIB, cores=64.0),
        disks=(Disk(path="/models", free=2000 * GIB),),
        engines=(EngineInstall(name="vllm", version="0.33.0", cuda="13.0"), EngineInstall(name="sim", version="0.1")),
        weights=(qwen(), small()),
    )
    return msgspec.structs.replace(base, **more)


def node(name: str, gpu: tuple[str, int, tuple[int, int]] = H100, count: int = 8, **more: Any) -> Node:
    """Fields of `Node` and of `Inventory` alike by name."""
    own = {f.name for f in msgspec.structs.fields(Node)}
    mine = {k: v for k, v in more.items() if k in own}
    return Node(inventory=inventory(name, gpu, count, **{k: v for k, v in more.items() if k not in own}), **mine)


def demand(name: str = "qwen", *shapes: Shape, **more: Any) -> Demand:
    base = Demand(name=name, engine="vllm", weights=QWEN72, max_model_len=32_768, shapes=shapes or (Shape(tp=4),))
    return attrs.evolve(base, **more)


def pending(replica: str, wanted: Demand, created: float = 0.0) -> Pending:
    return Pending(replica=replica, demand=wanted, created=created)


def held(replica: str, name: str, *indices: int, **more: Any) -> Reservation:
    base = Reservation(
        replica=replica,
        model=replica.rpartition("-")[0] or replica,
        node=name,
        gpus=tuple(f"GPU-{name}-{i}" for i in indices),
        vram=70 * GIB,
        ports=(20_000, 32),
    )
    return msgspec.structs.replace(base, **more)


def snapshot(*nodes: Node, **more: Any) -> Snapshot:
    return Snapshot(revision=7, at=1_000_000.0, nodes=nodes, **more)


def check(id_: str, scope: str, message: str, **more: Any) -> Check:
    return Check(id=id_, scope=scope, level="block", ok=False, message=message, **more)
