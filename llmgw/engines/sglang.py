"""SGLang, as `python -m sglang.launch_server …`."""

from __future__ import annotations

import json

from llmgw.engines.base import (
    BOOTSTRAP,
    KV_EVENTS,
    MASTER,
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
    "import json, sglang, torch; print(json.dumps({'version': sglang.__version__, 'cuda': torch.version.cuda, "
    "'arch': torch.cuda.get_arch_list()}))"
)
KEY_FILE = "sglang.json"  # JSON is YAML


class Sglang(Engine):
    """SGLang: tensor, data and pipeline parallel, several nodes, prefill/decode disaggregation."""

    api = 1
    name = "sglang"
    takes_share = True
    default_port = 30000
    metrics = MetricNames(
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        kv_usage=("sglang:token_usage",),
        block_size=("sglang:page_size", "sglang:cache_config_info@page_size"),
        blocks=("sglang:num_pages", "sglang:cache_config_info@num_pages", "sglang:max_total_num_tokens"),
        progress=("sglang:generation_tokens_total", "sglang:prompt_tokens_total"),
    )
    milestones = (
        (r"The server is fired up and ready to roll", "canary"),
        (r"Capture (cuda|CPU) graph|Capture cuda graph (begin|end)", "graphs"),
        (r"KV Cache is allocated|max_total_num_tokens=", "kv-cache"),
        (r"Load weight end", "weights-loaded"),
        (r"Load weight begin|Loading safetensors", "weights"),
        (r"server_args=", "engine"),
    )
    facts = (
        (r"max_total_num_tokens=(\d+)", "kv_tokens"),
        (r"Load weight end\..*?elapsed=([\d.]+) s", "load_s"),
        (r"Load weight end\..*?mem usage=([\d.]+) GB", "weights_gib"),
    )
    deaths = (
        Death(
            code="static-memory",
            pattern=r"Not enough memory\. Please try to increase --mem-fraction-static",
            cause="no GPU memory is left for the KV pool after the weights",
            remedy="raise the memory share, use more GPUs, or a smaller model",
            retry="never",
        ),
        Death(
            code="watchdog",
            pattern=r"(?i)watchdog.*timeout",
            cause="the scheduler hung and the engine's own watchdog ended it",
            remedy=READ,
        ),
    )
    wrappers = (r"Received sigquit from a child process",)
    owned_flags = flags(
        "--host --port --model-path --model --served-model-name --api-key --admin-api-key --config --tp --tp-size "
        "--tensor-parallel-size --dp --dp-size --data-parallel-size --pp --pp-size --pipeline-parallel-size --nnodes "
        "--node-rank --dist-init-addr --nccl-init-addr --base-gpu-id --gpu-id-step --disaggregation-mode "
        "--disaggregation-bootstrap-port --kv-events-config --is-embedding --enable-metrics --nccl-port "
        "--ssl-keyfile --ssl-certfile --ssl-ca-certs"
    )
    env_prefixes = ("SGLANG_", "SGL_", "FLASHINFER_", "MC_", "NVSHMEM_")

    def probe(self, program: tuple[str, ...]) -> Probe:
        return Probe(argv=(python_beside(program), "-c", PROBE), seconds=90)

    def command(self, launch: Launch) -> Command:
        if "encode" in launch.phases:
            raise ConfigError([Problem("sglang: the encode phase cannot be placed; run it as a static endpoint")])
        argv = [
            *launch.program,
            *("--model-path", launch.model, "--served-model-name", launch.names[0]),
            *("--host", launch.host, "--port", str(launch.first_port)),
            "--enable-metrics",
            *spread("--tp-size", launch.tp, 1),
            *spread("--pp-size", launch.pp, 1),
            *spread("--dp-size", launch.dp, 1),
            *spread("--context-length", launch.max_model_len),
            *spread("--mem-fraction-static", launch.memory_share),
            *spread("--max-running-requests", launch.max_seqs),
            *spread("--chunked-prefill-size", launch.max_batched_tokens),
            *spread("--dtype", launch.dtype),
            *spread("--quantization", launch.quantisation),
        ]
        if launch.task == "embed":
            argv.append("--is-embedding")
        if launch.nodes > 1:
            argv += ["--nnodes", str(launch.nodes), "--node-rank", str(launch.rank)]
            argv += ["--dist-init-addr", f"{launch.head}:{launch.head_port(MASTER)}"]
        if launch.phases != {"prefill", "decode"}:
            mode = "prefill" if "prefill" in launch.phases else "decode"
            argv += ["--disaggregation-mode", mode, "--disaggregation-bootstrap-port", str(launch.port(BOOTSTRAP))]
        if launch.kv_events:
            events = {"publisher": "zmq", "endpoint": f"tcp://*:{launch.port(KV_EVENTS)}", "topic": "kv-events"}
            argv += ["--kv-events-config", json.dumps(events)]
        files = {}
        if launch.key:  # it takes a key from argv, which every user of the node can read, or from a file
            files[KEY_FILE] = json.dumps({"api-key": launch.key})
            argv += ["--config", f"{launch.folder}/{KEY_FILE}"]
        env = base_env(launch) | {"HF_HUB_OFFLINE": "1"}
        return Command(argv=(*argv, *launch.extra), env=env, files=files)
