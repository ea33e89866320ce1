"""Discovery and preflight on a machine with NVIDIA GPUs, beside `nvidia-smi -q -x`: `python -m tests.gpu.check [OUT]`.

Below five minutes; changes nothing. Prints every difference and every failing row of the GPUs and the driver; exit
code 0 none, 1 some, 77 no GPU here. OUT: a folder for what was seen (inventory.json, nvidia-smi.xml).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import trio

from llmgw.agent.account import account
from llmgw.agent.discover import Discovery
from llmgw.agent.nvml import sysfs_bdf
from llmgw.agent.preflight import Preflight
from llmgw.agent.settings import Settings
from llmgw.placement.inventory import Inventory

NO_GPU = 77
MIB = 1 << 20
TEMPERATURE = 15  # °C that two looks may differ by


def text(node: ET.Element, path: str) -> str:
    found = node.findtext(path)
    return "" if found is None else found.strip()


def number(node: ET.Element, *paths: str) -> float | None:
    """The first of *paths* that holds a figure: their names differ between drivers."""
    for path in paths:
        words = text(node, path).split()
        if words and words[0].replace(".", "", 1).isdigit():
            return float(words[0])
    return None


def differences(found: Inventory, smi: ET.Element) -> list[str]:
    """What the inventory and `nvidia-smi` say differently."""
    lines: list[str] = []

    def same(what: str, ours: object, theirs: object) -> None:
        if ours != theirs:
            lines.append(f"{what}: {ours!r}, nvidia-smi says {theirs!r}")

    same("driver", found.driver, text(smi, "driver_version"))
    same("CUDA", found.cuda, text(smi, "cuda_version"))
    theirs = {text(g, "uuid"): g for g in smi.findall("gpu")}
    ours = {d.uuid: d for d in found.devices if not d.mig}
    parts = {d.bdf for d in found.devices if d.mig}
    same(
        "GPUs", sorted(ours), sorted(u for u, g in theirs.items() if sysfs_bdf(text(g, "pci/pci_bus_id")) not in parts)
    )
    for uuid in ours.keys() & theirs.keys():
        device, gpu = ours[uuid], theirs[uuid]
        same(f"{uuid} name", device.name, text(gpu, "product_name"))
        same(f"{uuid} bus id", device.bdf, sysfs_bdf(text(gpu, "pci/pci_bus_id")))
        same(f"{uuid} minor", str(device.minor), text(gpu, "minor_number"))
        total = number(gpu, "fb_memory_usage/total")
        if total is not None and not device.unified_memory and abs(device.memory / MIB - total) > 1:
            lines.append(f"{uuid} memory: {device.memory / MIB:.0f} MiB, nvidia-smi says {total:.0f}")
        heat = number(gpu, "temperature/gpu_temp")
        if heat is not None and device.temperature is not None and abs(device.temperature - heat) > TEMPERATURE:
            lines.append(f"{uuid} temperature: {device.temperature}, nvidia-smi says {heat:.0f}")
        limit = number(gpu, "gpu_power_readings/current_power_limit", "power_readings/enforced_power_limit")
        if limit is not None and device.power_limit is not None and abs(device.power_limit - limit) > 1:
            lines.append(f"{uuid} power limit: {device.power_limit}, nvidia-smi says {limit}")
    return lines


async def look(folder: Path | None) -> list[str]:
    settings = Settings(weights=())
    async with Discovery(settings) as discovery:
        checker = Preflight(discovery, account(""))
        await discovery.look()
        await checker.try_gpus(time.time())
        inventory = checker.complete(await discovery.look(), time.time(), checking=False)
    smi = (await trio.run_process(["nvidia-smi", "-q", "-x"], capture_stdout=True)).stdout
    if folder is not None:
        (folder / "inventory.json").write_bytes(msgspec.json.format(msgspec.json.encode(inventory)))
        (folder / "nvidia-smi.xml").write_bytes(smi)
    problems = differences(inventory, ET.fromstring(smi))
    rows = [c for c in inventory.checks if c.id.startswith(("DRV", "GPU"))]
    problems += [f"{c.id} {c.scope}: {c.message}" for c in rows if not c.ok]
    probed = {c.scope for c in rows if c.id == "GPU-3"}
    problems += [
        f"gpu:{d.uuid} was not probed" for d in inventory.devices if f"gpu:{d.uuid}" not in probed and not d.processes
    ]
    for d in inventory.devices:
        sys.stdout.write(f"GPU {d.index} {d.uuid} {d.name} {d.memory // MIB} MiB {d.health} island {d.island or '-'}\n")
    return problems


def has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    ran = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60)
    return ran.returncode == 0 and "GPU 0" in ran.stdout


def main() -> int:
    if not has_gpu():
        sys.stdout.write("no NVIDIA GPU on this machine: skipped\n")
        return NO_GPU
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with_problems = trio.run(look, folder)
    for line in with_problems:
        sys.stdout.write(f"DIFFERS {line}\n")
    sys.stdout.write(f"{len(with_problems)} differences\n")
    return int(bool(with_problems))


if __name__ == "__main__":
    sys.exit(main())
