"""The comparison itself, against an inventory of the stub; and the real device where there is one."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest

from llmgw.agent.discover import Discovery
from llmgw.agent.files import Root
from llmgw.agent.settings import Settings
from llmgw.placement.inventory import Inventory
from tests.agent import worlds
from tests.agent.native import compile_library
from tests.gpu import check


def smi(count: int) -> ET.Element:
    """As `nvidia-smi -q -x` writes it, the parts that are compared."""
    gpus = "".join(
        f'<gpu id="0000{worlds.bdf(n).upper()}"><product_name>NVIDIA H100 80GB HBM3</product_name><uuid>{worlds.uuid(n)}</uuid>'
        f"<minor_number>{n}</minor_number><pci><pci_bus_id>0000{worlds.bdf(n).upper()}</pci_bus_id></pci>"
        "<fb_memory_usage><total>81559 MiB</total></fb_memory_usage><temperature><gpu_temp>43 C</gpu_temp></temperature>"
        "<gpu_power_readings><current_power_limit>700.00 W</current_power_limit></gpu_power_readings></gpu>"
        for n in range(count)
    )
    head = "<driver_version>580.95.05</driver_version><cuda_version>13.0</cuda_version>"
    return ET.fromstring(f"<nvidia_smi_log>{head}{gpus}</nvidia_smi_log>")


async def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    library = compile_library("nvml.c", "libnvidia-ml.so.1", tmp_path)
    (tmp_path / "scenario").write_text(worlds.nvswitch(2))
    monkeypatch.setenv("LLMGW_STUB_NVML", str(tmp_path / "scenario"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    async with Discovery(Settings(), Root(str(worlds.machine(tmp_path / "root")))) as discovery:
        return await discovery.look()


async def test_what_agrees_has_no_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.differences(await look(tmp_path, monkeypatch), smi(2)) == []


async def test_every_difference_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inventory = await look(tmp_path, monkeypatch)
    first = msgspec.structs.replace(inventory.devices[0], memory=1 << 30, name="NVIDIA A100", minor=7)
    wrong = msgspec.structs.replace(inventory, driver="1", devices=(first,))
    told = "\n".join(check.differences(wrong, smi(2)))
    for word in ("driver: '1'", "GPUs:", "name: 'NVIDIA A100'", "minor: '7'", "memory: 1024 MiB"):
        assert word in told


def test_the_device_of_this_machine(tmp_path: Path) -> None:
    if not check.has_gpu():
        pytest.skip("no NVIDIA GPU on this machine")
    import trio

    assert trio.run(check.look, tmp_path) == []
