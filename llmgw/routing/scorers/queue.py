"""Work ahead."""

from __future__ import annotations

from llmgw.routing.field import Field


class Queue:
    """Seconds until the engine turns to the request: uncached prompt tokens ahead of it ÷ measured speed."""

    api = 1
    name = "queue"

    def score(self, field: Field) -> list[float] | None:
        return field.ahead
