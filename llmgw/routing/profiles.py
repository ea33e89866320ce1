"""Profiles: which filters, scorers and picker make a decision, and what each scorer weighs.

Ours are written in the same form as a user's, which is a plain mapping (of YAML):

    filters: [healthy, {labels: {labels: {pool: batch}}}]     after `model` and `admitted`, which always come first
    scorers: {queue: 1, prefix: {weight: 2, shared: 0.2}}
    picker: best | {near: {spread: 0.1}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from llmgw.errors import ConfigError, Problem
from llmgw.plugins import Registry
from llmgw.routing import filters, pickers, scorers
from llmgw.routing.field import Filter, Picker, Scorer

FILTERS: Registry[Filter] = Registry("filter", filters)
SCORERS: Registry[Scorer] = Registry("scorer", scorers)
PICKERS: Registry[Picker] = Registry("picker", pickers)

FIRST = ("model", "admitted")  # before a profile's own: nothing else makes sense without
ALWAYS = ("healthy", "tried", "concurrency", "context")  # unless a profile lists its own

BUILT_IN: dict[str, dict[str, Any]] = {
    "auto": {"scorers": {"queue": 1, "prefill": 1, "prefix": 1, "decode": 0.02, "crowd": 0.02, "session": 1, "health": 1}},
    "chat": {"scorers": {"session": {"least": 10.0}, "prefix": 1, "prefill": 1, "queue": 1, "kv": 0.5, "health": 1}},
    "batch": {"scorers": {"queue": 1, "inflight": 1, "prefix": 0.5, "health": 1}},
    "long-context": {"scorers": {"kv": {"weight": 2, "start": 0.2}, "queue": 1, "prefill": 1, "prefix": 1, "session": 1, "health": 1}},
    "round-robin": {"scorers": {"health": {"ramp": 0.0}}, "picker": "turn"},
    "least-load": {"scorers": {"inflight": 1, "health": {"ramp": 0.0}}},
    "session-hash": {"scorers": {"hash": 1, "health": {"ramp": 0.0}}},
}  # fmt: skip
"""`auto` is the default. The last three are what other gateways do: to compare with."""

DEFAULT = "auto"


@attrs.frozen
class Profile:
    """Plug-ins with their weights, ready to run."""

    name: str
    filters: tuple[Filter, ...]
    scorers: tuple[tuple[Scorer, float], ...]
    picker: Picker
    scorer_names: tuple[str, ...] = attrs.field(init=False)

    @scorer_names.default
    def _names(self) -> tuple[str, ...]:
        return tuple(scorer.name for scorer, _ in self.scorers)


def profiles(own: Mapping[str, Any] | None = None) -> dict[str, Profile]:
    """All profiles by name: ours, and the user's *own*, which may replace ours. Raises ConfigError with all problems."""
    made: dict[str, Profile] = {}
    problems: list[Problem] = []
    for name, text in {**BUILT_IN, **(own or {})}.items():
        try:
            made[name] = make(name, text)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return made


def make(name: str, text: Any) -> Profile:
    """One profile from its mapping. Raises ConfigError with all of its problems."""
    where = f"profiles.{name}"
    problems: list[Problem] = []
    if not isinstance(text, Mapping):
        raise ConfigError([Problem("must be a mapping with filters, scorers, picker", where)])
    problems += [
        Problem(f"unknown key {key!r}; known: filters, scorers, picker", where)
        for key in text
        if key not in ("filters", "scorers", "picker")
    ]

    def build(registry: Registry[Any], what: Any, place: str, taken: tuple[str, ...] = ()) -> Any:
        """A plug-in from ``name`` or ``{name: {parameter: value}}``; None if there is a problem."""
        if isinstance(what, str):
            what = {what: {}}
        if not isinstance(what, Mapping) or len(what) != 1:
            problems.append(Problem(f"must be a name or {{name: {{parameter: value}}}}, not {what!r}", place))
            return None
        ((plugin, parameters),) = what.items()
        if plugin in taken:
            problems.append(Problem(f"{registry.kind} {plugin!r} always applies; leave it out", place))
            return None
        try:
            return registry.make(plugin, parameters if isinstance(parameters, Mapping) else {"": parameters}, place)
        except ConfigError as error:
            problems.extend(error.problems)
            return None

    listed = text.get("filters", ALWAYS)
    if not isinstance(listed, (list, tuple)):
        problems.append(Problem("must be a list", f"{where}.filters"))
        listed = ()
    found_filters = [FILTERS.make(first, {}) for first in FIRST]
    found_filters += [build(FILTERS, one, f"{where}.filters[{i}]", FIRST) for i, one in enumerate(listed)]
    weighed = text.get("scorers", {})
    if not isinstance(weighed, Mapping):
        problems.append(Problem("must map scorers to weights", f"{where}.scorers"))
        weighed = {}
    found_scorers = []
    for scorer, value in weighed.items():
        place = f"{where}.scorers.{scorer}"
        parameters = dict(value) if isinstance(value, Mapping) else {"weight": value}
        weight = parameters.pop("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            problems.append(Problem(f"weight must be a number, not {weight!r}", place))
            continue
        if weight:
            found_scorers.append((build(SCORERS, {scorer: parameters}, place), float(weight)))
    picker = build(PICKERS, text.get("picker", "best"), f"{where}.picker")
    if problems:
        raise ConfigError(problems)
    return Profile(name, tuple(found_filters), tuple(found_scorers), picker)
