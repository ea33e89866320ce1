"""One request and the endpoints that may serve it, in columns: what filters, scorers and pickers work on.

Everything is a list with one entry a candidate, so that a plug-in is called once a request, whatever the number of candidates.
Columns that several scorers need are made when the first asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar, Protocol, cast

import msgspec

from llmgw.endpoint import Endpoint, EndpointView, Snapshot
from llmgw.request import InferenceRequest, Phase

PREFILL_RATE = (
    8_000.0  # tokens a second, where no endpoint of the model has been measured: an 8B model on a mid-range GPU
)
DECODE_RATE = 40.0  # tokens a second and sequence, likewise

WHOLE: tuple[Phase, ...] = ("prefill", "decode")


class Query(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request, and what the gateway knows of it beside its bytes."""

    request: InferenceRequest
    model: str  # the name that endpoints know, after aliases and canary
    phases: tuple[Phase, ...] = WHOLE
    decode: int = 256  # tokens expected of the answer
    tried: Collection[str] = ()  # endpoint ids that have failed it already
    allowed: Collection[str] | None = None  # endpoint ids that admission grants; None: any
    sticky: str = ""  # endpoint id that serves its session
    reuse: float = 0.0  # requests within ten seconds that a further copy of what is cached of its prompt would serve


class Roster:
    """What follows from a set of endpoints alone: made once a set, not once a request."""

    __slots__ = ("endpoints", "position")

    def __init__(self, endpoints: tuple[Endpoint, ...]) -> None:
        self.endpoints = endpoints
        self.position = {e.id: i for i, e in enumerate(endpoints)}


class Field:
    """The candidates that are left, and their columns."""

    __slots__ = ("_decode_rates", "_hits", "_prefill_rates", "at", "matched", "now", "query", "roster", "views")

    def __init__(
        self,
        query: Query,
        roster: Roster,
        at: Sequence[int],
        views: Sequence[EndpointView],
        matched: Mapping[str, int],
        now: float,
    ) -> None:
        """*at*: positions of the candidates in the roster, ascending; *views* belong to them. *matched*: prompt tokens
        that an endpoint has cached, by its id; absent = none."""
        self.query = query
        self.roster = roster
        self.at = at
        self.views = views
        self.matched = matched
        self.now = now
        self._prefill_rates: list[float] | None = None
        self._decode_rates: list[float] | None = None
        self._hits: list[tuple[int, int]] | None = None

    @property
    def endpoints(self) -> list[Endpoint]:
        everyone = self.roster.endpoints
        return [everyone[i] for i in self.at]

    def find(self, endpoint: str) -> int | None:
        """Where *endpoint* (an id) stands among the candidates; None: it is none of them."""
        position = self.roster.position.get(endpoint)
        if position is None:
            return None
        at = bisect_left(self.at, position)
        return at if at < len(self.at) and self.at[at] == position else None

    @property
    def hits(self) -> list[tuple[int, int]]:
        """(candidate, prompt tokens that it has cached) of those that have any. Never the whole prompt: engines compute
        its last token anew."""
        if (found := self._hits) is None:
            most = max(0, self.query.request.prompt_tokens - 1)
            found = self._hits = [
                (at, min(most, tokens)) for name, tokens in self.matched.items() if (at := self.find(name)) is not None
            ]
        return found

    def hit(self, candidate: int) -> int:
        """Prompt tokens that *candidate* has cached."""
        return next((tokens for at, tokens in self.hits if at == candidate), 0)

    @property
    def prefill_rates(self) -> list[float]:
        """Tokens a second. Who has not been measured is taken for the median."""
        if (found := self._prefill_rates) is None:
            found = self._prefill_rates = _known([v.prefill_rate for v in self.views], PREFILL_RATE)
        return found

    @property
    def decode_rates(self) -> list[float]:
        """Tokens a second that one more sequence would get."""
        if (found := self._decode_rates) is None:
            found = self._decode_rates = _known([v.decode_rate for v in self.views], DECODE_RATE)
        return found

    def wait(self, candidate: int) -> float:
        """As `ahead`, of one."""
        view = self.views[candidate]
        return max(0.0, (view.ahead or 0.0) - min(max(self.now - view.begun, 0.0), view.head))

    @property
    def ahead(self) -> list[float]:
        """Seconds of work before the endpoint would turn to the request; what is done of it by now is taken off."""
        now, views = self.now, self.views
        found = [v.ahead for v in views]
        if None in found:
            pairs = zip(views, self.prefill_rates, strict=True)
            found = [v.prefill_tokens / rate if v.ahead is None else v.ahead for v, rate in pairs]
        made = cast("list[float]", found)
        for at, view in enumerate(views):
            if view.head:
                made[at] -= min(max(now - view.begun, 0.0), view.head)
        return made


def _known(values: list[float | None], default: float) -> list[float]:
    """The median of the known ones in place of None."""
    if None not in values:
        return cast("list[float]", values)
    known = sorted(value for value in values if value is not None)
    if known:
        default = known[len(known) // 2]
    return [default if value is None else value for value in values]


class Filter(Protocol):
    """Says which candidates may not serve the request at all."""

    name: ClassVar[str]

    def keep(self, query: Query, snapshot: Snapshot, at: Sequence[int], now: float) -> Sequence[int]:
        """Those of *at* (positions in the snapshot, ascending) that stay, ascending. *at* itself where all do."""
        ...


class Scorer(Protocol):
    """Says what a candidate costs."""

    name: ClassVar[str]

    def score(self, field: Field) -> list[float] | None:
        """Seconds, one a candidate; lower is better, negative is time saved. None: nothing to say, all zero."""
        ...


class Picker(Protocol):
    """Chooses by the sums of the weighted scores."""

    name: ClassVar[str]

    def pick(self, costs: Sequence[float], field: Field, random: Callable[[], float]) -> int:
        """Position of the one that is chosen. *random*: 0 ≤ x < 1. There is at least one candidate."""
        ...
