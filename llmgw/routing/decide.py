"""Filter → score → pick: one request, one snapshot, one decision.

Pure: nothing but the arguments is read, nothing is written (plug-ins may remember what follows from the set of endpoints alone).
Cost: some 0.5 µs a candidate for `auto`; see tests/bench/routing_cost.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import add

from llmgw.endpoint import Snapshot
from llmgw.request import Refusal
from llmgw.routing.decision import Decision, Refused
from llmgw.routing.field import Field, Query
from llmgw.routing.profiles import Profile


def decide(
    snapshot: Snapshot,
    query: Query,
    profile: Profile,
    matched: Mapping[str, int],
    random: Callable[[], float],
    now: float,
) -> Decision | Refusal:
    """Who serves *query*. *matched*: cached prompt tokens by endpoint id (`affinity.Affinity.matched`). *random*: [0, 1).

    A refusal names the filter that left nobody.
    """
    endpoints, views = snapshot.endpoints, snapshot.views
    at: Sequence[int] = range(len(endpoints))
    refused: tuple[Refused, ...] = ()
    for one in profile.filters:
        stay = one.keep(query, snapshot, at, now)
        if len(stay) != len(at):
            kept = set(stay)
            gone = Refused(one.name, tuple(i for i in at if i not in kept))
            if not stay:
                return _nobody(query, snapshot, gone, refused)
            refused = (*refused, gone)
        at = stay
    if not at:
        return _nobody(query, snapshot, Refused("model", ()), refused)
    if len(at) == len(views):
        field = Field(query, endpoints, views, matched, now)
    else:
        field = Field(query, [endpoints[i] for i in at], [views[i] for i in at], matched, now)
    columns = []
    costs: Sequence[float] = ()
    for scorer, weight in profile.scorers:
        column = scorer.score(field)
        if weight != 1.0:
            column = [weight * x for x in column]
        columns.append(column)
        costs = list(map(add, costs, column)) if costs else column
    if not costs:
        costs = [0.0] * len(at)
    chosen = profile.picker.pick(costs, field, random)
    view, endpoint = field.views[chosen], field.endpoints[chosen]
    prompt = query.request.prompt_tokens
    cached = min(max(0, prompt - 1), matched.get(endpoint.id, 0)) if matched else 0
    overhead = view.overhead or 0.0
    work = view.prefill_tokens + prompt - cached
    return Decision(
        request_id=query.request.id,
        model=query.model,
        profile=profile.name,
        phases=query.phases,
        at=now,
        revision=snapshot.revision,
        endpoint=endpoint,
        endpoints=endpoints,
        candidates=at,
        chosen=chosen,
        scorers=profile.scorer_names,
        columns=tuple(columns),
        costs=costs,
        refused=refused,
        prompt_tokens=prompt,
        cached_tokens=cached,
        ttft=work / field.prefill_rates[chosen] + (view.queued + 1) * overhead,
    )


_SAYS = {
    "model": "No endpoint serves {model!r}{phases} at the moment.",
    "healthy": "None of the {count} endpoints of {model!r} is healthy; `llmgw ctl endpoints` says why.",
    "tried": "All {count} healthy endpoints of {model!r} were tried.",
    "concurrency": "All {count} endpoints of {model!r} have as many requests as max_concurrency allows.",
    "labels": "None of the {count} endpoints of {model!r} has the labels that the profile asks for.",
}


def _nobody(query: Query, snapshot: Snapshot, last: Refused, before: tuple[Refused, ...]) -> Refusal:
    """Names the filter that left nobody, and what the others had taken out already."""
    says = _SAYS.get(last.filter, "Filter {filter!r} refused the last {count} endpoints of {model!r}.")
    phases = "" if len(query.phases) > 1 else f" for {query.phases[0]}"
    text = says.format(model=query.model[:100], count=len(last.at), filter=last.filter, phases=phases)
    others = ", ".join(f"{r.filter} {len(r.at)}" for r in before if r.filter != "model")
    if others:
        text += f" Refused before: {others}."
    if last.filter == "healthy":
        return Refusal(reason="none_healthy", message=text, filter=last.filter)
    return Refusal(reason="no_endpoint", message=text, filter=last.filter)
