"""`llmgw sim-engine`: an engine without a GPU, for rehearsals and tests."""

from __future__ import annotations

from llmgw.engines.base import KV_EVENTS, Command, Engine, Launch, MetricNames, Probe, base_env, flags, spread
from llmgw.request import PHASES

KEY_FILE = "api-key"


class Sim(Engine):
    """The simulated engine that comes with llmgw; speaks vLLM's dialect."""

    api = 1
    name = "sim"
    default_port = 8000
    metrics = MetricNames(
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        kv_usage=("vllm:kv_cache_usage_perc",),
        block_size=("vllm:cache_config_info@block_size",),
        blocks=("vllm:cache_config_info@num_gpu_blocks",),
        progress=("vllm:iteration_tokens_total_count", "vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
    )
    milestones = ((r"listening on", "canary"),)
    owned_flags = flags(
        "--listen --model --served-model-name --max-num-seqs --max-model-len --api-key-file --phases --role --kv-events"
    )
    abbreviates = False

    def probe(self, program: tuple[str, ...]) -> Probe:
        return Probe(argv=(*program, "--help"), seconds=30)

    def command(self, launch: Launch) -> Command:
        host = f"[{launch.host}]" if ":" in launch.host else launch.host
        argv = [
            *launch.program,
            *("--listen", f"{host}:{launch.first_port}"),
            *(word for name in launch.names for word in ("--model", name)),
            *spread("--max-num-seqs", launch.max_seqs),
            *spread("--max-model-len", launch.max_model_len),
        ]
        if launch.phases != {"prefill", "decode"}:
            argv += ["--phases", ",".join(p for p in PHASES if p in launch.phases)]
        if launch.kv_events:
            argv += ["--kv-events", f"tcp://*:{launch.port(KV_EVENTS)}"]
        files = {}
        if launch.key:
            files[KEY_FILE] = launch.key + "\n"
            argv += ["--api-key-file", f"{launch.folder}/{KEY_FILE}"]
        return Command(argv=(*argv, *launch.extra), env=base_env(launch), files=files)
