"""What a model asks of the cluster: shapes to choose from, and conditions that hold for each of them.

The catalogue's `ModelSpec` is a `Demand` with more to it; the solver reads no more than this.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

import attrs

LLAMA = "llama-server"
SIM = "sim"
GGUF_ENGINES = frozenset({LLAMA})


@attrs.frozen(kw_only=True)
class Shape:
    """One way to run a replica. Empty strings and None mean: as the model says."""

    name: str = ""  # "" = made from the degrees: tp2, tp8pp2
    gpus: tuple[str, ...] = ()  # types in order of preference ("H100", "A100-40G"); empty = any
    cpu: bool = False  # runs without a GPU
    tp: int = 1
    pp: int = 1
    dp: int = 1
    nodes: int = 1
    expert_parallel: bool = False
    island: Literal["any", "nvlink", "node"] = "any"  # a tensor-parallel group needs one island; "node" = may span them
    shared: bool = False  # its GPUs may hold other shared replicas
    memory_fraction: float | None = None  # of each GPU; None = the engine's default
    vram: int | None = None  # bytes a GPU; replaces the estimate
    max_model_len: int | None = None
    max_num_seqs: int | None = None  # sequences at once; None = the engine's default (llama-server: 1 slot)
    max_batched_tokens: int | None = None
    dtype: str = ""
    quantisation: str = ""
    kv_dtype: str = ""
    eager: bool = False
    engine: str = ""
    weights: str = ""
    fabric: str = ""  # a group's; "" = any
    min_rails: int = 1
    strict_rails: bool = False  # every node of a group has the same number of rails
    flags: tuple[str, ...] = ()
    env: dict[str, str] = attrs.field(factory=dict, hash=False)  # shapes are keys

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

    name: str
    engine: str
    weights: str = ""  # path on the nodes or repository id; only the simulated engine needs none
    fetch: bool = False  # the engine may download what is missing
    dtype: str = ""
    quantisation: str = ""
    max_model_len: int | None = None  # None = the model's own
    shapes: tuple[Shape, ...] = (Shape(),)
    prefer: Literal["order", "score"] = "order"  # the first shape that fits, or the best score across all
    engine_version: str = ""  # least version: "0.11"
    labels: dict[str, str] = attrs.Factory(dict)  # a node must have all of these
    tolerations: tuple[str, ...] = ()  # taints that do not matter
    pin: tuple[str, ...] = ()  # only these nodes; empty = any
    degraded: bool = True  # a degraded node will do
    spread: Literal["soft", "hard"] = "soft"  # hard: never two replicas in one domain
    spread_by: str = "node"  # or a label of nodes: rack, zone
    node_cap: int | None = None  # replicas on one node, at most
    priority: int = 0
    preemption: Literal["never", "lower"] = "never"
    min_available: int = 0  # preemption and drain leave so many ready

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
