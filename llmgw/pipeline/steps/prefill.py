"""Prefill: choose the pair, have the prompt's blocks computed, keep what the engine says about where they are."""

# ruff: noqa: RUF009 -- `key` is attrs.field, which ruff does not recognise through a call

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

import attrs

from llmgw.pipeline import params
from llmgw.pipeline.commands import Answer, Call, Choose, Chosen, Command, Failed, Note, Reply
from llmgw.pipeline.context import Context
from llmgw.pipeline.legs import prefill_body, release_call
from llmgw.pipeline.step import EC_CONNECTORS, KV_CONNECTORS, EcConnector, KvConnector, LegFailed, Work, retryable
from llmgw.pipeline.wire import PATHS, leg_format, prompt_needs_one_engine


@attrs.frozen
class Prefill:
    """The prompt's KV blocks, computed by a prefill endpoint; may decide that decode does it all."""

    api: ClassVar[int] = 1
    name: ClassVar[str] = "prefill"
    use_openai_format: bool = params.key(
        params.boolean, "Legs as OpenAI bodies; false: as `/inference/v1/generate`, tokens in.", True
    )
    kv_connector: KvConnector = params.key(
        params.plugin(KV_CONNECTORS), "How KV blocks get from prefill to decode.", "kv-shared-storage"
    )
    ec_connector: EcConnector = params.key(
        params.plugin(EC_CONNECTORS), "How encoder outputs get to prefill.", "ec-shared-storage"
    )

    def run(self, ctx: Context) -> Work:
        ec_params = self.ec_connector.params(ctx)
        why = prompt_needs_one_engine(ctx)
        lost: LegFailed | None = None
        for left in range(ctx.policy.attempts - 1, -1, -1):
            chosen = yield from self._choose(ctx, why, lost)
            ctx.chosen = chosen
            if not chosen.disaggregate:
                yield Note("aggregated", {"why": chosen.why})
                return None
            try:
                yield from self._prefill(ctx, chosen, ec_params)
            except LegFailed as error:
                lost, failure = error, error.failure
                if error.clients_fault and failure.status != 429:
                    raise
                if chosen.prefill is not None:
                    ctx.failed.add(chosen.prefill.id)
                ctx.forget_pair()
                if left and retryable(failure):
                    yield Note("retry", {"leg": "prefill", "endpoint": failure.endpoint, "reason": failure.reason})
                    continue
                if ctx.policy.prefill_failed == "fail":
                    raise
                yield Note("decode_locally", {"why": failure.reason})
                why = "prefill_failed"
                ctx.chosen = yield from self._choose(ctx, why, error)
            return None
        return None

    def _choose(self, ctx: Context, why: str, lost: LegFailed | None) -> Generator[Command, Reply, Chosen]:
        """The pair. Where none is left after a failure (*lost*), a decode endpoint alone, if the policy allows it."""
        tokens = len(ctx.token_ids) if ctx.token_ids is not None else 0
        while True:
            reply = yield Choose(
                prompt_tokens=tokens,
                max_tokens=ctx.max_tokens,
                disaggregate=not why,
                why=why,
                avoid=frozenset(ctx.failed),
            )
            if isinstance(reply, Chosen):
                ctx.pairs += 1
                return reply
            assert isinstance(reply, Failed)
            if why or not ctx.failed or ctx.policy.prefill_failed == "fail":
                raise lost or LegFailed("prefill", reply)
            why = "prefill_failed"

    def _prefill(self, ctx: Context, chosen: Chosen, ec_params: dict[str, Any]) -> Generator[Command, Reply, None]:
        yield from self.kv_connector.prepare(ctx)
        fmt = leg_format(ctx.path, self.use_openai_format)
        call = Call(
            leg=ctx.leg("prefill"),
            step="prefill",
            phase="prefill",
            path=PATHS[fmt],
            body=prefill_body(ctx, fmt, self.kv_connector, ec_params),
            endpoint=chosen.prefill.id if chosen.prefill is not None else "",
            headers=ctx.pin_prefill,
            prompt_tokens=len(ctx.token_ids or ()),
        )
        if self.kv_connector.together:
            ctx.beside = (call,)
            return
        reply = yield call
        if not isinstance(reply, Answer):
            assert isinstance(reply, Failed)
            raise LegFailed("prefill", reply)
        told = reply.body.get("kv_transfer_params") if isinstance(reply.body, dict) else None
        ctx.kv_params = told if isinstance(told, dict) else None
        ctx.note_usage(reply.body)
        if self.kv_connector.pins:
            if ctx.kv_params:
                ctx.release = release_call(ctx, self.kv_connector)
            else:
                yield Note("recompute", {"why": "no_descriptor"})
