"""Mooncake (vLLM): both legs carry a transfer id, and decode asks prefill's bootstrap server for the blocks.

Decode must also name the prefill engine's id, which only that bootstrap server knows; it is asked once a pair.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

import attrs

from llmgw.pipeline import params
from llmgw.pipeline.commands import Answer, Body, Call, Command, Failed, Reply
from llmgw.pipeline.connectors.flags import asks_prefill, flipped
from llmgw.pipeline.context import Context
from llmgw.pipeline.reserve import nobody, prefill_host
from llmgw.pipeline.wire import Format, put_params

QUERY_TIMEOUT = 5.0
"""Seconds. A small page of a server beside the engine; one that does not answer in 5 s will not hand over blocks either."""


@attrs.frozen
class Mooncake:
    """vLLM's MooncakeConnector: a transfer id on both legs, sent together, the engine id asked of its bootstrap."""

    api: ClassVar[int] = 1
    name: ClassVar[str] = "kv-mooncake"
    together: ClassVar[bool] = True
    pins: ClassVar[bool] = False
    bootstrap_port: int = params.key(
        params.integer(1, 65535),
        "Port of the bootstrap server where an endpoint does not say (env SGLANG_BOOTSTRAP_PORT).",
        8998,
    )

    def prepare(self, ctx: Context) -> Generator[Command, Reply, None]:
        host, port = yield from prefill_host(ctx, self.bootstrap_port)
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        reply = yield Call(
            leg=ctx.leg("bootstrap"), step="prefill", path="/query", body={}, address=address, method="GET",
            timeout=QUERY_TIMEOUT,
        )  # fmt: skip
        if not isinstance(reply, Answer):
            assert isinstance(reply, Failed)
            raise nobody(ctx, f"{address}/query: {reply.reason} {reply.detail}".rstrip())
        engine = _engine_of_rank_0(reply.body)
        if engine is None:
            raise nobody(ctx, f"{address}/query names no engine_id")
        ctx.rendezvous = {
            "transfer_id": f"xfer-{ctx.request_id}-{ctx.number(1 << 63):016x}",
            "remote_bootstrap_addr": address,
            "remote_engine_id": engine,
        }

    def prefill(self, ctx: Context, body: Body, fmt: Format) -> None:
        mine = {**asks_prefill(), "transfer_id": ctx.rendezvous["transfer_id"]}
        put_params(body, fmt, "kv_transfer_params", mine)

    def decode(self, ctx: Context, body: Body, fmt: Format) -> None:
        put_params(body, fmt, "kv_transfer_params", flipped(ctx.rendezvous))


def _engine_of_rank_0(page: object) -> str | None:
    """The engine id in ``{"0": {"engine_id": …}, …}``; prefill legs go to rank 0 unless the engine balances by itself."""
    entry = page.get("0") if isinstance(page, dict) else None
    engine = entry.get("engine_id") if isinstance(entry, dict) else None
    return engine if isinstance(engine, str) else None
