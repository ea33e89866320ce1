"""The node as the ground of its replicas, on a machine that the NVML stub and a tree of files describe."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from llmgw.agent.account import account
from llmgw.agent.discover import Discovery
from llmgw.agent.files import Root
from llmgw.agent.node import Node
from llmgw.agent.preflight import Preflight
from llmgw.agent.settings import parse
from llmgw.agent.state import State
from llmgw.agent.supervise import Refusal
from llmgw.control.observed import Desired, Group, Ports
from llmgw.errors import ConfigError
from llmgw.net.world import RealWorld
from tests.agent import worlds
from tests.agent.native import compile_library
from tests.agent.test_weights import safetensors
from tests.agent.worlds import gpu, scenario, uuid

SETTINGS = """
version: 1
node: gpu-1
address: 10.0.0.7
interface: eth9
engines: {{vllm: {{command: [/opt/vllm/bin/vllm, serve]}}}}
weights: [{weights}]
fabrics: [{{fabric: ib-a, device: mlx5_0}}]
"""

DESIRED = Desired(
    replica="llama-1", model="llama", epoch=1, generation=1, engine="vllm", weights="llama", ports=Ports(20000),
    gpus=(uuid(0),), memory_fraction=0.9,
)  # fmt: skip


class Ground:
    """A node with two H100 and one adapter."""

    def __init__(self, folder: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.file = folder, folder / "scenario"
        monkeypatch.setenv("LLMGW_STUB_NVML", str(self.file))
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
        self.file.write_text(scenario(gpu(0), gpu(1)))
        root = worlds.machine(folder / "root")
        worlds.hca(root, "mlx5_0", "0000:18:00.0")
        gids = [("fec0:0000:0000:0001:a088:c203:0012:9990", "IB/RoCE v1", "")]
        worlds.hca(root, "mlx5_1", "0000:28:00.0", gids=gids)
        model = folder / "weights" / "llama"
        model.mkdir(parents=True)
        safetensors(model / "model.safetensors", 64)
        (model / "config.json").write_text("{}")
        (model / "tokenizer.json").write_text("{}")
        self.model, self.root = model, root

    @asynccontextmanager
    async def node(self) -> AsyncIterator[Node]:
        settings = parse(SETTINGS.format(weights=self.folder / "weights"))
        user = account("")
        async with Discovery(settings, Root(str(self.root))) as discovery:
            state = State.open(str(self.folder / "state"), user)
            node = Node(discovery, Preflight(discovery, user), state, RealWorld(seed=0), lambda _text: None)
            node.checking = False
            await node.look()
            yield node


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    return Ground(tmp_path, compile_library("nvml.c", "libnvidia-ml.so.1", tmp_path).parent, monkeypatch)


def change(desired: Desired, **more: object) -> Desired:
    return msgspec.structs.replace(desired, **more)


async def test_good_ground(ground: Ground) -> None:
    async with ground.node() as node:
        assert await node.check(DESIRED) is None
        launch = node.launch(DESIRED, "key")
        assert (launch.program, launch.model) == (("/opt/vllm/bin/vllm", "serve"), str(ground.model))
        assert (launch.host, launch.first_port, launch.gpus, launch.key) == ("10.0.0.7", 20000, (uuid(0),), "key")
        assert launch.folder == str(ground.folder / "state" / "replicas" / "llama-1")


async def test_strangers_on_the_gpu_are_named(ground: Ground) -> None:
    async with ground.node() as node:
        ground.file.write_text(scenario(gpu(0, used=worlds.H100 // 2), gpu(1), "proc gpu=0 pid=1 used=9"))
        refusal = await node.check(DESIRED)
        assert refusal is not None
        assert (refusal.row, refusal.retry) == ("GPU-4", "gpu-free")
        assert "39.8 GiB free, 71.7 needed; held by pid 1" in refusal.message
        assert await node.check(change(DESIRED, engine="llama-server")) is None  # it takes what it needs, no share


async def test_a_gpu_that_is_gone_or_blocked(ground: Ground) -> None:
    async with ground.node() as node:
        before = node.inputs()
        ground.file.write_text(scenario(gpu(1, recovery=2)))
        gone, blocked = await node.check(DESIRED), await node.check(change(DESIRED, gpus=(uuid(1),)))
        assert gone is not None
        assert f"{uuid(0)} is not on this node" in gone.message
        assert blocked is not None
        assert "GPU-1" in blocked.message
        assert "reboot the node" in blocked.message
        assert node.inputs() != before


async def test_weights_are_looked_at_just_before_a_start(ground: Ground) -> None:
    async with ground.node() as node:
        assert await node.check(DESIRED) is None
        absent = await node.check(change(DESIRED, weights="none"))
        assert absent is not None
        assert (absent.row, absent.retry) == ("WGT-1", "never")
        (ground.model / "model.safetensors").write_bytes(b"short")
        damaged = await node.check(DESIRED)
        assert damaged is not None
        assert damaged.row == "WGT-3"
        with pytest.raises(ConfigError, match="weights 'none' are not on this node"):
            node.launch(change(DESIRED, weights="none"), "k")
        with pytest.raises(ConfigError, match="engine 'sglang' is not on this node"):
            node.launch(change(DESIRED, engine="sglang"), "k")


async def test_host_memory(ground: Ground) -> None:
    worlds.machine(ground.root, memory_kb=1 << 20)
    async with ground.node() as node:
        refusal = await node.check(DESIRED)
        expected = "MEM-1: host memory: 0 GiB available, loading needs about 2 GiB"
        assert refusal == Refusal("MEM-1", expected, "backoff")


async def test_the_fabric_of_a_group_reaches_the_engine(ground: Ground) -> None:
    group = Group(rank=1, size=2, leader="10.0.0.6", port=20065, fabric="ib-a", hcas=("mlx5_0:1",))
    async with ground.node() as node:
        await node.check(DESIRED)
        launch = node.launch(change(DESIRED, group=group), "k")
        assert launch.fabric_env["NCCL_IB_HCA"] == "=mlx5_0:1"
        assert launch.fabric_env["NCCL_SOCKET_IFNAME"] == "=eth9"
        assert (launch.rank, launch.nodes, launch.head, launch.head_first_port) == (1, 2, "10.0.0.6", 20064)
        assert node.fabrics(change(DESIRED, group=group)) == ("ib-a",)
        assert node.fabrics(DESIRED) == ("ib-a", "px:fec0000000000001")
        plain = node.launch(
            change(DESIRED, group=Group(rank=0, size=2, leader="10.0.0.7", port=20001, fabric="ethernet")), "k"
        )
        assert plain.fabric_env["NCCL_NET"] == "Socket"


async def test_memory_that_is_still_held(ground: Ground) -> None:
    async with ground.node() as node:
        ground.file.write_text(scenario(gpu(0), gpu(1), f"proc gpu=0 pid=77 used={5 << 30}"))
        assert await node.still_held(DESIRED, frozenset({77})) == "GPU 0: 5 GiB still held by pid 77"
        assert await node.still_held(DESIRED, frozenset({78})) == ""
        assert await node.still_held(change(DESIRED, gpus=(uuid(1),)), frozenset({77})) == ""
        assert node.effort(change(DESIRED, gpus=(uuid(0), uuid(1)))) == 156.0


async def test_our_own_engines_are_no_strangers(ground: Ground) -> None:
    async with ground.node() as node:
        ground.file.write_text(scenario(gpu(0), gpu(1), "proc gpu=0 pid=77 used=9"))
        await node.look()
        assert [c.id for c in node.inventory.checks if c.id == "GPU-4" and not c.ok] == ["GPU-4"]
        node.members = lambda: {77: "llama-1"}
        await node.look()
        assert [c.id for c in node.inventory.checks if c.id == "GPU-4" and not c.ok] == []
        assert node.inventory.devices[0].processes[0].replica == "llama-1"


async def test_what_happens_to_hardware_is_logged(ground: Ground) -> None:
    async with ground.node() as node:
        lines: list[str] = []
        node.log = lines.append
        ground.file.write_text(scenario(gpu(0), gpu(1), "event gpu=1 xid=79"))
        await node.look()  # reads the file
        await node.look()  # hears of the event
        assert lines == [f"GPU 1 ({uuid(1)}) is blocked: Xid 79 (fallen off the bus: reboot needed)"]
        assert json.loads(node.inputs())[0][1] == [uuid(1), "blocked"]
