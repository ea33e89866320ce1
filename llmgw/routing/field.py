"""One request and the endpoints that may serve it, in columns: what filters, scorers and pickers work on.

Everything is a list with one entry a candidate, so that a plug-in is called once a request, whatever the number of candidates.
Columns that several scorers need are made when the first asks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar, Protocol

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
    sticky: str = ""  # endpoint id that serves its session


class Field:
    """The candidates that are left, and their columns."""

    __slots__ = (
        "_decode_rates",
        "_hits",
        "_overheads",
        "_prefill_rates",
        "endpoints",
        "matched",
        "now",
        "query",
        "views",
    )

    def __init__(
        self,
        query: Query,
        endpoints: Sequence[Endpoint],
        views: Sequence[EndpointView],
        matched: Mapping[str, int],
        now: float,
    ) -> None:
        """*matched*: prompt tokens that an endpoint has cached, by its id; absent = none."""
        self.query = query
        self.endpoints = endpoints
        self.views = views
        self.matched = matched
        self.now = now
        self._prefill_rates: list[float] | None = None
        self._decode_rates: list[float] | None = None
        self._overheads: list[float] | None = None
        self._hits: list[int] | None = None

    @property
    def prefill_rates(self) -> list[float]:
        """Tokens a second. Who has not been measured is taken for the median."""
        if (found := self._prefill_rates) is None:
            found = self._prefill_rates = _known([v.prefill_rate for v in self.views], PREFILL_RATE)
        return found

    @property
    def decode_rates(self) -> list[float]:
        """Tokens a second and sequence, at the batch size of now."""
        if (found := self._decode_rates) is None:
            found = self._decode_rates = _known([v.decode_rate for v in self.views], DECODE_RATE)
        return found

    @property
    def overheads(self) -> list[float]:
        """Seconds a request costs an endpoint beside its tokens."""
        if (found := self._overheads) is None:
            found = self._overheads = [v.overhead or 0.0 for v in self.views]
        return found

    @property
    def hits(self) -> list[int]:
        """Prompt tokens that are cached; never the whole prompt, of which engines compute the last token anew."""
        if (found := self._hits) is None:
            get, most = self.matched.get, max(0, self.query.request.prompt_tokens - 1)
            found = self._hits = [min(most, get(e.id, 0)) for e in self.endpoints]
        return found


def _known(values: list[float | None], default: float) -> list[float]:
    """The median of the known ones in place of None."""
    known = [value for value in values if value is not None]
    if len(known) == len(values):
        return known
    if known:
        known.sort()
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

    def score(self, field: Field) -> list[float]:
        """Seconds, one a candidate; lower is better, negative is time saved."""
        ...


class Picker(Protocol):
    """Chooses by the sums of the weighted scores."""

    name: ClassVar[str]

    def pick(self, costs: Sequence[float], field: Field, random: Callable[[], float]) -> int:
        """Position of the one that is chosen. *random*: 0 ≤ x < 1. There is at least one candidate."""
        ...
