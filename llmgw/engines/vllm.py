"""vLLM (0.10 and newer, V1 engine), as `vllm serve …` or `python -m vllm.entrypoints.openai.api_server …`."""

from __future__ import annotations

import json

from llmgw.engines.base import (
    BOOTSTRAP,
    DP_MASTER,
    DP_RPC,
    KV_EVENTS,
    KV_REPLAY,
    MASTER,
    SCAN,
    SIDE_CHANNEL,
    Command,
    Engine,
    Launch,
    MetricNames,
    Probe,
    base_env,
    flags,
    python_beside,
    spread,
)
from llmgw.engines.deaths import READ, Death
from llmgw.errors import ConfigError, Problem

PROBE = (
    "import json, vllm, torch; print(json.dumps({'version': vllm.__version__, 'cuda': torch.version.cuda, "
    "'arch': torch.cuda.get_arch_list()}))"
)
"""`vllm --version` imports slowly and never touches torch's CUDA; this says what the wheel was built for."""


class Vllm(Engine):
    """vLLM, `vllm serve`: tensor, pipeline and data parallel, several nodes (mp executor), prefill/decode by NIXL."""

    api = 1
    name = "vllm"
    takes_share = True
    default_port = 8000
    metrics = MetricNames(
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        block_size=("vllm:cache_config_info@block_size",),
        blocks=("vllm:cache_config_info@num_gpu_blocks",),
        progress=("vllm:iteration_tokens_total_count", "vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
    )
    milestones = (
        (r"Application startup complete", "canary"),
        (r"Graph capturing finished|Capturing CUDA graph", "graphs"),
        (r"GPU KV cache size|Maximum concurrency for|init engine", "kv-cache"),
        (r"torch\.compile|Compiling a graph|Dynamo bytecode transform", "compile"),
        (r"Loading weights took|Model loading took", "weights-loaded"),
        (r"Starting to load model|Loading safetensors|Loading pt checkpoint", "weights"),
        (r"Initializing a V1 LLM engine", "engine"),
    )
    facts = (
        (r"Model loading took ([\d.]+) Gi?B", "weights_gib"),
        (r"Available KV cache memory: ([\d.]+) GiB", "kv_gib"),
        (r"GPU KV cache size: ([\d,]+) tokens", "kv_tokens"),
        (r"Loading weights took ([\d.]+) seconds", "load_s"),
    )
    deaths = (
        Death(
            code="engine-core-died",
            pattern=r"EngineCore encountered a fatal error|EngineDeadError",
            cause="the engine core died while serving; the API server then leaves with exit code 0",
            remedy=READ,
        ),
        Death(
            code="worker-died",
            pattern=r"Worker proc .* died unexpectedly",
            cause="a worker process died",
            remedy="look for `oom-kill` and Xid lines in `dmesg` (MEM-1, GPU-1)",
        ),
    )
    wrappers = (
        r"Engine core initialization failed\. See root cause above",
        r"EngineCore failed to start",
    )
    owned_flags = flags(
        "--host --port --uds --api-key --model --served-model-name --config --root-path --ssl-keyfile --ssl-certfile "
        "--ssl-ca-certs --tensor-parallel-size -tp --pipeline-parallel-size -pp --data-parallel-size -dp "
        "--data-parallel-size-local --data-parallel-start-rank --data-parallel-rank --data-parallel-address "
        "--data-parallel-rpc-port --data-parallel-external-lb --data-parallel-hybrid-lb --nnodes --node-rank "
        "--master-addr --master-port --headless --device-ids --distributed-executor-backend --kv-transfer-config "
        "--kv-events-config --task --runner"
    )
    env_prefixes = ("VLLM_", "FLASHINFER_", "LMCACHE_", "MC_", "NVSHMEM_")
    owned_env = frozenset(
        {"VLLM_API_KEY", "VLLM_PORT", "VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"}
        | {
            "VLLM_DP_MASTER_PORT",
            "VLLM_DP_MASTER_IP",
            "VLLM_MOONCAKE_BOOTSTRAP_PORT",
            "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
        }
    )

    def probe(self, program: tuple[str, ...]) -> Probe:
        return Probe(argv=(python_beside(program), "-c", PROBE), seconds=90)

    def command(self, launch: Launch) -> Command:
        split = launch.phases != {"prefill", "decode"}
        problems = []
        if "encode" in launch.phases:
            problems.append(Problem("vllm: the encode phase cannot be placed; run it as a static endpoint"))
        if launch.dp > 1 and launch.nodes > 1 and launch.dp % launch.nodes:
            problems.append(Problem(f"vllm: dp {launch.dp} cannot be spread evenly over {launch.nodes} nodes"))
        if problems:
            raise ConfigError(problems)
        positional = launch.program[-1] == "serve"
        argv = [
            *launch.program,
            *(() if positional else ("--model",)),
            launch.model,
            *("--served-model-name", *launch.names),
            *("--host", launch.host, "--port", str(launch.first_port)),
            *spread("--tensor-parallel-size", launch.tp, 1),
            *spread("--pipeline-parallel-size", launch.pp, 1),
            *spread("--max-model-len", launch.max_model_len),
            *spread("--gpu-memory-utilization", launch.memory_share),
            *spread("--max-num-seqs", launch.max_seqs),
            *spread("--max-num-batched-tokens", launch.max_batched_tokens),
            *spread("--dtype", launch.dtype),
            *spread("--quantization", launch.quantisation),
        ]
        if launch.task == "embed":
            argv += ["--runner", "pooling"]
        if launch.dp > 1:
            argv += ["--data-parallel-size", str(launch.dp)]
            if launch.nodes > 1:
                local = launch.dp // launch.nodes
                argv += ["--data-parallel-size-local", str(local), "--data-parallel-address", launch.head]
                argv += ["--data-parallel-rpc-port", str(launch.head_port(DP_RPC))]
                argv += ["--headless", "--data-parallel-start-rank", str(local * launch.rank)] if launch.rank else []
        elif launch.nodes > 1:
            argv += ["--distributed-executor-backend", "mp", "--nnodes", str(launch.nodes)]
            argv += ["--node-rank", str(launch.rank), "--master-addr", launch.head]
            argv += ["--master-port", str(launch.head_port(MASTER))]
            argv += ["--headless"] if launch.rank else []
        if split:
            role = "kv_producer" if "prefill" in launch.phases else "kv_consumer"
            transfer = {"kv_connector": "NixlConnector", "kv_role": role}
            argv += [
                "--kv-transfer-config",
                json.dumps(transfer | ({} if launch.gpus else {"kv_buffer_device": "cpu"})),
            ]
        if launch.kv_events:
            events = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{launch.port(KV_EVENTS)}",
                "replay_endpoint": f"tcp://*:{launch.port(KV_REPLAY)}",
                "topic": "kv-events",
            }
            argv += ["--kv-events-config", json.dumps(events)]
        env = base_env(launch) | {
            "HF_HUB_OFFLINE": "1",  # weights lie on the node; nothing is fetched behind the agent's back
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_PORT": str(launch.port(SCAN)),  # workers scan upward from it; not the API's port
            "VLLM_DP_MASTER_PORT": str(launch.head_port(DP_MASTER)),
            "VLLM_HOST_IP": launch.host,
            **({"VLLM_API_KEY": launch.key} if launch.key else {}),
        }
        if split:
            env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = launch.host
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(launch.port(SIDE_CHANNEL))
            env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(launch.port(BOOTSTRAP))
        return Command(argv=(*argv, *launch.extra), env=env, secret=("VLLM_API_KEY",))
