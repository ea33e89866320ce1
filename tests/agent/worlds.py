"""Worlds that the agent looks at: NVML scenarios for the stub library, and re-created /sys and /proc trees."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

MIB = 1 << 20
H100 = 81559 * MIB
A100 = 40960 * MIB


def uuid(n: int) -> str:
    return f"GPU-5e0f1a10-0000-4000-8000-{n:012d}"


def bdf(n: int) -> str:
    return f"0000:{0x17 + 0x10 * n:02x}:00.0"


def gpu(n: int, **more: object) -> str:
    values: dict[str, object] = {
        "uuid": uuid(n),
        "name": "NVIDIA_H100_80GB_HBM3",
        "cc": "9.0",
        "total": H100,
        "used": 600 * MIB,
        "bdf": f"0000{bdf(n)}",
        "numa": n // 4,
        "temp": 41,
        "power": 78000,
        "limit": 700000,
        "width": 16,
        "width_max": 16,
    }
    return "gpu " + " ".join(f"{k}={v}" for k, v in (values | more).items())


def scenario(*lines: str, driver: str = "580.95.05", cuda: int = 13000) -> str:
    return "\n".join([f"driver {driver}", f"cuda {cuda}", *lines]) + "\n"


def nvswitch(count: int = 8) -> str:
    return scenario(*(gpu(n, links="18:switch") for n in range(count)))


def pcie_a100() -> str:
    """Four cards, two under each socket's root."""
    cards = [gpu(n, name="NVIDIA_A100-PCIE-40GB", cc="8.0", total=A100, numa=n // 2) for n in range(4)]
    levels = {(0, 1): 20, (2, 3): 30}
    pairs = [f"pair {a} {b} level={levels.get((a, b), 50)}" for a in range(4) for b in range(a + 1, 4)]
    return scenario(*cards, *pairs)


def tree(root: Path, files: dict[str, str], links: dict[str, str] | None = None) -> Path:
    """*files*: path → contents; *links*: path → what it points to, below the root."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    for name, target in (links or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        (root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
        path.symlink_to(Path(*[".."] * (len(path.relative_to(root).parts) - 1), target.lstrip("/")))
    return root


def pci_device(root: Path, address: str, vendor: str, kind: str, parents: Iterable[str] = ()) -> None:
    """A device at *address* below *parents* (root complex first)."""
    real = "/".join(["/sys/devices", *(parents or ["pci0000:00"]), address])
    tree(root, {f"{real}/vendor": vendor, f"{real}/class": kind}, {f"/sys/bus/pci/devices/{address}": real})


def nvidia_pci(root: Path, count: int) -> None:
    for n in range(count):
        pci_device(root, bdf(n), "0x10de", "0x030200", [f"pci0000:{n:02x}"])


def hca(
    root: Path,
    name: str,
    address: str,
    *,
    parents: Iterable[str] = ("pci0000:15",),
    layer: str = "InfiniBand",
    state: str = "4: ACTIVE",
    phys: str = "5: LinkUp",
    rate: str = "400 Gb/sec (4X NDR)",
    lid: str = "0x11",
    sm_lid: str = "0x1",
    gids: Iterable[tuple[str, str, str]] = (("fe80:0000:0000:0000:a088:c203:0012:3450", "IB/RoCE v1", ""),),
    kind: str = "MT4129",
    card: str = "a088:c203:0012:3450",
    node_type: str = "1: CA",
    numa: int = 0,
) -> None:
    """An adapter with one port. *gids*: (gid, type, netdev)."""
    real = "/".join(["/sys/devices", *parents, address])
    at = f"{real}/infiniband/{name}"
    port = f"{at}/ports/1"
    files = {
        f"{real}/vendor": "0x15b3",
        f"{real}/class": "0x020700",
        f"{real}/numa_node": str(numa),
        f"{at}/node_type": node_type,
        f"{at}/hca_type": kind,
        f"{at}/sys_image_guid": card,
        f"{port}/link_layer": layer,
        f"{port}/state": state,
        f"{port}/phys_state": phys,
        f"{port}/rate": rate,
        f"{port}/lid": lid,
        f"{port}/lid_mask_count": "0",
        f"{port}/sm_lid": sm_lid,
    }
    for slot, (gid, gid_type, netdev) in enumerate(gids):
        files[f"{port}/gids/{slot}"] = gid
        files[f"{port}/gid_attrs/types/{slot}"] = gid_type
        if netdev:
            files[f"{port}/gid_attrs/ndevs/{slot}"] = netdev
    verbs = f"/sys/class/infiniband_verbs/uverbs{len(list(root.glob('sys/class/infiniband_verbs/*')))}"
    files[f"{verbs}/ibdev"] = name
    files[f"/dev/infiniband/{verbs.rpartition('/')[2]}"] = ""
    tree(root, files, {f"{at}/device": real, f"/sys/class/infiniband/{name}": at})
    bus = root / "sys/bus/pci/devices" / address
    if not bus.is_symlink():
        tree(root, {}, {f"/sys/bus/pci/devices/{address}": real})


CPUINFO = "processor\t: 0\nmodel name\t: {model}\nflags\t\t: {flags}\n"
V3_FLAGS = "fpu vme cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
KVM64_FLAGS = "fpu de pse tsc msr pae cx16 nopl sse sse2 ssse3 hypervisor"


def machine(root: Path, *, model: str = "AMD EPYC 9454", flags: str = V3_FLAGS, memory_kb: int = 1 << 30) -> Path:
    return tree(
        root,
        {
            "/proc/cpuinfo": CPUINFO.format(model=model, flags=flags),
            "/proc/meminfo": f"MemTotal: {memory_kb} kB\nMemAvailable: {memory_kb // 2} kB\nHugepagesize: 2048 kB",
            "/proc/sys/net/ipv4/ip_local_port_range": "32768\t60999",
            "/proc/sys/kernel/random/boot_id": "91aae77d-30be-4b68-9d73-f13633b29704",
            "/etc/os-release": 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"',
        },
    )
