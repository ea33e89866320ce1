"""The memory model against published figures: KV cache per token, what vLLM and llama.cpp need, what fits."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.placement import llamacpp
from llmgw.placement.geometry import Geometry, from_config, from_gguf, parameters, read, weight_bytes
from llmgw.placement.inventory import GIB
from llmgw.placement.memory import Load, Need, budget, host_need, kv_per_token, need, start_deadline

MIB = 1 << 20


def shape(layers: int, kv_heads: int, head_dim: int, heads: int = 64, **more: int) -> Geometry:
    return msgspec.convert(
        {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "heads": heads, "hidden": 8192, **more}, Geometry
    )


QWEN72 = shape(80, 8, 128, intermediate=29568, vocab=152064)
QWEN72_BYTES = 145_412_407_296


@pytest.mark.parametrize(
    ("name", "geometry", "token"),
    [
        ("Llama-3.1-8B", shape(32, 8, 128), 131_072),
        ("Llama-3-70B", shape(80, 8, 128), 327_680),
        ("Llama-3.1-405B", shape(126, 8, 128), 516_096),
        ("Qwen2.5-7B", shape(28, 4, 128), 57_344),
        ("Qwen3-8B", shape(36, 8, 128), 147_456),
        ("Qwen3-32B", shape(64, 8, 128), 262_144),
        ("Qwen3-30B-A3B", shape(48, 4, 128), 98_304),
        ("Qwen3-235B-A22B", shape(94, 4, 128), 192_512),
        ("DeepSeek-V3", shape(61, 128, 192, latent=512, rope_dim=64), 70_272),
        ("gpt-oss-20b, its full layers", shape(24, 8, 64, windowed=12, window=128), 24_576),
    ],
)
def test_kv_per_token(name: str, geometry: Geometry, token: int) -> None:
    assert kv_per_token(geometry) == token, name


def test_heads_are_replicated_beyond_their_number() -> None:
    qwen = shape(94, 4, 128)
    assert [kv_per_token(qwen, tp=tp) for tp in (1, 2, 4, 8)] == [192_512, 96_256, 48_128, 48_128]


def test_fp8_layout_of_mla() -> None:
    deepseek = shape(61, 128, 192, latent=512, rope_dim=64)
    assert kv_per_token(deepseek, "fp8") == 40_016
    assert kv_per_token(deepseek, tp=8) == kv_per_token(deepseek), "the latent is on every rank"


def test_only_attending_layers_grow() -> None:
    config = {
        "num_hidden_layers": 65, "full_attention_interval": 4, "hidden_size": 5120,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
    }  # fmt: skip
    geometry = from_config(config)
    assert geometry.full == 16
    assert need(geometry, 0, Load(max_model_len=262_144)).kv == 16 * GIB


@pytest.mark.parametrize(
    ("mib", "tp", "figures", "longest", "tokens"),
    [
        (81_559, 1, (73.28, 135.43, 2.69, 10.00, 148.12), 0, 0),
        (81_559, 2, (73.28, 67.71, 3.04, 5.00, 75.75), 16_512, 16_525),
        (81_559, 4, (73.28, 33.86, 2.82, 2.50, 39.17), 479_744, 479_770),
        (143_771, 2, (129.17, 67.71, 3.04, 5.00, 75.75), 382_720, 382_829),
        (40_960, 4, (36.80, 33.86, 2.82, 2.50, 39.17), 1_664, 1_676),
        (24_564, 2, (22.07, 67.71, 3.04, 5.00, 75.75), 0, 0),
    ],
)
def test_worked_vector(mib: int, tp: int, figures: tuple[float, ...], longest: int, tokens: int) -> None:
    found = need(QWEN72, QWEN72_BYTES, Load(tp=tp, max_model_len=32_768))
    have = budget(mib * MIB)
    assert tuple(round(n / GIB, 2) for n in (have, found.weights, found.overhead, found.kv, found.total)) == figures
    assert found.longest(have) == longest
    assert found.tokens(have) == tokens
    if 0 < longest < 32_768:
        assert need(QWEN72, QWEN72_BYTES, Load(tp=tp, max_model_len=longest)).total <= have < found.total


def test_published_runs() -> None:
    qwen = shape(94, 4, 128)
    tokens = int(8.11 * GIB) // kv_per_token(qwen, tp=4)
    assert tokens == pytest.approx(178_880, rel=0.012), "8.11 GiB as printed, rounded"
    llama = need(shape(126, 8, 128), int(462.016 * GIB), Load(tp=8, max_model_len=8192))
    assert llama.weights / GIB == pytest.approx(57.752, abs=0.001)


def test_windows_are_capped() -> None:
    mixed = shape(24, 8, 64, windowed=12, window=128)
    load = Load(max_model_len=131_072, max_batched_tokens=8192)
    found = need(mixed, 0, load)
    pages = -(-(128 - 1 + 8192) // 16) + 1
    assert found.kv_fixed == pages * 16 * 24_576
    assert found.kv == 24_576 * 131_072 + found.kv_fixed
    short = need(mixed, 0, Load(max_model_len=1024))
    assert short.kv == 2 * 24_576 * 1024, "a short sequence is held whole by every layer"


@given(
    st.builds(
        Load,
        tp=st.sampled_from([1, 2, 4, 8]),
        pp=st.sampled_from([1, 2, 4]),
        max_model_len=st.integers(1, 200_000),
        kv_dtype=st.sampled_from(["", "fp8"]),
    ),
    st.integers(1, 50_000),
    st.sampled_from([QWEN72, shape(48, 4, 128, windowed=24, window=512), shape(61, 8, 128, latent=512, rope_dim=64)]),
)
def test_need_grows_with_length_and_shrinks_with_ranks(load: Load, more: int, geometry: Geometry) -> None:
    here = need(geometry, QWEN72_BYTES, load)
    longer = need(geometry, QWEN72_BYTES, msgspec.structs.replace(load, max_model_len=load.max_model_len + more))
    assert longer.total >= here.total
    if 1 < load.tp < 8:
        wider = need(geometry, QWEN72_BYTES, msgspec.structs.replace(load, tp=load.tp * 2))
        assert wider.total <= here.total


@given(st.integers(10 * GIB, 300 * GIB), st.integers(1, 100_000))
def test_a_suggested_length_fits_and_the_next_does_not(have: int, length: int) -> None:
    load = Load(tp=2, max_model_len=length)
    longest = need(QWEN72, QWEN72_BYTES, load).longest(have)
    if longest:
        fits = need(QWEN72, QWEN72_BYTES, msgspec.structs.replace(load, max_model_len=longest))
        assert fits.total <= have
    beyond = need(QWEN72, QWEN72_BYTES, msgspec.structs.replace(load, max_model_len=longest + 144))
    assert beyond.total > have


def test_experts_are_divided_by_expert_parallelism_alone() -> None:
    deepseek = msgspec.structs.replace(
        shape(61, 128, 192, latent=512, rope_dim=64, experts=256, expert_intermediate=2048, vocab=129_280),
        hidden=7168, intermediate=18_432, dense_layers=3, shared_experts=1,
    )  # fmt: skip
    load = Load(tp=1, dp=8, max_model_len=4096)
    whole = need(deepseek, 640 * GIB, load).weights
    spread = need(deepseek, 640 * GIB, msgspec.structs.replace(load, expert_parallel=True)).weights
    assert whole == 640 * GIB
    assert 80 * GIB < spread < 120 * GIB, "attention and shared experts stay whole on each rank"


@pytest.mark.parametrize(
    ("weights", "context", "geometry", "published"),
    [
        (4.36, 131_072, shape(28, 4, 128, heads=28), 18.89),
        (7.54, 131_072, shape(28, 4, 128, heads=28), 21.82),
        (44.15, 32_768, shape(80, 8, 128, heads=64), 58.18),
    ],
)
def test_llama_cpp_without_flash_attention(weights: float, context: int, geometry: Geometry, published: float) -> None:
    found = llamacpp.need(geometry, int(weights * GIB), context=context, flash=False)
    assert found.total / GIB == pytest.approx(published, rel=0.015)


def test_llama_cpp_pads_and_splits_by_layers() -> None:
    geometry = shape(28, 4, 128, heads=28)
    assert llamacpp.padded(1000, flash=False) == 1024
    assert llamacpp.padded(1000, flash=True) == 1024
    assert llamacpp.padded(1025, flash=True) == 1280
    one = llamacpp.need(geometry, 4 * GIB, context=32_768, flash=True)
    two = llamacpp.need(geometry, 4 * GIB, context=32_768, devices=2, flash=True)
    assert (two.weights, two.kv) == (one.weights // 2, one.kv // 2)
    assert llamacpp.budget(24 * GIB) == 23 * GIB


def test_geometry_of_configs() -> None:
    qwen3 = from_config(
        {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25_600, "vocab_size": 151_936,
         "torch_dtype": "bfloat16", "sliding_window": None, "max_position_embeddings": 40_960}
    )  # fmt: skip
    assert (qwen3.head_dim, kv_per_token(qwen3)) == (128, 262_144), "hidden / heads = 80 would be wrong"
    assert (qwen3.architecture, qwen3.dtype, qwen3.context) == ("Qwen3ForCausalLM", "bfloat16", 40_960)
    gemma3 = from_config(
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {
            "num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32, "num_key_value_heads": 16,
            "head_dim": 128, "sliding_window": 1024, "sliding_window_pattern": 6}}
    )  # fmt: skip
    assert (gemma3.full, gemma3.windowed, gemma3.window) == (10, 52, 1024)
    oss = from_config(
        {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "sliding_window": 128,
         "layer_types": ["sliding_attention", "full_attention", "linear_attention", "full_attention"]}
    )  # fmt: skip
    assert (oss.full, oss.windowed, oss.recurrent) == (2, 1, 1)
    qwen2 = from_config(
        {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "sliding_window": 131_072,
         "use_sliding_window": False}
    )  # fmt: skip
    assert (qwen2.full, qwen2.kv_heads) == (4, 8)
    with pytest.raises(ValueError, match="no num_hidden_layers"):
        from_config({"hidden_size": 1})


def test_geometry_of_gguf() -> None:
    meta = {
        "general.architecture": "qwen2", "qwen2.block_count": 28, "qwen2.embedding_length": 3584,
        "qwen2.attention.head_count": 28, "qwen2.attention.head_count_kv": 4, "qwen2.context_length": 131_072,
    }  # fmt: skip
    assert kv_per_token(from_gguf(meta)) == 57_344
    hybrid = {
        **meta, "general.architecture": "m", "m.block_count": 65, "m.embedding_length": 5120,
        "m.attention.head_count": 24, "m.full_attention_interval": 4,
    }  # fmt: skip
    assert from_gguf(hybrid).full == 16
    assert from_gguf({**hybrid, "m.attention.recurrent_layers": [True] * 40 + [False] * 25}).full == 25
    assert from_gguf({**meta, "qwen2.attention.head_count_kv": [0, 4] * 14}).full == 14
    with pytest.raises(ValueError, match=r"general\.architecture"):
        from_gguf({})


def test_what_cannot_be_read_is_unknown() -> None:
    assert read("", "safetensors") is None
    assert read("{", "safetensors") is None
    assert read("[1]", "gguf") is None
    assert read('{"hidden_size": 4}', "safetensors") is None


def test_parameters_when_no_file_can_be_weighed() -> None:
    llama = msgspec.structs.replace(shape(32, 8, 128, heads=32, intermediate=14_336, vocab=128_256), hidden=4096)
    assert sum(parameters(llama)) == pytest.approx(8.03e9, rel=0.001)
    assert weight_bytes(llama) == pytest.approx(16_060_522_496, rel=0.001)
    assert weight_bytes(llama, "fp8") == pytest.approx(9.08e9, rel=0.01), "embedding and head stay in 16 bit"


def test_host_and_time() -> None:
    assert host_need(5 * GIB, 140 * GIB, 2) == 13 * GIB
    assert host_need(None, 2 * GIB, 1) == 6 * GIB
    assert start_deadline(10 * GIB) == 600.0
    assert start_deadline(QWEN72_BYTES) == pytest.approx(3 * (145.4 + 120), rel=0.01)


def test_a_need_without_kv_has_no_longest_length() -> None:
    assert Need(weights=GIB, overhead=0, kv=0).longest(2 * GIB) == 0
