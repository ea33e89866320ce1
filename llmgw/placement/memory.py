"""How much memory a rank needs: weights, KV cache, overhead; and how much of a GPU an engine may use.

The rules are vLLM's, which SGLang shares in substance; llama.cpp's are in `llmgw.placement.llamacpp`. Sizes are bytes.
The estimate is a heuristic whose constants are named here; what engines report of themselves replaces it.
"""

from __future__ import annotations

import math

import msgspec

from llmgw.placement import geometry as geo
from llmgw.placement.geometry import Geometry
from llmgw.placement.inventory import GIB

BLOCK = 16  # tokens a KV block, vLLM's default
FRACTION = 0.92  # gpu_memory_utilization, vLLM's default
CONTEXT = GIB // 2  # CUDA context and allocator
COLLECTIVES = int(0.8 * GIB)  # NCCL buffers, as soon as there are two ranks
GRAPHS = GIB // 2  # captured CUDA graphs; none when eager
MLA_FP8 = 656  # bytes a token and layer of vLLM's fp8 layout of MLA: latent in fp8, scales, rotary part in 16 bit
LENGTH_STEP = 128  # a suggested maximum length is a multiple of this


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is spread and used. All that the need depends on, besides the model itself."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    max_model_len: int
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    kv_dtype: str = ""  # "fp8…" = one byte; "" = 16 bit
    eager: bool = False


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank needs, for one sequence of the maximum length (an engine that cannot hold that does not start)."""

    weights: int
    overhead: int
    kv: int
    kv_token: float = 0.0  # how much of kv each token adds
    kv_fixed: int = 0  # how much of kv does not grow (windowed layers)
    measured: bool = False  # an engine reported it; else estimated

    @property
    def total(self) -> int:
        return self.weights + self.overhead + self.kv

    def longest(self, budget: int) -> int:
        """The longest sequence for which it would fit into *budget*; 0 if weights and overhead alone do not."""
        return self.tokens(budget) // LENGTH_STEP * LENGTH_STEP

    def tokens(self, budget: int) -> int:
        """How many tokens the KV cache holds in all, when the engine takes *budget*."""
        rest = budget - self.weights - self.overhead - self.kv_fixed
        return int(rest / self.kv_token) if rest > 0 and self.kv_token > 0 else 0


def kv_per_token(geometry: Geometry, kv_dtype: str = "", tp: int = 1, layers: int | None = None) -> int:
    """Bytes a token in one layer set of one rank. *layers*: how many that keep every token; default the model's.

    Beyond tp = kv_heads the heads are replicated, so that nothing more is saved; MLA's latent is on every rank.
    """
    count = geometry.full if layers is None else layers
    width = 1 if kv_dtype.startswith("fp8") else 2
    if geometry.latent:
        return count * (MLA_FP8 if width == 1 else (geometry.latent + geometry.rope_dim) * width)
    heads = max(1, geometry.kv_heads // tp)
    return count * heads * (geometry.head_dim + (geometry.value_dim or geometry.head_dim)) * width


def kv_sequence(geometry: Geometry, load: Load) -> tuple[int, int]:
    """KV cache of one sequence of the maximum length in one rank: bytes that each token adds, and bytes that stay."""
    tokens = -(-load.max_model_len // BLOCK) * BLOCK
    full = kv_per_token(geometry, load.kv_dtype, load.tp, -(-geometry.full // load.pp))
    fixed = 0
    if geometry.windowed:
        reach = min(geometry.window - 1 + load.max_batched_tokens, load.max_model_len)
        pages = min(-(-reach // BLOCK) + 1, tokens // BLOCK)
        fixed = pages * BLOCK * kv_per_token(geometry, load.kv_dtype, load.tp, -(-geometry.windowed // load.pp))
    return full, fixed


def weights_rank(geometry: Geometry, weights: int, load: Load) -> int:
    """Weights of the heaviest rank. Tensors that every rank holds (norms, routers: 1 to 3 %) are within the overhead."""
    if load.expert_parallel and load.dp > 1 and geometry.experts:
        routed = weights * geo.expert_share(geometry)
        return math.ceil((weights - routed + routed / load.dp) / (load.tp * load.pp))
    return math.ceil(weights / (load.tp * load.pp))


def overhead(geometry: Geometry, load: Load) -> int:
    """Context, collectives, graphs and the activations of the profiling run."""
    activations = load.max_batched_tokens * (4 * geometry.hidden + 2 * geometry.intermediate / load.tp) * 2
    logits = load.max_num_seqs * geometry.vocab * 8
    many = load.tp * load.pp * load.dp > 1
    return int(CONTEXT + COLLECTIVES * many + (0 if load.eager else GRAPHS) + activations + logits)


def need(geometry: Geometry, weights: int, load: Load) -> Need:
    """What each rank needs; *weights* are the tensors' bytes in all."""
    token, fixed = kv_sequence(geometry, load)
    tokens = -(-load.max_model_len // BLOCK) * BLOCK
    return Need(
        weights=weights_rank(geometry, weights, load),
        overhead=overhead(geometry, load),
        kv=token * tokens + fixed,
        kv_token=token,
        kv_fixed=fixed,
    )


def budget(total: int, fraction: float = FRACTION) -> int:
    """What the engine takes of a GPU. It refuses to start where less than that is free, however small the model."""
    return math.ceil(total * fraction)


def host_need(largest_file: int | None, weights: int, ranks: int, offload: int = 0) -> int:
    """Host memory that loading takes: the largest shard and 4 GiB a rank (the page cache can be reclaimed)."""
    shard = largest_file if largest_file is not None else min(weights, 5 * GIB)
    return shard + 4 * GIB * ranks + offload


def load_seconds(weights: int, bandwidth: float = 1e9) -> float:
    """How long a start takes: reading at *bandwidth* bytes a second, then compiling and capturing graphs."""
    return weights / bandwidth + 120.0


def start_deadline(weights: int) -> float:
    """Without progress for so long, a start has failed."""
    return max(600.0, 3 * load_seconds(weights))
