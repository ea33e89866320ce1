"""GPUs through a real loader: the helper process with a stub libnvidia-ml.so.1 that tells what a text file says."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from llmgw.agent import gpus
from llmgw.agent.files import Root
from llmgw.agent.gpus import Ailments, Gpus, Helper, assemble
from tests.agent import worlds
from tests.agent.native import compile_library
from tests.agent.worlds import bdf, gpu, scenario, uuid


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the stub."""
    return compile_library("nvml.c", "libnvidia-ml.so.1", tmp_path_factory.mktemp("nvml")).parent


class Box:
    """A machine with NVIDIA cards: the stub's file, and the PCI list."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, library: Path | None) -> None:
        self.file, self.root = folder / "scenario", worlds.machine(folder / "root")
        monkeypatch.setenv("LLMGW_STUB_NVML", str(self.file))
        monkeypatch.setenv("LD_LIBRARY_PATH", "" if library is None else str(library))
        self.helper, self.ailments = Helper(), Ailments()

    async def look(self, text: str | None = None) -> Gpus:
        if text is not None:
            self.file.write_text(text)
        report = await self.helper.report()
        now = trio.current_time()
        self.ailments.note(report, now)
        return assemble(report, Root(str(self.root)), self.ailments, now)


@pytest.fixture
async def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvml: Path) -> AsyncIterator[Box]:
    box = Box(tmp_path, monkeypatch, nvml)
    yield box
    await box.helper.close()


@pytest.fixture
async def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Box]:
    box = Box(tmp_path, monkeypatch, None)
    yield box
    await box.helper.close()


async def test_eight_h100_on_nvswitch_are_one_island(box: Box) -> None:
    worlds.nvidia_pci(box.root, 8)
    found = await box.look(worlds.nvswitch())

    assert (found.state, found.driver, found.cuda, found.problem) == ("ok", "580.95.05", "13.0", "")
    assert [(i.kind, len(i.gpus), i.links) for i in found.islands] == [("nvswitch", 8, 18)]
    first = found.devices[0]
    assert (first.name, first.capability, first.memory) == ("NVIDIA H100 80GB HBM3", (9, 0), worlds.H100)
    assert first.memory_free == worlds.H100 - (600 << 20)
    assert (first.bdf, first.numa, first.power, first.health) == (bdf(0), 0, 78.0, "ok")
    assert {d.island for d in found.devices} == {found.islands[0].id}
    assert found.library.endswith("libnvidia-ml.so.1")


async def test_four_a100_on_pcie_are_an_island_a_socket(box: Box) -> None:
    found = await box.look(worlds.pcie_a100())
    assert [(i.kind, i.gpus) for i in found.islands] == [("pxb", (uuid(0), uuid(1))), ("phb", (uuid(2), uuid(3)))]


async def test_bridged_pairs_are_islands_with_their_links_counted(box: Box) -> None:
    to = {0: 1, 1: 0, 2: 3, 3: 2}
    found = await box.look(scenario(*(gpu(n, links=f"4:0000{bdf(to[n])}") for n in range(4))))
    assert [(i.kind, i.gpus, i.links) for i in found.islands] == [
        ("nvlink-pair", (uuid(0), uuid(1)), 4),
        ("nvlink-pair", (uuid(2), uuid(3)), 4),
    ]


async def test_in_a_virtual_machine_peer_access_tells_the_island(box: Box) -> None:
    found = await box.look(scenario(*(gpu(n) for n in range(3)), "pair 0 1 p2p=0", "pair 0 2 p2p=0", "pair 1 2 p2p=0"))
    assert [(i.kind, len(i.gpus)) for i in found.islands] == [("nvlink-mesh", 3)]


async def test_mig_instances_are_devices(box: Box) -> None:
    parts = [f"mig gpu=0 uuid=MIG-{n} name=NVIDIA_H100_MIG_1g.10gb total={10 << 30}" for n in range(3)]
    found = await box.look(scenario(gpu(0, mig=1), gpu(1, mig=0), *parts))
    assert [(d.uuid, d.mig) for d in found.devices] == [
        ("MIG-0", "1g.10gb"),
        ("MIG-1", "1g.10gb"),
        ("MIG-2", "1g.10gb"),
        (uuid(1), ""),
    ]


@pytest.mark.parametrize(
    ("more", "health", "words"),
    [
        ({"mig": 1}, "blocked", "no instance created"),
        ({"mig": 0, "mig_pending": 1}, "blocked", "MIG mode changes"),
        ({"recovery": 2}, "blocked", "reboot the node"),
        ({"remap_failed": 1}, "blocked", "remapping failed"),
        ({"compute_mode": 2}, "blocked", "prohibited"),
        ({"width": 4}, "degraded", "PCIe x4 of x16"),
        ({"ecc_uncorr": 3}, "degraded", "3 uncorrected ECC"),
        ({"remap_pending": 1}, "degraded", "waits for a reset"),
    ],
)
async def test_health_of_one_gpu(box: Box, more: dict[str, object], health: str, words: str) -> None:
    device = (await box.look(scenario(gpu(0, **more)))).devices[0]
    assert device.health == health
    assert words in device.reason


async def test_a_slowdown_counts_when_it_lasts(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    text = scenario(gpu(0, reasons=0x40, temp=88))
    assert (await box.look(text)).devices[0].health == "ok"
    monkeypatch.setattr(gpus, "THROTTLE_GRACE", 0.0)
    device = (await box.look(text)).devices[0]
    assert (device.health, device.reason) == ("degraded", "hardware slowdown at 88 °C: check cooling and power")


async def test_an_application_xid_leaves_the_gpu_healthy_and_79_blocks_it(box: Box) -> None:
    found = await box.look(scenario(gpu(0), gpu(1), "event gpu=0 xid=31", "event gpu=1 xid=79"))
    assert [d.health for d in found.devices] == ["ok", "blocked"]
    assert found.devices[1].reason == "Xid 79 (fallen off the bus: reboot needed)"
    again = await box.look()
    assert again.devices[1].health == "blocked"
    box.ailments.cured(uuid(1))
    assert (await box.look()).devices[1].health == "ok"


async def test_a_gpu_that_dies_between_two_looks(box: Box) -> None:
    worlds.nvidia_pci(box.root, 2)
    assert (await box.look(scenario(gpu(0), gpu(1)))).problem == ""
    found = await box.look(scenario(gpu(0), gpu(1), "fail gpu=1 call=DeviceGetHandleByIndex rc=15"))
    assert found.state == "partial"
    assert found.problem == f"1 of 2 GPUs answer NVML; missing {bdf(1)}"
    assert [d.uuid for d in found.devices] == [uuid(0)]


async def test_a_lost_gpu_whose_handle_still_works(box: Box) -> None:
    found = await box.look(scenario(gpu(0), "fail gpu=0 call=DeviceGetMemoryInfo rc=15"))
    assert (found.devices[0].health, found.devices[0].reason) == ("blocked", gpus.ERRORS[15])


async def test_driver_mismatch_names_both_versions(box: Box) -> None:
    worlds.nvidia_pci(box.root, 1)
    worlds.tree(box.root, {"/sys/module/nvidia/version": "570.133.20"})
    found = await box.look("driver 580.95.05\ninit_rc 18\n")
    assert found.state == "failed"
    assert "does not match loaded kernel module 570.133.20; reboot" in found.problem


@pytest.mark.parametrize(("rc", "words"), [(9, "modprobe nvidia"), (4, "/dev/nvidia"), (999, "restart it")])
async def test_a_driver_that_fails_says_why(box: Box, rc: int, words: str) -> None:
    worlds.nvidia_pci(box.root, 1)
    found = await box.look(f"init_rc {rc}\n")
    assert (found.state, found.devices) == ("failed", ())
    assert words in found.problem


async def test_a_driver_loaded_later_is_found(box: Box) -> None:
    assert (await box.look("init_rc 9\n")).state == "failed"
    assert (await box.look(scenario(gpu(0)))).state == "ok"


async def test_a_hung_driver_costs_the_helper_only(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "DEADLINE", 2.0)
    assert (await box.look(scenario(gpu(0)))).state == "ok"
    monkeypatch.setattr(gpus, "DEADLINE", 0.3)
    found = await box.look(scenario(gpu(0), "sleep call=DeviceGetUtilizationRates ms=30000"))
    assert (found.state, found.problem) == ("failed", "NVML hung: no answer in 0.3 s")
    monkeypatch.setattr(gpus, "DEADLINE", 5.0)
    assert (await box.look(scenario(gpu(0)))).state == "ok"


async def test_no_library_and_no_card_is_a_healthy_cpu_node(bare: Box) -> None:
    found = await bare.look()
    assert (found.state, found.problem) == ("none", "")


async def test_a_card_without_library_is_a_node_in_trouble(bare: Box) -> None:
    worlds.nvidia_pci(bare.root, 1)
    found = await bare.look()
    assert found.state == "failed"
    assert "libnvidia-ml.so.1 not found" in found.problem


async def test_who_holds_memory(box: Box) -> None:
    found = await box.look(scenario(gpu(0), f"proc gpu=0 pid={os.getpid()} used=1048576"))
    (holder,) = found.devices[0].processes
    assert (holder.pid, holder.memory, holder.replica) == (os.getpid(), 1 << 20, "")


async def test_unified_memory_is_the_hosts(box: Box) -> None:
    device = (await box.look(f"driver 1\ngpu uuid={uuid(0)} name=GB10 cc=12.1 bdf=0000{bdf(0)}\n")).devices[0]
    assert device.unified_memory
    assert device.memory == 1 << 40


async def test_multi_node_nvlink_domain(box: Box) -> None:
    text = scenario(
        gpu(0, cluster="0f" * 16, clique=7), gpu(1, cluster="00" * 16), gpu(2, cluster="0f" * 16, fabric_v2=1)
    )
    domains = [d.nvlink_domain for d in (await box.look(text)).devices]
    assert domains == [f"{'0f' * 4}-0f0f-0f0f-0f0f-{'0f' * 6}.7", "", f"{'0f' * 4}-0f0f-0f0f-0f0f-{'0f' * 6}.0"]
