"""The messages between agent and server, and what routing gets of a ready replica."""

from __future__ import annotations

import msgspec
import pytest

from llmgw.control.observed import (
    Answer,
    Desired,
    EndpointFacts,
    Observed,
    Ports,
    Run,
    RunState,
    Sync,
    digest,
    endpoint,
)
from llmgw.endpoint import Model
from llmgw.placement.inventory import Check, Device, Host, Inventory

FACTS = EndpointFacts(
    url="http://10.0.0.7:20000", phases=("decode",), fabrics=("ib-a",), max_model_len=8192, block_size=16, api_key="k"
)
RUN = Run(
    replica="qwen-1", model="qwen", epoch=7, generation=2, state="ready", engine="vllm", start_id="ab", endpoint=FACTS
)
NODE = Inventory(
    node="gpu-01",
    labels={"rack": "r1"},
    devices=(Device(uuid="GPU-1", index=0, name="NVIDIA H200", memory=10, memory_free=1 << 30, temperature=40),),
    host=Host(memory_available=100 << 30),
    checks=(Check(id="ENG-2", scope="engine:vllm", level="block", ok=True, at=5.0),),
)


def test_a_ready_replica_is_an_endpoint_without_anything_typed_twice() -> None:
    found = endpoint(RUN, Model(name="qwen", aliases=("q",), max_model_len=32768), NODE)
    assert found is not None
    assert (found.id, found.name, found.url) == ("qwen-1@ab", "qwen-1", "http://10.0.0.7:20000")
    assert found.models == (Model(name="qwen", aliases=("q",), max_model_len=8192),)
    assert (found.phases, found.fabrics) == (frozenset({"decode"}), frozenset({"ib-a"}))
    assert (found.host, found.labels, found.engine, found.replica) == ("gpu-01", {"rack": "r1"}, "vllm", "qwen-1")
    assert found.auth == "qwen-1", "a reference, never the key"


def test_another_life_of_the_engine_is_another_endpoint() -> None:
    again = msgspec.structs.replace(RUN, start_id="cd")
    first, second = endpoint(RUN, Model(name="qwen"), NODE), endpoint(again, Model(name="qwen"), NODE)
    assert first is not None
    assert second is not None
    assert first.id != second.id
    assert first.name == second.name


@pytest.mark.parametrize("state", ["fetching", "starting", "canary", "stopping", "gone", "failed"])
def test_only_a_ready_replica_is_one(state: RunState) -> None:
    assert endpoint(msgspec.structs.replace(RUN, state=state), Model(name="qwen"), NODE) is None


def test_a_key_is_not_printed() -> None:
    secret = msgspec.structs.replace(FACTS, api_key="sk-secret")
    assert "sk-secret" not in repr(msgspec.structs.replace(RUN, endpoint=secret))


def test_the_digest_ignores_what_moves_all_the_time() -> None:
    base = Observed(inventory=NODE, runs=(RUN,))
    device = NODE.devices[0]

    def seen(device: Device) -> str:
        return digest(Observed(inventory=msgspec.structs.replace(NODE, devices=(device,)), runs=(RUN,)))

    assert seen(msgspec.structs.replace(device, temperature=80, memory_free=(1 << 30) + 4096)) == digest(base)
    assert seen(msgspec.structs.replace(device, memory_free=0)) != digest(base)
    assert seen(msgspec.structs.replace(device, health="blocked")) != digest(base)
    later = tuple(msgspec.structs.replace(c, at=99.0) for c in NODE.checks)
    assert digest(Observed(inventory=msgspec.structs.replace(NODE, checks=later), runs=(RUN,))) == digest(base)
    failed = tuple(msgspec.structs.replace(c, ok=False) for c in NODE.checks)
    assert digest(Observed(inventory=msgspec.structs.replace(NODE, checks=failed), runs=(RUN,))) != digest(base)
    assert digest(Observed(inventory=NODE)) != digest(base)


def test_messages_are_plain_json() -> None:
    sync = Sync(node="gpu-01", boot="b", agent="a", observed=Observed(inventory=NODE, runs=(RUN,)))
    assert msgspec.json.decode(msgspec.json.encode(sync), type=Sync) == sync
    desired = Desired(
        replica="qwen-1", model="qwen", epoch=7, generation=2, engine="vllm", weights="/m", ports=Ports(20000)
    )
    answer = Answer(term=1, revision=9, desired=(desired,))
    assert msgspec.json.decode(msgspec.json.encode(answer), type=Answer) == answer
