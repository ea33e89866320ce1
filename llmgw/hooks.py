"""The four places where tenancy takes part in a request. Synchronous, in this order, each at most once a request.

    identify(head) → reserve(principal, request, estimate) → progress(reservation, tokens)* → settle(reservation, outcome)

Today one anonymous principal; tenancy replaces the object, not the call sites.
"""

from __future__ import annotations

from typing import Protocol

from llmgw.request import Head, InferenceRequest, Outcome, Principal, Refusal


class Hooks(Protocol):
    """What the brain calls. A reservation is an opaque number; 0 means that nothing was reserved."""

    def identify(self, head: Head) -> Principal | Refusal: ...

    def reserve(self, principal: Principal, request: InferenceRequest, estimate: int) -> int | Refusal:
        """*estimate*: tokens that the request may cost, prompt and completion."""
        ...

    def progress(self, reservation: int, tokens: int) -> None: ...

    def settle(self, reservation: int, outcome: Outcome) -> None: ...


class Anonymous:
    """Everybody is one principal; the flow is the client's address, so that fairness still means something."""

    def identify(self, head: Head) -> Principal | Refusal:
        return Principal("anonymous", head.client or "local")

    def reserve(self, principal: Principal, request: InferenceRequest, estimate: int) -> int | Refusal:
        return 0

    def progress(self, reservation: int, tokens: int) -> None:
        return None

    def settle(self, reservation: int, outcome: Outcome) -> None:
        return None
