"""RDMA ports from re-created sysfs trees: states, evidence of fabrics, rails, distances."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.agent.files import Root
from llmgw.agent.rdma import FabricRule, read_ports, unbound_adapters
from llmgw.placement.inventory import Device
from tests.agent.worlds import hca, pci_device, tree

OTHER = "fec0:0000:0000:0001:a088:c203:0012:9990"


def test_one_fabric(tmp_path: Path) -> None:
    hca(tmp_path, "mlx5_0", "0000:18:00.0")
    (port,) = read_ports(Root(str(tmp_path)))

    assert (port.device, port.port, port.layer, port.state, port.rate) == ("mlx5_0", 1, "infiniband", "active", 400.0)
    assert (port.lid, port.sm_lid, port.prefix, port.guid) == (0x11, 1, "", "a088c20300123450")
    assert (port.bdf, port.numa, port.card, port.reason) == ("0000:18:00.0", 0, "a088:c203:0012:3450", "")


def test_two_isolated_fabrics_with_the_default_prefix_show_their_lids(tmp_path: Path) -> None:
    hca(tmp_path, "mlx5_0", "0000:18:00.0")
    hca(tmp_path, "mlx5_4", "0000:98:00.0", parents=["pci0000:95"], lid="0x11", numa=1)
    ports = read_ports(Root(str(tmp_path)))
    assert [(p.prefix, p.lid, p.sm_lid, p.fabric) for p in ports] == [("", 17, 1, "")] * 2


def test_a_prefix_of_its_own_is_evidence(tmp_path: Path) -> None:
    hca(tmp_path, "mlx5_0", "0000:18:00.0", gids=[(OTHER, "IB/RoCE v1", "")])
    (port,) = read_ports(Root(str(tmp_path)), sm_guids={"mlx5_0/1": "0xa088c20300aaaa01"})
    assert (port.prefix, port.sm_guid) == ("fec0000000000001", "0xa088c20300aaaa01")


def test_eight_rails(tmp_path: Path) -> None:
    for n in range(8):
        hca(tmp_path, f"mlx5_{n}", f"0000:{0x18 + 16 * n:02x}:00.0", card=f"a088:c203:0012:00{n:02x}")
    rules = [FabricRule(fabric="ib-a", device=f"mlx5_{n}", rail=n) for n in range(8)]
    ports = read_ports(Root(str(tmp_path)), rules)
    assert [(p.fabric, p.rail) for p in ports] == [("ib-a", n) for n in range(8)]


def test_roce_has_a_network_and_a_vlan(tmp_path: Path) -> None:
    gids = [
        ("fe80:0000:0000:0000:0a00:27ff:fe00:0001", "IB/RoCE v1", "ens1np0"),
        ("fe80:0000:0000:0000:0a00:27ff:fe00:0001", "RoCE v2", "ens1np0"),
        ("0000:0000:0000:0000:0000:ffff:0a14:0005", "IB/RoCE v1", "ens1np0.120"),
        ("0000:0000:0000:0000:0000:ffff:0a14:0005", "RoCE v2", "ens1np0.120"),
    ]
    hca(tmp_path, "mlx5_bond_0", "0000:18:00.0", layer="Ethernet", lid="0x0", sm_lid="0x0", gids=gids)
    # destination 10.20.0.0, mask 255.255.0.0, as the kernel writes them
    route = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\nens1np0.120\t0000140A\t00000000\t0001\t0\t0\t0\t0000FFFF"
    tree(tmp_path, {"/proc/net/route": route})
    (port,) = read_ports(Root(str(tmp_path)), [FabricRule(fabric="roce-a", network="10.0.0.0/8", vlan=120)])

    assert (port.layer, port.network, port.vlan, port.address) == ("roce", "10.20.0.0/16", 120, "10.20.0.5")
    assert (port.netdev, port.fabric, port.reason) == ("ens1np0.120", "roce-a", "")


def test_roce_without_an_address_says_where_to_put_one(tmp_path: Path) -> None:
    gids = [("fe80:0000:0000:0000:0a00:27ff:fe00:0001", "RoCE v2", "ens1np0")]
    hca(tmp_path, "mlx5_0", "0000:18:00.0", layer="Ethernet", gids=gids)
    tree(tmp_path, {}, {})
    (port,) = read_ports(Root(str(tmp_path)))
    assert port.reason.startswith("RoCE port has no IPv4/IPv6 GID")


@pytest.mark.parametrize(
    ("state", "phys", "lid", "sm_lid", "seen", "words"),
    [
        ("1: DOWN", "2: Polling", "0x0", "0x0", "down", "no cable"),
        ("1: DOWN", "3: Disabled", "0x0", "0x0", "disabled", "disabled administratively"),
        ("2: INIT", "5: LinkUp", "0x0", "0x0", "init", "fabric has no SM"),
        ("3: ARMED", "5: LinkUp", "0x4", "0x1", "armed", "not yet activated"),
        ("4: ACTIVE", "5: LinkUp", "0x4", "0x1", "active", ""),
    ],
)
def test_states(tmp_path: Path, state: str, phys: str, lid: str, sm_lid: str, seen: str, words: str) -> None:
    hca(tmp_path, "mlx5_0", "0000:18:00.0", state=state, phys=phys, lid=lid, sm_lid=sm_lid)
    (port,) = read_ports(Root(str(tmp_path)))
    assert port.state == seen
    assert words in port.reason
    assert bool(words) == bool(port.reason)


def test_a_port_trained_slow_is_seen_beside_its_peers(tmp_path: Path) -> None:
    hca(tmp_path, "mlx5_0", "0000:18:00.0")
    hca(tmp_path, "mlx5_1", "0000:28:00.0", rate="100 Gb/sec (1X NDR)")
    slow = read_ports(Root(str(tmp_path)))[1]
    assert slow.reason == "trained at 100 Gb/s, other ports of this kind at 400"


def test_iwarp_is_not_for_nccl(tmp_path: Path) -> None:
    hca(tmp_path, "cxgb4_0", "0000:18:00.0", layer="Ethernet", node_type="4: RNIC")
    (port,) = read_ports(Root(str(tmp_path)))
    assert port.layer == "iwarp"
    assert "NCCL cannot use it" in port.reason


def test_an_adapter_without_its_driver(tmp_path: Path) -> None:
    pci_device(tmp_path, "0000:18:00.0", "0x15b3", "0x020700")
    assert unbound_adapters(Root(str(tmp_path))) == ("0000:18:00.0",)
    hca(tmp_path, "mlx5_1", "0000:28:00.0")
    assert unbound_adapters(Root(str(tmp_path))) == ("0000:18:00.0",)


def test_distance_between_gpu_and_adapter(tmp_path: Path) -> None:
    switch = ["pci0000:15", "0000:15:01.0", "0000:16:00.0"]
    hca(tmp_path, "mlx5_0", "0000:18:00.0", parents=[*switch, "0000:17:00.0"])
    for address, parents in {
        "0000:19:00.0": [*switch, "0000:17:01.0"],  # the same switch
        "0000:1a:00.0": ["pci0000:15", "0000:15:01.0", "0000:1b:00.0", "0000:1c:00.0", "0000:1d:00.0"],
        "0000:1e:00.0": ["pci0000:15", "0000:15:02.0"],
        "0000:29:00.0": ["pci0000:25"],
        "0000:99:00.0": ["pci0000:95"],
    }.items():
        pci_device(tmp_path, address, "0x10de", "0x030200", parents)
    gpus = [
        Device(uuid=address, index=n, name="H100", memory=1, bdf=address, numa=numa)
        for n, (address, numa) in enumerate(
            [("0000:19:00.0", 0), ("0000:1a:00.0", 0), ("0000:1e:00.0", 0), ("0000:29:00.0", 0), ("0000:99:00.0", 1)]
        )
    ]
    (port,) = read_ports(Root(str(tmp_path)), devices=gpus)
    assert list(port.distances.values()) == ["PIX", "PXB", "PHB", "NODE", "SYS"]
