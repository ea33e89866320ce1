"""Every row of the table by a line that real engines print, and the order in which rows win."""

from __future__ import annotations

import pytest

from llmgw.engines import ENGINES
from llmgw.engines.deaths import Exit, Verdict

LINES = [
    ("llama-server", 127, "llama-server: error while loading shared libraries: libgomp.so.1: cannot open shared object file: No such file or directory", "missing-library", "never"),
    ("llama-server", 127, "llama-server: error while loading shared libraries: libcuda.so.1: cannot open shared object file: No such file", "missing-library", "never"),
    ("llama-server", 1, "llama-server: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by llama-server)", "glibc", "never"),
    ("vllm", 1, "ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.92, 72.8 GiB).", "gpu-memory-taken", "gpu-free"),
    ("vllm", 1, "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", "cuda-system-not-ready", "never"),
    ("vllm", 1, "RuntimeError: The NVIDIA driver on your system is too old (found version 12040).", "driver-old", "never"),
    ("vllm", 1, "RuntimeError: CUDA error: no kernel image is available for execution on the device", "no-kernel-image", "never"),
    ("vllm", 1, "RuntimeError: Failed to infer device type", "no-gpu", "never"),
    ("vllm", 1, "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (9.1 GiB). Based on the available memory, the estimated maximum model length is 74528.", "kv-too-small", "never"),
    ("vllm", 1, "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.", "no-kv", "never"),
    ("vllm", 1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total", "cuda-oom", "gpu-free"),
    ("vllm", 1, "torch.cuda.OutOfMemoryError: CUDA out of memory.", "cuda-oom", "gpu-free"),
    ("vllm", 1, "ValueError: Total number of attention heads (64) must be divisible by tensor parallel size (3).", "divisible", "never"),
    ("vllm", 1, "ValueError: World size (16) is larger than the number of available GPUs (8) in this node", "world-size", "never"),
    ("vllm", 1, "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0", "bf16", "never"),
    ("vllm", 1, "ValueError: The quantization method fp8 is not supported for the current GPU. Minimum capability: 89. Current capability: 80.", "capability", "never"),
    ("vllm", 1, "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", "weights-damaged", "never"),
    ("vllm", 1, "OSError: /models/x does not appear to have a file named config.json. Checkout", "weights-missing", "never"),
    ("vllm", 1, "OSError: You are trying to access a gated repo.", "gated", "never"),
    ("vllm", 1, "ValueError: Model architectures ['FooForCausalLM'] are not supported for now.", "architecture", "never"),
    ("vllm", 2, "vllm: error: unrecognized arguments: --frobnicate 3", "bad-flag", "never"),
    ("vllm", 1, "OSError: [Errno 98] Address already in use", "port-taken", "backoff"),
    ("sglang", 1, "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 30000): address already in use", "port-taken", "backoff"),
    ("llama-server", 1, "srv  start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080", "port-taken", "backoff"),
    ("vllm", 1, "OSError: [Errno 28] No space left on device", "disk-full", "backoff"),
    ("vllm", 1, "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error, ncclSystemError", "nccl", "backoff"),
    ("vllm", 1, "node1:77:99 [0] misc/ibvwrap.cc:236 NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory", "rdma-memlock", "never"),
    ("vllm", 0, "ERROR 11-30 10:00:00 [core.py:700] EngineCore encountered a fatal error.", "engine-core-died", "backoff"),
    ("sglang", 1, "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "static-memory", "never"),
    ("llama-server", 1, "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory", "cuda-oom", "gpu-free"),
    ("llama-server", 1, "gguf_init_from_file: failed to open GGUF file '/models/none.gguf'", "weights-missing", "never"),
    ("llama-server", 1, "llama_model_load: error loading model: tensor 'blk.61.ffn_down.weight' data is not within the file bounds, model is corrupted or incomplete", "weights-damaged", "never"),
]  # fmt: skip


def verdict(kind: str, ended: Exit, *tail: str) -> Verdict:
    return ENGINES.make(kind, {}).diagnose(ended, tail)


@pytest.mark.parametrize(("kind", "code", "line", "row", "retry"), LINES)
def test_the_line_names_the_cause(kind: str, code: int, line: str, row: str, retry: str) -> None:
    found = verdict(kind, Exit(code=code), "INFO something before", line, "INFO and after")

    assert (found.code, found.retry) == (row, retry)
    assert found.line == line.strip()
    assert found.cause
    assert found.remedy
    assert "{" not in str(found)


def test_libgomp_is_named_with_its_package() -> None:
    found = verdict("llama-server", Exit(code=127), LINES[0][2])
    assert str(found) == "libgomp.so.1 is missing: Debian/Ubuntu: apt install libgomp1"


def test_an_adopted_engine_leaves_no_code() -> None:
    found = verdict("vllm", Exit(), "INFO all is well")
    assert (found.code, found.cause) == ("unknown", "exit code unknown (adopted process)")


def test_exit_0_is_a_failure() -> None:
    found = verdict("vllm", Exit(code=0, ready=True), "INFO: Application shutdown complete.")
    assert found.code == "exit-0"
    assert "after it had been ready" in found.cause


def test_the_root_cause_wins_over_the_wrapper_and_the_last_traceback() -> None:
    found = verdict(
        "vllm",
        Exit(code=1),
        "(EngineCore pid=7) ValueError: No available memory for the cache blocks. Try increasing",
        *["INFO noise"] * 200,
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'x': 1}",
    )
    assert found.code == "no-kv"


def test_an_exception_that_no_row_knows_is_quoted() -> None:
    found = verdict(
        "vllm",
        Exit(code=1),
        "Traceback (most recent call last):",
        "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1] KeyError: 'layers.0.weird'",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    )
    assert found.cause == "KeyError: 'layers.0.weird'"


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (Exit(signal=4), "signal-4"),
        (Exit(code=132), "signal-4"),
        (Exit(code=137), "signal-9"),
        (Exit(signal=11), "signal-11"),
        (Exit(code=127), "not-startable"),
        (Exit(code=3), "unknown"),
        (Exit(signal=15), "unknown"),
        (Exit(signal=9, oom_killed=True), "oom-killed"),
    ],
)
def test_without_a_line_the_exit_decides(ended: Exit, code: str) -> None:
    assert verdict("sim", ended, "").code == code


@pytest.mark.parametrize(
    ("kind", "line", "phase"),
    [
        ("vllm", "INFO 11-30 [core.py:1] Initializing a V1 LLM engine (v0.32.0)", "engine"),
        ("vllm", "INFO Starting to load model /models/llama...", "weights"),
        ("vllm", "INFO Loading weights took 4.21 seconds", "weights-loaded"),
        ("vllm", "INFO GPU KV cache size: 178,880 tokens", "kv-cache"),
        ("vllm", "INFO:     Application startup complete.", "canary"),
        ("sglang", "The server is fired up and ready to roll!", "canary"),
        ("llama-server", "main: server is listening on http://127.0.0.1:8080", "canary"),
        ("llama-server", "load_tensors: loading model tensors", "weights"),
    ],
)
def test_milestones_name_phases(kind: str, line: str, phase: str) -> None:
    assert ENGINES.make(kind, {}).phase(line) == phase


def test_facts_are_read_from_the_log() -> None:
    vllm = ENGINES.make("vllm", {})
    fact = vllm.fact("INFO GPU KV cache size: 178,880 tokens")
    assert fact is not None
    assert (fact.name, fact.value) == ("kv_tokens", 178880.0)
    assert vllm.fact("INFO nothing") is None
