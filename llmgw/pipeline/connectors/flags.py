"""What vLLM's connectors have in common: two flags that say on which side of the hand-over a request is."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from llmgw.pipeline.commands import Command, Reply


def asks_prefill() -> dict[str, Any]:
    """The flags of a prefill leg."""
    return {"do_remote_decode": True, "do_remote_prefill": False}


def flipped(params: dict[str, Any] | None) -> dict[str, Any]:
    """Prefill's descriptor as decode gets it: all keys as they are, known or not, and the flags turned round.

    Without a descriptor the flags alone: the engine recomputes the prompt, slowly and correctly.
    """
    return {**(params or {}), "do_remote_decode": False, "do_remote_prefill": True}


def nothing_to_prepare() -> Generator[Command, Reply, None]:
    """A `prepare` that asks nothing."""
    yield from ()
