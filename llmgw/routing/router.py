"""All that routing remembers, and the few calls by which a server uses it.

    choose ─► Decision │ Refusal          nothing is counted yet
    sent(leg, decision) ─► progress* ─► ended(leg, outcome)      the ledger, both indexes, sessions, the ring

A leg is one attempt of a request on one endpoint. `ended` is called once for every `sent`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from llmgw.endpoint import Endpoint, Snapshot
from llmgw.request import InferenceRequest, Outcome, Phase, Refusal
from llmgw.routing.affinity import NOTHING, Affinity
from llmgw.routing.decide import decide
from llmgw.routing.decision import Decision
from llmgw.routing.field import WHOLE, Query
from llmgw.routing.ledger import Ledger
from llmgw.routing.profiles import DEFAULT, Profile, profiles
from llmgw.routing.recent import Recent
from llmgw.routing.report import Reading
from llmgw.routing.sessions import Sessions

EXPECTED = 256.0  # completion tokens of a model that has not answered yet: the median of public chat traces is below it
STEP = 0.02  # weight of one answer in what is expected of the next
MODELS = 4096  # models whose answers are remembered


class Router:
    """See the module. *random* gives numbers 0 ≤ x < 1."""

    def __init__(
        self,
        random: Callable[[], float],
        now: float,
        own_profiles: Mapping[str, object] | None = None,
    ) -> None:
        """Raises ConfigError for profiles that cannot be used."""
        self.ledger = Ledger(now)
        self.affinity = Affinity()
        self.sessions = Sessions()
        self.recent = Recent()
        self.profiles: dict[str, Profile] = profiles(own_profiles)
        self._random = random
        self._expected: dict[str, float] = {}
        self._legs: dict[Hashable, tuple[InferenceRequest, Decision]] = {}

    def replace(self, endpoints: Sequence[Endpoint], now: float) -> None:
        """The full set. What is remembered goes by id: who stays keeps it."""
        self.ledger.replace(endpoints, now)
        self.affinity.replace(endpoints)

    def learned(self, endpoint: str, reading: Reading) -> None:
        """What its metrics page says."""
        self.ledger.report(endpoint, reading.report)
        if reading.blocks and reading.block_size:
            self.affinity.resize(endpoint, reading.blocks * reading.block_size)

    def snapshot(self, now: float) -> Snapshot:
        return self.ledger.snapshot(now)

    def expected(self, request: InferenceRequest, model: str) -> int:
        """Completion tokens that are expected of the answer."""
        mean = self._expected.get(model, EXPECTED)
        limit = mean if request.max_tokens is None else request.max_tokens
        return int(min(mean, limit)) * max(request.n, 1)

    def unknown_profile(self, name: str) -> Refusal | None:
        """The refusal for a profile that is none."""
        if not name or name in self.profiles:
            return None
        known = ", ".join(sorted(self.profiles))
        return Refusal(
            reason="unknown_profile",
            param="x-llmgw-profile",
            message=f"There is no profile {name[:100]!r}; there are: {known}.",
        )

    def choose(
        self,
        request: InferenceRequest,
        model: str,
        now: float,
        *,
        profile: str = DEFAULT,
        phases: tuple[Phase, ...] = WHOLE,
        tried: Collection[str] = (),
        allowed: Collection[str] | None = None,
    ) -> Decision | Refusal:
        """Who serves *request* as *model*. *profile*: of the model; the request's own goes before. *tried*: endpoint
        ids that failed it. *allowed*: those that admission grants, None: any."""
        used = self.profiles.get(request.profile) or self.profiles[profile]
        matched = self.affinity.matched(request) if used.scorers else NOTHING
        query = Query(
            request=request,
            model=model,
            phases=phases,
            decode=self.expected(request, model),
            tried=tried,
            allowed=allowed,
            sticky=self.sessions.find(model, request.session, now) if request.session else "",
            reuse=self.affinity.reuse(request, matched, now) if matched else 0.0,
        )
        return decide(self.ledger.snapshot(now), query, used, matched, self._random, now)

    def sent(
        self, leg: Hashable, request: InferenceRequest, decision: Decision, now: float, *, again: bool = False
    ) -> None:
        """*request* goes where *decision* says. *again*: it is not its first attempt."""
        endpoint = decision.endpoint.id
        prefill = decision.uncached if "prefill" in decision.phases else 0
        expected = self.expected(request, decision.model) if "decode" in decision.phases else 1
        due = None if request.stream else now + decision.ttft
        self.ledger.open(leg, endpoint, prefill=prefill, decode=expected, now=now, due=due)
        self._legs[leg] = (request, decision)
        self.affinity.sent(endpoint, request, now, self.affinity.matched(request))
        if request.session:
            self.sessions.keep(decision.model, request.session, endpoint, now)
        self.recent.add(decision, again=again)

    def progress(self, leg: Hashable, tokens: int, now: float) -> None:
        """*tokens* of its answer have come."""
        self.ledger.progress(leg, tokens, now)

    def ended(self, leg: Hashable, now: float, outcome: Outcome | None = None) -> None:
        """It is over. *outcome*: of the request, with its last leg; None: the attempt failed, another may follow."""
        found = self._legs.pop(leg, None)
        if found is None:
            return
        request, decision = found
        computed = outcome is not None and outcome.first is not None and outcome.status < 400
        completion = outcome.completion_tokens if outcome is not None else None
        if computed and completion:
            self.ledger.progress(leg, completion, now)
        self.ledger.close(leg)
        self.affinity.ended(
            decision.endpoint.id, request, outcome.prompt_tokens if outcome else None, completion,
            outcome.cached_tokens if outcome else None,
            computed=computed, believed=decision.cached_tokens,
        )  # fmt: skip
        if outcome is None:
            return
        self.recent.ended(outcome)
        if computed and completion and not outcome.reason:
            if len(self._expected) > MODELS:
                self._expected.clear()
            mean = self._expected.get(decision.model, EXPECTED)
            self._expected[decision.model] = mean + STEP * (completion / max(request.n, 1) - mean)
