"""In turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmgw.routing.field import Field
from llmgw.routing.pickers.best import cheapest

CURSORS = 4096  # models that are remembered; beyond it all begin anew, which costs fairness for a moment


class Turn:
    """One of the cheapest after the other: round robin, with a cursor for each model."""

    api = 1
    name = "turn"

    def __init__(self) -> None:
        self._cursors: dict[str, int] = {}

    def pick(self, costs: Sequence[float], field: Field, random: Callable[[], float]) -> int:
        if len(self._cursors) > CURSORS:
            self._cursors.clear()
        turn = self._cursors.get(field.query.model, 0)
        self._cursors[field.query.model] = turn + 1
        equals = cheapest(costs)
        return equals[turn % len(equals)]
