"""Whose turn it is: fair in tokens, whatever flows ask for."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from llmgw.admission.flows import QUANTUM, Flows
from llmgw.admission.gate import Ticket, _Pool

POOL = _Pool("m", 1)


def ticket(number: int, flow: str, tokens: int) -> Ticket:
    return Ticket(number, POOL, 0, flow, tokens, tokens, 0, 0, False, 0.0, waiting=True)


def served(flows: Flows) -> Ticket | None:
    found = flows.head()
    if found is not None:
        assert flows.head() is found, "the same until it is taken"
        flows.take(found)
        found.waiting = False
    return found


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 20_000)), max_size=200))
def test_all_are_served_once_and_each_flow_in_its_order(asked: list[tuple[str, int]]) -> None:
    flows = Flows()
    for number, (flow, tokens) in enumerate(asked):
        flows.push(ticket(number, flow, tokens))
    out = []
    while found := served(flows):
        out.append(found)
    assert sorted(t.id for t in out) == list(range(len(asked)))
    for name in "abcd":
        ids = [t.id for t in out if t.flow == name]
        assert ids == sorted(ids)
    assert flows.count == flows.tokens == 0


@given(
    st.lists(st.integers(1, 9_000), min_size=40, max_size=80), st.lists(st.integers(1, 9_000), min_size=40, max_size=80)
)
def test_two_that_always_wait_differ_by_less_than_a_quantum_and_a_ticket(left: list[int], right: list[int]) -> None:
    flows = Flows()
    for number, tokens in enumerate(left):
        flows.push(ticket(number, "left", tokens))
    for number, tokens in enumerate(right):
        flows.push(ticket(1000 + number, "right", tokens))
    largest = max(*left, *right)
    quantum = max(QUANTUM, largest)
    got: Counter[str] = Counter()
    counts = Counter({"left": len(left), "right": len(right)})
    while counts["left"] and counts["right"]:
        found = served(flows)
        assert found is not None
        got[found.flow] += found.cost
        counts[found.flow] -= 1
        assert abs(got["left"] - got["right"]) <= 2 * quantum + largest


def test_one_with_ten_thousand_does_not_keep_one_waiting() -> None:
    flows = Flows()
    for number in range(10_000):
        flows.push(ticket(number, "many", 500))
    flows.push(ticket(10_000, "one", 500))
    before = 0
    while (found := served(flows)) is not None and found.flow != "one":
        before += found.cost
    assert before <= QUANTUM
    assert flows.ahead("new") <= QUANTUM
    assert flows.ahead("many") > 4_000_000


@given(st.lists(st.booleans(), min_size=1, max_size=400))
def test_who_leaves_is_not_served_and_not_kept(leave: list[bool]) -> None:
    flows = Flows()
    tickets = [ticket(n, "f", 10) for n in range(len(leave))]
    for each in tickets:
        flows.push(each)
    for each, gone in zip(tickets, leave, strict=True):
        if gone:
            each.waiting = False
            flows.discard(each)
    stay = [t for t, gone in zip(tickets, leave, strict=True) if not gone]
    assert flows.count == len(stay)
    assert [t.id for t in flows] == [t.id for t in stay]
    assert [served(flows) for _ in stay] == stay
    assert served(flows) is None
