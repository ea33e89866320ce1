"""NIXL (vLLM): decode pulls the blocks from where prefill's answer says they are."""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

import attrs

from llmgw.pipeline.commands import Body, Command, Reply
from llmgw.pipeline.connectors.flags import asks_prefill, flipped, nothing_to_prepare
from llmgw.pipeline.context import Context
from llmgw.pipeline.wire import Format, put_params


@attrs.frozen
class Nixl:
    """vLLM's NixlConnector: every key of prefill's descriptor goes to decode unchanged."""

    api: ClassVar[int] = 1
    name: ClassVar[str] = "kv-nixl"
    together: ClassVar[bool] = False
    pins: ClassVar[bool] = True

    def prepare(self, ctx: Context) -> Generator[Command, Reply, None]:
        return nothing_to_prepare()

    def prefill(self, ctx: Context, body: Body, fmt: Format) -> None:
        params = {
            **asks_prefill(),
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        put_params(body, fmt, "kv_transfer_params", params)

    def decode(self, ctx: Context, body: Body, fmt: Format) -> None:
        put_params(body, fmt, "kv_transfer_params", flipped(ctx.kv_params))
