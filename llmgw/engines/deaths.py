"""How engines die: exit codes and log lines, each with a cause, a remedy, and whether trying again can help.

`diagnose` goes through the table in order, most specific first; the first row found anywhere in the last lines wins,
since the root cause is printed before the final traceback. Any exit that nobody asked for is a failure, 0 included.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

READ = "read the engine's log (its last lines: `llmgw ctl logs REPLICA`; all of it: logs/ in the agent's state folder)"

Retry = Literal["backoff", "gpu-free", "never"]
"""*gpu-free*: once more when the GPU's memory is seen free. *never*: not before an input (node, catalogue) changes."""

PACKAGES = {
    "libgomp.so.1": "libgomp1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "libssl.so.3": "libssl3",
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libopenblas.so.0": "libopenblas0",
    "libstdc++.so.6": "libstdc++6",
    "libvulkan.so.1": "libvulkan1",
    "libucp.so.0": "libucx0",
}
"""Shared libraries engines are built against → the Debian/Ubuntu package that has them."""


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """A row. *cause* and *remedy* may use {1}, {2}… for the groups of *pattern*."""

    code: str
    pattern: str
    cause: str
    remedy: str
    retry: Retry = "backoff"


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a process ended. Both None = it was adopted, so nobody can tell."""

    code: int | None = None
    signal: int | None = None
    ready: bool = False  # it had served before
    oom_killed: bool = False  # the kernel said so (memory.events)

    def __str__(self) -> str:
        if self.signal is not None:
            return f"killed by signal {self.signal}"
        return "exit code unknown (adopted process)" if self.code is None else f"exit code {self.code}"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Why a replica failed, for a person. *line* is the log line that says so, "" if none did."""

    code: str
    cause: str
    remedy: str
    retry: Retry
    line: str = ""

    def __str__(self) -> str:
        return f"{self.cause}: {self.remedy}"


def package_of(library: str) -> str:
    """What to do about a missing shared library."""
    if library.startswith(("libcuda.so", "libnvidia")):
        return "it comes with the NVIDIA driver: install the driver, or start the container with GPU access"
    if library.startswith(("libcudart", "libcublas", "libcudnn", "libnccl", "libnvrtc")):
        return "it comes with CUDA: install the CUDA runtime that the engine was built for, or use a matching build"
    if package := PACKAGES.get(library):
        return f"Debian/Ubuntu: apt install {package}"
    return f"find its package (Debian/Ubuntu: apt-file search {library})"


COMMON: tuple[Death, ...] = (
    Death(
        code="missing-library",
        pattern=r"error while loading shared libraries: (\S+): cannot open shared object file",
        cause="{1} is missing",
        remedy="",  # from the library's name
        retry="never",
    ),
    Death(
        code="glibc",
        pattern=r"version [`'](GLIBC\w*_[\d.]+)' not found",
        cause="the binary was built for a newer system: {1} is not here",
        remedy="use a build for this distribution, or a newer distribution",
        retry="never",
    ),
    Death(
        code="gpu-memory-taken",
        pattern=r"Free memory on device \S* ?\(([\d.]+)/([\d.]+) GiB\).*less than desired GPU memory",
        cause="only {1} of {2} GiB were free on the GPU at the start",
        remedy="see who holds it in `llmgw agent --preflight` (GPU-4), or lower the model's memory share",
        retry="gpu-free",
    ),
    Death(
        code="cuda-system-not-ready",
        pattern=r"(?:CUDA error|Error) 802|system not yet initialized",
        cause="CUDA says 802, system not yet initialised: the fabric manager is not running",
        remedy="start nvidia-fabricmanager in exactly the driver's version",
        retry="never",
    ),
    Death(
        code="cuda-mismatch",
        pattern=r"(?:CUDA error|Error) 803|Driver/library version mismatch",
        cause="the kernel module and the driver's libraries are of different versions",
        remedy="reboot, or unload and load the nvidia modules",
        retry="never",
    ),
    Death(
        code="cuda-forward-compat",
        pattern=r"(?:CUDA error|Error) 804|forward compatibility was attempted on non supported HW",
        cause="a cuda-compat package is used on a GPU that does not support it",
        remedy="remove cuda-compat from the loader's path",
        retry="never",
    ),
    Death(
        code="driver-old",
        pattern=r"NVIDIA driver on your system is too old \(found version (\d+)\)",
        cause="the NVIDIA driver is too old for this build (it supports CUDA {1})",
        remedy="upgrade the driver, or use an engine built for an older CUDA",
        retry="never",
    ),
    Death(
        code="no-kernel-image",
        pattern=r"no kernel image is available",
        cause="this build has no code for this GPU's compute capability",
        remedy="use a build whose architecture list has this GPU",
        retry="never",
    ),
    Death(
        code="no-gpu",
        pattern=r"Failed to infer device type|No CUDA GPUs are available|no CUDA-capable device is detected",
        cause="the engine sees no GPU",
        remedy="run `llmgw agent --preflight`: rows DRV-1 and GPU-3 say why",
        retry="never",
    ),
    Death(
        code="kv-too-small",
        pattern=r"max seq len \(?(\d+)\)?.*larger than the available KV cache memory"
        r"(?:.*estimated maximum model length is (\d+))?",
        cause="one sequence of max_model_len {1} does not fit the KV cache",
        remedy="lower max_model_len (the engine's own estimate: {2}), raise the memory share, or use more GPUs",
        retry="never",
    ),
    Death(
        code="no-kv",
        pattern=r"No available memory for the cache blocks",
        cause="no GPU memory is left for the KV cache after the weights",
        remedy="raise the memory share, use more GPUs, or a smaller model",
        retry="never",
    ),
    Death(
        code="cuda-oom",
        pattern=r"(?:torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory)(?:.*Tried to allocate ([\d.]+ \w+))?",
        cause="the GPU ran out of memory (tried to allocate {1})",
        remedy="lower max_model_len or max_seqs, or use more GPUs; see who else is on the GPU (GPU-4)",
        retry="gpu-free",
    ),
    Death(
        code="divisible",
        pattern=r"(.*must be divisible by tensor parallel size.*|.*is not divisible by weight quantization block.*)",
        cause="the model cannot be split over so many GPUs: {1}",
        remedy="choose another tensor-parallel size in the model's shape",
        retry="never",
    ),
    Death(
        code="world-size",
        pattern=r"World size \((\d+)\) is larger than the number of available GPUs \((\d+)\)",
        cause="the shape needs {1} GPUs, the engine sees {2}",
        remedy="correct tp, pp or nodes of the model's shape",
        retry="never",
    ),
    Death(
        code="bf16",
        pattern=r"Bfloat16 is only supported",
        cause="this GPU has no bfloat16",
        remedy="set dtype half, or place the model on compute capability 8.0 or newer",
        retry="never",
    ),
    Death(
        code="capability",
        pattern=r"Minimum capability: (\d+)",
        cause="this quantisation needs compute capability {1} or newer",
        remedy="place the model on a newer GPU type, or use another quantisation",
        retry="never",
    ),
    Death(
        code="weights-damaged",
        pattern=r"(HeaderTooLarge|MetadataIncompleteBuffer|InvalidHeaderDeserialization)",
        cause="a weights file is damaged, truncated, or a git-lfs pointer ({1})",
        remedy="fetch the weights again; `llmgw agent --preflight` names the file (WGT-3)",
        retry="never",
    ),
    Death(
        code="weights-missing",
        pattern=r"(?:is not a local folder and is not a valid model identifier|does not appear to have a file named (\S+)"
        r"|Cannot find any model weights with)",
        cause="the weights are not where the catalogue says, or a file is missing",
        remedy="put them there and check the model's path; `llmgw agent --preflight` names the file (WGT-1, WGT-2)",
        retry="never",
    ),
    Death(
        code="gated",
        pattern=r"trying to access a gated repo|401 Client Error",
        cause="the weights are behind a login",
        remedy="fetch them on the node yourself: engines run without access to a hub",
        retry="never",
    ),
    Death(
        code="architecture",
        pattern=r"Model architectures \[?'?(\w+)'?\]? (?:are not supported|failed to be inspected)",
        cause="this version of the engine does not know the architecture {1}",
        remedy="install a newer engine",
        retry="never",
    ),
    Death(
        code="bad-flag",
        pattern=r"(?:unrecognized arguments?|error: invalid argument|error while handling argument|No such option)[:\s]+(.*)",
        cause="the engine does not know a flag: {1}",
        remedy="correct `args` in the catalogue, or install the version that has it",
        retry="never",
    ),
    Death(
        code="port-taken",
        pattern=r"(?i:address already in use)|EADDRINUSE|couldn't bind HTTP server socket.*port: (\d+)"
        r"|server socket has failed to listen",
        cause="a port of the replica's block is in use",
        remedy="the next start takes another block; `ss -ltnp` shows who holds it",
    ),
    Death(
        code="disk-full",
        pattern=r"No space left on device",
        cause="a disk is full",
        remedy="free space where the weights, the cache and /var/lib/llmgw live (DSK-1); /dev/shm counts too (LIM-2)",
    ),
    Death(
        code="rdma-memlock",
        pattern=r"ibv_\w+.*Cannot allocate memory",
        cause="memory could not be locked for RDMA",
        remedy="LimitMEMLOCK=infinity in the agent's unit (LIM-1)",
        retry="never",
    ),
    Death(
        code="nccl",
        pattern=r"(ncclSystemError|ncclRemoteError|ncclUnhandledCudaError|NCCL error.*|NET/IB.*(?:error|status=12).*)",
        cause="NCCL failed: {1}",
        remedy="run `llmgw agent --preflight`: rows IB-1 to IB-3, LIM-1 and GPU-6",
    ),
)
"""Rows that any engine can die of."""

GENERIC: tuple[Death, ...] = (
    Death(
        code="exception",
        pattern=r"^\s*(?:\([^)]*\)\s*)?(?:\w+ \d\d-\d\d [\d:]+ \[[^\]]*\]\s*)?"
        r"((?:\w+\.)*\w*(?:Error|Exception|Exit)): (.+)",
        cause="{1}: {2}",
        remedy=READ,
    ),
)
"""The last exception of a traceback, where no row knows better. Searched from the end."""

_SIGNALS: dict[int, tuple[str, str, Retry]] = {
    4: ("the CPU lacks instructions that the engine was built with", "see CPU-1: set the VM's CPU type to host, or use a build for this CPU", "never"),
    6: ("the engine aborted itself", READ, "backoff"),
    7: ("bus error: most often /dev/shm is full", "enlarge /dev/shm (LIM-2)", "backoff"),
    9: ("killed from outside: most often the kernel's OOM killer", "look for `oom-kill` in `dmesg`; give the host more memory or place fewer replicas (MEM-1)", "backoff"),
    11: ("segmentation fault", "check driver and engine versions against each other; " + READ, "backoff"),
}  # fmt: skip


def _fill(text: str, found: re.Match[str]) -> str:
    return re.sub(r"\{(\d)\}", lambda m: (found[int(m[1])] or "unknown").strip(), text)


def diagnose(ended: Exit, tail: Sequence[str], rows: Sequence[Death], wrappers: Sequence[str] = ()) -> Verdict:
    """The verdict on one end. *tail*: last lines of the log, oldest first."""
    if ended.oom_killed:
        cause, remedy, _ = _SIGNALS[9]
        return Verdict(code="oom-killed", cause="the kernel's OOM killer ended it", remedy=remedy, retry="backoff")
    lines = [line for line in tail if not any(re.search(w, line) for w in wrappers)]
    for row in rows:
        pattern = re.compile(row.pattern)
        for line in reversed(lines):
            if found := pattern.search(line):
                remedy = package_of(found[1]) if row.code == "missing-library" else _fill(row.remedy, found)
                cause = _fill(row.cause, found)
                return Verdict(code=row.code, cause=cause, remedy=remedy, retry=row.retry, line=line.strip()[:500])
    last = next((line.strip()[:500] for line in reversed(lines) if line.strip()), "")
    number = ended.signal
    if number is None and ended.code is not None and ended.code > 128 and ended.code - 128 in _SIGNALS:
        number = ended.code - 128  # a shell in between reports signals so
    if number is not None and number in _SIGNALS:
        cause, remedy, retry = _SIGNALS[number]
        return Verdict(code=f"signal-{number}", cause=cause, remedy=remedy, retry=retry, line=last)
    if ended.code == 127:
        cause, remedy = "the program could not be started", "run `llmgw agent --preflight`: rows ENG-1 to ENG-3"
        return Verdict(code="not-startable", cause=cause, remedy=remedy, retry="never", line=last)
    if ended.code == 0:
        when = "after it had been ready" if ended.ready else "before it was ready"
        remedy = READ
        return Verdict(code="exit-0", cause=f"it ended by itself {when}", remedy=remedy, retry="backoff", line=last)
    return Verdict(code="unknown", cause=str(ended), remedy=READ, retry="backoff", line=last)
