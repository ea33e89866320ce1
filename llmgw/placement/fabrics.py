"""Which fabric a port is on, from evidence: the operator's word, the subnet manager, the subnet prefix, the IP network.

A wrong guess is expensive (two isolated fabrics with the default prefix look like one: ranks meet over TCP, then every
queue pair times out), so ports that nothing tells apart are *unresolved* and carry no group, until the operator names
them, declares that there is one fabric only, or gives one fabric a prefix of its own.

Within one InfiniBand subnet every port sees the same sm_lid and LID ranges do not overlap; so an overlap *proves* that
there are two, while no overlap proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from llmgw.placement.inventory import Inventory, Port

DEFAULT_PREFIX = "fe80000000000000"
GOOD_RATE = 0.9  # of the nominal rate: a port below it is no rail


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """How a node hangs on one fabric."""

    fabric: str
    rails: int  # ports that are active, usable and run at their rate
    ports: tuple[Port, ...]  # these ports, by rail
    troubles: tuple[str, ...] = ()  # of the others: "mlx5_3/1: no cable or switch port down"


class Fabrics(msgspec.Struct, frozen=True, kw_only=True):
    """What all ports together tell."""

    attached: dict[str, dict[str, Attachment]]  # node → fabric → how
    unresolved: dict[str, tuple[str, ...]]  # node → ports that nothing tells apart, with why
    down: dict[str, tuple[str, ...]]  # node → ports that no fabric reaches
    conflicts: tuple[str, ...] = ()  # evidence against what the operator said


def evidence(port: Port) -> str:
    """The strongest evidence that the port itself gives: ``sm:…``, ``px:…``, ``roce:…`` or nothing."""
    if port.layer == "roce":
        if not port.network:
            return ""
        return f"roce:{port.network}" + (f".{port.vlan}" if port.vlan is not None else "")
    if port.sm_guid:
        return f"sm:{port.sm_guid}"
    prefix = port.prefix.replace(":", "").removeprefix("0x").lower()
    return f"px:{prefix}" if prefix and prefix != DEFAULT_PREFIX else ""


def resolve(nodes: Iterable[Inventory], assume_single: bool = False) -> Fabrics:
    """Judge all ports of all *nodes*. The order of nodes does not matter."""
    inventories = sorted((n for n in nodes if n.ports), key=lambda n: n.node)
    names, conflicts = _operator_names(inventories)
    single, clash = _default_fabric(inventories) if assume_single else ("", "")
    attached: dict[str, dict[str, Attachment]] = {}
    unresolved: dict[str, tuple[str, ...]] = {}
    down: dict[str, tuple[str, ...]] = {}
    for inventory in inventories:
        by: dict[str, list[Port]] = {}
        loose, dead = [], []
        for port in sorted(inventory.ports, key=_rail_order):
            key = evidence(port)
            fabric = port.fabric or names.get(key, key)
            where = f"{port.device}/{port.port}"
            if not fabric and port.state not in ("active", "armed"):
                dead.append(f"{where}: {port.reason or port.state}")
            elif not fabric and port.layer == "infiniband" and single:
                by.setdefault(single, []).append(port)
            elif not fabric:
                loose.append(f"{where}: {clash or 'fabric unknown (default prefix fe80::/64, no name)'}")
            else:
                by.setdefault(fabric, []).append(port)
        attached[inventory.node] = {fabric: _attachment(fabric, ports) for fabric, ports in by.items()}
        unresolved[inventory.node] = tuple(loose)
        down[inventory.node] = tuple(dead)
    return Fabrics(attached=attached, unresolved=unresolved, down=down, conflicts=tuple(conflicts))


def is_rail(port: Port) -> bool:
    slow = port.rate_nominal is not None and port.rate < GOOD_RATE * port.rate_nominal
    return port.state == "active" and port.usable and port.layer != "iwarp" and not slow


def _rail_order(port: Port) -> tuple[bool, int, str, str, int]:
    return (port.rail is None, port.rail or 0, port.bdf, port.device, port.port)


def _attachment(fabric: str, ports: list[Port]) -> Attachment:
    good = tuple(p for p in ports if is_rail(p))
    troubles = tuple(
        f"{p.device}/{p.port}: {p.reason or (p.state if p.state != 'active' else 'too slow or not to be opened')}"
        for p in ports
        if not is_rail(p)
    )
    return Attachment(fabric=fabric, rails=len(good), ports=good, troubles=troubles)


def _operator_names(inventories: list[Inventory]) -> tuple[dict[str, str], list[str]]:
    """Evidence → the operator's name: naming one port names all that the same evidence joins to it."""
    said: dict[str, set[str]] = {}
    for inventory in inventories:
        for port in inventory.ports:
            if port.fabric and (key := evidence(port)):
                said.setdefault(key, set()).add(port.fabric)
    conflicts = [
        f"{key} is called {' and '.join(sorted(names))}: ports that it joins have two names"
        for key, names in sorted(said.items())
        if len(names) > 1
    ]
    return {key: next(iter(names)) for key, names in said.items() if len(names) == 1}, conflicts


def _default_fabric(inventories: list[Inventory]) -> tuple[str, str]:
    """The name of the one fabric that ports without evidence are on, or the proof that there are two."""
    owners: dict[int, str] = {}
    managers: dict[int, str] = {}
    for inventory in inventories:
        for port in inventory.ports:
            if port.fabric or evidence(port) or port.layer != "infiniband" or port.state != "active":
                continue
            where = f"{inventory.node} {port.device}/{port.port}"
            managers.setdefault(port.sm_lid, where)
            for lid in range(port.lid, port.lid + (1 << min(port.lmc, 7))):
                if other := owners.get(lid):
                    return (
                        "",
                        f"LID {lid:#x} is on {other} and on {where}: at least two fabrics share the default prefix",
                    )
                owners[lid] = where
    if len(managers) > 1:
        first, second = (f"{lid:#x} ({where})" for lid, where in sorted(managers.items())[:2])
        return "", f"subnet managers {first} and {second} differ: at least two fabrics share the default prefix"
    return ("default", "") if owners else ("", "")
