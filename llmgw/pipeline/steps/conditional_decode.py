"""Conditional decode: a decode endpoint that has the prompt in its cache answers at once; otherwise the rest follows."""

from __future__ import annotations

from typing import ClassVar

import attrs

from llmgw.pipeline import params
from llmgw.pipeline.commands import Call, Declined, Failed, Note, Relay, Relayed
from llmgw.pipeline.context import CHAT, Context
from llmgw.pipeline.legs import tokens_into
from llmgw.pipeline.step import Done, LegFailed, Work


@attrs.frozen
class ConditionalDecode:
    """Early answer from a warm cache (`Prefer: if-available`); 412 goes on with the pipeline."""

    api: ClassVar[int] = 1
    name: ClassVar[str] = "conditional-decode"
    use_openai_format: bool = params.key(
        params.boolean, "Accepted and without effect: this leg is written for the client's own path.", True
    )

    def run(self, ctx: Context) -> Work:
        body = dict(ctx.body)
        if ctx.token_ids or ctx.path != CHAT:
            tokens_into(ctx, body)
        call = Call(
            leg=ctx.leg("probe"),
            step="conditional-decode",
            phase="decode",
            path=ctx.path,
            body=body,
            headers=(("prefer", "if-available"),),
            prompt_tokens=len(ctx.token_ids or ()),
        )
        reply = yield Relay(call=call, conditional=True)
        if isinstance(reply, Relayed):
            yield Note("probe", {"result": "served"})
            return Done(reply.status)
        if isinstance(reply, Declined):
            yield Note("probe", {"result": "deferred"})
            return None
        assert isinstance(reply, Failed)
        if reply.reason == "client_gone":
            raise LegFailed("conditional-decode", reply)
        yield Note("probe", {"result": "failed", "reason": reply.reason})
        return None
