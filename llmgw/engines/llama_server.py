"""llama-server of llama.cpp: GGUF files, one node."""

from __future__ import annotations

from llmgw.engines.base import Command, Engine, Launch, MetricNames, Probe, base_env, flags, spread
from llmgw.engines.deaths import Death
from llmgw.errors import ConfigError, Problem

KEY_FILE = "api-key"


class LlamaServer(Engine):
    """llama.cpp's own server: one GGUF file, GPUs of one node or the CPU."""

    api = 1
    name = "llama-server"
    default_port = 8080
    metrics = MetricNames(
        running=("llamacpp:requests_processing",),
        waiting=("llamacpp:requests_deferred",),
        kv_usage=("llamacpp:kv_cache_usage_ratio",),
        progress=("llamacpp:n_decode_total", "llamacpp:tokens_predicted_total", "llamacpp:prompt_tokens_total"),
    )
    milestones = (
        (r"server is listening|main: model loaded", "canary"),
        (r"llama_context|KV self size|llama_kv_cache|initializing slots", "kv-cache"),
        (r"load_tensors:", "weights"),
        (r"loading model|llama_model_loader", "weights"),
        (r"build: \d+|system_info:", "engine"),
    )
    facts = (
        (r"offloaded (\d+)/\d+ layers to GPU", "gpu_layers"),
        (r"n_ctx_per_seq\s*=\s*(\d+)", "context"),
    )
    deaths = (
        Death(
            code="cuda-oom",
            pattern=r"cudaMalloc failed: out of memory|unable to allocate CUDA\d* buffer",
            cause="the GPU ran out of memory while the model was loaded",
            remedy="lower max_model_len or max_seqs, or use more GPUs; see who else is on the GPU (GPU-4)",
            retry="gpu-free",
        ),
        Death(
            code="weights-damaged",
            pattern=r"tensor '([^']+)' data is not within the file bounds|invalid magic characters|gguf_init_from_file.*invalid",
            cause="the GGUF file is damaged or truncated",
            remedy="fetch the weights again; `llmgw agent --preflight` names the file (WGT-4)",
            retry="never",
        ),
        Death(
            code="weights-missing",
            pattern=r"failed to open GGUF file '?([^']*)'?",
            cause="the GGUF file cannot be opened ({1})",
            remedy="check the model's path and who may read it (WGT-1)",
            retry="never",
        ),
    )
    wrappers = (r"exiting due to model loading error",)
    owned_flags = flags(
        "--host --port --model -m --model-url -mu --docker-repo -dr --hf-repo -hf -hfr --hf-file -hff --alias -a "
        "--api-key --api-key-file --ctx-size -c --parallel -np --gpu-layers -ngl --n-gpu-layers --metrics --device -dev "
        "--rpc --embedding --embeddings --models-dir --models-preset --api-prefix --ssl-key-file --ssl-cert-file "
        "--fit -fit --log-file --slots --no-slots --reuse-port"
    )
    env_prefixes = ("GGML_",)
    owned_env = frozenset({"GGML_BACKEND_PATH"})
    abbreviates = False

    def probe(self, program: tuple[str, ...]) -> Probe:
        return Probe(argv=(*program, "--version"), seconds=10)

    def command(self, launch: Launch) -> Command:
        problems = []
        if launch.phases != {"prefill", "decode"}:
            problems.append(Problem("llama-server: prefill and decode cannot be placed apart; use vllm or sglang"))
        if launch.nodes > 1 or launch.dp > 1:
            problems.append(Problem("llama-server: a replica is one node and one process; use vllm or sglang"))
        if launch.kv_events:
            problems.append(Problem("llama-server: it publishes no KV events; leave `kv_events` out"))
        if problems:
            raise ConfigError(problems)
        slots = launch.max_seqs or 4
        argv = [
            *launch.program,
            *("-m", launch.model, "--alias", launch.names[0]),
            *("--host", launch.host, "--port", str(launch.first_port)),
            # all layers or none, and the context as asked: by itself it shrinks both until they fit, without a word
            *("--fit", "off", "-ngl", "999" if launch.gpus else "0"),
            *spread("-c", launch.max_model_len and launch.max_model_len * slots),  # shared by all slots
            *("-np", str(slots), "--metrics", "--slots"),
            *spread("-b", launch.max_batched_tokens),
        ]
        argv += ["--embedding"] if launch.task == "embed" else ["--jinja"]
        files = {}
        if launch.key:
            files[KEY_FILE] = launch.key + "\n"
            argv += ["--api-key-file", f"{launch.folder}/{KEY_FILE}"]
        return Command(argv=(*argv, *launch.extra), env=base_env(launch), files=files)
