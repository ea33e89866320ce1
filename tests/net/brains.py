"""A brain that behaves, without a server around it: round robin, a retry budget of its own, every call on record."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from llmgw.request import Failure, InferenceRequest, Lease, Limits, Outcome, Page, Refusal, Target, Wait


class RoundRobin:
    """Serves every model from *targets* in turn. *most_attempts* of one request; refusals as the reasons table has them.

    Invariants that tests read: `open` (leases not settled), `waiting` (tickets not answered), `outcomes` (one a request).
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        limits: Limits | None = None,
        usage: str = "count",
        most_attempts: int = 3,
        hold: bool = False,
        patience: int = 0,
    ) -> None:
        self.targets = list(targets)
        self.limits = limits or Limits()
        self.usage = usage
        self.most_attempts = most_attempts
        self.hold = hold  # True: everybody waits until `release`
        self.open: dict[int, tuple[InferenceRequest, int, int]] = {}
        self.waiting: dict[int, InferenceRequest] = {}
        self.outcomes: list[Outcome] = []
        self.progressed: list[tuple[int, int]] = []
        self.made_answers: list[str] = []
        self.asked_quiet = 0
        self.patience = patience  # how often `quiet` says: go on
        self._next = 0
        self._ids = 0

    def _lease(self, request: InferenceRequest, attempt: int) -> Lease:
        self._ids += 1
        target = self.targets[self._next % len(self.targets)]
        self._next += 1
        self.open[self._ids] = (request, attempt, self._next - 1)
        return Lease(
            id=self._ids,
            request_id=request.id,
            target=target,
            limits=self.limits,
            usage="ask" if self.usage == "ask" else "count",
            attempt=attempt,
        )

    def admit(self, request: InferenceRequest) -> Lease | Wait | Refusal | Page:
        if request.head.route in ("/health", "/healthz", "/readyz"):
            return Page(body=b"")
        if request.head.route.startswith("/v1/models"):
            return Page(body=b'{"object":"list","data":[]}')
        if request.model == "nope":
            return Refusal(reason="model_not_found", message="no endpoint has the model 'nope'", param="model")
        if not self.targets:
            return Refusal(reason="none_healthy", message="no endpoint is healthy")
        if self.hold:
            self._ids += 1
            self.waiting[self._ids] = request
            return Wait(self._ids)
        return self._lease(request, 1)

    def release(self) -> list[tuple[int, Lease]]:
        """Leases for all who wait, to be passed to the mover."""
        granted = [(ticket, self._lease(request, 1)) for ticket, request in self.waiting.items()]
        self.waiting.clear()
        return granted

    def withdraw(self, ticket: int, outcome: Outcome) -> None:
        del self.waiting[ticket]
        self.outcomes.append(msgspec.structs.replace(outcome))

    def retry(self, lease: int, failure: Failure) -> Lease | Wait | Refusal:
        request, attempt, _ = self.open[lease]
        again = failure.reused or (not failure.started)
        if again and attempt < self.most_attempts:
            del self.open[lease]
            return self._lease(request, attempt + 1)
        if failure.reason == "no_endpoint":
            return Refusal(reason="no_endpoint", message="every endpoint says that it is full", filter="busy")
        return Refusal(reason=failure.reason, message="the engine did not answer")

    def progress(self, lease: int, tokens: int) -> None:
        assert lease in self.open
        self.progressed.append((lease, tokens))

    def made(self, lease: int, answer: str) -> None:
        assert lease in self.open
        self.made_answers.append(answer)

    def quiet(self, lease: int, seconds: float) -> Refusal | None:
        assert lease in self.open
        self.asked_quiet += 1
        if self.asked_quiet <= self.patience:
            return None
        return Refusal(reason="idle_timeout", message=f"no byte for {seconds:g} s")

    def settle(self, lease: int | None, outcome: Outcome) -> None:
        if lease is not None:
            del self.open[lease]  # KeyError: settled twice
        self.outcomes.append(msgspec.structs.replace(outcome))
