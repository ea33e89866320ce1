"""Evidence about fabrics, strongest first, and what it may not conclude."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from llmgw.placement.fabrics import evidence, resolve
from llmgw.placement.inventory import Inventory, Port


def port(device: str = "mlx5_0", **more: Any) -> Port:
    base = {"device": device, "state": "active", "rate": 400.0, "lid": 0x11, "sm_lid": 1, "prefix": "fe80000000000000"}
    return msgspec.convert({**base, **more}, Port)


def node(name: str, *ports: Port) -> Inventory:
    return Inventory(node=name, ports=ports)


def test_evidence_strongest_first() -> None:
    assert evidence(port(sm_guid="0xa0", prefix="fe80000000000001")) == "sm:0xa0"
    assert evidence(port(prefix="fe80:0000:0000:0001")) == "px:fe80000000000001"
    assert evidence(port()) == ""
    assert evidence(port(layer="roce", network="10.20.0.0/16", vlan=120)) == "roce:10.20.0.0/16.120"


def test_a_fabric_is_a_property_of_a_port() -> None:
    found = resolve([node("a", port(sm_guid="1"), port("mlx5_1", sm_guid="2", lid=9)), node("b", port(sm_guid="1"))])
    assert {n: sorted(f) for n, f in found.attached.items()} == {"a": ["sm:1", "sm:2"], "b": ["sm:1"]}


def test_the_operator_s_word_wins_and_spreads_along_evidence() -> None:
    found = resolve([node("a", port(sm_guid="1", fabric="ib-a")), node("b", port(sm_guid="1"))])
    assert list(found.attached["b"]) == ["ib-a"]
    assert not found.conflicts


def test_two_names_for_one_subnet_are_shown_not_hidden() -> None:
    found = resolve([node("a", port(sm_guid="1", fabric="x")), node("b", port(sm_guid="1", fabric="y"))])
    assert found.conflicts == ("sm:1 is called x and y: ports that it joins have two names",)
    assert (list(found.attached["a"]), list(found.attached["b"])) == (["x"], ["y"])


def test_the_default_prefix_alone_resolves_nothing() -> None:
    found = resolve([node("a", port()), node("b", port(lid=0x12))])
    assert found.attached["a"] == {}
    assert "default prefix" in found.unresolved["a"][0]


def test_one_fabric_by_declaration() -> None:
    found = resolve([node("a", port()), node("b", port(lid=0x12))], assume_single=True)
    assert list(found.attached["a"]) == list(found.attached["b"]) == ["default"]


def test_a_lid_twice_proves_two_fabrics_whatever_is_declared() -> None:
    found = resolve([node("a", port()), node("b", port(lid=0x10, lmc=1))], assume_single=True)
    assert found.attached == {"a": {}, "b": {}}
    assert "LID 0x11 is on a mlx5_0/1 and on b mlx5_0/1" in found.unresolved["b"][0]


def test_two_subnet_managers_prove_it_too() -> None:
    found = resolve([node("a", port()), node("b", port(lid=0x12, sm_lid=2))], assume_single=True)
    assert "differ" in found.unresolved["a"][0]


def test_rails() -> None:
    ports = (
        port("mlx5_2", fabric="a", rate_nominal=400.0, bdf="0000:30:00.0"),
        port("mlx5_1", fabric="a", rate=100.0, rate_nominal=400.0),
        port("mlx5_0", fabric="a", state="down", reason="no cable or switch port down"),
        port("mlx5_4", fabric="a", rate_nominal=400.0, bdf="0000:10:00.0"),
        port("mlx5_5", fabric="a", usable=False),
        port("mlx5_6", fabric="a", rail=0),
    )
    found = resolve([node("n", *ports)]).attached["n"]["a"]
    assert found.rails == 3
    assert [p.device for p in found.ports] == ["mlx5_6", "mlx5_4", "mlx5_2"]
    assert "mlx5_0/1: no cable or switch port down" in found.troubles


def test_a_dead_port_is_down_not_unresolved() -> None:
    found = resolve([node("n", port(state="down", reason="no cable or switch port down"))])
    assert found.down["n"] == ("mlx5_0/1: no cable or switch port down",)
    assert not found.unresolved["n"]


@given(st.permutations([node("a", port()), node("b", port(lid=0x12)), node("c", port(lid=0x12, sm_guid="7"))]))
def test_order_does_not_matter(nodes: list[Inventory]) -> None:
    assert resolve(nodes, assume_single=True) == resolve(sorted(nodes, key=lambda n: n.node), assume_single=True)
