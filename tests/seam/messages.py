"""What goes over the link: the calls of `Brain` and `Mover` as structs, msgpack. Nothing in them is alive.

mover → brain   Hello, then Admit, Retry, Withdraw, Progress, Made, Quiet, Settle
brain → mover   Leased, Refused, Shown (the answer to the ticket of an Admit or a Retry), Abandon
"""

from __future__ import annotations

import msgspec

from llmgw.request import Failure, InferenceRequest, Lease, Outcome, Page, Refusal


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Hello(Message, frozen=True):
    now: float  # of the mover's clock: the two processes count from different zeros


class Admit(Message, frozen=True):
    ticket: int  # chosen by the mover
    request: InferenceRequest


class Retry(Message, frozen=True):
    ticket: int
    lease: int
    failure: Failure


class Withdraw(Message, frozen=True):
    ticket: int
    outcome: Outcome


class Progress(Message, frozen=True):
    lease: int
    tokens: int


class Made(Message, frozen=True):
    lease: int
    answer: str


class Quiet(Message, frozen=True):
    lease: int
    seconds: float


class Settle(Message, frozen=True):
    lease: int | None
    outcome: Outcome


class Leased(Message, frozen=True):
    ticket: int
    lease: Lease


class Refused(Message, frozen=True):
    ticket: int
    refusal: Refusal


class Shown(Message, frozen=True):
    ticket: int
    page: Page


class Abandon(Message, frozen=True):
    lease: int
    refusal: Refusal


encode = msgspec.msgpack.Encoder().encode
decode_asked = msgspec.msgpack.Decoder(Hello | Admit | Retry | Withdraw | Progress | Made | Quiet | Settle).decode
decode_answered = msgspec.msgpack.Decoder(Leased | Refused | Shown | Abandon).decode
