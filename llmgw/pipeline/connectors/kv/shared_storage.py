"""Shared storage: both engines reach the same store of blocks; nobody tells anybody where."""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

import attrs

from llmgw.pipeline.commands import Body, Command, Reply
from llmgw.pipeline.connectors.flags import asks_prefill, flipped, nothing_to_prepare
from llmgw.pipeline.context import Context
from llmgw.pipeline.wire import Format, put_params


@attrs.frozen
class SharedStorage:
    """Engines that share a store of KV blocks: flags only, prefill's answer is ignored."""

    api: ClassVar[int] = 1
    name: ClassVar[str] = "kv-shared-storage"
    together: ClassVar[bool] = False
    pins: ClassVar[bool] = False

    def prepare(self, ctx: Context) -> Generator[Command, Reply, None]:
        return nothing_to_prepare()

    def prefill(self, ctx: Context, body: Body, fmt: Format) -> None:
        put_params(body, fmt, "kv_transfer_params", asks_prefill())

    def decode(self, ctx: Context, body: Body, fmt: Format) -> None:
        put_params(body, fmt, "kv_transfer_params", flipped(None))
