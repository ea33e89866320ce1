"""The CUDA probe: `python -m llmgw.agent.cuda`, with CUDA_VISIBLE_DEVICES naming one GPU.

NVML looks perfect on a machine where CUDA cannot start (no fabric manager: 802). So: initialise, take the primary
context, allocate 64 MiB, write them, wait, free. Prints {"call", "code"} of the first call that failed, or code 0.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable

SIZE = 64 << 20

CODES: dict[int, str] = {
    2: "out of memory: another process fills the GPU",
    3: "CUDA could not be initialised",
    34: "a stub libcuda was loaded: take the stubs folder off the loader's path",
    35: "the driver is too old for this CUDA",
    46: "the GPU is in use in exclusive mode",
    100: "CUDA sees no device",
    101: "CUDA does not know this device",
    802: "system not yet initialised: the fabric manager is not running",
    803: "kernel module and driver library do not match: reboot",
    804: "cuda-compat on a GPU that does not support it: remove it from the loader's path",
    999: "unknown error: often nvidia_uvm is not loaded, or /dev/nvidia-uvm is missing",
}
"""CUDA driver return code → what it means for an operator."""

NO_LIBRARY = -1


def probe() -> tuple[str, int]:
    """The first call that failed and its code; ("", 0) if none did."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1", NO_LIBRARY
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    steps: list[tuple[str, Callable[[], int]]] = [
        ("cuInit", lambda: cuda.cuInit(0)),
        ("cuDeviceGet", lambda: cuda.cuDeviceGet(ctypes.byref(device), 0)),
        ("cuDevicePrimaryCtxRetain", lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)),
        ("cuCtxSetCurrent", lambda: cuda.cuCtxSetCurrent(context)),
        ("cuMemAlloc", lambda: cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(SIZE))),
        ("cuMemsetD8", lambda: cuda.cuMemsetD8_v2(memory, ctypes.c_ubyte(0xA5), ctypes.c_size_t(SIZE))),
        ("cuCtxSynchronize", cuda.cuCtxSynchronize),
        ("cuMemFree", lambda: cuda.cuMemFree_v2(memory)),
    ]
    for name, call in steps:
        code = int(call())
        if code:
            return name, code
    return "", 0


def describe(call: str, code: int) -> str:
    """One line on a failure; "" = it passed."""
    if code == 0:
        return ""
    if code == NO_LIBRARY:
        return "libcuda.so.1 not found: the driver's CUDA part is not installed"
    return f"{call} says {code}: {CODES.get(code, 'see the CUDA driver API')}"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dict(zip(("call", "code"), probe(), strict=True))) + "\n")
