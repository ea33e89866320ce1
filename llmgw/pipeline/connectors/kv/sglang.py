"""SGLang: both legs carry the same host, port and room, and are in flight together.

The prefill engine answers only when decode has fetched its blocks, so waiting for it first would wait for ever. The
room is a random integer: it pairs the two requests, and must be unique among those in flight.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

import attrs

from llmgw.pipeline import params
from llmgw.pipeline.commands import Body, Command, Reply
from llmgw.pipeline.context import Context
from llmgw.pipeline.reserve import prefill_host
from llmgw.pipeline.wire import Format

ROOMS = 1 << 63


@attrs.frozen
class Sglang:
    """SGLang's bootstrap: top-level host, port and integer room on both legs, sent together."""

    api: ClassVar[int] = 1
    name: ClassVar[str] = "kv-sglang"
    together: ClassVar[bool] = True
    pins: ClassVar[bool] = False
    bootstrap_port: int = params.key(
        params.integer(1, 65535),
        "Port of the bootstrap server where an endpoint does not say (env SGLANG_BOOTSTRAP_PORT).",
        8998,
    )

    def prepare(self, ctx: Context) -> Generator[Command, Reply, None]:
        host, port = yield from prefill_host(ctx, self.bootstrap_port)
        ctx.rendezvous = {
            "bootstrap_host": f"[{host}]" if ":" in host else host,
            "bootstrap_port": port,
            "bootstrap_room": ctx.number(ROOMS),
        }

    def prefill(self, ctx: Context, body: Body, fmt: Format) -> None:
        body.update(ctx.rendezvous)

    def decode(self, ctx: Context, body: Body, fmt: Format) -> None:
        body.update(ctx.rendezvous)
