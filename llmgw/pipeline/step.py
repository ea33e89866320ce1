"""What a step and a connector are, and what every step needs.

A *step* is a class with ``api = 1``, a ``name`` and ``run(ctx)``, a generator of commands (`llmgw.pipeline.commands`).
Its configuration is its constructor. It ends with None (next step), `Done` (the client has its answer) or `Again` (the
pair of endpoints is lost: start once more where a pair is chosen). A request that is the client's fault raises
`Refused`; an upstream that said no, or a phase that failed, raises `LegFailed`.

A *KV connector* writes what prefill and decode tell their engines about the blocks in both bodies; an *EC connector*
does it for the outputs of encoders. One file each in `steps/`, `connectors/kv/`, `connectors/ec/`; third parties'
come by the entry points ``llmgw.step``, ``llmgw.kv_connector``, ``llmgw.ec_connector``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from llmgw.errors import LlmgwError
from llmgw.pipeline import steps
from llmgw.pipeline.commands import Answer, Body, Call, Command, Failed, Note, Reply
from llmgw.pipeline.connectors import ec, kv
from llmgw.pipeline.context import Context
from llmgw.pipeline.wire import Format
from llmgw.plugins import Registry


class Done(msgspec.Struct, frozen=True):
    """The client has its answer; *status* as it saw it."""

    status: int


class Again(msgspec.Struct, frozen=True):
    """The pair is lost while nothing reached the client. `run` goes back to the step that chose it."""

    failure: Failed


Result = Done | Again | None
Work = Generator[Command, Reply, Result]

T = TypeVar("T")


class Step(Protocol):
    """One step of a pipeline."""

    api: ClassVar[int]
    name: ClassVar[str]

    def run(self, ctx: Context) -> Work:
        """Do the step's part for one request."""
        ...


class KvConnector(Protocol):
    """How the KV cache gets from prefill to decode.

    *together*: both legs must be in flight at the same time (the prefill engine answers only when decode has fetched).
    *pins*: the prefill engine holds its blocks until decode has fetched them.
    """

    api: ClassVar[int]
    name: ClassVar[str]
    together: ClassVar[bool]
    pins: ClassVar[bool]

    def prepare(self, ctx: Context) -> Generator[Command, Reply, None]:
        """Whatever must be known before the prefill leg can be written, once a pair."""
        ...

    def prefill(self, ctx: Context, body: Body, fmt: Format) -> None:
        """Write into the prefill leg's body."""
        ...

    def decode(self, ctx: Context, body: Body, fmt: Format) -> None:
        """Write into the decode leg's body. `ctx.kv_params` is what prefill answered, None for nothing usable."""
        ...


class EcConnector(Protocol):
    """How the encoders' outputs get to prefill."""

    api: ClassVar[int]
    name: ClassVar[str]

    def keep(self, ctx: Context, answer: Any, index: int) -> Generator[Command, Reply, None]:
        """Look at what the encoder said of image *index* (``ec_transfer_params``, or None)."""
        ...

    def params(self, ctx: Context) -> dict[str, Any]:
        """What prefill is told; {} = nothing. Raises LegFailed where two encoders contradict each other."""
        ...


STEPS: Registry[Step] = Registry("step", steps)
KV_CONNECTORS: Registry[KvConnector] = Registry("kv_connector", kv)
EC_CONNECTORS: Registry[EcConnector] = Registry("ec_connector", ec)


class LegFailed(LlmgwError):
    """A leg brought no answer to go on with. The client hears step and status, never the upstream's text."""

    def __init__(self, step: str, failure: Failed) -> None:
        super().__init__(f"{step}: {failure.reason} {failure.status or ''} {failure.detail}".rstrip())
        self.step = step
        self.failure = failure

    @property
    def clients_fault(self) -> bool:
        """Whether the upstream said 4xx: the same request will fail everywhere."""
        return self.failure.status is not None and 400 <= self.failure.status < 500


def retryable(failure: Failed) -> bool:
    """Whether another endpoint may do better. Behind a gateway nobody can be avoided: only if nothing was begun."""
    if failure.reason in ("cancelled", "client_gone") or (not failure.endpoint and failure.started):
        return False
    return failure.status is None or failure.status >= 500 or failure.status == 429


def attempt(ctx: Context, make: Callable[[], Call]) -> Generator[Command, Reply, Answer]:
    """Send what *make* makes until an endpoint answers, at most `ctx.policy.attempts` times. Raises LegFailed.

    Every attempt has a leg name, hence a request id, of its own, and avoids the endpoints that failed.
    """
    left = ctx.policy.attempts
    while True:
        call = make()
        reply = yield call
        if isinstance(reply, Answer):
            return reply
        assert isinstance(reply, Failed)
        left -= 1
        if not left or not retryable(reply):
            raise LegFailed(call.step, reply)
        if reply.endpoint:
            ctx.failed.add(reply.endpoint)
        yield Note("retry", {"leg": call.leg, "endpoint": reply.endpoint, "reason": reply.reason})
