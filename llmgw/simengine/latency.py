"""How long one step of a simulated engine takes.

Two models behind one call. `Knobs` is the single-knob form, for tests and rough plans:

    T = sqrt( ((1 + contention·(D - 1)) / decode_tps)² + (prefill tokens / prefill_tps)² )      D decoding sequences

`Physics` is made from a GPU, a model and a tensor-parallel degree:

    T = t0 + t_req·B + sqrt(W² + (c·N)²) + kappa·context + prefill attention

    B sequences, N new tokens · W streaming the weights once · c computing one token · kappa reading one token of KV
    t0 launching: a cost a layer, and with several GPUs two all-reduces a layer

The square root is a smooth maximum: few tokens wait for memory, many for arithmetic, with the knee at W/c.
Sources: data sheets (dense BF16 TFLOPS, TB/s, GiB), model configurations, and the efficiencies that public profiles show.
"""

from __future__ import annotations

from math import hypot
from typing import Protocol

import attrs

from llmgw.errors import ConfigError, Problem

GIB = 2**30


class StepModel(Protocol):
    """Seconds for one step."""

    def step(self, decodes: int, prefills: int, prefill_tokens: int, context: int, pairs: float) -> float:
        """*context*: KV tokens read (decodes' contexts, and the prefix that each chunk builds on). *pairs*: sum over
        the chunks of chunk · (prefix + chunk / 2), which attention is computed for.
        """
        ...


@attrs.frozen
class Knobs:
    """The single-knob form. *decode_tps* is one sequence alone; *contention* how much of a step another one adds."""

    prefill_tps: float = 8000.0
    decode_tps: float = 100.0
    contention: float = 0.01

    def step(self, decodes: int, prefills: int, prefill_tokens: int, context: int, pairs: float) -> float:
        decode = (1.0 + self.contention * (decodes - 1)) / self.decode_tps if decodes else 0.0
        return hypot(decode, prefill_tokens / self.prefill_tps) if prefill_tokens else decode


@attrs.frozen
class Gpu:
    """A GPU type. Efficiencies: share of the data sheet's figure that kernels reach."""

    name: str
    tflops: float  # dense BF16
    tbps: float  # memory, TB/s
    gib: float
    mfu: float = 0.65  # large matrix products (measured 0.65 to 0.70 on A100, H100, A40)
    weight_eff: float = 0.75  # streaming weights (0.70 in eager profiles, 0.80 to 0.90 with newer kernels)
    kv_eff: float = 0.60  # reading KV (0.55 at 8 sequences, rising with batch)
    fp8: float = 1.0  # factor on TFLOPS with 8-bit weights
    layer_us: float = 17.5  # launching one layer (15 to 20)
    reduce_us: float = 12.0  # one small all-reduce


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40", 312, 1.555, 40),
        Gpu("a100-80", 312, 2.039, 80),
        Gpu("h100", 989, 3.35, 80, fp8=2.0),
        Gpu("h100-pcie", 756, 2.0, 80, fp8=2.0),
        Gpu("h200", 989, 4.8, 141, fp8=2.0),
        Gpu("l40s", 181, 0.864, 48, weight_eff=0.85, fp8=2.0),
        Gpu("l4", 121, 0.30, 24, weight_eff=0.85, fp8=2.0),
        Gpu("a10", 125, 0.60, 24),
        Gpu("a40", 150, 0.696, 48),
        Gpu("rtx4090", 165, 1.008, 24, mfu=0.92, weight_eff=0.88, fp8=2.0),  # boosts above its data sheet
        Gpu("rtxpro6000", 500, 1.597, 96, mfu=0.72, weight_eff=0.88, fp8=2.0),
        Gpu("b200", 2250, 8.0, 180, fp8=2.0),
        Gpu("mi300x", 1307, 5.3, 192, fp8=2.0),
    )
}


@attrs.frozen
class Model:
    """A dense or mixture-of-experts transformer, as far as time and memory depend on it."""

    name: str
    params: float  # billions
    layers: int
    hidden: int  # heads · head size of the queries
    kv_heads: int
    head_size: int = 128
    embedding: float = 0.26  # billions in one of the two vocabulary matrices; the output one is read each step
    active: float | None = None  # billions a token uses; None: all
    experts: int = 0
    experts_active: int = 0
    expert_params: float = 0.0  # billions in all experts together
    weight_bytes: float = 2.0  # a parameter

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV a token, 16-bit."""
        return 2 * self.layers * self.kv_heads * self.head_size * 2


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("0.5b", 0.49, 24, 896, 2, 64, embedding=0.136),
        Model("7b", 6.74, 32, 4096, 32, embedding=0.131),  # Llama-2-7B: no grouped queries, 512 KiB a token
        Model("qwen-7b", 7.62, 28, 3584, 4, embedding=0.545),  # Qwen2.5-7B
        Model("8b", 8.03, 32, 4096, 8, embedding=0.525),  # Llama-3(.1)-8B
        Model("12b", 12.2, 40, 4096, 8, embedding=0.671),  # Mistral-Nemo-12B
        Model("32b", 32.8, 64, 8192, 8, embedding=0.778),  # Qwen3-32B
        Model("34b", 34.4, 60, 7168, 8, embedding=0.459),  # Yi-34B
        Model("codellama-34b", 33.7, 48, 8192, 8, embedding=0.262),
        Model("70b", 70.6, 80, 8192, 8, embedding=1.05),  # Llama-3.x-70B
        Model("70b-fp8", 70.6, 80, 8192, 8, weight_bytes=1.0, embedding=1.05),
        Model("llama2-70b", 69.0, 80, 8192, 8, embedding=0.262),
        Model(
            "mixtral", 46.7, 32, 4096, 8, active=12.9, experts=8, experts_active=2, expert_params=45.1, embedding=0.131
        ),
        Model("405b", 405.9, 126, 16384, 8, embedding=2.1),
    )
}


@attrs.frozen
class Physics:
    """The model of the module's head for *tp* GPUs that hold one replica."""

    gpu: Gpu
    model: Model
    tp: int = 1
    _t0: float = attrs.field(init=False)
    _weights: float = attrs.field(init=False)
    _head: float = attrs.field(init=False)
    _token: float = attrs.field(init=False)
    _kappa: float = attrs.field(init=False)
    _pair: float = attrs.field(init=False)
    _experts: float = attrs.field(init=False)

    T_REQ = 5e-6
    """Seconds a sequence adds to a step: sampling, bookkeeping."""
    T_STEP = 130e-6
    """Seconds a step costs whatever is in it."""

    def __attrs_post_init__(self) -> None:
        gpu, model, tp = self.gpu, self.model, self.tp
        flops = gpu.tflops * 1e12 * gpu.mfu * tp * (gpu.fp8 if model.weight_bytes <= 1 else 1.0)
        stream = gpu.tbps * 1e12 * gpu.weight_eff * tp
        reduce = 2 * model.layers * gpu.reduce_us * 1e-6 if tp > 1 else 0.0
        put = object.__setattr__
        put(self, "_t0", model.layers * gpu.layer_us * 1e-6 + self.T_STEP + reduce)
        layers = (model.params - 2 * model.embedding) * 1e9
        put(self, "_weights", (layers - model.expert_params * 1e9) * model.weight_bytes / stream)
        put(self, "_experts", model.expert_params * 1e9 * model.weight_bytes / stream)
        put(self, "_token", 2 * ((model.active or model.params) - 2 * model.embedding) * 1e9 / flops)
        put(self, "_head", model.embedding * 1e9 * model.weight_bytes / stream)
        put(self, "_kappa", model.kv_bytes / (gpu.tbps * 1e12 * gpu.kv_eff * tp))
        put(self, "_pair", 4 * model.layers * model.hidden / flops)

    def step(self, decodes: int, prefills: int, prefill_tokens: int, context: int, pairs: float) -> float:
        tokens = decodes + prefill_tokens
        if not tokens:
            return 0.0
        weights = self._weights
        if self._experts:
            model = self.model
            weights += self._experts * (1 - (1 - model.experts_active / model.experts) ** tokens)
        return (
            self._t0
            + self._head
            + self.T_REQ * (decodes + prefills)
            + hypot(weights, self._token * tokens)
            + self._kappa * context
            + self._pair * pairs
        )

    def linear(self, tokens: int) -> float:
        """Seconds of the linear layers alone, which public profiles list."""
        return hypot(self._weights, self._token * tokens)

    def blocks(self, block_size: int, utilization: float = 0.92) -> int:
        """KV blocks that fit beside the weights (GiB: 5.5 activations dense, 8 with experts; 0.15 or 0.6 a GPU else)."""
        gpu, model, tp = self.gpu, self.model, self.tp
        room = gpu.gib * GIB * utilization * tp - model.params * 1e9 * model.weight_bytes
        room -= (8.0 if model.experts else 5.5) * GIB + (0.15 if tp == 1 else 0.6) * GIB * tp
        return int(room / (model.kv_bytes * block_size))


def hardware(name: str) -> Physics:
    """``GPU-MODEL[-tpN]``: ``h100-8b``, ``h200-70b-tp4``, ``rtx4090-8b``. Raises ConfigError, naming what there is."""
    base, _, tail = name.rpartition("-tp")
    tp = int(tail) if base and tail.isdigit() else 1
    base = base if base and tail.isdigit() else name
    for gpu in sorted(GPUS, key=len, reverse=True):
        if base.startswith(gpu + "-") and base[len(gpu) + 1 :] in MODELS:
            physics = Physics(GPUS[gpu], MODELS[base[len(gpu) + 1 :]], tp)
            if tp not in (1, 2, 4, 8):
                raise ConfigError([Problem(f"hardware {name!r}: tensor parallelism is 1, 2, 4 or 8, not {tp}")])
            if physics.blocks(16) < 2:
                raise ConfigError([Problem(f"hardware {name!r}: the weights do not fit; use more GPUs (-tp2, -tp4)")])
            return physics
    raise ConfigError(
        [Problem(f"hardware {name!r} is no GPU-MODEL[-tpN]: GPUs {', '.join(GPUS)}; models {', '.join(MODELS)}")]
    )
