"""Filter, score, pick: who is chosen, why, and what is said when nobody is."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.endpoint import Endpoint, EndpointView, Model, Report, Snapshot
from llmgw.errors import ConfigError
from llmgw.request import Head, InferenceRequest, Refusal
from llmgw.routing.decide import decide
from llmgw.routing.decision import Decision
from llmgw.routing.field import Query
from llmgw.routing.profiles import BUILT_IN, FILTERS, PICKERS, SCORERS, make, profiles

KNOWN = profiles()


def endpoint(name: str, **more: Any) -> Endpoint:
    more.setdefault("models", (Model(name="m", aliases=("alias",), loras=("sql",)),))
    return Endpoint(id=f"{name}#1", name=name, url=f"http://{name}", **more)


def ready(**more: Any) -> EndpointView:
    more.setdefault("health", "ready")
    return EndpointView(since=-1000.0, **more)


def snapshot(*pairs: tuple[Endpoint, EndpointView]) -> Snapshot:
    return Snapshot(1, tuple(e for e, _ in pairs), tuple(v for _, v in pairs))


def query(**more: Any) -> Query:
    own = {k: more.pop(k) for k in ("model", "phases", "decode", "tried", "sticky", "reuse") if k in more}
    own.setdefault("model", "m")
    more.setdefault("prompt_tokens", 1000)
    return Query(
        request=InferenceRequest(id="r", head=Head("/v1/chat/completions", "1.2.3.4"), model="m", **more), **own
    )


def run(
    seen: Snapshot, asked: Query, profile: str = "auto", matched: dict[str, int] | None = None, seed: int = 1
) -> Decision | Refusal:
    return decide(seen, asked, KNOWN[profile], matched or {}, random.Random(seed).random, 0.0)


def chosen(*args: Any, **more: Any) -> str:
    found = run(*args, **more)
    assert isinstance(found, Decision), found
    return found.endpoint.name


RATE: dict[str, float] = {"prefill_rate": 10_000.0, "decode_rate": 50.0, "overhead": 0.01}


def test_the_shorter_queue_wins() -> None:
    seen = snapshot((endpoint("a"), ready(ahead=0.9, **RATE)), (endpoint("b"), ready(ahead=0.1, **RATE)))

    assert chosen(seen, query()) == "b"


def test_a_cached_prompt_is_worth_the_queue_that_it_saves() -> None:
    warm = {"a#1": 8000}
    seen = snapshot((endpoint("a"), ready(ahead=0.5, **RATE)), (endpoint("b"), ready(ahead=0.0, **RATE)))
    assert chosen(seen, query(prompt_tokens=9000), matched=warm) == "a"
    seen = snapshot((endpoint("a"), ready(ahead=1.5, **RATE)), (endpoint("b"), ready(ahead=0.0, **RATE)))

    assert chosen(seen, query(prompt_tokens=9000), matched=warm) == "b"


def test_speed_is_measured_and_counts() -> None:
    slow = ready(prefill_rate=2_500.0, decode_rate=12.0, ahead=0.0)
    seen = snapshot((endpoint("slow"), slow), (endpoint("fast"), ready(ahead=0.2, **RATE)))

    assert chosen(seen, query(prompt_tokens=4000)) == "fast"


def test_who_has_not_been_measured_is_taken_for_the_median_and_gets_its_share() -> None:
    seen = snapshot((endpoint("a"), ready(ahead=0.3, **RATE)), (endpoint("new"), ready()))

    assert chosen(seen, query()) == "new"


def test_a_session_stays_and_moves_only_when_it_must() -> None:
    a, b = endpoint("a"), endpoint("b")
    asked = query(prompt_tokens=8000, sticky="a#1")
    assert chosen(snapshot((a, ready(ahead=0.3, **RATE)), (b, ready(ahead=0.0, **RATE))), asked) == "a"
    gone = ready(health="quarantined", ahead=0.0, **RATE)

    assert chosen(snapshot((a, gone), (b, ready(ahead=5.0, **RATE))), asked) == "b"


def test_chat_holds_a_session_longer_than_auto() -> None:
    seen = snapshot((endpoint("a"), ready(ahead=1.5, **RATE)), (endpoint("b"), ready(ahead=0.0, **RATE)))
    asked = query(prompt_tokens=2000, sticky="a#1")

    assert (chosen(seen, asked), chosen(seen, asked, "chat")) == ("b", "a")


def test_batch_takes_the_shortest_queue_and_long_context_the_emptiest_cache() -> None:
    full = Report(at=0.0, kv_usage=0.8)
    free = Report(at=0.0, kv_usage=0.1)
    seen = snapshot(
        (endpoint("short"), ready(ahead=0.0, inflight=1, report=full, **RATE)),
        (endpoint("empty"), ready(ahead=0.5, inflight=6, report=free, **RATE)),
    )

    assert (chosen(seen, query(), "batch"), chosen(seen, query(), "long-context")) == ("short", "empty")


def test_degraded_is_used_where_nothing_better_is() -> None:
    bad = ready(health="degraded", ahead=0.0, **RATE)
    assert chosen(snapshot((endpoint("a"), bad), (endpoint("b"), ready(ahead=1.0, **RATE))), query()) == "b"

    assert chosen(snapshot((endpoint("a"), bad)), query()) == "a"


def test_a_new_engine_is_not_flooded() -> None:
    new = EndpointView(health="ready", since=-1.0, inflight=3, ahead=0.0, prefill_rate=10_000.0)
    old = ready(ahead=0.5, inflight=3, **RATE)

    assert chosen(snapshot((endpoint("new"), new), (endpoint("old"), old)), query()) == "old"


@pytest.mark.parametrize(
    ("asked", "pairs", "reason", "filter_", "says"),
    [
        ({"model": "other"}, [(endpoint("a"), ready())], "no_endpoint", "model", "No endpoint serves 'other'"),
        ({"lora": "x"}, [(endpoint("a"), ready())], "no_endpoint", "model", "No endpoint serves"),
        ({"phases": ("encode",)}, [(endpoint("a"), ready())], "no_endpoint", "phases", "does encode"),
        ({}, [(endpoint("a"), ready(health="joining"))], "none_healthy", "healthy", "None of the 1 endpoints"),
        ({}, [(endpoint("a"), ready(health="draining"))], "none_healthy", "healthy", "ctl endpoints"),
        ({"tried": {"a#1"}}, [(endpoint("a"), ready())], "no_endpoint", "tried", "were tried"),
        ({}, [(endpoint("a", max_concurrency=2), ready(inflight=2))], "no_endpoint", "concurrency", "max_concurrency"),
        ({}, [], "no_endpoint", "model", "No endpoint"),
    ],
)
def test_a_refusal_names_the_filter_that_left_nobody(
    asked: dict[str, Any], pairs: list[tuple[Endpoint, EndpointView]], reason: str, filter_: str, says: str
) -> None:
    found = run(snapshot(*pairs), query(**asked))

    assert isinstance(found, Refusal)
    assert (found.reason, found.filter) == (reason, filter_)
    assert says in found.message


def test_a_refusal_says_whom_the_others_took_out() -> None:
    seen = snapshot((endpoint("a"), ready(health="gone")), (endpoint("b", max_concurrency=1), ready(inflight=1)))
    found = run(seen, query())

    assert isinstance(found, Refusal)
    assert "Refused before: healthy 1." in found.message


def test_aliases_adapters_and_phases_are_served() -> None:
    seen = snapshot(
        (endpoint("p", phases=frozenset({"prefill"})), ready()), (endpoint("d", phases=frozenset({"decode"})), ready())
    )

    assert chosen(seen, query(model="alias", phases=("prefill",))) == "p"
    assert chosen(seen, query(model="sql", lora="sql", phases=("decode",))) == "d"


def test_a_prompt_goes_where_it_fits_and_where_none_fits_the_engine_says_so() -> None:
    short = endpoint("short", models=(Model(name="m", max_model_len=1000),))
    long = endpoint("long", models=(Model(name="m", max_model_len=9000),))
    seen = snapshot((short, ready(ahead=0.0, **RATE)), (long, ready(ahead=3.0, **RATE)))

    assert chosen(seen, query(prompt_tokens=900)) == "short"
    assert chosen(seen, query(prompt_tokens=900, max_tokens=200)) == "long"
    assert chosen(seen, query(prompt_tokens=10_000)) == "short"


def test_the_columns_are_the_explanation() -> None:
    seen = snapshot(
        (endpoint("a"), ready(ahead=0.9, **RATE)),
        (endpoint("b"), ready(ahead=0.1, **RATE)),
        (endpoint("gone"), ready(health="gone")),
    )
    found = run(seen, query(), matched={"b#1": 500})
    assert isinstance(found, Decision)

    assert [found.endpoints[i].name for i in found.candidates] == ["a", "b"]
    assert [(r.filter, r.at) for r in found.refused] == [("healthy", (2,))]
    for at in range(2):
        total = sum(column[at] for column in found.columns if column is not None)
        assert found.costs[at] == pytest.approx(total)
    assert (found.cached_tokens, found.uncached) == (500, 500)
    assert found.ttft == pytest.approx(0.1 + 0.05 + 0.01)


VIEWS = st.builds(
    EndpointView,
    health=st.sampled_from(["joining", "ready", "degraded", "quarantined", "draining", "gone"]),
    since=st.floats(-100, 0),
    inflight=st.integers(0, 50),
    prefill_tokens=st.integers(0, 100_000),
    report=st.none() | st.builds(Report, at=st.just(0.0), kv_usage=st.none() | st.floats(0, 1)),
    prefill_rate=st.none() | st.floats(1, 1e5),
    decode_rate=st.none() | st.floats(1, 1e3),
    ahead=st.none() | st.floats(0, 100),
)


@given(st.lists(VIEWS, min_size=1, max_size=12), st.sampled_from(sorted(BUILT_IN)), st.integers(0, 99), st.data())
def test_every_profile_chooses_a_candidate_or_says_why_not(
    views: list[EndpointView], profile: str, seed: int, data: st.DataObject
) -> None:
    pairs = [
        (endpoint(f"e{i}", max_concurrency=data.draw(st.none() | st.integers(1, 40))), v) for i, v in enumerate(views)
    ]
    seen = snapshot(*pairs)
    matched = {e.id: data.draw(st.integers(0, 2000)) for e, _ in pairs if data.draw(st.booleans())}
    asked = query(sticky="e0#1", tried={"e1#1"})
    found = run(seen, asked, profile, matched, seed)
    able = [
        e.name
        for e, v in pairs
        if v.health in ("ready", "degraded")
        and e.id != "e1#1"
        and (e.max_concurrency is None or v.inflight < e.max_concurrency)
    ]

    if isinstance(found, Refusal):
        assert not able
    else:
        assert [found.endpoints[i].name for i in found.candidates] == able
        assert found.endpoint.name == able[found.chosen]
        gone = {i for r in found.refused for i in r.at}
        assert gone | set(found.candidates) == set(range(len(pairs)))
        assert not gone & set(found.candidates)
        if len(able) == 1:
            assert found.costs == ()  # nothing was weighed
        elif profile in ("auto", "chat", "batch", "long-context"):
            assert found.costs[found.chosen] <= min(found.costs) + 1e-6


def test_round_robin_takes_turns_by_model() -> None:
    both = (Model(name="m"), Model(name="n"))
    seen = snapshot(*((endpoint(n, models=both), ready()) for n in "abc"))
    profile = make("x", BUILT_IN["round-robin"])

    def turn(model: str) -> str:
        found = decide(seen, query(model=model), profile, {}, random.random, 0.0)
        assert isinstance(found, Decision)
        return found.endpoint.name

    assert [turn("m"), turn("n"), turn("m"), turn("m"), turn("n"), turn("m")] == ["a", "a", "b", "c", "b", "a"]


def test_a_hash_keeps_sessions_when_an_endpoint_goes() -> None:
    pairs = [(endpoint(f"e{i}"), ready()) for i in range(8)]
    before = {s: chosen(snapshot(*pairs), query(session=s), "session-hash") for s in map(str, range(200))}
    after = {s: chosen(snapshot(*pairs[1:]), query(session=s), "session-hash") for s in before}

    assert len(set(before.values())) == 8
    assert all(after[s] == before[s] for s in before if before[s] != "e0")


@pytest.mark.parametrize("picker", ["near", "two"])
def test_pickers_by_lot_prefer_the_cheap(picker: str) -> None:
    profile = make("x", {"scorers": {"queue": 1}, "picker": picker})
    seen = snapshot(*((endpoint(f"e{i}"), ready(ahead=i * 0.1, **RATE)) for i in range(5)))
    rng = random.Random(5)
    count = [0] * 5
    for _ in range(1000):
        found = decide(seen, query(), profile, {}, rng.random, 0.0)
        assert isinstance(found, Decision)
        count[found.chosen] += 1

    assert count == sorted(count, reverse=True)
    assert count[0] > 300


def test_a_custom_profile_pins_to_labels() -> None:
    profile = make(
        "night", {"filters": ["healthy", {"labels": {"labels": {"pool": "b"}}}], "scorers": {"inflight": {"weight": 2}}}
    )
    seen = snapshot(
        (endpoint("a", labels={"pool": "a"}), ready()), (endpoint("b", labels={"pool": "b", "x": "y"}), ready())
    )
    found = decide(seen, query(), profile, {}, random.random, 0.0)

    assert isinstance(found, Decision)
    assert found.endpoint.name == "b"


def test_every_problem_of_a_profile_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        profiles(
            {
                "one": {
                    "scorer": {},
                    "scorers": {"qeue": 1, "prefix": "x", "kv": {"start": 0.1, "stop": 2}},
                    "picker": "nobody",
                },
                "two": ["queue"],
                "three": {"filters": ["model", 7, {"labels": {}}, {"labels": {"labels": {}}}], "scorers": []},
            }
        )
    said = str(caught.value)

    for part in (
        "profiles.one: unknown key 'scorer'",
        "profiles.one.scorers.qeue: unknown scorer 'qeue'; known: crowd, decode",
        "weight must be a number",
        "unknown key 'stop' for scorer 'kv'",
        "unknown picker 'nobody'",
        "profiles.two: must be a mapping",
        "filter 'model' always applies",
        "must be a name or",
        "labels must map",
        "must map scorers to weights",
    ):
        assert part in said


def test_every_plug_in_says_what_it_is() -> None:
    for registry in (FILTERS, SCORERS, PICKERS):
        for name, plugin in registry.all().items():
            assert plugin.__doc__, name
            assert plugin.__doc__.splitlines()[0].endswith("."), name


def test_a_prompt_that_many_share_gets_copies_as_load_demands() -> None:
    seen = snapshot(
        (endpoint("a"), ready(ahead=0.3, inflight=30, **RATE)), (endpoint("b"), ready(ahead=0.0, inflight=2, **RATE))
    )
    warm = {"a#1": 9000}

    assert chosen(seen, query(prompt_tokens=9500), matched=warm) == "a"
    assert chosen(seen, query(prompt_tokens=9500, reuse=200.0), matched=warm) == "b"
