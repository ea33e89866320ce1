"""Encode: each image to an encoder, in parallel; what they answer tells prefill where to find the outputs."""

# ruff: noqa: RUF009 -- `key` is attrs.field, which ruff does not recognise through a call

from __future__ import annotations

from typing import ClassVar

import attrs

from llmgw.pipeline import params
from llmgw.pipeline.commands import Answer, Call, Failed, Gather, Note
from llmgw.pipeline.context import GENERATE, Context
from llmgw.pipeline.legs import encode_body
from llmgw.pipeline.step import EC_CONNECTORS, EcConnector, LegFailed, Work, retryable
from llmgw.pipeline.wire import PATHS, leg_format


@attrs.frozen
class Encode:
    """Images to encoders, one call each; skipped without images and for tokens-in requests."""

    api: ClassVar[int] = 1
    name: ClassVar[str] = "encode"
    max_parallel: int = params.key(params.integer(1), "How many images of one request are encoded at once.", 8)
    use_openai_format: bool = params.key(
        params.boolean, "Legs as OpenAI bodies; false: as `/inference/v1/generate`, tokens in.", True
    )
    ec_connector: EcConnector = params.key(
        params.plugin(EC_CONNECTORS), "How encoder outputs get to prefill.", "ec-shared-storage"
    )

    def run(self, ctx: Context) -> Work:
        if (
            ctx.path == GENERATE
        ):  # prefill encodes from the tensors that the client sent: shipping them twice costs more
            yield Note("skipping encode for generate request")
            return None
        if not ctx.entries:
            return None
        fmt = leg_format(ctx.path, self.use_openai_format)
        answers: dict[int, Answer] = {}
        for round_ in range(ctx.policy.attempts):
            missing = [index for index in range(len(ctx.entries)) if index not in answers]
            calls = tuple(
                Call(
                    leg=ctx.leg(f"encode-{index}"),
                    step=f"encode[{index}]",
                    phase="encode",
                    path=PATHS[fmt],
                    body=encode_body(ctx, ctx.entries[index], fmt),
                    avoid=frozenset(ctx.failed),
                    prompt_tokens=ctx.entries[index].length + 1,
                )
                for index in missing
            )
            replies = yield Gather(calls, self.max_parallel)
            assert isinstance(replies, tuple)
            failed: tuple[Call, Failed] | None = None
            for index, call, reply in zip(missing, calls, replies, strict=True):
                if isinstance(reply, Answer):
                    answers[index] = reply
                elif isinstance(reply, Failed) and reply.reason != "cancelled" and failed is None:
                    failed = call, reply
            if failed is None:
                break
            call, failure = failed
            if round_ + 1 == ctx.policy.attempts or not retryable(failure):
                raise LegFailed(call.step, failure)
            if failure.endpoint:
                ctx.failed.add(failure.endpoint)
        yield Note("all sub-requests complete", {"count": len(answers)})
        for index in sorted(answers):
            answer = answers[index].body
            told = answer.get("ec_transfer_params") if isinstance(answer, dict) else None
            yield from self.ec_connector.keep(ctx, told, index)
        return None
