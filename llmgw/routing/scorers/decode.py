"""Computing the answer."""

from __future__ import annotations

from llmgw.routing.field import Field


class Decode:
    """Seconds to generate the expected answer, at the speed that each sequence there has at present."""

    api = 1
    name = "decode"

    def score(self, field: Field) -> list[float]:
        tokens = field.query.decode
        return [tokens / rate for rate in field.decode_rates]
