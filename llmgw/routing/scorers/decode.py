"""Computing the answer."""

from __future__ import annotations

from llmgw.routing.field import Field


class Decode:
    """Seconds to generate the expected answer, at the speed that one more sequence would get there."""

    api = 1
    name = "decode"

    def score(self, field: Field) -> list[float] | None:
        tokens = field.query.decode
        return [tokens / rate for rate in field.decode_rates]
