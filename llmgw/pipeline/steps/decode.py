"""Decode: the client's own request to the decode endpoint, told where the blocks are; its answer goes to the client."""

# ruff: noqa: RUF009 -- `key` is attrs.field, which ruff does not recognise through a call

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

import attrs

from llmgw.pipeline import params
from llmgw.pipeline.commands import Call, Choose, Chosen, Command, Failed, Note, Relay, Relayed, Reply
from llmgw.pipeline.context import Context
from llmgw.pipeline.legs import decode_body
from llmgw.pipeline.step import KV_CONNECTORS, Again, Done, KvConnector, LegFailed, Work, retryable


@attrs.frozen
class Decode:
    """The answer, streamed to the client; ends the pipeline."""

    api: ClassVar[int] = 1
    name: ClassVar[str] = "decode"
    ends: ClassVar[bool] = True
    use_openai_format: bool = params.key(
        params.boolean, "Accepted and without effect: this leg is written for the client's own path.", True
    )
    kv_connector: KvConnector = params.key(
        params.plugin(KV_CONNECTORS), "How KV blocks get from prefill to decode.", "kv-shared-storage"
    )

    def run(self, ctx: Context) -> Work:
        tries = ctx.policy.attempts
        while True:
            tries -= 1
            split = ctx.chosen is not None and ctx.chosen.disaggregate
            decode = ctx.chosen.decode if ctx.chosen is not None else None
            another = ctx.policy.decode_lost == "another_pair"
            another_pair = another and split and decode is not None and ctx.pairs < ctx.policy.pairs
            call = Call(
                leg=ctx.leg("decode"),
                step="decode",
                phase="decode",
                path=ctx.path,
                body=decode_body(ctx, self.kv_connector if split else None),
                endpoint=decode.id if decode is not None else "",
                avoid=frozenset(ctx.failed),
                prompt_tokens=0 if split else len(ctx.token_ids or ()),
            )
            release, ctx.release = ctx.release, None  # from here on decode's engine tells prefill's, or nobody can
            reply = yield Relay(call=call, beside=ctx.beside, hold_5xx=another_pair)
            if isinstance(reply, Relayed):
                for answer in reply.beside:
                    ctx.note_usage(answer.body)
                return Done(reply.status)
            assert isinstance(reply, Failed)
            blocks_wait = not reply.started and not ctx.beside
            if blocks_wait:
                ctx.release = release
            if not another or not retryable(reply):
                raise LegFailed(reply.step or "decode", reply)
            self._suspect(ctx, reply)
            yield Note("retry", {"leg": "decode", "endpoint": reply.endpoint, "reason": reply.reason})
            same_blocks = tries > 0 and (blocks_wait or not split)
            if same_blocks and (decode is None or (yield from self._another_decode(ctx))):
                continue
            if another_pair:
                return Again(reply)
            raise LegFailed(reply.step or "decode", reply)

    def _suspect(self, ctx: Context, failure: Failed) -> None:
        """Which endpoint another attempt avoids.

        A decode engine that answers 5xx is alive, and says so when it could not fetch its blocks: prefill is to blame.
        """
        if failure.status is not None and failure.status != 503 and ctx.chosen is not None and ctx.chosen.prefill:
            ctx.failed.add(ctx.chosen.prefill.id)
        elif failure.endpoint:
            ctx.failed.add(failure.endpoint)

    def _another_decode(self, ctx: Context) -> Generator[Command, Reply, bool]:
        """A decode endpoint in place of the lost one: with the same prefill where the request is split."""
        assert ctx.chosen is not None
        prefill = ctx.chosen.prefill if ctx.chosen.disaggregate else None
        reply = yield Choose(
            prompt_tokens=len(ctx.token_ids or ()),
            max_tokens=ctx.max_tokens,
            disaggregate=ctx.chosen.disaggregate,
            why=ctx.chosen.why,
            avoid=frozenset(ctx.failed),
            keep_prefill=prefill.id if prefill is not None else "",
        )
        if not isinstance(reply, Chosen) or reply.disaggregate != ctx.chosen.disaggregate:
            return False
        ctx.chosen = reply
        return True
