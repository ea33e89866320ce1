"""Same session."""

from __future__ import annotations

from llmgw.routing.field import Field


class Session:
    """Seconds saved where the session was served last: all but the newest turn of its prompt is taken for cached.

    Counts only what `prefix` does not know of. *turn*: share of a prompt that is new.
    """

    api = 1
    name = "session"

    def __init__(self, turn: float = 0.1, least: float = 0.0) -> None:
        """*least*: seconds that staying is worth at any rate (state beside the KV cache: adapters, files)."""
        self.turn = turn
        self.least = least

    def score(self, field: Field) -> list[float] | None:
        if not field.query.sticky or (at := field.find(field.query.sticky)) is None:
            return None
        found = [0.0] * len(field.views)
        unknown = field.query.request.prompt_tokens * (1.0 - self.turn) - field.hit(at)
        found[at] = -max(self.least, unknown / field.prefill_rates[at])
        return found
