"""What a model asks of the cluster: shapes to choose from, and conditions that hold for each of them.

The catalogue's `ModelSpec` is a `Demand` with more to it; the solver reads no more than this.
"""

# ruff: noqa: RUF009 -- `key` is attrs.field, which ruff does not recognise through a call

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

import attrs

from llmgw.schema import a_name, key, not_empty, not_negative, positive
from llmgw.units import Size


def a_fraction(value: float) -> str | None:
    return None if 0 < value <= 1 else "must be more than 0 and at most 1"


LLAMA = "llama-server"
SIM = "sim"
GGUF_ENGINES = frozenset({LLAMA})


@attrs.frozen(kw_only=True)
class Shape:
    """One way to run a replica. Empty strings and null mean: as the model says."""

    name: str = key("Of the shape; made from the degrees if it is empty: `tp2`, `tp8pp2x2`.", "")
    gpus: tuple[str, ...] = key("Types in order of preference: `[H200, A100-80G]`; empty = any.", ())
    cpu: bool = key("Runs without a GPU.", False)
    tp: int = key("Tensor-parallel degree; a group of so many GPUs needs one island.", 1, check=positive)
    pp: int = key("Pipeline-parallel degree.", 1, check=positive)
    dp: int = key("Data-parallel degree inside one replica.", 1, check=positive)
    nodes: int = key("Over how many nodes of one fabric the replica is spread.", 1, check=positive)
    expert_parallel: bool = key("Routed experts are divided among all ranks.", False)
    island: Literal["any", "nvlink", "node"] = key(
        "Where a tensor-parallel group may be: in `any` one island, in one of `nvlink`, or across the islands of a `node`.",
        "any",
    )
    shared: bool = key("Its GPUs may hold other shared replicas; needs `memory_fraction`.", False)
    memory_fraction: float | None = key(
        "Part of each GPU that the engine takes; null = its own default (vLLM 0.92).", None, check=a_fraction
    )
    vram: Size | None = key("Memory that it needs of each GPU; replaces the estimate.", None, check=positive)
    max_model_len: int | None = key("As the model's.", None, check=positive)
    max_num_seqs: int | None = key(
        "Sequences at once; null = the engine's default (llama-server: 1).", None, check=positive
    )
    max_batched_tokens: int | None = key("Tokens of one step.", None, check=positive)
    dtype: str = key("As the model's.", "")
    quantisation: str = key("As the model's.", "")
    kv_dtype: str = key("Of the KV cache: `fp8`; empty = 16 bit.", "")
    eager: bool = key("No CUDA graphs: saves memory, costs speed.", False)
    engine: str = key("As the model's.", "")
    weights: str = key("As the model's.", "")
    fabric: str = key("Fabric of a group; empty = any.", "")
    min_rails: int = key("Healthy ports that each node of a group has on the fabric.", 1, check=positive)
    strict_rails: bool = key("All nodes of a group have the same number of rails.", False)
    flags: tuple[str, ...] = key("Appended to the engine's command line, after the model's.", ())
    env: dict[str, str] = key("Environment of the engine, over the model's.", attrs.Factory(dict), hash=False)

    @property
    def ranks(self) -> int:
        """GPUs of a replica, over all its nodes."""
        return 0 if self.cpu else self.tp * self.pp * self.dp

    @property
    def share(self) -> int:
        """GPUs of a replica on one of its nodes."""
        return self.ranks // self.nodes

    @property
    def label(self) -> str:
        if self.name:
            return self.name
        if self.cpu:
            return "cpu"
        degrees = (("tp", self.tp), ("pp", self.pp), ("dp", self.dp))
        return "".join(f"{k}{n}" for k, n in degrees if n > 1 or k == "tp") + (
            f"x{self.nodes}" if self.nodes > 1 else ""
        )


@attrs.frozen(kw_only=True)
class Demand:
    """A model as placement sees it."""

    name: str = key("Of the model, as clients ask for it.", check=a_name)
    engine: str = key("`vllm`, `sglang`, `llama-server` or `sim`.")
    weights: str = key("Path on the nodes, or repository id; only `sim` needs none.", "")
    fetch: bool = key("The engine may download what a node has not got (a repository id only).", False)
    dtype: str = key("`bfloat16`, `float16`; empty = the checkpoint's.", "")
    quantisation: str = key("`fp8`, `awq`, …; empty = the checkpoint's.", "")
    max_model_len: int | None = key("Longest sequence, tokens; null = the model's own.", None, check=positive)
    shapes: tuple[Shape, ...] = key("Ways to run a replica.", (Shape(),), check=not_empty)
    prefer: Literal["order", "score"] = key(
        "The first shape of the list that fits anywhere (`order`), or the best `score` of all.", "order"
    )
    engine_version: str = key("Least version of the engine: `0.11`.", "")
    labels: dict[str, str] = key("Labels that a node must have.", attrs.Factory(dict))
    tolerations: tuple[str, ...] = key("Taints of nodes that do not matter.", ())
    pin: tuple[str, ...] = key("Only these nodes; empty = any.", ())
    degraded: bool = key("A degraded node will do.", True)
    spread: Literal["soft", "hard"] = key("`hard`: never two replicas in one domain.", "soft")
    spread_by: str = key("What a domain is: `node`, or a label of nodes (`rack`).", "node")
    node_cap: int | None = key("Replicas on one node, at most.", None, check=positive)
    priority: int = key("Who is placed first, and who may be preempted.", 0)
    preemption: Literal["never", "lower"] = key("May it take the place of replicas with lower priority?", "never")
    min_available: int = key("Ready replicas that drain and preemption leave.", 0, check=not_negative)

    def engine_of(self, shape: Shape) -> str:
        return shape.engine or self.engine

    def weights_of(self, shape: Shape) -> str:
        return shape.weights or self.weights

    def dtype_of(self, shape: Shape) -> str:
        return shape.dtype or self.dtype

    def quantisation_of(self, shape: Shape) -> str:
        return shape.quantisation or self.quantisation


@attrs.frozen(kw_only=True)
class Pending:
    """A replica that wants a place."""

    replica: str
    demand: Demand
    created: float = 0.0


_PARTS = re.compile(r"\d+|\D+", re.ASCII)


@lru_cache(maxsize=16384)  # names of nodes and replicas: the same ones in every decision
def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which gpu-2 comes before gpu-10."""
    return tuple((0, int(part), part) if part.isdigit() else (1, 0, part) for part in _PARTS.findall(name))
