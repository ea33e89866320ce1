"""What llama.cpp needs of a GPU: it splits by layers, keeps one context for all slots, and has its own buffers.

It also *fits itself*: left alone it silently shortens the context or spills to the CPU. So it is started with fitting
off and all layers on the GPU, and what it needs is reckoned here.
"""

from __future__ import annotations

from llmgw.placement.geometry import Geometry
from llmgw.placement.memory import Need

MIB = 1 << 20
RESERVE = 500 * MIB  # context and allocator of a device
COMPUTE = 300 * MIB  # buffers of a graph with flash attention
KEEP_FREE = 1024 * MIB  # left on each device, as llama.cpp itself does
UBATCH = 512  # tokens computed at once


def padded(context: int, flash: bool) -> int:
    """Tokens that the cache is made for."""
    step = 256 if flash else 32
    return -(-context // step) * step


def kv_per_token(geometry: Geometry, layers: int, key_bytes: float = 2.0, value_bytes: float = 2.0) -> float:
    value = geometry.value_dim or geometry.head_dim
    return layers * geometry.kv_heads * (geometry.head_dim * key_bytes + value * value_bytes)


def need(
    geometry: Geometry, weights: int, *, context: int, devices: int = 1, slots: int = 1, batch: int = 2048, flash: bool
) -> Need:
    """What the fullest of *devices* needs. *context* is of all *slots* together (``-c``)."""
    tokens = padded(context, flash)
    full = kv_per_token(geometry, geometry.full) / devices
    kept = min(tokens, padded(geometry.window * slots + batch, flash)) if geometry.windowed else 0
    fixed = int(kv_per_token(geometry, geometry.windowed) / devices * kept)
    compute = COMPUTE if flash else 4 * tokens * UBATCH * geometry.heads
    return Need(
        weights=-(-weights // devices),
        overhead=RESERVE + compute,
        kv=int(full * tokens) + fixed,
        kv_token=full + (0 if flash else 4.0 * UBATCH * geometry.heads),
        kv_fixed=fixed,
    )


def budget(total: int) -> int:
    return total - KEEP_FREE
