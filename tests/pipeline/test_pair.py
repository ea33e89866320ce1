"""Pairs: never across fabrics, never worse than the best there is, and only where splitting pays."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.endpoint import Endpoint, EndpointView, Model, Report, Snapshot
from llmgw.pipeline import pair
from llmgw.pipeline.links import Links
from llmgw.pipeline.pair import PairDecision, Policy, choose, fabrics
from llmgw.request import Head, InferenceRequest, Phase, Refusal
from llmgw.routing.field import Query

MODEL = (Model(name="m"),)


def endpoint(name: str, phases: tuple[Phase, ...], *on: str, **more: Any) -> Endpoint:
    return Endpoint(
        id=name, name=name, url=f"http://{name}", models=MODEL, phases=frozenset(phases), fabrics=frozenset(on), **more
    )


def view(**more: Any) -> EndpointView:
    return EndpointView(**{"health": "ready", "since": -1e6, "prefill_rate": 10_000.0, "decode_rate": 40.0, **more})


def query(tokens: int, tried: tuple[str, ...] = ()) -> Query:
    request = InferenceRequest(id="r", head=Head("/v1/chat/completions", ""), model="m", prompt_tokens=tokens)
    return Query(request=request, model="m", tried=tried)


def ask(places: dict[Endpoint, EndpointView] | list[tuple[Endpoint, EndpointView]], tokens: int, **more: Any) -> Any:
    items = list(places.items()) if isinstance(places, dict) else places
    snapshot = Snapshot(1, tuple(e for e, _ in items), tuple(v for _, v in items))
    policy = more.pop("policy", Policy())
    matched, links = more.pop("matched", {}), more.pop("links", Links())
    asked = query(tokens, more.pop("tried", ()))
    return choose(snapshot, asked, policy, matched, links, random.Random(0).random, more.pop("now", 0.0), **more)


def both() -> list[tuple[Endpoint, EndpointView]]:
    return [
        (endpoint("p-a", ("prefill",), "a"), view()),
        (endpoint("p-b", ("prefill",), "b"), view()),
        (endpoint("d-a", ("decode",), "a"), view()),
        (endpoint("d-b", ("decode",), "b"), view()),
    ]


ALWAYS = Policy(mode="always")

places = st.lists(
    st.tuples(
        st.sampled_from([("prefill",), ("decode",), ("prefill", "decode")]),
        st.sets(st.sampled_from("abc"), max_size=2),
        st.integers(0, 100_000),  # tokens ahead
        st.integers(0, 40),  # in flight
        st.integers(1_000, 40_000),  # prefill rate
        st.sampled_from([None, 0.1, 0.7, 0.95]),
        st.sampled_from(["ready", "ready", "ready", "quarantined"]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=50)
@given(places, st.integers(1, 50_000), st.sampled_from(["auto", "always", "never"]), st.booleans())
def test_properties(drawn: list[Any], tokens: int, mode: Any, degrade: bool) -> None:
    items = [
        (
            endpoint(f"e{i}", phases, *on),
            view(
                ahead=ahead / rate, prefill_tokens=ahead, inflight=inflight, prefill_rate=float(rate), health=health,
                report=None if kv is None else Report(at=0.0, kv_usage=kv),
            ),
        )
        for i, (phases, on, ahead, inflight, rate, kv, health) in enumerate(drawn)
    ]  # fmt: skip
    links = Links()
    if degrade:
        links.start("x", ("e0", "e1"), "a", 1 << 30, 0.0)
        links.tick(60.0)
    found = ask(items, tokens, policy=Policy(mode=mode), links=links, now=60.0)
    healthy = [e for e, v in items if v.health == "ready"]
    decoders = [e for e in healthy if "decode" in e.phases]
    pairs = [
        (p, d)
        for p in healthy
        if "prefill" in p.phases
        for d in decoders
        if p.id != d.id and set(fabrics(p)) & set(fabrics(d))
    ]
    if isinstance(found, Refusal):
        assert not decoders or (mode == "always" and not pairs)
        return
    assert isinstance(found, PairDecision)
    assert found.decode in decoders
    if found.prefill is None:
        assert mode != "always"
        return
    assert mode != "never"
    assert (found.prefill, found.decode) in pairs
    assert found.fabric in set(fabrics(found.prefill)) & set(fabrics(found.decode))
    # the cheapest there is, by brute force over all pairs
    prefill, decode = found.legs[0], found.legs[1]
    costs = {
        (a.id, b.id): prefill.costs[i] + decode.costs[j] + links.seconds((a.id, b.id), "a", tokens * (128 << 10), 60.0)
        for i, a in enumerate(prefill.endpoints[k] for k in prefill.candidates)
        for j, b in enumerate(decode.endpoints[k] for k in decode.candidates)
        if (a, b) in pairs
    }
    assert found.pair_cost is not None
    assert min(costs.values()) <= found.pair_cost <= min(costs.values()) + pair.FAR + 1e-9
    if mode == "auto":
        assert found.local_cost is not None
        assert found.pair_cost < found.local_cost


def test_a_fabric_in_common_is_hard() -> None:
    items = both()[:2] + both()[3:]  # the only decode endpoint is on b, and its prefill is buried in work
    items[1] = (items[1][0], view(ahead=1e6, prefill_tokens=10**9))
    assert ask(items, 10_000, policy=ALWAYS).prefill.name == "p-b"
    items.pop(1)
    refusal = ask(items, 10_000, policy=ALWAYS)
    assert (refusal.reason, refusal.filter) == ("no_endpoint", "fabric")
    assert ask(items, 10_000).why == "no pair with a fabric in common"


def test_endpoints_that_name_no_fabric_are_on_one_network() -> None:
    items = [(endpoint("p", ("prefill",)), view()), (endpoint("d", ("decode",)), view())]
    assert ask(items, 10_000, policy=ALWAYS).prefill.name == "p"
    items.append((endpoint("d2", ("decode",), "a"), view()))
    assert ask(items, 10_000, policy=ALWAYS).decode.name == "d"


def test_splitting_pays_for_long_prompts_beside_running_answers() -> None:
    items = both()
    items[2] = (items[2][0], view(inflight=30))
    items[3] = (items[3][0], view(inflight=30))
    long, short = ask(items, 20_000), ask(items, 20)
    assert long.prefill is not None
    assert long.pair_cost < long.local_cost
    assert short.prefill is None
    assert short.why == "one endpoint is quicker"


def test_a_prompt_that_decode_has_cached_is_not_split() -> None:
    items = both()
    items[2] = (items[2][0], view(inflight=30))
    found = ask(items, 20_000, matched={"d-a": 19_990})
    assert found.prefill is None
    assert found.decode.name == "d-a"


def test_what_prefill_has_cached_draws_the_prompt_there() -> None:
    items = both()
    assert ask(items, 20_000, policy=ALWAYS, matched={"p-b": 15_000}).prefill.name == "p-b"
    assert ask(items, 20_000, policy=ALWAYS, matched={"p-a": 15_000}).prefill.name == "p-a"


def test_what_decode_has_cached_is_not_moved() -> None:
    found = ask(both(), 20_000, policy=ALWAYS, matched={"d-b": 12_000})
    assert found.decode.name == "d-b"
    assert found.size == 8_000 * (128 << 10)


def test_a_slow_link_is_avoided_and_still_used_where_it_is_the_only_one() -> None:
    items = both()[:1] + both()[2:3] + [(endpoint("p2-a", ("prefill",), "a"), view(ahead=0.5))]
    links = Links()
    links.start("x", ("p-a", "d-a"), "a", 1 << 30, 0.0)
    links.tick(20.0)
    found = ask(items, 20_000, policy=ALWAYS, links=links, now=20.0)
    assert found.prefill.name == "p2-a"
    assert found.avoided == (("p-a", "d-a"),)
    assert ask(items[:2], 20_000, policy=ALWAYS, links=links, now=20.0).prefill.name == "p-a"


def test_near_is_better_where_nothing_else_differs() -> None:
    items = [
        (endpoint("p", ("prefill",), "a", labels={"rail": "2"}), view()),
        (endpoint("d1", ("decode",), "a", labels={"rail": "1"}), view()),
        (endpoint("d2", ("decode",), "a", labels={"rail": "2"}), view()),
    ]
    assert ask(items, 100, policy=ALWAYS).decode.name == "d2"
    assert ask([(e, v) for e, v in items if e.name != "d2"], 100, policy=ALWAYS).decode.name == "d1"


def test_what_cannot_be_split_and_what_failed() -> None:
    items = both()
    found = ask(items, 20_000, policy=ALWAYS, split=False, why="prompt_logprobs")
    assert (found.prefill, found.why) == (None, "prompt_logprobs")
    found = ask(items, 20_000, policy=ALWAYS, tried=("p-a",))
    assert (found.prefill.name, found.decode.name) == ("p-b", "d-b")
    found = ask(items, 20_000, policy=ALWAYS, tried=("d-a",), keep_prefill="p-a")
    assert isinstance(found, Refusal), "its blocks cannot be fetched from fabric b"


def test_a_unified_engine_does_it_alone_when_idle() -> None:
    items = [(endpoint("u", ("prefill", "decode"), "a"), view()), *both()]
    assert ask(items, 20_000).prefill is None
    assert ask(items[1:], 20_000).why


@pytest.mark.parametrize("count", [8, 40])
def test_a_large_fleet_looks_at_a_bounded_number_of_pairs(count: int) -> None:
    looked = []

    class Counting(Links):
        def seconds(self, pair: tuple[str, str], fabric: str, size: int, now: float) -> float:
            looked.append(pair)
            return super().seconds(pair, fabric, size, now)

    items = [(endpoint(f"p{i}", ("prefill",), "a"), view(ahead=i / 100)) for i in range(count)]
    items += [(endpoint(f"d{i}", ("decode",), "a"), view(inflight=i)) for i in range(count)]
    found = ask(items, 20_000, policy=ALWAYS, links=Counting())
    assert (found.prefill.name, found.decode.name) == ("p0", "d0")
    assert len(looked) <= pair.BEST**2
