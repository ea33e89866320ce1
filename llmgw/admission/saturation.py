"""How many requests one engine can have in hand before more of them only wait inside it.

Nobody tells this number reliably: it follows from the engine's flags, its KV cache and the lengths of what it runs. So it
is learned:

    a configured cap            never exceeded, whatever was learned
    KV blocks of the engine     tokens that it can hold; a request is costed prompt and expected completion
    first tokens in time        at the limit, none overdue, none waiting by the last report: one more for each
    a first token overdue       the engine queues inside: the limit becomes what it runs (its report says, else what
                                has given a token)
    reports of a queue, twice   likewise
    a report of none            at the limit: a quarter more, for engines whose clients do not stream

*Overdue* is a request that has had no token for `OVERDUE` seconds longer than the prompts before it take to compute. A
single report of `waiting` proves nothing: a request waits for the step under way in any engine.
Without reports all of it works on first tokens alone; without first tokens (an outage of both) the limit stays.
"""

from __future__ import annotations

START = 16
"""Requests that an unknown engine gets before the first has answered; it doubles with every round of first tokens."""

OVERDUE = 0.5
"""Seconds: several steps of a loaded engine, far below what a full one makes its queue wait."""

TOLERANCE = 2.0
"""Prompts may take so many times the learned rate: prefill shares its steps with decoding."""

FRESH = 5.0
"""Seconds that a report is believed, as in the ledger of routing."""

BACK_OFF = 30.0
"""Seconds after a limit was found before one more is tried again: lengths change, and with them what fits."""


class Limit:
    """One engine's. `now` is seconds."""

    __slots__ = ("_found", "_waited", "cap", "seqs", "tokens")

    def __init__(self, cap: int | None = None, tokens: int | None = None) -> None:
        """*cap*: configured. *tokens*: KV tokens, where known."""
        self.cap = cap
        self.tokens = tokens
        self.seqs = START if cap is None else min(START, cap)
        self._found: float | None = None  # when it was last found full
        self._waited = False  # the last report had requests waiting

    @property
    def known(self) -> bool:
        """Whether the limit is a fact: configured, or the engine has been seen full."""
        return self._found is not None or self.seqs == self.cap

    def configure(self, cap: int | None, tokens: int | None) -> None:
        """What is configured or told of it has changed."""
        if cap is not None:
            self.seqs = min(self.seqs, cap)
        self.cap, self.tokens = cap, tokens

    def in_time(self, used: int, now: float) -> bool:
        """A first token came in time while *used* requests were in hand. True: the limit has risen."""
        return self._rise(1, used, now)

    def _rise(self, by: int, used: int, now: float) -> bool:
        if used < self.seqs or self._waited or (self._found is not None and now - self._found < BACK_OFF):
            return False
        if self.cap is not None and self.seqs >= self.cap:
            return False
        self.seqs += by if self.cap is None else min(by, self.cap - self.seqs)
        return True

    def reported(self, used: int, running: float, waiting: float, now: float) -> None:
        """What its metrics page says, foreign requests taken out. Two pages in a row with requests waiting, while all
        that it may have is in its hands: it is full."""
        if waiting and self._waited and used >= self.seqs:
            self.overdue(0, running, now)
        elif not waiting:
            self._rise(max(self.seqs // 4, 1), used, now)
        self._waited = waiting > 0

    def overdue(self, running: int, reported: float | None, now: float) -> None:
        """A first token is overdue. *running*: requests of ours that gave a token; *reported*: what the engine says that
        it runs of ours, if it said so lately."""
        seqs = max(1, running, int(reported or 0))
        self.seqs = seqs if self.cap is None else min(seqs, self.cap)
        self._found = now


def late(age: float, tokens: int, rate: float) -> bool:
    """Whether a request sent *age* seconds ago is overdue, with *tokens* of prompts to compute up to its own."""
    return age > OVERDUE + TOLERANCE * tokens / rate
