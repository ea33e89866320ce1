"""The numbers of a model that decide what it needs: read off `config.json` or the metadata of a GGUF file.

Two traps that others fall into are handled here and nowhere else: which layers keep how much per token (all of it, a
window, a constant state), and where the numbers of a multimodal model hide (`text_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """Layers and widths of one model. Zero = it has none of that."""

    architecture: str = ""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int  # of keys; of queries too
    value_dim: int = 0  # of values; 0 = as keys
    intermediate: int = 0  # of the dense MLP
    vocab: int = 0
    latent: int = 0  # MLA: kv_lora_rank
    rope_dim: int = 0  # MLA: qk_rope_head_dim, kept beside the latent
    windowed: int = 0  # layers that attend to the last *window* tokens only
    window: int = 0
    recurrent: int = 0  # layers that keep a constant state a sequence
    experts: int = 0
    expert_intermediate: int = 0
    shared_experts: int = 0
    dense_layers: int = 0  # of a mixture of experts: first layers without experts
    tied: bool = False  # embedding and output head are one tensor
    dtype: str = ""  # "bfloat16"
    quantisation: str = ""  # quant_method of a quantised checkpoint
    block: int = 0  # of block-wise FP8, along the outputs
    group: int = 0  # of AWQ and GPTQ
    context: int | None = None  # longest that the model was made for

    @property
    def full(self) -> int:
        """Layers that keep every token."""
        return self.layers - self.windowed - self.recurrent


BYTES: dict[str, float] = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "awq": 0.516,
    "gptq": 0.516,
    "mxfp4": 0.53125,
    "nvfp4": 0.5625,
}
"""Bytes a parameter of the layers; embeddings and head of a quantised checkpoint stay in 16 bit. Groups of 128 (awq,
gptq: 4 bit and a scale), of 32 (mxfp4: an 8-bit scale), of 16 (nvfp4: an fp8 scale)."""


def from_config(config: Mapping[str, Any]) -> Geometry:
    """Geometry of a Hugging Face `config.json`. Raises ValueError naming the field that is missing."""
    text = config.get("text_config")
    inner: Mapping[str, Any] = {**config, **text} if isinstance(text, dict) else config
    layers = _need(inner, "num_hidden_layers", "n_layer", "num_layers")
    hidden = _need(inner, "hidden_size", "n_embd", "d_model")
    heads = _need(inner, "num_attention_heads", "n_head", "num_heads")
    experts = _int(inner, "num_local_experts", "n_routed_experts", "num_experts")
    quant = config.get("quantization_config") or inner.get("quantization_config") or {}
    windowed, recurrent = _layer_kinds(inner, layers)
    window = _int(inner, "sliding_window", "attention_chunk_size")
    block = quant.get("weight_block_size") or []
    names = config.get("architectures") or inner.get("architectures") or [""]
    return Geometry(
        architecture=str(names[0]),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_int(inner, "num_key_value_heads", "num_kv_heads") or heads,
        head_dim=_int(inner, "head_dim") or hidden // heads,
        value_dim=_int(inner, "v_head_dim"),
        intermediate=_int(inner, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden,
        vocab=_int(inner, "vocab_size"),
        latent=_int(inner, "kv_lora_rank"),
        rope_dim=_int(inner, "qk_rope_head_dim"),
        windowed=windowed if window else 0,
        window=window,
        recurrent=recurrent,
        experts=experts,
        expert_intermediate=(_int(inner, "moe_intermediate_size") or _int(inner, "intermediate_size"))
        if experts
        else 0,
        shared_experts=_int(inner, "n_shared_experts") if experts else 0,
        dense_layers=_int(inner, "first_k_dense_replace") if experts else 0,
        tied=bool(config.get("tie_word_embeddings", inner.get("tie_word_embeddings", False))),
        dtype=str(inner.get("dtype") or inner.get("torch_dtype") or "").removeprefix("torch."),
        quantisation=str(quant.get("quant_method") or ""),
        block=int(block[0]) if block else 0,
        group=_int(quant, "group_size", "q_group_size"),
        context=_int(inner, "max_position_embeddings", "n_positions") or None,
    )


def from_gguf(meta: Mapping[str, Any]) -> Geometry:
    """Geometry of a GGUF file's metadata (keys as in the file). Raises ValueError naming the key that is missing."""
    name = str(meta.get("general.architecture") or "")
    if not name:
        raise ValueError("GGUF metadata has no general.architecture")
    layers = _need(meta, f"{name}.block_count")
    hidden = _need(meta, f"{name}.embedding_length")
    heads = _top(meta.get(f"{name}.attention.head_count")) or 1
    kv = meta.get(f"{name}.attention.head_count_kv")
    recurrent = meta.get(f"{name}.attention.recurrent_layers")
    interval = _int(meta, f"{name}.full_attention_interval")
    if isinstance(recurrent, list):
        constant = sum(1 for r in recurrent if r)
    elif interval:
        constant = layers - layers // interval
    else:  # a per-layer list has zero KV heads where a layer keeps a constant state
        constant = sum(1 for n in kv if not n) if isinstance(kv, list) else 0
    window = _int(meta, f"{name}.attention.sliding_window")
    pattern = meta.get(f"{name}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        windowed = sum(1 for p in pattern if p)
    else:
        windowed = layers - layers // int(pattern) if pattern else layers
    tokens = meta.get("tokenizer.ggml.tokens")
    return Geometry(
        architecture=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_top(kv) or heads,
        head_dim=_int(meta, f"{name}.attention.key_length") or hidden // heads,
        value_dim=_int(meta, f"{name}.attention.value_length"),
        intermediate=_top(meta.get(f"{name}.feed_forward_length")),
        vocab=_int(meta, f"{name}.vocab_size") or (len(tokens) if isinstance(tokens, list) else 0),
        windowed=windowed if window else 0,
        window=window,
        recurrent=constant,
        experts=_int(meta, f"{name}.expert_count"),
        expert_intermediate=_int(meta, f"{name}.expert_feed_forward_length"),
        context=_int(meta, f"{name}.context_length") or None,
    )


def read(text: str, format_: Literal["", "safetensors", "gguf", "other"]) -> Geometry | None:
    """Geometry of what an agent read off the weights; None where it says too little."""
    try:
        config = msgspec.json.decode(text or "null", type=dict[str, Any] | None)
        if not config:
            return None
        return from_gguf(config) if format_ == "gguf" else from_config(config)
    except (ValueError, TypeError, msgspec.MsgspecError):
        return None


def parameters(geometry: Geometry) -> tuple[int, int]:
    """Parameters of the layers, and of embedding and head. An estimate, for when no file can be weighed."""
    g = geometry
    value = g.value_dim or g.head_dim
    attention = g.hidden * (g.heads * g.head_dim + g.kv_heads * (g.head_dim + value)) + g.heads * value * g.hidden
    dense = 3 * g.hidden * g.intermediate
    mixture = g.hidden * g.experts + 3 * g.hidden * g.expert_intermediate * (g.experts + g.shared_experts)
    sparse = g.layers - g.dense_layers if g.experts else 0
    layers = g.layers * (attention + 2 * g.hidden) + sparse * mixture + (g.layers - sparse) * dense + g.hidden
    return layers, g.vocab * g.hidden * (1 if g.tied else 2)


def weight_bytes(geometry: Geometry, dtype: str = "") -> int:
    """Parameter count × width: the fallback. The tensors on disk, where somebody weighed them, say better."""
    layers, outer = parameters(geometry)
    kind = dtype or geometry.quantisation or geometry.dtype or "bfloat16"
    width = BYTES.get(kind, 2.0)
    return int(layers * width + outer * (width if width >= 2 else 2.0))


def expert_share(geometry: Geometry) -> float:
    """Which part of the layers' weights is routed experts (what expert parallelism divides)."""
    layers, outer = parameters(geometry)
    sparse = geometry.layers - geometry.dense_layers
    return 3 * geometry.hidden * geometry.expert_intermediate * geometry.experts * sparse / (layers + outer)


def _layer_kinds(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """(windowed, recurrent) layers. The list says best; else the family's rule for every n-th layer."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(kinds, list):
        windowed = sum(1 for k in kinds if str(k).startswith(("sliding", "chunked")))
        recurrent = sum(1 for k in kinds if "attention" not in str(k) or "linear" in str(k))
        return windowed, recurrent
    if interval := _int(config, "full_attention_interval", "attn_layer_period"):
        return 0, layers - layers // interval
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0, 0
    if pattern := _int(config, "sliding_window_pattern"):
        return layers - layers // pattern, 0
    if str(config.get("model_type")).startswith("gemma2"):
        return layers // 2, 0
    return layers, 0


def _int(source: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = source.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return int(value)
    return 0


def _need(source: Mapping[str, Any], *names: str) -> int:
    found = _int(source, *names)
    if found <= 0:
        raise ValueError(f"no {names[0]}")
    return found


def _top(value: object) -> int:
    """The largest of a per-layer list, or the number itself."""
    if isinstance(value, list):
        return max((int(v) for v in value), default=0)
    return int(value) if isinstance(value, (int, float)) else 0
