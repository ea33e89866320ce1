"""Everything that is known about one request while it goes through its steps.

One mutable object; steps run strictly one after another, so each sees all that the former ones wrote. The client's own
body is never changed after the media step: a leg's body is a copy, so any step can run again on another endpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from llmgw.pipeline.commands import Body, Call, Chosen
from llmgw.pipeline.policy import FailurePolicy

if TYPE_CHECKING:
    import random

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
ROUTES = (CHAT, COMPLETIONS, GENERATE)


@attrs.define
class Entry:
    """One image of the prompt, in request order.

    *part* is its index among all ``image_url`` parts, well-formed or not, so that it can be found again; -1 where the
    client sent tokens and no parts. *kwargs* is the processed tensor in base64, or None: "take it from the cache".
    """

    part: int
    content_type: str = ""
    hash: str = ""
    kwargs: str | None = None
    offset: int = 0  # of its placeholder in the token ids
    length: int = 0


@attrs.define
class Context:
    """A request under way. Times, endpoints' load and sockets are the driver's; what goes over the wire is here."""

    request_id: str
    path: str  # one of ROUTES
    body: Body  # the working body: as received, media replaced
    policy: FailurePolicy = attrs.Factory(FailurePolicy)
    rng: random.Random | None = None  # for rooms and transfer ids; None where no connector needs one

    token_ids: list[int] | None = None  # None: nothing was rendered
    entries: list[Entry] = attrs.Factory(list)
    ec_params: list[dict[str, Any]] = attrs.Factory(list)  # one per kept encode answer, in request order
    kv_params: dict[str, Any] | None = None  # what prefill answered
    chosen: Chosen | None = None
    beside: tuple[Call, ...] = ()  # legs that wait to be sent together with decode
    rendezvous: dict[str, Any] = attrs.Factory(dict)  # what a connector agreed with itself for this pair of legs
    pin_prefill: tuple[tuple[str, str], ...] = ()  # headers that send the prefill leg where it was reserved
    failed: set[str] = attrs.Factory(set)  # ids of endpoints that failed this request
    pairs: int = 0  # how many pairs were chosen
    attempts: dict[str, int] = attrs.Factory(dict)  # leg → how often it was sent
    release: Call | None = None  # what frees the blocks that prefill holds for a decode that has not been sent
    abandoned: list[Call] = attrs.Factory(list)  # releases of former pairs
    cached_tokens: int | None = None  # of prefill, as its engine said
    prompt_tokens: int | None = None  # as rendered, or as prefill's engine said

    @property
    def model(self) -> str:
        """The model asked for; "" where the client named none."""
        found = self.body.get("model")
        return found if isinstance(found, str) else ""

    @property
    def max_tokens(self) -> int | None:
        """How many tokens the client allows, as far as it says."""
        place = self.body.get("sampling_params") if self.path == GENERATE else self.body
        if not isinstance(place, dict):
            return None
        for key in ("max_completion_tokens", "max_tokens"):
            found = place.get(key)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
        return None

    def note_usage(self, answer: Any) -> None:
        """Remember what prefill's engine says of the prompt: decode's engine would call pulled blocks its own."""
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if not isinstance(usage, dict):
            return
        if type(usage.get("prompt_tokens")) is int:
            self.prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and type(details.get("cached_tokens")) is int:
            self.cached_tokens = details["cached_tokens"]

    def leg(self, name: str) -> str:
        """The next name for the leg *name*: itself first, then ``name-2``, …: no two legs share a request id."""
        self.attempts[name] = self.attempts.get(name, 0) + 1
        return name if self.attempts[name] == 1 else f"{name}-{self.attempts[name]}"

    def forget_pair(self) -> None:
        """Another pair follows: nothing of the former one may get into its bodies."""
        self.chosen = None
        self.kv_params = None
        self.beside = ()
        if self.release is not None:
            self.abandoned.append(self.release)
        self.release = None
        self.rendezvous = {}
        self.pin_prefill = ()

    def number(self, below: int) -> int:
        """A random number of this request, below *below*."""
        assert self.rng is not None, "this pipeline's connector needs chance: the driver must pass rng"
        return self.rng.randrange(below)
