"""The machine around the GPUs, from re-created /proc trees, and this machine for what cannot be re-created."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from llmgw.agent import host
from llmgw.agent.discover import Discovery, changes, default_address
from llmgw.agent.files import Root
from llmgw.agent.settings import Settings, parse
from llmgw.errors import ConfigError
from llmgw.placement.inventory import Device, Inventory, Port
from tests.agent.worlds import KVM64_FLAGS, V3_FLAGS, machine, tree


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (V3_FLAGS, "x86-64-v3"),
        (V3_FLAGS + " avx512f avx512bw avx512cd avx512dq avx512vl", "x86-64-v4"),
        (V3_FLAGS.replace(" avx2", ""), "x86-64-v2"),
        (KVM64_FLAGS, "x86-64-v1"),
        ("fp asimd evtstrm sve", ""),
    ],
)
def test_cpu_level_goes_by_flags(tmp_path: Path, flags: str, level: str) -> None:
    machine(tmp_path, model="Common KVM processor", flags=flags)
    found = host.read_host(Root(str(tmp_path)))
    assert (found.cpu, found.cpu_level) == ("Common KVM processor", level)
    assert found.virtual == ("vm" if "hypervisor" in flags else "")


def test_the_cgroup_cuts_memory_and_cores(tmp_path: Path) -> None:
    machine(tmp_path)
    tree(
        tmp_path,
        {
            "/sys/fs/cgroup/memory.max": str(8 << 30),
            "/sys/fs/cgroup/memory.current": str(3 << 30),
            "/sys/fs/cgroup/cpu.max": "50000 100000",
        },
    )
    found = host.read_host(Root(str(tmp_path)))
    assert (found.memory_available, found.cores) == (5 << 30, 0.5)


def test_this_machine_is_read_too() -> None:
    found = host.read_host(Root())
    assert found.memory > 0
    assert found.cores > 0
    assert found.boot_id
    assert found.shm is None or found.shm > 0


def test_listening_ports_are_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        assert port in host.listening_ports(Root(), port, port)
    assert port not in host.listening_ports(Root(), port, port)


def test_disk(tmp_path: Path) -> None:
    disk = host.read_disk(Root(), str(tmp_path))
    assert disk is not None
    assert disk.free > 0
    assert disk.kind
    assert host.read_disk(Root(), str(tmp_path / "none")) is None


def test_the_default_address_is_literal() -> None:
    assert socket.inet_aton(default_address())


async def test_discovery_puts_it_together(tmp_path: Path) -> None:
    machine(tmp_path)
    text = "version: 1\nnode: gpu-7\naddress: 10.0.0.7\nlabels: {rack: r1}\nports: 20000-20999\nweights: [/w]\n"
    tree(tmp_path, {"/w/x": ""})
    async with Discovery(parse(text), Root(str(tmp_path))) as discovery:
        found = await discovery.look()
    assert (found.node, found.address, found.labels, found.engine_ports) == (
        "gpu-7",
        "10.0.0.7",
        {"rack": "r1"},
        (20000, 20999),
    )
    assert [d.path for d in found.disks] == ["/w"]
    assert found.os == "Debian GNU/Linux 12 (bookworm)"


def test_what_came_and_went_is_told() -> None:
    one, two = (
        Device(uuid="GPU-1", index=0, name="H100", memory=1),
        Device(uuid="GPU-2", index=1, name="H100", memory=1),
    )
    bad = Device(uuid="GPU-1", index=0, name="H100", memory=1, health="blocked", reason="Xid 79")
    before = Inventory(node="n", devices=(one, two), ports=(Port(device="mlx5_0", state="active", rate=400),))
    after = Inventory(node="n", devices=(bad,), ports=(Port(device="mlx5_0", state="down", reason="no cable"),))
    assert changes(before, after) == [
        "GPU 1 (GPU-2) disappeared",
        "GPU 0 (GPU-1) is blocked: Xid 79",
        "port mlx5_0/1 is down, 0 Gb/s: no cable",
    ]
    assert changes(before, before) == []


def test_settings_report_all_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("version: 1\nports: 80-90\nengines: {vlm: {command: [x]}}\nstate: here\nfrobnicate: 1\n", "agent.yaml")
    text = str(caught.value)
    assert "agent.yaml:2" in text
    assert "frobnicate" in text
    assert "state" in text


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown engine 'vlm'; known: llama-server, sglang, sim, vllm"):
        parse("version: 1\nengines: {vlm: {command: [x]}}\n")


def test_the_simulated_engine_is_always_there() -> None:
    assert "sim" in Settings().programs()
    assert parse("").node == ""
