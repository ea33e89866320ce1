"""A request through its steps, as one generator of commands.

    state        event                         then
    step i       returns None                  step i + 1, or `internal` after the last (nothing answered)
                 Done(status)                  served
                 Again, a step chose a pair    that step once more, the pair forgotten
                 Again, no step did            phase_failed
                 Refused                       refused with its reason
                 LegFailed, upstream said 4xx  answered with that status, the engine's text left out
                 LegFailed, otherwise          phase_failed (502), or the routing reason (503)

The driver may close the generator at any command (client gone, drain). Whatever the ending, `releases` names the calls
that the engines still need to hear, so that no KV blocks stay pinned; they are sent without the client.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import msgspec

from llmgw import reasons
from llmgw.errors import Refused
from llmgw.pipeline.commands import Call, Command, Failed, Note, Reply
from llmgw.pipeline.context import Context
from llmgw.pipeline.step import Again, Done, LegFailed, Step
from llmgw.request import Refusal


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a pipeline ended. *refusal* None: the client has its answer, *status* as it saw it.

    With a refusal, *status* is what to answer where the reason's own does not apply (an engine's 4xx), else None.
    """

    status: int | None = None
    refusal: Refusal | None = None
    step: str = ""
    failure: Failed | None = None


def run(steps: Sequence[Step], ctx: Context) -> Generator[Command, Reply, Ending]:
    """Drive *ctx* through *steps*."""
    index = 0
    chooser: int | None = None
    while index < len(steps):
        step = steps[index]
        yield Note("step", {"step": step.name})
        before = ctx.chosen
        try:
            result = yield from step.run(ctx)
        except Refused as error:
            return Ending(refusal=error.refusal, step=step.name)
        except LegFailed as error:
            return _failed(ctx, error)
        if isinstance(result, Done):
            return Ending(status=result.status, step=step.name)
        if isinstance(result, Again):
            if chooser is None:
                return _failed(ctx, LegFailed(step.name, result.failure))
            ctx.forget_pair()
            index = chooser
            continue
        if before is None and ctx.chosen is not None:
            chooser = index
        index += 1
    return Ending(
        refusal=Refusal(reason="internal", message="no step of the pipeline answered; add a decode step"), step="run"
    )


def releases(ctx: Context) -> tuple[Call, ...]:
    """What must still be said so that the prefill engine frees what it holds for this request."""
    found = ctx.abandoned + ([ctx.release] if ctx.release is not None else [])
    ctx.abandoned, ctx.release = [], None
    return tuple(found)


ROUTING_REASONS = ("no_endpoint", "none_healthy", "draining", "client_gone", "idle_timeout", "generation_timeout")


def _failed(ctx: Context, error: LegFailed) -> Ending:
    failure, name = error.failure, f"(request_id: {ctx.request_id})"
    status = None
    if error.clients_fault:
        status = failure.status
        reason = "phase_failed"
        message = f"{error.step} rejected the request: HTTP {status} {name}"
    elif failure.reason in ROUTING_REASONS:
        reason = failure.reason
        message = f"{error.step}: {failure.detail or reasons.get(reason).meaning} {name}"
    else:
        reason = "phase_failed"
        said = f"HTTP {failure.status}" if failure.status is not None else failure.reason
        at = f" at {failure.endpoint}" if failure.endpoint else ""
        message = f"{error.step} failed{at}: {said} {name}"
    return Ending(refusal=Refusal(reason=reason, message=message), status=status, step=error.step, failure=failure)
