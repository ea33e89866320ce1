"""What a node is: GPUs and how they hang together, ports and fabrics, host, engines, weights, preflight.

The agent observes it, the server stores and places by it; it is plain JSON. Nothing here decides whether a node is to
be used: that is `llmgw.placement.constraints`. Sizes are bytes, times seconds; `None` means *not known*, never zero.
Strings that a person reads (`reason`, `message`, `fix`) are one line, without a trailing full stop.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import msgspec

IslandKind = Literal["nvswitch", "nvlink-mesh", "nvlink-pair", "pix", "pxb", "phb", "sys"]
"""How the GPUs of an island reach each other, best first; pix, pxb, phb, sys are PCIe (one switch … across sockets)."""

NVLINK: frozenset[IslandKind] = frozenset({"nvswitch", "nvlink-mesh", "nvlink-pair"})

Health = Literal["ok", "degraded", "blocked"]
CheckLevel = Literal["block", "degrade", "info"]
GIB = 1 << 30


class Process(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A process that holds memory of a GPU."""

    pid: int  # of the host, also inside a container
    name: str = ""
    user: str = ""
    memory: int | None = None
    replica: str = ""  # ours, if it belongs to one; "" = foreign


class Device(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One GPU, or one MIG instance. Its identity is *uuid*; *index* (PCI order) changes over reboots."""

    uuid: str
    index: int
    name: str  # as the driver says: "NVIDIA H100 80GB HBM3"
    memory: int  # total
    memory_free: int | None = None
    capability: tuple[int, int] | None = None  # compute capability (9, 0); None = not a CUDA device
    vendor: Literal["nvidia", "amd", "other"] = "nvidia"
    island: str = ""  # Island.id; "" = an island of its own
    bdf: str = ""  # PCI address, "0000:17:00.0"
    numa: int | None = None
    minor: int | None = None  # /dev/nvidia<minor>
    serial: str = ""
    mig: str = ""  # profile of a MIG instance ("1g.10gb"); "" = a whole GPU
    unified_memory: bool = False  # memory is the host's
    nvlink_domain: str = (
        ""  # "<cluster uuid>.<clique>": GPUs of several nodes with the same one reach each other by NVLink
    )
    health: Health = "ok"
    reason: str = ""  # why it is not ok: "Xid 79 at 12:03:11 (fallen off the bus): reboot needed"
    processes: tuple[Process, ...] = ()
    temperature: int | None = None  # °C
    power: float | None = None  # W
    power_limit: float | None = None  # W
    utilisation: float | None = None  # 0..1


class Island(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """GPUs of one node that reach each other the same way. Islands of a node do not overlap."""

    id: str
    kind: IslandKind
    gpus: tuple[str, ...]  # UUIDs, in PCI order
    links: int = 0  # the least number of NVLinks between two of them


class Port(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One port of an RDMA adapter. A fabric is a property of a port, never of a node.

    *fabric* is what the operator named it in the agent's configuration; the others are evidence, strongest first:
    *sm_guid*, *prefix* (other than the default fe80…), *network* and *vlan* (RoCE). `llmgw.placement.fabrics` judges.
    """

    device: str  # "mlx5_0"
    port: int = 1
    layer: Literal["infiniband", "roce", "iwarp"] = "infiniband"
    state: Literal["active", "armed", "init", "down", "disabled", "unknown"] = "unknown"
    rate: float = 0.0  # Gb/s as trained
    rate_nominal: float | None = None  # Gb/s of a healthy port of this kind
    guid: str = ""
    card: str = ""  # sys_image_guid: ports of one card share its PCIe bandwidth
    fabric: str = ""
    sm_guid: str = ""
    prefix: str = ""  # upper 64 bits of GID 0, 16 hex digits
    lid: int = 0
    lmc: int = 0  # the port owns LIDs lid … lid + 2**lmc - 1
    sm_lid: int = 0
    network: str = ""  # "10.20.0.0/16" of a RoCE v2 GID
    vlan: int | None = None
    rail: int | None = None  # operator's ordinal; None = by PCI order
    address: str = ""  # IP address on it, if any
    netdev: str = ""
    bdf: str = ""
    numa: int | None = None
    usable: bool = True  # the engine's user can open its verbs device
    reason: str = ""  # what is wrong: "no cable or switch port down"
    distances: dict[str, str] = {}  # GPU uuid → PIX, PXB, PHB, NODE or SYS


class Host(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The machine around the GPUs."""

    arch: str = "x86_64"
    cpu: str = ""  # model name
    cpu_level: str = ""  # "x86-64-v3"; "" = not known
    cores: float = 0.0  # usable: min(online, cgroup quota)
    memory: int = 0
    memory_available: int | None = None  # also below the cgroup's limit
    shm: int | None = None  # size of /dev/shm
    shm_free: int | None = None
    memlock: int | None = None  # of an engine's process; None = unlimited
    nofile: int | None = None
    kernel: str = ""
    machine_id: str = ""
    boot_id: str = ""
    ephemeral: tuple[int, int] = (32768, 60999)  # ports the kernel gives out
    virtual: str = ""  # "vm", "container", "vm, container"; "" = a machine of its own
    hugepages: int = 0  # reserved, bytes
    clock_synchronised: bool | None = None  # what the kernel says of its own clock


class Disk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A file system that holds weights, or would."""

    path: str
    free: int
    inodes_free: int | None = None
    read_only: bool = False
    kind: str = ""  # ext4, xfs, nfs4, overlay


class EngineInstall(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An engine that the node has. Whether it *starts* is told by the preflight checks of its scope."""

    name: str  # vllm, sglang, llama-server, sim
    version: str = ""
    path: str = ""
    cuda: str = ""  # CUDA it was built for, "13.0"; "" = none or not known
    gpu_arches: tuple[str, ...] = ()  # ("sm_90a", "compute_120"); empty = not known
    architectures: tuple[str, ...] = ()  # model architectures it knows; empty = not known
    gpu: bool = True  # it can use a GPU


class Weights(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a node has of one model's weights. *ref* is the catalogue's spelling (path or repository id)."""

    ref: str
    path: str = ""  # where they lie; "" = absent
    format: Literal["", "safetensors", "gguf", "other"] = ""
    bytes: int = 0  # of tensors that are there, without duplicates and headers
    bytes_total: int | None = None  # of the complete set; None = not known
    largest_file: int | None = None
    digest: str = ""  # of the set of files; equal on two nodes = the same weights
    problem: str = (
        ""  # "3 of 4 shards present (missing model-00003-of-00004.safetensors)"; "" = complete and well-formed
    )
    config: str = ""  # config.json as text, or the GGUF metadata as a JSON object; "" = not read


class Check(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row of preflight. *scope*: `node`, `gpu:UUID`, `engine:NAME`, `weights:REF`, `fabric:DEVICE/PORT`."""

    id: str  # "ENG-2"; stable
    scope: str
    level: CheckLevel
    ok: bool
    message: str = ""  # what was found, if not ok
    fix: str = ""  # the command or setting that cures it
    evidence: dict[str, str] = {}
    at: float = 0.0  # wall clock
    took: float = 0.0
    ttl: float = 900.0  # it may be relied on for so long
    skipped: bool = False  # it was not tried here; `message` says why, and `ok` is true


class Inventory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All that a node says of itself. Its heavy parts change rarely; two equal inventories have equal digests."""

    node: str
    agent_version: str = ""
    hostname: str = ""
    address: str = ""  # where engines of this node can be reached from the server
    os: str = ""
    driver: str = ""  # "580.95.05"; "" = none
    cuda: str = ""  # highest CUDA the driver serves, "13.0"
    gpu_library: str = ""  # real path of the library that the GPU facts came from; a stand-in cannot hide
    gpu_problem: str = ""  # GPUs exist but cannot be read: why. "" with no devices = a node without GPUs
    devices: tuple[Device, ...] = ()
    islands: tuple[Island, ...] = ()
    ports: tuple[Port, ...] = ()
    host: Host = Host()
    disks: tuple[Disk, ...] = ()
    engines: tuple[EngineInstall, ...] = ()
    weights: tuple[Weights, ...] = ()
    checks: tuple[Check, ...] = ()
    checking: bool = False  # the first round of preflight has not ended
    labels: dict[str, str] = {}  # from the agent's configuration: rack, leaf, zone, …
    taints: tuple[str, ...] = ()
    engine_ports: tuple[int, int] = (20000, 29999)  # from which replicas get their blocks
    ports_taken: tuple[int, ...] = ()  # of these, already listened on by something that is not ours


NodeState = Literal["joining", "ready", "degraded", "not-ready"]


def node_state(inventory: Inventory) -> NodeState:
    """What the checks of scope `node` amount to. Engines', GPUs' and weights' checks concern candidates, not the node."""
    failed = [c.level for c in inventory.checks if c.scope == "node" and not c.ok]
    if "block" in failed:
        return "not-ready"
    if inventory.checking:
        return "joining"
    troubled = "degrade" in failed or inventory.gpu_problem or any(d.health != "ok" for d in inventory.devices)
    return "degraded" if troubled else "ready"


_NOISE = frozenset({"nvidia", "amd", "tesla", "geforce", "quadro", "graphics", "gpu", "generation", "instinct"})


@lru_cache(maxsize=1024)  # few kinds of GPU in a cluster, few spellings in a catalogue
def type_tokens(name: str) -> frozenset[str]:
    """The words of a GPU's name that tell types apart: ``NVIDIA H100 80GB HBM3`` → {h100, 80g, hbm3}."""
    words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
    found = set()
    for word in words:
        number = word.removesuffix("gib").removesuffix("gb").removesuffix("g")
        found.add(number + "g" if number.isdigit() and number != word else word)
    return frozenset(found - _NOISE)


@lru_cache(maxsize=4096)
def is_type(wanted: str, name: str, memory: int) -> bool:
    """Does a GPU called *name* with *memory* bytes answer to *wanted* (``H100``, ``A100-40G``, ``RTX 4090``)?

    Every word of *wanted* must be a word of the name; the memory in whole GiB counts as one, so that ``A100-40G``
    and ``A100-80G`` differ even where the driver's name does not say. A MIG profile is written out: ``H100 1g.10gb``.
    """
    return type_tokens(wanted) <= type_tokens(name) | {f"{round(memory / GIB)}g"}
