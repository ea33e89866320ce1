"""Shared storage: the encoders write their outputs where prefill finds them; no leg says anything."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

import attrs

from llmgw.pipeline.commands import Command, Reply
from llmgw.pipeline.connectors.flags import nothing_to_prepare
from llmgw.pipeline.context import Context


@attrs.frozen
class SharedStorage:
    """Encoders and prefill that share a store: no `ec_transfer_params` on any leg."""

    api: ClassVar[int] = 1
    name: ClassVar[str] = "ec-shared-storage"

    def keep(self, ctx: Context, answer: Any, index: int) -> Generator[Command, Reply, None]:
        return nothing_to_prepare()

    def params(self, ctx: Context) -> dict[str, Any]:
        return {}
