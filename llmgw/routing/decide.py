"""Filter → score → pick: one request, one snapshot, one decision.

Pure: nothing but the arguments is read, nothing is written (plug-ins may remember what follows from the set of endpoints alone).
Cost: some 0.5 µs a candidate for `auto`; see tests/bench/routing_cost.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import add

from llmgw.endpoint import Endpoint, EndpointView, Snapshot
from llmgw.request import Refusal
from llmgw.routing.decision import Decision, Refused
from llmgw.routing.field import Field, Query, Roster
from llmgw.routing.filters.model import serves
from llmgw.routing.profiles import Profile


def decide(
    snapshot: Snapshot,
    query: Query,
    profile: Profile,
    matched: Mapping[str, int],
    random: Callable[[], float],
    now: float,
    *,
    weigh: bool = False,
) -> Decision | Refusal:
    """Who serves *query*. *matched*: cached prompt tokens by endpoint id (`affinity.Affinity.matched`). *random*: [0, 1).
    *weigh*: the costs are wanted even of a single candidate, to compare them with another decision's.

    A refusal names the filter that left nobody.
    """
    endpoints = snapshot.endpoints
    at: Sequence[int] = range(len(endpoints))
    refused: tuple[Refused, ...] = ()
    if query.request.only:
        at = [i for i, e in enumerate(endpoints) if e.id == query.request.only]
        if len(at) != len(endpoints):
            refused = (Refused("only", tuple(i for i in range(len(endpoints)) if i not in at)),)
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
    views: Sequence[EndpointView] = snapshot.views
    if len(at) != len(views):
        views = [views[i] for i in at]
    field = Field(query, _roster(endpoints), at, views, matched, now)
    columns: list[Sequence[float] | None] = []
    costs: Sequence[float] = ()
    chosen = 0
    if len(at) > 1 or weigh or query.request.explain:  # else there is nothing to weigh
        for scorer, weight in profile.scorers:
            column = scorer.score(field)
            if column is not None:
                if weight != 1.0:
                    column = [weight * x for x in column]
                costs = list(map(add, costs, column)) if costs else column
            columns.append(column)
        costs = costs or [0.0] * len(at)
        chosen = profile.picker.pick(costs, field, random)
    view = views[chosen]
    prompt = query.request.prompt_tokens
    cached = field.hit(chosen) if matched else 0
    return Decision(
        request_id=query.request.id,
        model=query.model,
        profile=profile.name,
        phases=query.phases,
        at=now,
        revision=snapshot.revision,
        endpoint=endpoints[at[chosen]],
        endpoints=endpoints,
        candidates=at,
        chosen=chosen,
        scorers=profile.scorer_names if columns else (),
        columns=tuple(columns),
        costs=costs,
        refused=refused,
        prompt_tokens=prompt,
        cached_tokens=cached,
        ttft=field.wait(chosen) + (prompt - cached) / field.prefill_rates[chosen] + (view.overhead or 0.0),
    )


ROSTERS = 4  # sets of endpoints that are remembered: the present one, and that of a comparison or a test beside it

_rosters: list[Roster] = []


def _roster(endpoints: tuple[Endpoint, ...]) -> Roster:
    """The same for the same tuple: a memo, since a set is decided on thousands of times."""
    for roster in _rosters:
        if roster.endpoints is endpoints:
            return roster
    roster = Roster(endpoints)
    _rosters.insert(0, roster)
    del _rosters[ROSTERS:]
    return roster


_SAYS = {
    "model": "No endpoint serves {model!r} at the moment.",
    "phases": "No endpoint of {model!r} does {phases}.",
    "admitted": "None of the {count} endpoints of {model!r} that could serve it has room for its band.",
    "healthy": "None of the {count} endpoints of {model!r} is healthy; `llmgw ctl endpoints` says why.",
    "tried": "All {count} healthy endpoints of {model!r} were tried.",
    "concurrency": "All {count} endpoints of {model!r} have as many requests as max_concurrency allows.",
    "labels": "None of the {count} endpoints of {model!r} has the labels that the profile asks for.",
}


def _serves_otherwise(query: Query, snapshot: Snapshot) -> bool:
    return any(serves(e, query.model, query.request.lora, ()) for e in snapshot.endpoints)


def _nobody(query: Query, snapshot: Snapshot, last: Refused, before: tuple[Refused, ...]) -> Refusal:
    """Names the filter that left nobody, and what the others had taken out already."""
    name = last.filter
    if name == "model" and _serves_otherwise(query, snapshot):
        name = "phases"
    says = _SAYS.get(name, "Filter {filter!r} refused the last {count} endpoints of {model!r}.")
    text = says.format(model=query.model[:100], count=len(last.at), filter=name, phases=" and ".join(query.phases))
    others = ", ".join(f"{r.filter} {len(r.at)}" for r in before if r.filter != "model")
    if others:
        text += f" Refused before: {others}."
    if last.filter == "healthy":
        return Refusal(reason="none_healthy", message=text, filter=last.filter)
    return Refusal(reason="no_endpoint", message=text, filter=name)
