"""What the brain answers, what it holds meanwhile, and that all of it is given back, once."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.request import Failure, Head, InferenceRequest, Lease, Outcome, Page, Principal, Refusal, Target, Wait
from tests.server.worlds import bench

TWO = ("a=http://a:1=m", "b=http://b:1=m")


def refusal(found: Any, reason: str) -> Refusal:
    assert isinstance(found, Refusal), found
    assert found.reason == reason, found
    return found


# -- admission -----------------------------------------------------------------------------------------------------


def test_turn_by_turn_among_the_healthy() -> None:
    one = bench(*TWO, "c=http://c:1=m")
    one.ready("a", "c")
    assert [one.lease().target.name for _ in range(4)] == ["a", "c", "a", "c"]
    one.ready("b")
    assert {one.lease().target.name for _ in range(3)} == {"a", "b", "c"}


def test_a_lease_says_all_that_a_mover_needs(tmp_path: Any) -> None:
    one = bench(
        text="""
endpoints:
  - {name: a, url: 'https://gpu-1/prefix/', models: [{name: real, aliases: [near]}], api_key_file: /k}
  - {name: b, url: 'unix:/run/e.sock', models: [other]}
models:
  real: {aliases: [gpt], usage: ask, timeouts: {idle: 7s}}
""",
        read_key=lambda path: f"key of {path}",
    )
    one.ready()
    lease = one.lease("gpt")
    assert msgspec.to_builtins(lease.target) == {
        "endpoint": "a@https://gpu-1/prefix/",
        "name": "a",
        "address": "tcp:gpu-1:443",
        "host": "gpu-1",
        "path": "/prefix",
        "tls": True,
        "headers": (("authorization", "Bearer key of /k"),),
        "model": "real",
    }
    assert (lease.limits.idle, lease.limits.connect, lease.usage, lease.attempt) == (7.0, 5.0, "ask", 1)
    assert "key" not in repr(lease)
    assert one.lease("near").target.model == "real"
    assert one.lease("real").target.model == ""
    other = one.lease("other")
    assert (other.target.address, other.target.host, other.usage) == ("unix:/run/e.sock", "localhost", "count")


@pytest.mark.parametrize(
    ("url", "address", "host"),
    [
        ("http://gpu:8000", "tcp:gpu:8000", "gpu:8000"),
        ("http://gpu", "tcp:gpu:80", "gpu"),
        ("http://[::1]:8000/v", "tcp:[::1]:8000", "[::1]:8000"),
        ("https://[::1]", "tcp:[::1]:443", "[::1]"),
    ],
)
def test_addresses(url: str, address: str, host: str) -> None:
    one = bench(f"a={url}=m")
    one.ready()
    target = one.lease().target
    assert (target.address, target.host) == (address, host)


def test_refusals_name_what_is_wrong() -> None:
    one = bench(*TWO, "p=http://p:1=split,phases=prefill", text="models: {absent: {aliases: [gone]}}\n")
    assert "None of the 2 endpoints" in refusal(one.admit(), "none_healthy").message
    one.ready()
    found = refusal(one.admit("x" * 500), "model_not_found")
    assert len(found.message) < 200
    assert found.param == "model"
    assert found.message.endswith("there are: m, split.")
    assert refusal(one.admit("absent"), "no_endpoint").filter == "model"
    assert refusal(one.admit("gone"), "no_endpoint").filter == "model"
    assert refusal(one.admit("split"), "no_endpoint").filter == "phases"
    assert "m, split" in refusal(one.admit(""), "bad_field").message
    one.brain.draining = True
    refusal(one.admit(), "draining")


def test_a_request_without_a_model_gets_the_only_one() -> None:
    one = bench(*TWO)
    one.ready()
    assert one.lease("").target.model == ""


def test_a_model_may_be_unknown_because_an_engine_has_not_said_yet() -> None:
    one = bench("a=http://a:1=m", "b=http://b:1")
    one.ready("a")
    refusal(one.admit("other"), "none_healthy")


def test_an_endpoint_has_no_more_requests_than_it_may() -> None:
    one = bench(text="endpoints: [{name: a, url: 'http://a:1', models: [m], max_concurrency: 2}]\n")
    one.ready()
    first, _ = one.lease(), one.lease()
    third = one.admit()
    assert isinstance(third, Wait)
    mover = Granted()
    one.brain.movers = (mover,)
    one.settle(first)
    ((ticket, answer),) = mover.answers
    assert ticket == third.ticket
    assert isinstance(answer, Lease)
    assert one.counts("a")[0] == 2


def test_a_degraded_endpoint_is_used_when_no_other_is_left() -> None:
    one = bench(*TWO)
    one.ready()
    one.fleet.happened(one.place("a"), "probe_failed", "slow")
    assert {one.lease().target.name for _ in range(4)} == {"b"}
    one.fleet.happened(one.place("b"), "connect_failed", "refused")
    assert {one.lease().target.name for _ in range(4)} == {"a"}


# -- pages ---------------------------------------------------------------------------------------------------------


def test_pages() -> None:
    one = bench(
        *TWO,
        text="""
endpoints:
  - {name: c, url: 'http://c:1', models: [{name: org/n, max_model_len: 10, loras: [n-sql]}]}
models: {m: {aliases: [gpt]}}
""",
    )
    assert one.admit("", "/health") == Page()
    assert one.admit("", "/healthz") == Page()
    assert one.admit("", "/readyz") == Page(status=503)
    one.ready("c")
    assert one.admit("", "/readyz") == Page()
    listed = json.loads(one.admit("", "/v1/models").body)
    assert [entry["id"] for entry in listed["data"]] == ["gpt", "m", "n-sql", "org/n"]
    single = json.loads(one.admit("", "/v1/models/org/n").body)
    assert (single["id"], single["max_model_len"], single["created"]) == ("org/n", 10, 10**9)
    refusal(one.admit("", "/v1/models/absent"), "model_not_found")
    one.brain.draining = True
    assert one.admit("", "/readyz") == Page(status=503)
    assert one.admit("", "/health") == Page()


# -- retries -------------------------------------------------------------------------------------------------------

REFUSED = Failure(reason="connect_failed", started=False)
CLOSED = Failure(reason="upstream_closed", body_digest=7)
DEAD = Failure(reason="upstream_closed", reused=True, body_digest=7)


def test_a_refused_connection_goes_to_another_endpoint_and_ejects_this_one() -> None:
    one = bench(*TWO)
    one.ready()
    first = one.lease(prompt_tokens=50)
    second = one.brain.retry(first.id, REFUSED)
    assert isinstance(second, Lease)
    assert (second.target.name, second.attempt) == ("b", 2)
    assert (one.counts("a")[:2], one.counts("b")[:2]) == ((0, 0), (1, 50))
    assert one.place("a").health.state == "quarantined"
    outcome = one.settle(second, first=101.0)
    assert outcome.attempts == 2
    assert outcome.endpoints == {"prefill": second.target.endpoint, "decode": second.target.endpoint}
    assert one.counts("b")[0] == 0
    last = refusal(one.brain.retry(one.lease().id, REFUSED), "connect_failed")
    assert last.message == "Endpoint b cannot be connected to."


@pytest.mark.parametrize("status", [429, 503])
def test_an_engine_that_is_full_is_left_alone_and_not_blamed(status: int) -> None:
    one = bench(*TWO)
    one.ready()
    full = Failure(reason="no_endpoint", status=status, retry_after=4.0)
    second = one.brain.retry(one.lease().id, full)
    assert isinstance(second, Lease)
    last = refusal(one.brain.retry(second.id, full), "no_endpoint")
    assert last.retry_after == 4.0
    assert last.message == f"Endpoint b said {status}, the last of 2 attempts."
    assert one.place("a").health.state == one.place("b").health.state == "ready"


def test_work_that_may_have_begun_is_not_begun_again() -> None:
    one = bench(*TWO)
    one.ready()
    refusal(one.brain.retry(one.lease().id, CLOSED), "upstream_closed")
    refusal(one.brain.retry(one.lease().id, Failure(reason="idle_timeout")), "idle_timeout")
    refusal(one.brain.retry(one.lease().id, Failure(reason="upstream_protocol")), "upstream_protocol")
    assert one.place("a").health.state == "degraded"


def test_a_dead_idle_connection_costs_one_more_attempt_even_at_the_same_endpoint() -> None:
    one = bench("a=http://a:1=m")
    one.ready()
    again = one.brain.retry(one.lease().id, DEAD)
    assert isinstance(again, Lease)
    assert again.target.name == "a"
    refusal(one.brain.retry(again.id, DEAD), "upstream_closed")
    assert one.place("a").health.state == "ready"


def test_retries_have_a_budget() -> None:
    one = bench(*TWO)
    one.ready()
    full = Failure(reason="no_endpoint", status=503)

    def again() -> bool:
        lease = one.lease()
        answer = one.brain.retry(lease.id, full)
        one.settle(answer if isinstance(answer, Lease) else lease)
        return isinstance(answer, Lease)

    results = [again() for _ in range(100)]
    assert 12 <= sum(results) <= 30  # 10 and a fifth of 100
    assert results[:10] == [True] * 10
    one.clock[0] += 11.0
    assert isinstance(one.brain.retry(one.lease().id, full), Lease)


def test_a_body_that_kills_two_engines_is_kept_from_the_third() -> None:
    one = bench(*TWO, "c=http://c:1=m")
    one.ready()
    refusal(one.brain.retry(one.lease(body_bytes=9).id, CLOSED), "upstream_closed")
    assert one.lease(body_bytes=9).poison == ()
    lease = one.lease(body_bytes=9)
    assert lease.target.name != "a"
    refusal(one.brain.retry(lease.id, CLOSED), "poison")
    assert one.lease(body_bytes=10).poison == ()
    marked = one.lease(body_bytes=9)
    assert marked.poison == (7,)
    refusal(one.brain.retry(marked.id, Failure(reason="poison", body_digest=7, started=False)), "poison")
    assert one.logged("body_poisoned")[0]["digest"] == "0000000000000007"
    one.clock[0] += 601.0
    assert one.lease(body_bytes=9).poison == ()


# -- settlement ----------------------------------------------------------------------------------------------------


def test_one_request_one_line_one_count() -> None:
    one = bench(*TWO)
    one.ready()
    lease = one.lease()
    one.settle(lease, first=101.0, last=102.0, accepted=100.0, completion_tokens=3)
    (line,) = one.logged()
    assert (line["endpoint"], line["ttft"], line["principal"], line["flow"]) == ("a", 1.0, "anonymous", "1.2.3.4")
    assert "served" not in line
    one.settle(lease)  # a mover's mistake
    assert len(one.logged()) == 1
    assert one.counts("a")[0] == 0
    assert one.metrics.bugs == 1
    assert "not open" in one.logged("bug")[0]["message"]
    refusal(one.brain.retry(lease.id, REFUSED), "internal")


def test_refused_requests_are_counted_and_health_checks_are_not_logged() -> None:
    one = bench(*TWO)
    one.settle(None, 503, "none_healthy")
    one.brain.settle(None, Outcome(request_id="r", route="/health", status=200))
    one.brain.withdraw(5, Outcome(request_id="w", route="/v1/completions", status=499, reason="client_gone"))
    assert [line["reason"] for line in one.logged()] == ["none_healthy", "client_gone"]
    assert one.metrics.disconnects == 1


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        ({"status": 200, "first": 1.0}, "ready"),
        ({"status": 400, "upstream_status": 400, "first": 1.0}, "ready"),
        ({"status": 499, "reason": "client_gone", "first": 1.0}, "ready"),
        ({"status": 200, "reason": "upstream_closed", "first": 1.0}, "degraded"),
        ({"status": 200, "reason": "generation_timeout", "first": 1.0}, "ready"),
        ({"status": 500, "upstream_status": 500, "first": 1.0}, "degraded"),
        ({"status": 502, "reason": "upstream_closed"}, "ready"),  # judged by retry already
    ],
)
def test_what_an_end_says_about_the_endpoint(outcome: dict[str, Any], state: str) -> None:
    one = bench("a=http://a:1=m")
    one.ready()
    one.settle(one.lease(), **outcome)
    assert one.place("a").health.state == state


def test_progress_moves_expectations() -> None:
    one = bench("a=http://a:1=m")
    one.ready()
    lease = one.lease(prompt_tokens=1000, max_tokens=100, n=2, stream=True)
    place = one.place("a")
    assert one.counts("a") == (1, 1000, 200)
    one.brain.progress(lease.id, 1)
    assert one.counts("a") == (1, 0, 199)
    one.brain.progress(lease.id, 150)
    assert one.counts("a") == (1, 0, 50)
    one.brain.progress(lease.id, 900)
    assert one.counts("a") == (1, 0, 0)
    assert place.alive == 100.0
    one.settle(lease)
    assert one.counts("a") == (0, 0, 0)
    one.brain.progress(lease.id, 5)  # too late: nothing


class Granted:
    """A mover that notes what it is granted."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, object]] = []

    def granted(self, ticket: int, answer: object) -> None:
        self.answers.append((ticket, answer))

    def abandon(self, lease: int, refusal: Refusal) -> None:
        raise AssertionError("nothing is ended")


class Abandoning:
    """A mover that notes what it is told to end."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, str]] = []

    def granted(self, ticket: int, answer: object) -> None:
        raise AssertionError("nothing waits")

    def abandon(self, lease: int, refusal: Refusal) -> None:
        self.ended.append((lease, refusal.reason))


def test_a_long_generation_is_told_from_a_hung_engine() -> None:
    one = bench("a=http://a:1=m")
    mover = Abandoning()
    one.brain.movers = (mover,)
    one.ready()
    lease, place = one.lease(), one.place("a")
    for _ in range(120):  # 20 minutes without a byte, and every probe is answered
        one.clock[0] += 10.0
        one.fleet.happened(place, "probe_ok")
        assert one.brain.quiet(lease.id, 120.0) is None
    young = one.lease()
    hung = one.clock[0]
    while not mover.ended:
        one.clock[0] += 10.0
        one.brain.progress(young.id, 1) if one.clock[0] == hung + 10.0 else None
        one.fleet.happened(place, "probe_failed", "no answer")
        assert one.clock[0] < hung + 120.0
    assert mover.ended == [(lease.id, "idle_timeout"), (young.id, "idle_timeout")]
    assert one.clock[0] == hung + 70.0  # a minute after its last token
    refusal(one.brain.quiet(lease.id, 120.0), "idle_timeout")
    assert one.brain.quiet(999, 120.0) is None


class Counting:
    """Hooks that count what is reserved and given back."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.made = 0

    def identify(self, head: Head) -> Principal | Refusal:
        return Refusal(reason="no_key", message="no") if head.credential == b"bad" else Principal("p", "f")

    def reserve(self, principal: Principal, request: InferenceRequest, estimate: int) -> int | Refusal:
        if estimate > 10_000:
            return Refusal(reason="rate_limited", message="no")
        self.made += 1
        self.open.add(self.made)
        return self.made

    def progress(self, reservation: int, tokens: int) -> None:
        assert reservation in self.open

    def settle(self, reservation: int, outcome: Outcome) -> None:
        self.open.remove(reservation)


def test_hooks_may_refuse() -> None:
    one = bench(*TWO, hooks=Counting())
    one.ready()
    request = InferenceRequest(id="r", head=Head("/v1/models", "", b"bad"), model="")
    refusal(one.brain.admit(request), "no_key")
    refusal(one.admit(prompt_tokens=20_000), "rate_limited")


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "refused", "full", "closed", "progress", "settle", "twice", "gone", "back", "drop"]),
        st.integers(0, 9),
    )
)


@given(STEPS)
def test_everything_is_given_back(steps: list[tuple[str, int]]) -> None:
    """Whatever happens in whatever order, ledgers and reservations end where they began."""
    hooks = Counting()
    one = bench(*TWO, "c=http://c:1=m", hooks=hooks)
    one.ready()
    everywhere = dict(one.fleet.places)
    open_: list[Lease] = []
    closed: list[Lease] = []
    failures = {"refused": REFUSED, "full": Failure(reason="no_endpoint", status=503), "closed": CLOSED}
    for what, which in steps:
        if what == "admit":
            found = one.admit(prompt_tokens=which, body_bytes=1)
            if isinstance(found, Lease):
                open_.append(found)
        elif what in ("gone", "back"):
            endpoints = tuple(p.endpoint for p in everywhere.values())
            one.fleet.replace("static", endpoints[which % 3 :] if what == "gone" else endpoints)
            everywhere |= one.fleet.places
            one.ready()
        elif what == "drop":
            one.clock[0] += which
        elif what == "twice" and closed:
            one.settle(closed[which % len(closed)])
        elif open_:
            lease = open_.pop(which % len(open_))
            if what in failures:
                found = one.brain.retry(lease.id, failures[what])
                open_.append(found if isinstance(found, Lease) else lease)
            elif what == "progress":
                one.brain.progress(lease.id, which)
                open_.append(lease)
            else:
                one.settle(lease)
                closed.append(lease)
        assert one.brain.inflight == len(open_) == len(hooks.open)
    for lease in open_:
        one.settle(lease, 499, "client_gone")
    assert not hooks.open
    assert one.brain.inflight == 0
    for place in (*everywhere.values(), *one.fleet.places.values()):
        assert one.fleet.router.ledger.counts(place.endpoint.id) == (0, 0, 0)


def test_admission_is_quick() -> None:
    """A bound that only a mistake breaks: an idle machine needs a twentieth of it."""
    import time

    one = bench(*(f"e{i}=http://e{i}:1=m" for i in range(8)))
    one.ready()
    before = time.process_time()
    for _ in range(500):
        one.settle(one.lease(), first=101.0, last=102.0, accepted=100.0)
    assert (time.process_time() - before) / 500 < 1e-3


# -- routing -------------------------------------------------------------------------------------------------------


def blocks(text: str) -> tuple[int, ...]:
    start = sum(text.encode()) * 1000
    return tuple(range(start, start + 40))


def test_a_prompt_goes_where_its_beginning_is() -> None:
    one = bench(*TWO, text="routing: {profile: auto}\n")
    one.ready()
    one.clock[0] += 60.0
    first = one.lease(prompt_tokens=5000, blocks=blocks("a"), stream=True)
    one.brain.progress(first.id, 1)
    names = set()
    for _ in range(5):
        lease = one.lease(prompt_tokens=5000, blocks=blocks("a"), stream=True)
        names.add(lease.target.name)
        one.brain.progress(lease.id, 1)
        one.settle(lease, first=one.clock[0])
    assert names == {first.target.name}


def test_an_attempt_that_never_computed_leaves_nothing_in_the_index() -> None:
    one = bench(*TWO, text="routing: {profile: auto}\n")
    one.ready()
    lease = one.lease(prompt_tokens=5000, blocks=blocks("a"), stream=True)
    one.settle(lease, 499, "client_gone")
    assert one.fleet.router.affinity.estimated.match(blocks("a")) == {}


def test_an_unknown_profile_names_the_known_ones() -> None:
    one = bench(*TWO)
    one.ready()
    found = refusal(one.admit(profile="fastest"), "unknown_profile")
    assert "auto, batch, chat, least-load, long-context" in found.message
    assert found.param == "x-llmgw-profile"


def test_a_session_stays_where_it_is_and_moves_once() -> None:
    one = bench(*TWO, text="routing: {profile: chat}\n")
    one.ready()
    one.clock[0] += 60.0
    home = one.lease(session="s", prompt_tokens=500).target.name
    assert {one.lease(session="s", prompt_tokens=500).target.name for _ in range(4)} == {home}
    other = {"a": "b", "b": "a"}[home]
    one.fleet.happened(one.place(home), "connect_failed")
    assert one.lease(session="s", prompt_tokens=500).target.name == other
    one.fleet.happened(one.place(home), "probe_ok")
    one.clock[0] += 60.0
    assert {one.lease(session="s", prompt_tokens=500).target.name for _ in range(4)} == {other}


def test_a_canary_gets_its_share_of_sessions() -> None:
    one = bench("a=http://a:1=m", "b=http://b:1=next", text="models: {m: {canary: {next: 0.2}}}\n")
    one.ready()

    def served(session: str) -> Target:
        lease = one.lease(session=session)
        one.settle(lease)
        return lease.target

    side = {s: served(s) for s in map(str, range(300))}
    moved = [s for s, target in side.items() if target.name == "b"]
    assert 30 <= len(moved) <= 90
    assert all(side[s].model == "next" for s in moved)
    assert all(served(s).name == "b" for s in moved)


def test_a_fallback_serves_while_the_model_cannot() -> None:
    one = bench("a=http://a:1=m", "b=http://b:1=small", text="models: {m: {fallback: [absent, small]}}\n")
    one.ready("b")
    target = one.lease().target
    assert (target.name, target.model) == ("b", "small")
    one.ready("a")
    assert (one.lease().target.name, one.lease().target.model) == ("a", "")
    one.fleet.happened(one.place("a"), "connect_failed")
    one.fleet.happened(one.place("b"), "connect_failed")
    assert "endpoints of 'm' is healthy" in refusal(one.admit(), "none_healthy").message


def test_a_decision_is_kept_with_what_came_true() -> None:
    one = bench(*TWO, text="routing: {profile: auto}\n")
    one.ready()
    lease = one.lease(prompt_tokens=700, stream=True)
    second = one.brain.retry(lease.id, REFUSED)
    assert isinstance(second, Lease)
    one.settle(second, first=100.5, completion_tokens=9, cached_tokens=64)
    kept = one.fleet.router.recent.get("r")
    assert kept is not None
    assert [d.endpoint.name for d in kept.decisions] == [lease.target.name, second.target.name]
    assert kept.outcome is not None
    assert kept.outcome.cached_tokens == 64


def test_a_client_s_fault_never_ejects() -> None:
    one = bench("a=http://a:1=m", text="routing: {profile: auto}\n")
    one.ready()
    for _ in range(50):
        one.settle(one.lease(), 400, "", first=one.clock[0], upstream_status=400)
    assert one.place("a").health.state == "ready"


def test_a_reload_keeps_what_an_endpoint_has() -> None:
    one = bench(*TWO)
    one.ready()
    for _ in range(4):
        one.lease(prompt_tokens=100)
    everyone = tuple(p.endpoint for p in one.fleet.places.values())
    one.fleet.replace("static", everyone[:1])
    one.fleet.replace("static", everyone)
    assert (one.counts("a")[0], one.counts("b")[0]) == (2, 2)


def test_an_engine_that_answers_500_again_and_again_is_ejected_but_never_more_than_half() -> None:
    one = bench("a=http://a:1=m", "b=http://b:1=m", "c=http://c:1=m", "d=http://d:1=m")
    one.ready()
    for _ in range(40):
        one.settle(one.lease(), 500, "", first=one.clock[0], upstream_status=500)
    states = sorted(p.health.state for p in one.fleet.places.values())
    assert states == ["degraded", "degraded", "quarantined", "quarantined"]


def test_media_that_must_be_fetched_can_be_refused() -> None:
    b = bench("a=http://a=m", "a=http://a=n", text="models: {m: {media_urls: refuse}}")
    b.ready()
    refused = b.admit("m", fetches=True)
    assert (refused.reason, refused.param) == ("forbidden_field", "messages")
    for known in ({"model": "m"}, {"model": "n", "fetches": True}):
        b.settle(b.lease(**known))
