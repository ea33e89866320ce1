"""The machine around the GPUs: processor, memory, limits, disks, clock, ports."""

from __future__ import annotations

import ctypes
import os
import platform
import resource

from llmgw.agent.files import Root
from llmgw.agent.gpus import meminfo
from llmgw.placement.inventory import Disk, Host

V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
V4 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
STA_UNSYNC = 0x40


def cpu_flags(root: Root) -> tuple[str, frozenset[str]]:
    """Model name and flags of the first processor."""
    model, flags = "", frozenset[str]()
    for line in (root.text("/proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        key = key.strip()
        if key in ("model name", "Processor") and not model:
            model = value.strip()
        if key in ("flags", "Features") and not flags:
            flags = frozenset(value.split())
    return model, flags


def cpu_level(flags: frozenset[str]) -> str:
    """The x86-64 level by flags: names lie ("Common KVM processor" may have them all)."""
    if not flags or "fpu" not in flags:
        return ""  # not x86
    if not flags >= V2:
        return "x86-64-v1"
    if not flags >= V3:
        return "x86-64-v2"
    return "x86-64-v4" if flags >= V4 else "x86-64-v3"


def cores(root: Root) -> float:
    """Usable processors: the affinity mask, cut by the cgroup's quota."""
    online = float(len(os.sched_getaffinity(0)))
    quota = (root.text("/sys/fs/cgroup/cpu.max") or "").split()
    if len(quota) == 2 and quota[0] != "max":
        return min(online, int(quota[0]) / int(quota[1]))
    return online


def available_memory(root: Root) -> int | None:
    """MemAvailable, or what the cgroup leaves if that is less."""
    free = meminfo(root, "MemAvailable")
    limit, used = root.number("/sys/fs/cgroup/memory.max"), root.number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        room = max(limit - used, 0)
        return room if free is None else min(free, room)
    return free


def limit(which: int) -> int | None:
    """The hard limit: engines are started with the soft one raised to it. None = unlimited."""
    _, hard = resource.getrlimit(which)
    return None if hard == resource.RLIM_INFINITY else hard


def virtual(root: Root, flags: frozenset[str]) -> str:
    """Hints that this is not a machine of its own."""
    container = root.exists("/.dockerenv") or root.exists("/run/.containerenv") or root.text("/run/systemd/container")
    return ", ".join([*(["vm"] if "hypervisor" in flags else []), *(["container"] if container else [])])


def clock_synchronised() -> bool | None:
    """Whether the kernel considers its clock disciplined (adjtimex)."""
    buffer = (ctypes.c_long * 64)()  # struct timex is 208 bytes; modes = 0 reads only
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.adjtimex(ctypes.byref(buffer)) < 0:
            return None
    except (AttributeError, OSError):
        return None
    status = ctypes.cast(buffer, ctypes.POINTER(ctypes.c_int))[
        10
    ]  # modes, pad, offset, freq, maxerror, esterror, status
    return not status & STA_UNSYNC


def read_host(root: Root) -> Host:
    model, flags = cpu_flags(root)
    try:
        shm = os.statvfs(root.at("/dev/shm"))
    except OSError:
        shm = None
    span = (root.text("/proc/sys/net/ipv4/ip_local_port_range") or "32768 60999").split()
    pages, size = root.number("/proc/sys/vm/nr_hugepages") or 0, meminfo(root, "Hugepagesize") or 0
    return Host(
        arch=platform.machine(),
        cpu=model,
        cpu_level=cpu_level(flags),
        cores=cores(root),
        memory=meminfo(root, "MemTotal") or 0,
        memory_available=available_memory(root),
        shm=None if shm is None else shm.f_blocks * shm.f_frsize,
        shm_free=None if shm is None else shm.f_bavail * shm.f_frsize,
        memlock=limit(resource.RLIMIT_MEMLOCK),
        nofile=limit(resource.RLIMIT_NOFILE),
        kernel=platform.release(),
        machine_id=root.text("/etc/machine-id") or "",
        boot_id=root.text("/proc/sys/kernel/random/boot_id") or "",
        ephemeral=(int(span[0]), int(span[1])),
        virtual=virtual(root, flags),
        hugepages=pages * size,
        clock_synchronised=clock_synchronised(),
    )


def read_disk(root: Root, path: str) -> Disk | None:
    """The file system that *path* is on; None if the path does not exist."""
    try:
        stat = os.statvfs(root.at(path))
    except OSError:
        return None
    return Disk(
        path=path,
        free=stat.f_bavail * stat.f_frsize,
        inodes_free=stat.f_favail or None,
        read_only=bool(stat.f_flag & os.ST_RDONLY),
        kind=_kind(root, path),
    )


def _kind(root: Root, path: str) -> str:
    """File system type, by the longest mount point that *path* lies under."""
    best, kind = "", ""
    for line in (root.text("/proc/self/mounts") or "").splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if len(point) >= len(best) and (path == point or path.startswith(point.rstrip("/") + "/")):
            best, kind = point, fields[2]
    return kind


def listening_ports(root: Root, low: int, high: int) -> dict[int, int]:
    """Ports in [low, high] that something listens on → inode of the socket (v4 and v6)."""
    found: dict[int, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (root.text(table) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == "0A":
                port = int(fields[1].rpartition(":")[2], 16)
                if low <= port <= high:
                    found[port] = int(fields[9])
    return found
