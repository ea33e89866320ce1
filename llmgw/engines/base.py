"""What every engine kind declares, and the parts that all of them share.

An engine kind is a subclass of `Engine` in a file of its own. It declares constants (metric names, log milestones,
deaths, flags that nobody may override) and makes one thing: the `Command` for a `Launch`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import msgspec

from llmgw.engines.deaths import COMMON, GENERIC, Death, Exit, Verdict, diagnose
from llmgw.errors import Problem
from llmgw.request import Phase

PORT_BLOCK = 32
"""Ports a replica gets on a node, contiguous and its own. vLLM's workers scan upward from a base, one port a worker;
with the defaults, two replicas on one node collide."""

API, MASTER, DP_RPC, DP_MASTER, KV_EVENTS, KV_REPLAY, BOOTSTRAP, RAS, SIDE_CHANNEL, SCAN = 0, 1, 2, 3, 4, 5, 6, 7, 8, 16
"""Offsets in the block. SIDE_CHANNEL has room for 8 data-parallel ranks (NIXL adds the rank), SCAN for 16 workers."""

Task = Literal["generate", "embed"]


class MetricNames(msgspec.Struct, frozen=True, kw_only=True):
    """Where a kind's figures stand on its metrics page.

    Each is an ordered tuple of candidate specs, and the first one present wins: ``name``, ``name{label=value,…}``, or
    ``name@label`` for a figure that is the value of a label. The whole family name is matched. Empty = the engine does
    not say, which is unknown, not zero. *progress*: counters that rise while the engine works; those present are added.
    """

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    kv_usage: tuple[str, ...] = ()  # 0..1
    block_size: tuple[str, ...] = ()  # tokens
    blocks: tuple[str, ...] = ()
    progress: tuple[str, ...] = ()
    path: str = "/metrics"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a replica, as the agent asks for it. Every path is on this node."""

    program: tuple[str, ...]  # how this node starts the engine, e.g. ("/opt/vllm/bin/vllm", "serve")
    model: str  # the weights: a folder, or a file for llama-server
    names: tuple[str, ...]  # served names; the first one stands in answers
    host: str  # address to listen on
    first_port: int  # of a block of PORT_BLOCK
    folder: str  # private folder of this replica, where `Command.files` go
    key: str = ""  # the replica's API key; "" = none
    task: Task = "generate"
    phases: frozenset[Phase] = frozenset({"prefill", "decode"})
    gpus: tuple[str, ...] = ()  # UUIDs; empty = CPU
    tp: int = 1
    pp: int = 1
    dp: int = 1
    rank: int = 0  # which node of a group this is
    nodes: int = 1
    head: str = ""  # address of rank 0 on the bootstrap network; needed where nodes > 1
    head_first_port: int = 0  # rank 0's port block; 0 = same as first_port
    max_model_len: int | None = None
    memory_share: float | None = None  # of each GPU's total memory, 0..1
    max_seqs: int | None = None
    max_batched_tokens: int | None = None
    dtype: str = ""
    quantisation: str = ""
    kv_events: bool = False
    fabric_env: dict[str, str] = {}  # NCCL_… and friends, computed for the chosen fabric
    extra: tuple[str, ...] = ()  # flags of the catalogue, already checked
    env: dict[str, str] = {}  # variables of the catalogue, already checked

    def __repr__(self) -> str:  # the key must not get into a log through a traceback
        return f"Launch({self.names!r}, rank {self.rank} of {self.nodes}, port {self.first_port})"

    def port(self, offset: int) -> int:
        return self.first_port + offset

    def head_port(self, offset: int) -> int:
        return (self.head_first_port or self.first_port) + offset


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What to execute: no shell takes part. *files* (name → content) are written into the replica's folder first,
    mode 0600 and owned by the engine's user. *secret* names the variables whose values are never shown."""

    argv: tuple[str, ...]
    env: dict[str, str]
    files: dict[str, str] = {}
    secret: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Command({' '.join(self.argv)!r})"


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP question to an engine."""

    method: str = "GET"
    path: str
    body: bytes = b""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A command that proves the engine's program can start, within *seconds*. Python engines print one JSON object
    {version, cuda, arch}: what the wheel is and which CUDA and GPUs it was built for."""

    argv: tuple[str, ...]
    seconds: float


class Fact(msgspec.Struct, frozen=True):
    """A figure that an engine wrote into its log, e.g. ("kv_tokens", 178880)."""

    name: str
    value: float


class Engine:
    """Base of all kinds. Subclasses set the constants below and write `command`."""

    api: ClassVar[int]  # not set here: only kinds are registered
    name: ClassVar[str]
    metrics: ClassVar[MetricNames]
    default_port: ClassVar[int]  # where people who start it by hand find it
    milestones: ClassVar[tuple[tuple[str, str], ...]]  # (regular expression, phase), in the order of a start
    facts: ClassVar[tuple[tuple[str, str], ...]] = ()  # (regular expression with one group, name of the figure)
    deaths: ClassVar[tuple[Death, ...]] = ()
    wrappers: ClassVar[tuple[str, ...]] = ()  # lines that report a death but are not its cause
    owned_flags: ClassVar[frozenset[str]]  # long and short flags that the agent sets, or that could undo what it sets
    env_prefixes: ClassVar[tuple[str, ...]] = ()  # variables the catalogue may set, besides COMMON_ENV
    owned_env: ClassVar[frozenset[str]] = frozenset()  # …except these
    takes_share: ClassVar[bool] = False  # it takes `memory_share` of each GPU, and does not start if less is free
    abbreviates: ClassVar[bool] = True  # its argument parser takes `--por` for `--port`
    health: ClassVar[Ask] = Ask(path="/health")
    models: ClassVar[Ask] = Ask(path="/v1/models")

    def command(self, launch: Launch) -> Command:
        """The command for one rank. Raises ConfigError where this kind cannot do what is asked, listing all of it."""
        raise NotImplementedError

    def probe(self, program: tuple[str, ...]) -> Probe:
        """How to find out that *program* starts here, and what it is."""
        raise NotImplementedError

    def serves_http(self, launch: Launch) -> bool:
        """Whether this rank answers requests. Followers of a group do not; their process is all there is to watch."""
        return launch.rank == 0

    def canary(self, launch: Launch) -> Ask:
        """The smallest request that proves the engine can serve. `/health` proves less."""
        name = launch.names[0]
        if launch.task == "embed":
            return Ask(method="POST", path="/v1/embeddings", body=json.dumps({"model": name, "input": "ping"}).encode())
        body = {"model": name, "prompt": "ping", "max_tokens": 1, "temperature": 0, "stream": False}
        return Ask(method="POST", path="/v1/completions", body=json.dumps(body).encode())

    def phase(self, line: str) -> str | None:
        """The phase of the start that *line* announces, if it does."""
        return next((phase for pattern, phase in self.milestones if re.search(pattern, line)), None)

    def fact(self, line: str) -> Fact | None:
        """The figure in *line*, if there is one."""
        for pattern, name in self.facts:
            if found := re.search(pattern, line):
                return Fact(name, float(found[1].replace(",", "")))
        return None

    def diagnose(self, ended: Exit, tail: Sequence[str]) -> Verdict:
        """Why it ended, from how it ended and its last lines (250 or more, oldest first)."""
        return diagnose(ended, tail, (*self.deaths, *COMMON, *GENERIC), self.wrappers)

    def check(self, extra: Sequence[str], env: Mapping[str, str], where: str = "") -> list[Problem]:
        """What the catalogue must not say: flags and variables that the agent owns. Empty = fine."""
        return [*self._check_flags(extra, where), *self._check_env(env, where)]

    def _check_flags(self, extra: Sequence[str], where: str) -> list[Problem]:
        problems = []
        for word in extra:
            if not word.startswith("-") or _is_number(word):
                continue
            flag = normal_flag(word)
            owned = next((f for f in sorted(self.owned_flags) if self._reaches(flag, f)), None)
            if owned is not None:
                shown = "" if owned == flag else f" (it reaches {owned})"
                problems.append(
                    Problem(f"{self.name}: flag {flag}{shown} is set by the agent; leave it out of `args`", where)
                )
        return problems

    def _reaches(self, flag: str, owned: str) -> bool:
        if flag == owned:
            return True
        if not self.abbreviates:
            return False
        if not flag.startswith("--"):  # -p8000 is `-p 8000`
            return len(owned) == 2 and flag.startswith(owned)
        return len(flag) > 2 and owned.startswith(flag)

    def _check_env(self, env: Mapping[str, str], where: str) -> list[Problem]:
        allowed = (*COMMON_ENV, *self.env_prefixes)
        problems = []
        for key in env:
            if key in self.owned_env or key in OWNED_ENV:
                problems.append(
                    Problem(f"{self.name}: variable {key} is set by the agent; leave it out of `env`", where)
                )
            elif not any(key == a or (a.endswith("_") and key.startswith(a)) for a in allowed):
                text = f"{self.name}: variable {key} is not on the list of allowed ones: {', '.join(allowed)}"
                problems.append(Problem(f"{text} (a name that ends in _ stands for all that begin so)", where))
        return problems


COMMON_ENV: tuple[str, ...] = (
    "NCCL_", "GLOO_", "UCX_", "TP_SOCKET_IFNAME", "OMP_", "MKL_", "TORCH_", "PYTORCH_", "TRITON_", "CUDA_MODULE_LOADING",
    "CUDA_LAUNCH_BLOCKING", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "TZ", "LANG", "LC_ALL",
)  # fmt: skip

OWNED_ENV: frozenset[str] = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
    }
    | {"NCCL_RAS_ADDR", "LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "PATH", "HOME", "PYTHONPATH", "PYTHONSTARTUP"}
)
"""Variables that choose devices or decide what code runs: never the catalogue's."""


def flags(words: str) -> frozenset[str]:
    """The flags in *words*."""
    return frozenset(words.split())


def normal_flag(word: str) -> str:
    """`--api_key=x` → `--api-key`; `--kv-transfer-config.kv_role` → `--kv-transfer-config`."""
    flag = word.split("=", 1)[0]
    return flag.split(".", 1)[0].replace("_", "-") if flag.startswith("--") else flag


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-\d+(\.\d+)?", word) is not None


def base_env(launch: Launch) -> dict[str, str]:
    """The variables that every engine gets. The order of merging: computed here, then the catalogue's."""
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order; CUDA's own puts the fastest first
        "CUDA_VISIBLE_DEVICES": ",".join(launch.gpus),
        **launch.fabric_env,
        **({"NCCL_RAS_ADDR": f"localhost:{launch.port(RAS)}"} if len(launch.gpus) > 1 or launch.nodes > 1 else {}),
        **launch.env,
    }


def spread(flag: str, value: float | str | None, default: float | None = None) -> tuple[str, ...]:
    """(flag, value), or nothing where the value is unset or what the engine does anyway."""
    return () if value in (None, "", default) else (flag, str(value))


def python_beside(program: tuple[str, ...]) -> str:
    """The interpreter that runs *program*: itself, or the one beside the console script in its `bin`."""
    folder, _, last = program[0].rpartition("/")
    if last.startswith("python"):
        return program[0]
    return f"{folder}/python" if folder else "python3"
