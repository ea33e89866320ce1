"""InfiniBand and RoCE ports from sysfs, with the evidence of which fabric each is on.

Only evidence: GID prefix, LIDs, subnet manager, RoCE networks, and what the operator said. `llmgw.placement.fabrics`
judges over all nodes, since only there a collision of LIDs can be seen.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import attrs
import msgspec

from llmgw.agent.files import Root
from llmgw.placement.inventory import Device, Port

BASE = "/sys/class/infiniband"
DEFAULT_PREFIX = "fe80000000000000"
GIDS_READ = 64  # slots looked at; RoCE drivers list up to 256, filled from the front
State = Literal["active", "armed", "init", "down", "disabled", "unknown"]
_STATES: dict[str, State] = {"4": "active", "5": "active", "3": "armed", "2": "init", "1": "down", "0": "down"}


@attrs.frozen
class FabricRule:
    """An operator's word on which fabric a port is on: every condition that is given must hold."""

    fabric: str
    device: str = ""  # "mlx5_0" or "mlx5_0/1"
    guid: str = ""
    prefix: str = ""
    sm_guid: str = ""
    network: str = ""  # a port's network lies in it
    vlan: int | None = None
    rail: int | None = None

    def holds(self, port: Port) -> bool:
        return (
            self.device in ("", port.device, f"{port.device}/{port.port}")
            and _hex(self.guid) in ("", _hex(port.guid))
            and _hex(self.prefix) in ("", port.prefix)
            and _hex(self.sm_guid) in ("", _hex(port.sm_guid))
            and (not self.network or _within(port.network, self.network))
            and (self.vlan is None or self.vlan == port.vlan)
        )


def _hex(text: str) -> str:
    return text.lower().removeprefix("0x").replace(":", "")


def _within(inner: str, outer: str) -> bool:
    try:
        return ipaddress.ip_network(inner, strict=False).subnet_of(ipaddress.ip_network(outer, strict=False))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def read_ports(
    root: Root,
    rules: Sequence[FabricRule] = (),
    devices: Sequence[Device] = (),
    sm_guids: Mapping[str, str] | None = None,
) -> tuple[Port, ...]:
    """All ports of all adapters. *sm_guids*: "mlx5_0/1" → GUID of its master subnet manager, where it was asked."""
    ports = []
    for name in root.names(BASE):
        base = f"{BASE}/{name}"
        bdf = root.real(f"{base}/device").rpartition("/")[2]
        for number in sorted(int(n) for n in root.names(f"{base}/ports") if n.isdigit()):
            ports.append(_port(root, name, base, number, bdf))
    nominal: dict[str, float] = {}
    for port in ports:
        kind = root.text(f"{BASE}/{port.device}/hca_type") or ""
        nominal[kind] = max(nominal.get(kind, 0.0), port.rate)
    found = []
    for seen in ports:
        kind = root.text(f"{BASE}/{seen.device}/hca_type") or ""
        port = msgspec.structs.replace(
            seen,
            rate_nominal=nominal[kind] or None,
            sm_guid=(sm_guids or {}).get(f"{seen.device}/{seen.port}", ""),
            distances={d.uuid: distance(root, d, seen) for d in devices if d.bdf and seen.bdf},
        )
        rule = next((r for r in rules if r.holds(port)), None)
        if rule is not None:
            port = msgspec.structs.replace(port, fabric=rule.fabric, rail=rule.rail)
        found.append(msgspec.structs.replace(port, reason=port.reason or _slow(port)))
    return tuple(found)


def unbound_adapters(root: Root) -> tuple[str, ...]:
    """PCI addresses of InfiniBand adapters that no RDMA driver has taken."""
    base = "/sys/bus/pci/devices"
    bound = {root.real(f"{BASE}/{name}/device").rpartition("/")[2] for name in root.names(BASE)}
    return tuple(
        bdf
        for bdf in root.names(base)
        if bdf not in bound
        and root.text(f"{base}/{bdf}/vendor") == "0x15b3"
        and (root.text(f"{base}/{bdf}/class") or "").startswith("0x0207")
    )


def _port(root: Root, device: str, base: str, number: int, bdf: str) -> Port:
    at = f"{base}/ports/{number}"
    layer_text = root.text(f"{at}/link_layer") or ""
    iwarp = (root.text(f"{base}/node_type") or "").startswith("4")
    layer: Literal["infiniband", "roce", "iwarp"] = (
        "iwarp" if iwarp else "infiniband" if layer_text == "InfiniBand" else "roce"
    )
    raw = (root.text(f"{at}/state") or "").partition(":")[0]
    physical = (root.text(f"{at}/phys_state") or "").partition(":")[0]
    state: State = _STATES.get(raw, "unknown")
    if state == "down" and physical == "3":
        state = "disabled"
    rate_text = root.text(f"{at}/rate") or ""
    rate = re.match(r"[\d.]+", rate_text)
    gid = _gid(root.text(f"{at}/gids/0"))
    netdevs = root.names(f"{base}/device/net")
    network, address, vlan, netdev = "", "", None, netdevs[0] if netdevs else ""
    if layer == "roce":
        network, address, vlan, found_netdev = _roce(root, at)
        netdev = found_netdev or netdev
    numa = root.number(f"{base}/device/numa_node")
    lid, sm_lid = root.number(f"{at}/lid") or 0, root.number(f"{at}/sm_lid") or 0
    prefix = gid[:16] if layer == "infiniband" and gid[:16] != DEFAULT_PREFIX else ""
    return Port(
        device=device,
        port=number,
        layer=layer,
        state=state,
        rate=float(rate[0]) if rate else 0.0,
        guid=gid[16:] if gid.strip("0") else "",
        card=root.text(f"{base}/sys_image_guid") or "",
        prefix=prefix,
        lid=lid,
        lmc=root.number(f"{at}/lid_mask_count") or 0,
        sm_lid=sm_lid,
        network=network,
        vlan=vlan,
        address=address,
        netdev=netdev,
        bdf=bdf,
        numa=None if numa is None or numa < 0 else numa,
        usable=_usable(root, device),
        reason=_reason(layer, state, physical, lid, sm_lid, network, netdev),
    )


def _gid(text: str | None) -> str:
    """`fe80:0000:…` → 32 hex digits; "" for an absent slot."""
    digits = (text or "").replace(":", "")
    return digits if len(digits) == 32 else ""


def _roce(root: Root, at: str) -> tuple[str, str, int | None, str]:
    """Network, address, VLAN and interface of the first routable RoCE v2 GID."""
    for slot in range(GIDS_READ):
        gid = _gid(root.text(f"{at}/gids/{slot}"))
        if not gid or root.text(f"{at}/gid_attrs/types/{slot}") != "RoCE v2" or gid[:16] == DEFAULT_PREFIX:
            continue
        if not gid.strip("0"):
            continue
        address = ipaddress.IPv6Address(bytes.fromhex(gid))
        plain = address.ipv4_mapped or address
        netdev = root.text(f"{at}/gid_attrs/ndevs/{slot}") or ""
        # 100 first: `ens1np0.120`; else the name says nothing about a VLAN
        tag = re.search(r"\.(\d+)$", netdev)
        length = _prefix_length(root, netdev, str(plain)) or (24 if plain.version == 4 else 64)
        network = ipaddress.ip_network(f"{plain}/{length}", strict=False)
        return str(network), str(plain), int(tag[1]) if tag else None, netdev
    return "", "", None, ""


def _prefix_length(root: Root, netdev: str, address: str) -> int | None:
    """The length of the network that *address* is in, from the kernel's routes of the interface (IPv4)."""
    best = None
    for line in (root.text("/proc/net/route") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8 or fields[0] != netdev or fields[2] != "00000000" or "." not in address:
            continue
        mask = bin(int(fields[7], 16)).count("1")
        target = ipaddress.IPv4Address(int.from_bytes(bytes.fromhex(fields[1]), "little"))
        if mask and ipaddress.ip_address(address) in ipaddress.ip_network(f"{target}/{mask}", strict=False):
            best = max(best or 0, mask)
    return best


def _usable(root: Root, device: str) -> bool:
    """Whether this user may open the adapter's verbs device. A visible adapter that one side cannot open makes NCCL hang."""
    base = "/sys/class/infiniband_verbs"
    for name in root.names(base):
        if root.text(f"{base}/{name}/ibdev") == device:
            return os.access(root.at(f"/dev/infiniband/{name}"), os.R_OK | os.W_OK)
    return False


def _reason(layer: str, state: str, physical: str, lid: int, sm_lid: int, network: str, netdev: str) -> str:
    if layer == "iwarp":
        return "iWARP adapter: NCCL cannot use it"
    if state == "disabled":
        return "port disabled administratively"
    if state == "down":
        return "no cable or switch port down" if physical in ("2", "") else f"port down (physical state {physical})"
    if state == "init":
        if layer == "infiniband" and not lid and not sm_lid:
            return "link is up but no subnet manager reached this port (fabric has no SM)"
        return "link is up, not yet configured by the subnet manager"
    if state == "armed":
        return "subnet manager configured the port, not yet activated"
    if state == "active" and layer == "roce" and not network:
        return f"RoCE port has no IPv4/IPv6 GID: assign an address to {netdev or 'its interface'}"
    return "" if state == "active" else "state not known"


def _slow(port: Port) -> str:
    if port.state == "active" and port.rate_nominal and port.rate < 0.9 * port.rate_nominal:
        return f"trained at {port.rate:g} Gb/s, other ports of this kind at {port.rate_nominal:g}"
    return ""


def distance(root: Root, gpu: Device, port: Port) -> str:
    """How far apart a GPU and an adapter are on PCIe: PIX one switch, PXB several, PHB one root, NODE, SYS."""
    base = "/sys/bus/pci/devices"
    a = root.real(f"{base}/{gpu.bdf}").split("/")
    b = root.real(f"{base}/{port.bdf}").split("/")
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    shared = [part for part in a[:common] if re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", part)]
    if len(shared) >= 2:  # below one bridge of a switch, not only below the root port
        return "PIX" if max(len(a), len(b)) - common <= 2 else "PXB"
    if shared:
        return "PXB"
    if any(part.startswith("pci") for part in a[:common]):
        return "PHB"
    return "NODE" if gpu.numa is not None and gpu.numa == port.numa else "SYS"
