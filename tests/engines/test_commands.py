"""Commands as engines get them, against golden files, and what nobody may override.

`LLMGW_UPDATE_GOLDEN=1 pytest tests/engines` writes the golden files anew: read the difference before you keep it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import msgspec
import pytest

from llmgw.engines import ENGINES
from llmgw.engines.base import Engine, Launch
from llmgw.engines.network import fabric_env
from llmgw.errors import ConfigError
from llmgw.request import Phase
from llmgw.simengine.options import Options, from_flags
from llmgw.simengine.options import flags as sim_flags

GOLDEN = Path(__file__).parent / "golden"
P, D = frozenset[Phase]({"prefill"}), frozenset[Phase]({"decode"})
H0, H1 = "GPU-5e0f1a10-0000-4000-8000-000000000000", "GPU-5e0f1a10-0000-4000-8000-000000000001"

ONE = Launch(
    program=("/opt/vllm/bin/vllm", "serve"),
    model="/models/llama",
    names=("llama", "llama-8b"),
    host="10.0.0.7",
    first_port=20000,
    folder="/var/lib/llmgw/replicas/llama-1",
    key="key-of-llama-1",
    gpus=(H0,),
)
MODULE = ("/opt/sglang/bin/python", "-m", "sglang.launch_server")
LLAMA = ("/opt/llama/llama-server",)

CASES: dict[str, tuple[str, Launch]] = {
    "vllm-one-gpu": ("vllm", msgspec.structs.replace(ONE, max_model_len=8192, memory_share=0.92, max_seqs=256)),
    "vllm-tp2": (
        "vllm",
        msgspec.structs.replace(
            ONE,
            gpus=(H0, H1),
            tp=2,
            extra=("--enable-prompt-tokens-details",),
            max_batched_tokens=8192,
            dtype="bfloat16",
            quantisation="fp8",
        ),
    ),
    "vllm-module-cpu": (
        "vllm",
        msgspec.structs.replace(
            ONE,
            program=("/opt/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server"),
            gpus=(),
            env={"VLLM_CPU_KVCACHE_SPACE": "1"},
            extra=("--dtype", "float32", "--enforce-eager"),
        ),
    ),
    "vllm-two-nodes-head": (
        "vllm",
        msgspec.structs.replace(
            ONE,
            gpus=(H0, H1),
            tp=2,
            pp=2,
            nodes=2,
            head="10.0.0.7",
            fabric_env=fabric_env("ib", ["mlx5_0:1"], "eth0", "10.0.0.7"),
        ),
    ),
    "vllm-two-nodes-follower": (
        "vllm",
        msgspec.structs.replace(
            ONE, gpus=(H0, H1), tp=2, pp=2, nodes=2, rank=1, head="10.0.0.7", host="10.0.0.8", head_first_port=20064
        ),
    ),
    "vllm-dp-follower": (
        "vllm",
        msgspec.structs.replace(ONE, gpus=(H0, H1), dp=4, nodes=2, rank=1, head="10.0.0.7", host="10.0.0.8"),
    ),
    "vllm-prefill": ("vllm", msgspec.structs.replace(ONE, phases=P)),
    "vllm-decode-cpu": ("vllm", msgspec.structs.replace(ONE, phases=D, gpus=())),
    "vllm-kv-events": ("vllm", msgspec.structs.replace(ONE, kv_events=True)),
    "vllm-embed": ("vllm", msgspec.structs.replace(ONE, task="embed")),
    "sglang-one-gpu": ("sglang", msgspec.structs.replace(ONE, program=MODULE, max_model_len=8192, memory_share=0.88)),
    "sglang-prefill-tp2": ("sglang", msgspec.structs.replace(ONE, program=MODULE, gpus=(H0, H1), tp=2, phases=P)),
    "sglang-two-nodes-follower": (
        "sglang",
        msgspec.structs.replace(ONE, program=MODULE, gpus=(H0, H1), tp=4, nodes=2, rank=1, head="10.0.0.7"),
    ),
    "llama-server-gpu": (
        "llama-server",
        msgspec.structs.replace(ONE, program=LLAMA, model="/models/llama.gguf", max_model_len=4096, max_seqs=8),
    ),
    "llama-server-cpu": ("llama-server", msgspec.structs.replace(ONE, program=LLAMA, gpus=(), key="")),
    "sim": ("sim", msgspec.structs.replace(ONE, program=("/usr/bin/llmgw", "sim-engine"), gpus=(), max_seqs=64)),
}


def engine(name: str) -> Engine:
    return ENGINES.make(name, {})


@pytest.mark.parametrize("case", CASES)
def test_command_is_the_golden_one(case: str) -> None:
    name, launch = CASES[case]
    command = engine(name).command(launch)

    lines = [*command.argv, "", *(f"{k}={v}" for k, v in sorted(command.env.items()))]
    lines += [f"\nfile {name}: {text}" for name, text in command.files.items()]
    text = "\n".join(lines).rstrip() + "\n"
    path = GOLDEN / f"{case}.txt"
    if os.environ.get("LLMGW_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("case", CASES)
def test_no_key_stands_in_argv(case: str) -> None:
    name, launch = CASES[case]
    command = engine(name).command(launch)

    assert launch.key == "" or launch.key not in " ".join(command.argv)
    assert launch.key == "" or any(launch.key in v for v in [*command.files.values(), *command.env.values()])
    assert {k for k, v in command.env.items() if launch.key and launch.key in v} <= set(command.secret)
    assert "key-of" not in repr(launch) + repr(command)


def test_every_golden_file_has_its_case() -> None:
    assert {p.stem for p in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", ENGINES.all())
def test_every_flag_that_the_agent_gives_is_refused_from_the_catalogue(name: str) -> None:
    made = engine(name)
    # flags that tune rather than decide: the catalogue may repeat them, its word comes last
    tuning = {"--max-model-len", "--gpu-memory-utilization", "--max-num-seqs", "--context-length"}
    tuning |= {"--mem-fraction-static", "--max-running-requests", "--jinja", "--max-num-batched-tokens", "--dtype"}
    tuning |= {"--quantization", "--chunked-prefill-size", "-b"}
    for kind, launch in CASES.values():
        if kind != name:
            continue
        ours = list(made.command(msgspec.structs.replace(launch, extra=())).argv[len(launch.program) :])
        flags = {w for w in ours if w.startswith("-") and w not in tuning}
        assert flags <= {p.message.split()[2] for p in made.check(sorted(flags), {})}


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("vllm", "--port"),
        ("vllm", "--port=9"),
        ("vllm", "--por"),
        ("vllm", "--api_key"),
        ("vllm", "--served-model"),
        ("vllm", "--kv-transfer-config.kv_role"),
        ("vllm", "--config"),
        ("vllm", "--uds=/tmp/x"),
        ("sglang", "--hos"),
        ("sglang", "--model"),
        ("llama-server", "-m"),
        ("llama-server", "--api-key-file"),
        ("sim", "--listen"),
    ],
)
def test_flags_of_the_agent_are_refused(name: str, flag: str) -> None:
    (problem,) = engine(name).check(["--x-y", flag, "-1", "-0.5"], {}, "models.llama.args")

    assert flag.split("=", maxsplit=1)[0].split(".", maxsplit=1)[0].replace("_", "-") in problem.message
    assert problem.where == "models.llama.args"


def test_other_flags_pass() -> None:
    args = [
        "--enable-prefix-caching",
        "--max-num-batched-tokens=8192",
        "--hf-overrides.x",
        "{}",
        "--chat-template",
        "f",
    ]
    assert engine("vllm").check(args, {"VLLM_LOGGING_LEVEL": "DEBUG", "NCCL_DEBUG": "INFO"}) == []
    assert engine("llama-server").check(["-b", "2048", "-fa", "auto", "-mm", "x.gguf"], {"GGML_CUDA_P2P": "1"}) == []


@pytest.mark.parametrize(
    "key", ["LD_PRELOAD", "PATH", "CUDA_VISIBLE_DEVICES", "VLLM_API_KEY", "VLLM_PORT", "AWS_SECRET"]
)
def test_variables_are_allowed_by_list(key: str) -> None:
    (problem,) = engine("vllm").check([], {key: "x", "VLLM_USE_V1": "1"})
    assert key in problem.message


def test_what_a_kind_cannot_do_is_said_wholly() -> None:
    launch = msgspec.structs.replace(ONE, program=LLAMA, phases=P, nodes=2, kv_events=True)
    with pytest.raises(ConfigError) as caught:
        engine("llama-server").command(launch)
    assert len(caught.value.problems) == 3


def test_canary_asks_for_one_token_of_the_first_name() -> None:
    ask = engine("vllm").canary(ONE)
    assert (ask.method, ask.path) == ("POST", "/v1/completions")
    assert json.loads(ask.body)["model"] == "llama"
    assert json.loads(ask.body)["max_tokens"] == 1
    assert engine("vllm").canary(msgspec.structs.replace(ONE, task="embed")).path == "/v1/embeddings"


def test_probe_runs_the_interpreter_beside_the_script() -> None:
    assert engine("vllm").probe(("/opt/vllm/bin/vllm", "serve")).argv[0] == "/opt/vllm/bin/python"
    assert engine("sglang").probe(MODULE).argv[0] == "/opt/sglang/bin/python"
    assert engine("llama-server").probe(LLAMA).argv == ("/opt/llama/llama-server", "--version")


def test_the_fabric_is_pinned_exactly() -> None:
    ib = fabric_env("ib", ["mlx5_1:1", "mlx5_10:1"], "eth0", "10.0.0.7")
    assert ib["NCCL_NET"] == "IB"
    assert ib["NCCL_IB_HCA"] == "=mlx5_1:1,mlx5_10:1"
    assert fabric_env("roce", ["mlx5_0:1"], "eth0", "10.0.0.7")["NCCL_IB_ADDR_FAMILY"] == "AF_INET"
    nvlink = fabric_env("nvlink", [], "eth0", "10.0.0.7")
    assert (nvlink["NCCL_MNNVL_ENABLE"], "NCCL_NET" in nvlink) == ("1", False)
    assert fabric_env("ethernet", [], "eth0", "10.0.0.7")["NCCL_NET"] == "Socket"


def test_the_simulated_engine_understands_its_command(tmp_path: Path) -> None:
    """By its own parser: a flag that it does not know, or a key that it does not take, shows here."""
    launch = msgspec.structs.replace(
        CASES["sim"][1], folder=str(tmp_path), phases=P, max_model_len=4096, kv_events=True
    )
    command = engine("sim").command(launch)
    for name, text in command.files.items():
        (tmp_path / name).write_text(text)
    found: list[Options] = []

    @click.command()
    @sim_flags
    def parse(**given: object) -> None:
        found.append(from_flags(given))

    parse.main(list(command.argv[len(launch.program) :]), standalone_mode=False)
    (options,) = found
    assert options.listen == ("10.0.0.7:20000",)
    assert {options.model, *options.served_model_name} == {"llama", "llama-8b"}
    assert (options.api_key, options.phases, options.max_model_len) == ("key-of-llama-1", ("prefill",), 4096)
    assert options.kv_events == "tcp://*:20004"
