"""Which shapes a model can take, and which GPUs can run it: the arithmetic that engines check at start, checked before.

Divisibility is vLLM's and SGLang's; llama.cpp splits by layers and asks for none. Capabilities are compute
capabilities × 10 (80 = Ampere, 89 = Ada, 90 = Hopper, 100 = Blackwell).
"""

from __future__ import annotations

from llmgw.placement.geometry import Geometry

CAPABILITY: dict[str, int] = {
    "float32": 60,
    "float16": 60,
    "bfloat16": 80,
    "fp8": 75,  # weight-only below 89, native from there
    "compressed-tensors": 75,
    "int8": 75,
    "awq": 75,
    "awq_marlin": 75,
    "gptq": 60,
    "gptq_marlin": 75,
    "wna16": 75,
    "w8a8-fp8": 89,
    "w4a8-fp8": 90,
    "nvfp4": 75,  # emulated below 100
    "modelopt_fp4": 75,
    "mxfp4": 80,
    "modelopt": 80,
    "mxfp8": 80,
    "fp_quant": 100,
}

DRIVER: dict[int, int] = {11: 450, 12: 525, 13: 580}
"""Least driver branch by CUDA major that an engine was built for."""

NO_HALF = ("gemma",)
"""Families whose activations overflow float16: they need bfloat16, hence Ampere."""


def divisible(geometry: Geometry, tp: int, pp: int = 1, dp: int = 1, expert_parallel: bool = False) -> list[str]:
    """Every reason why these degrees cannot be; empty = they can. Vocabularies are padded by the engine."""
    g = geometry
    found = []
    if g.heads % tp:
        found.append(f"attention heads {g.heads} % tp {tp} != 0")
    elif not g.latent and (g.kv_heads % tp and tp % g.kv_heads):
        found.append(f"KV heads {g.kv_heads} and tp {tp}: neither divides the other")
    experts = bool(g.experts) and not expert_parallel
    width, what = (g.expert_intermediate, "expert") if experts else (g.intermediate, "MLP")
    checked = not g.experts or experts
    if checked and width % tp:
        found.append(f"{what} width {width} % tp {tp} != 0")
    elif checked and g.block and (width // tp) % g.block:
        found.append(f"{what} width {width} / tp {tp} = {width // tp} is not a multiple of the FP8 block {g.block}")
    elif checked and g.group > 0 and g.quantisation in ("awq", "gptq") and (width // tp) % g.group:
        found.append(f"{what} width {width} / tp {tp} = {width // tp} is not a multiple of the group {g.group}")
    if pp > g.layers:
        found.append(f"pp {pp} > layers {g.layers}")
    if expert_parallel and g.experts and g.experts % (tp * dp):
        found.append(f"experts {g.experts} % (tp {tp} x dp {dp}) != 0")
    return found


def capability(dtype: str, quantisation: str) -> tuple[int, str]:
    """Least capability × 10 for these, and which of them asks for it."""
    wanted = [(CAPABILITY.get(name, 0), name) for name in (dtype, quantisation) if name]
    return max(wanted, default=(0, ""))


def runs_on(arches: tuple[str, ...], gpu: tuple[int, int]) -> bool:
    """Does a build with code for *arches* (``sm_90a``, ``compute_120``) start on a GPU of that capability?

    Binary code runs on the same major and an equal or higher minor; with suffix `a` on exactly its own; `f` on its
    family; PTX (`compute_`) is compiled for anything equal or newer. An empty list says nothing: yes.
    """
    for arch in arches:
        kind, _, number = arch.partition("_")
        suffix = number[-1:] if number[-1:] in ("a", "f") else ""
        digits = number.removesuffix(suffix)
        if not digits.isdigit() or len(digits) < 2:
            continue
        have = (int(digits[:-1]), int(digits[-1]))
        if suffix == "a":
            fits = have == gpu
        elif kind == "compute" and not suffix:
            fits = have <= gpu
        else:
            fits = have[0] == gpu[0] and have[1] <= gpu[1]
        if fits:
            return True
    return not arches


def driver_floor(cuda: str) -> int:
    """Least driver branch for a build for *cuda* ("13.0"); 0 = none known."""
    major = cuda.partition(".")[0]
    return DRIVER.get(int(major), 0) if major.isdigit() else 0


def driver_branch(driver: str) -> int:
    """The branch of a driver: ``580.95.05`` → 580."""
    major = driver.partition(".")[0]
    return int(major) if major.isdigit() else 0
