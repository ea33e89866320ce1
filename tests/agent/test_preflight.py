"""Rows from worlds in which something is wrong, and the CUDA probe with a real loader."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from llmgw.agent import preflight, reference, rows
from llmgw.agent.account import account
from llmgw.agent.discover import Discovery
from llmgw.agent.files import Root
from llmgw.agent.gpus import Gpus
from llmgw.agent.preflight import Preflight, accepted, cuda_row
from llmgw.agent.report import status
from llmgw.agent.settings import Settings, parse
from llmgw.cli import main
from llmgw.placement.inventory import Check, Device, Disk, Host, Inventory, Island, Port, Process, node_state
from tests.agent.native import compile_library
from tests.agent.worlds import KVM64_FLAGS, hca, machine, pci_device

H100 = Device(uuid="GPU-1", index=0, name="NVIDIA H100", memory=80 << 30, capability=(9, 0))
FINE = Inventory(
    node="n", hostname="localhost", address="10.0.0.7", host=Host(cpu_level="x86-64-v3", cores=16, shm=64 << 30)
)


def bad(checks: object) -> dict[str, Check]:
    return {c.id: c for c in checks if not c.ok}  # type: ignore[attr-defined]


def test_driver_states() -> None:
    assert bad(preflight.driver_rows(Gpus(), 0.0)) == {}
    assert set(bad(preflight.driver_rows(Gpus(state="failed", code=9, problem="x"), 0.0))) == {"DRV-1"}
    assert set(bad(preflight.driver_rows(Gpus(state="failed", code=18, problem="x"), 0.0))) == {"DRV-2"}
    assert set(bad(preflight.driver_rows(Gpus(state="partial", problem="x"), 0.0))) == {"DRV-3"}


def test_gpu_rows() -> None:
    foreign = Process(pid=4121, name="python3", user="bob", memory=10 << 30)
    devices = (
        msgspec.structs.replace(H100, health="blocked", reason="Xid 79 (fallen off the bus: reboot needed)"),
        msgspec.structs.replace(H100, uuid="GPU-2", index=1, health="degraded", reason="PCIe x4 of x16"),
        msgspec.structs.replace(H100, uuid="GPU-3", index=2, health="blocked", reason="MIG enabled, no instance"),
        msgspec.structs.replace(H100, uuid="GPU-4", index=3, processes=(foreign, Process(pid=1, replica="r"))),
    )
    island = Island(id="nvswitch-0", kind="nvswitch", gpus=tuple(d.uuid for d in devices))
    found = bad(preflight.gpu_rows(msgspec.structs.replace(FINE, devices=devices, islands=(island,)), (1, 2), 0.0))
    assert {row: c.scope for row, c in found.items()} == {
        "GPU-1": "gpu:GPU-1",
        "GPU-2": "gpu:GPU-2",
        "GPU-5": "gpu:GPU-3",
        "GPU-4": "gpu:GPU-4",
        "GPU-6": "node",
    }
    assert found["GPU-4"].message == "GPU 3: 10.0 GiB held by pid 4121 (python3, user bob), not managed by llmgw"


def test_a_kvm64_cpu_is_told(tmp_path: Path) -> None:
    from llmgw.agent.host import read_host

    machine(tmp_path, model="Common KVM processor", flags=KVM64_FLAGS)
    inventory = msgspec.structs.replace(FINE, host=read_host(Root(str(tmp_path))))
    row = bad(preflight.host_rows(inventory, Root(str(tmp_path)), None, 0.0))["CPU-1"]
    assert 'Common KVM processor"): CPU inference and tokenisation 6-9x slower' in row.message
    assert "qm set ID --cpu host" in row.fix


def test_host_rows(tmp_path: Path) -> None:
    root = Root(str(tmp_path))
    assert bad(preflight.host_rows(FINE, root, "10.0.0.7", 0.0)) == {}
    poor = msgspec.structs.replace(
        FINE,
        address="127.0.0.1",
        devices=(H100,),
        engine_ports=(40000, 41000),
        disks=(Disk(path="/w", free=1), Disk(path="/r", free=1 << 50, read_only=True)),
        host=msgspec.structs.replace(FINE.host, shm=64 << 20, nofile=1024, cores=1.0),
    )
    found = bad(preflight.host_rows(poor, root, None, 0.0))
    assert set(found) == {"CPU-2", "LIM-2", "LIM-3", "NET-2", "NET-3", "DSK-1"}
    assert found["LIM-2"].message.startswith("/dev/shm is 64 MiB")
    assert found["DSK-1"].message == "/w has 0.0 GiB free; /r is mounted read-only"
    reserved = tmp_path / "proc/sys/net/ipv4/ip_local_reserved_ports"
    reserved.parent.mkdir(parents=True)
    reserved.write_text("8080,40000-42000\n")
    assert "NET-3" not in bad(preflight.host_rows(poor, root, None, 0.0))


@pytest.mark.parametrize(("own", "words"), [("", "does not resolve"), ("127.0.1.1", "127.0.1.1: gloo"), (None, "")])
def test_the_hosts_own_name(tmp_path: Path, own: str | None, words: str) -> None:
    found = bad(preflight.host_rows(FINE, Root(str(tmp_path)), own, 0.0))
    assert (words in found["NET-2"].message) if words else "NET-2" not in found


async def test_localhost_resolves() -> None:
    assert await preflight.resolve("localhost") == "127.0.0.1"


def test_rdma_rows(tmp_path: Path) -> None:
    hca(tmp_path, "mlx5_0", "0000:18:00.0")
    pci_device(tmp_path, "0000:99:00.0", "0x15b3", "0x020700")
    port = Port(device="mlx5_0", state="active", usable=False)
    inventory = msgspec.structs.replace(
        FINE, ports=(port,), devices=(H100,), host=msgspec.structs.replace(FINE.host, memlock=8 << 20)
    )
    found = {(c.id, c.scope): c.message for c in preflight.rdma_rows(inventory, Root(str(tmp_path)), 0.0) if not c.ok}
    assert found == {
        ("IB-1", "fabric:0000:99:00.0"): "IB: adapter 0000:99:00.0 present, mlx5_ib not loaded",
        ("IB-2", "fabric:mlx5_0/1"): "mlx5_0/1: fabric unknown (default prefix fe80::/64, no label)",
        ("IB-3", "fabric:mlx5_0/1"): "mlx5_0/1: its verbs device cannot be opened",
        ("LIM-1", "fabric:mlx5_0/1"): "memlock 8192 kB: RDMA registration will fail",
        ("IB-4", "node"): "RDMA works without GPUDirect: expect a third of the bandwidth",
    }


@pytest.mark.parametrize(
    ("offset", "word", "message"),
    [
        (None, "skip", "no server to compare with"),
        (1.0, "ok", ""),
        (-3.0, "warn", "clock is 3.0 s behind the server"),
        (92.0, "fail", "clock is 92.0 s ahead of the server"),
    ],
)
def test_clock(offset: float | None, word: str, message: str) -> None:
    check = preflight.clock_row(offset, 0.0)
    assert (status(check), check.message) == (word, message)


def test_an_accepted_row_is_a_warning_that_says_so() -> None:
    checks = (rows.result("DRV-1", "node", "driver: broken", at=0.0), rows.result("DRV-2", "node", at=0.0))
    (first, second) = accepted(checks, {"DRV-1": "no GPU models here", "DRV-2": "x"})
    assert (first.level, first.message) == ("degrade", "driver: broken (accepted by the operator: no GPU models here)")
    assert second == checks[1]
    assert node_state(msgspec.structs.replace(FINE, checks=checks)) == "not-ready"
    assert node_state(msgspec.structs.replace(FINE, checks=(first, second))) == "degraded"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("", ""),
        ("cuInit=802", "cuInit says 802: system not yet initialised: the fabric manager is not running"),
        ("cuMemAlloc=2", "cuMemAlloc says 2: out of memory"),
        ("cuMemsetD8=999", "nvidia_uvm"),
    ],
)
async def test_cuda_probe(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, said: str, words: str
) -> None:
    library = compile_library("cuda.c", "libcuda.so.1", tmp_path_factory.getbasetemp())
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setattr("llmgw.agent.account.KEPT", ("PATH", "LD_LIBRARY_PATH", "LLMGW_STUB_CUDA"))
    monkeypatch.setenv("LLMGW_STUB_CUDA", said)
    check = await cuda_row(H100, account(""), 0.0)
    assert check.ok == (not said)
    assert words in check.message


async def test_no_cuda_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    check = await cuda_row(H100, account(""), 0.0)
    assert not check.ok


async def test_the_whole_round(tmp_path: Path) -> None:
    machine(tmp_path)
    text = "version: 1\nengines: {llama-server: {command: [/no/llama-server]}}\nweights: [/none]\n"
    async with Discovery(parse(text), Root(str(tmp_path))) as discovery:
        checker = Preflight(discovery, account(""))
        inventory = await discovery.look()
        await checker.try_engines(0.0, only="llama-server")
        await checker.try_weights(["some/model"])
        found = checker.complete(inventory, 0.0, checking=False)
    failing = {(c.id, c.scope) for c in found.checks if not c.ok and c.level == "block"}
    assert failing == {("ENG-1", "engine:llama-server"), ("WGT-1", "weights:some/model")}
    assert [w.ref for w in found.weights] == ["some/model"]
    assert node_state(found) in ("ready", "degraded")  # neither row is of scope node


def test_the_document_is_as_the_code_has_it() -> None:
    text = (Path(__file__).parents[2] / "docs" / "node-onboarding.md").read_text()
    assert reference.renewed(text) == text, "run: python -m llmgw.agent.reference"
    assert all(f"| {row.id} |" in text for row in rows.ROWS)


def test_the_example_settings_can_be_read() -> None:
    text = (Path(__file__).parents[2] / "examples" / "systemd" / "agent.yaml").read_text()
    settings = parse(text, "agent.yaml")
    assert settings.programs()["vllm"] == ("/opt/vllm/bin/vllm", "serve")


def test_the_unit_leaves_engines_alone_and_starts_what_there_is() -> None:
    lines = (Path(__file__).parents[2] / "examples" / "systemd" / "llmgw-agent.service").read_text().splitlines()
    assert "KillMode=process" in lines
    (command,) = [line.partition("=")[2].split()[2:] for line in lines if line.startswith("ExecStart=")]
    flags = {name for parameter in main.commands["agent"].params for name in parameter.opts}
    assert {word for word in command if word.startswith("--")} <= flags


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze on this machine")
    text = (Path(__file__).parents[2] / "examples" / "systemd" / "llmgw-agent.service").read_text()
    unit = tmp_path / "llmgw-agent.service"
    unit.write_text(text.replace("/opt/llmgw/bin/llmgw", "/bin/true"))
    ran = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60)
    assert [line for line in ran.stderr.splitlines() if "llmgw-agent" in line] == []


def test_commands_of_the_document_run() -> None:
    text = (Path(__file__).parents[2] / "docs" / "node-onboarding.md").read_text()
    commands = [line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines()]
    assert commands
    for command in commands:
        words = command.split()
        assert words[0] == "llmgw"
        assert CliRunner().invoke(main, words[1:]).exit_code == 0, command


def test_command_line(tmp_path: Path) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text(f"version: 1\nnode: n7\nengines: {{llama-server: {{command: [{tmp_path}/none]}}}}\n")
    runner = CliRunner()
    ran = runner.invoke(main, ["agent", "--config", str(config), "--preflight", "--engine", "llama-server", "--json"])
    assert ran.exit_code == 1
    said = json.loads(ran.output)
    assert said["node"] == "n7"
    assert [c["message"] for c in said["checks"] if c["id"] == "ENG-1"] == [
        f"llama-server: {tmp_path}/none does not exist"
    ]
    assert runner.invoke(main, ["agent", "--config", str(config), "--discover"]).exit_code == 0
    assert runner.invoke(main, ["agent", "--config", str(config)]).exit_code == 2
    assert runner.invoke(main, ["agent", "--config", str(tmp_path / "no")]).exit_code == 2


def test_the_users_own_account_needs_no_switch() -> None:
    assert not account("").switch
    assert Settings().user == ""
