"""What a pipeline asks of the world, and what it gets back: plain data, both ways.

A step is a generator. It yields one of the commands below and is resumed with the reply that the table names; it reads
as if it blocked, and nothing in it blocks. Whoever performs commands (the driver of `llmgw.server`, a test, a
simulation) decides nothing about the protocol.

    command   reply                                  the driver …
    Choose    Chosen | Failed                        picks prefill and decode endpoints together
    Call      Answer | Failed                        POSTs (or GETs) one leg and reads its whole answer
    Gather    tuple of Answer | Failed, same order   performs several calls at once; the first failure cancels the rest
    Fetch     tuple of Media | Failed, same order    downloads media under the rules of `llmgw.pipeline.media`
    Relay     Relayed | Declined | Failed            POSTs one leg and relays its answer to the client as it comes
    Note      None                                   remembers it for explain, log and metrics; never waits

Nothing here is ever sent as it stands: bodies are JSON objects, encoded by `llmgw.pipeline.wire.encode`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from llmgw.endpoint import Endpoint
from llmgw.request import Phase

Body = dict[str, Any]


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One upstream request of a leg. Two calls of one request never share *leg*: it is the request id's suffix."""

    leg: str  # "prefill", "encode-0", "prefill-2" (the second attempt), …
    step: str  # as errors name it: "prefill", "encode[0]", "render"
    path: str
    body: Body
    phase: Phase | None = None  # None: a service at *address*, not an endpoint of the pool
    endpoint: str = ""  # Endpoint.id; "" = the driver picks one that has the phase
    avoid: frozenset[str] = frozenset()  # endpoint ids that failed this request already
    address: str = ""  # http(s)://HOST[:PORT] of a service; only where *phase* is None
    headers: tuple[tuple[str, str], ...] = ()  # stamped by the step, beside those that every leg gets
    method: Literal["POST", "GET"] = "POST"
    timeout: float | None = None  # seconds for the whole call; None = the leg's usual limits
    prompt_tokens: int = 0  # what the endpoint will have to prefill, for the ledger


class Gather(msgspec.Struct, frozen=True):
    """Several calls, at most *at_once* in flight. A call cancelled by another's failure answers Failed("cancelled")."""

    calls: tuple[Call, ...]
    at_once: int


class Choose(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill and decode endpoints, chosen together. Asked before the first of the two legs is built."""

    prompt_tokens: int
    max_tokens: int | None
    disaggregate: bool = True  # False: this request cannot be split, *why* says what stands against it
    why: str = ""
    avoid: frozenset[str] = frozenset()  # endpoint ids that failed this request
    keep_prefill: str = ""  # endpoint id that holds the blocks already: only its partner is asked for


class Fetch(msgspec.Struct, frozen=True, kw_only=True):
    """Media to download, with the limits of the step that asks."""

    urls: tuple[str, ...]
    limits: FetchLimits


class FetchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one request's downloads. The rules for addresses are `llmgw.pipeline.media`'s."""

    timeout: float = 10.0  # seconds for one object, redirects included
    at_once: int = 10
    max_bytes: int = 10 << 20  # of one object, after any content encoding
    allow_private: bool = False
    domains: tuple[str, ...] = ()  # empty = any


class Relay(msgspec.Struct, frozen=True, kw_only=True):
    """The leg whose answer the client gets, as it comes.

    *conditional*: only if the endpoint has the prompt cached; otherwise `Declined`, and nothing was relayed.
    *beside*: calls that must be in flight together with it; one failing before the answer began ends the leg as Failed.
    *hold_5xx*: an answer of 500 and above is Failed instead of the client's: the step has another way to try.
    """

    call: Call
    conditional: bool = False
    beside: tuple[Call, ...] = ()
    hold_5xx: bool = False


class Note(msgspec.Struct, frozen=True):
    """Something worth knowing about this request. Its names are few and fixed: they become metric labels."""

    event: str
    fields: dict[str, Any] = {}


Command = Call | Gather | Choose | Fetch | Relay | Note


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer with status 200."""

    body: Any  # decoded JSON
    endpoint: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """A call that brought no answer to work with, or a relay of which nothing reached the client.

    *status* is the upstream's where it said one. *started*: the engine may have begun the work. *step* names the leg
    that failed where several were in flight together.
    """

    reason: str  # code of llmgw.reasons, or "cancelled"
    status: int | None = None
    endpoint: str = ""
    detail: str = ""  # for the log, never for the client
    started: bool = True
    step: str = ""


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The endpoints of one request. In gateway mode both are None: the gateway chooses, leg by leg."""

    prefill: Endpoint | None = None
    decode: Endpoint | None = None
    fabric: str = ""
    disaggregate: bool = True
    why: str = ""


class Media(msgspec.Struct, frozen=True):
    """A downloaded object: its content type, sniffed, and its bytes in base64."""

    content_type: str
    base64: str


class Relayed(msgspec.Struct, frozen=True, kw_only=True):
    """The client has an answer, whole or broken: the pipeline ends here. *status* is what it saw.

    *beside*: answers of the calls that were in flight with it, as far as they came.
    """

    status: int
    beside: tuple[Answer, ...] = ()


class Declined(msgspec.Struct, frozen=True):
    """A conditional leg whose endpoint does not have the prompt (HTTP 412). Nothing went to the client."""


Reply = Answer | Failed | Chosen | Relayed | Declined | tuple[Answer | Failed, ...] | tuple[Media | Failed, ...] | None
