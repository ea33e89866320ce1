"""NIXL: prefill pulls each image's output from the encoder that its descriptor names."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

import attrs

from llmgw.pipeline.commands import Command, Failed, Note, Reply
from llmgw.pipeline.context import Context
from llmgw.pipeline.step import LegFailed


@attrs.frozen
class Nixl:
    """Encoder outputs by NIXL: the encoders' descriptors, merged by image hash, go to prefill."""

    api: ClassVar[int] = 1
    name: ClassVar[str] = "ec-nixl"

    def keep(self, ctx: Context, answer: Any, index: int) -> Generator[Command, Reply, None]:
        if isinstance(answer, dict) and answer:
            ctx.ec_params.append(answer)
        else:
            yield Note("encoder_without_descriptor", {"image": index})

    def params(self, ctx: Context) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for answer in ctx.ec_params:
            for key, descriptor in answer.items():
                if descriptor is None:
                    continue
                if key in merged and merged[key] != descriptor:
                    # guessing would pull from a peer that may have recycled the buffer meanwhile
                    detail = f"two encoders gave different descriptors for image {key}"
                    raise LegFailed("prefill", Failed(reason="phase_failed", detail=detail))
                merged[key] = dict(descriptor) if isinstance(descriptor, dict) else descriptor
        return merged
