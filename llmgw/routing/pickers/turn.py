"""In turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmgw.routing.field import Field

CURSORS = 4096  # models that are remembered; beyond it all begin anew, which costs fairness for a moment


class Turn:
    """One after the other, whatever they cost: round robin, with a cursor for each model."""

    api = 1
    name = "turn"

    def __init__(self) -> None:
        self._cursors: dict[str, int] = {}

    def pick(self, costs: Sequence[float], field: Field, random: Callable[[], float]) -> int:
        if len(self._cursors) > CURSORS:
            self._cursors.clear()
        turn = self._cursors.get(field.query.model, 0)
        self._cursors[field.query.model] = turn + 1
        return turn % len(costs)
