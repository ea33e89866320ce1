"""Stored answers: who refers to one goes where it was made; a stranger, or a restart, finds nothing."""

from __future__ import annotations

import pytest

from llmgw.hooks import Anonymous
from llmgw.request import Head, InferenceRequest, Lease, Principal, Refusal
from llmgw.server.kept import Kept
from tests.server.worlds import Bench, bench


class ByKey(Anonymous):
    """The credential is the principal's name."""

    def identify(self, head: Head) -> Principal | Refusal:
        return Principal(name=head.credential.decode(), flow="f")


@pytest.fixture(name="b")
def _b() -> Bench:
    made = bench("a=http://a=m", "b=http://b=m", hooks=ByKey())
    made.ready()
    return made


def made_by(b: Bench, answer: str = "resp_1") -> str:
    lease = b.lease()
    b.brain.made(lease.id, answer)
    b.settle(lease)
    return lease.target.endpoint


def test_a_conversation_stays_where_its_answer_is(b: Bench) -> None:
    home = made_by(b)
    for _ in range(4):
        lease = b.lease(continues="resp_1")
        assert lease.target.endpoint == home
        b.settle(lease)
        kept = b.admit("", route="/v1/responses/resp_1", continues="resp_1")
        assert isinstance(kept, Lease)
        assert kept.target.endpoint == home
        b.settle(kept)


def test_unknown_answers(b: Bench) -> None:
    found = b.admit("m", continues="resp_9")
    assert (found.reason, found.param) == ("bad_field", "previous_response_id")
    assert b.admit("", route="/v1/responses/resp_9", continues="resp_9").reason == "response_not_found"


def test_another_keys_answer_does_not_exist(b: Bench) -> None:
    made_by(b)
    stranger = InferenceRequest(id="r", head=Head("/v1/responses", "", b"eve"), model="m", continues="resp_1")
    found = b.brain.admit(stranger)
    assert isinstance(found, Refusal)
    assert found.reason == "bad_field"


def test_its_engine_is_gone_or_ill(b: Bench) -> None:
    home = made_by(b)
    place = b.fleet.places[home]
    for _ in range(9):
        b.fleet.happened(place, "connect_failed")
    refused = b.admit("m", continues="resp_1")
    assert refused.reason == "none_healthy"
    b.fleet.replace("static", tuple(p.endpoint for p in b.fleet.places.values() if p is not place))
    assert b.admit("m", continues="resp_1").reason == "bad_field"


def test_the_table_is_bounded() -> None:
    kept = Kept(most=3)
    for i in range(3):
        kept.keep("p", f"r{i}", "e", "m")
    assert kept.find("p", "r0") is not None
    kept.keep("p", "r3", "e", "m")
    assert len(kept) == 3
    assert kept.find("p", "r1") is None
    assert kept.find("p", "r0") is not None
