"""Company."""

from __future__ import annotations

from llmgw.routing.field import Field


class Crowd:
    """Seconds that the answers under way there and this one cost each other: every sequence lengthens every step.

    Expected tokens × how much one sequence adds to a step (measured) × sequences, twice: its own wait, and theirs.
    """

    api = 1
    name = "crowd"

    def score(self, field: Field) -> list[float] | None:
        both = 2.0 * field.query.decode
        return [both * v.contention * (v.inflight + v.foreign) for v in field.views]
