"""A real engine through the agent: `nox -s engines`. llama-server on the CPU, with a tiny model.

LLMGW_LLAMA_SERVER  the binary; without it this is skipped
LLMGW_LLAMA_MODEL   a GGUF file of a chat model that writes for a few seconds when asked for 400 tokens; without it,
                    one is made by ../shared/tools/tiny-model, where that and its packages are there
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import trio

from llmgw.agent.account import account
from llmgw.agent.files import Root
from llmgw.agent.local import start_time
from llmgw.agent.weights import inspect
from llmgw.control.observed import Desired, EndpointFacts, Ports
from llmgw.net.client import Client
from llmgw.net.world import RealWorld
from llmgw.request import Target
from tests.agent.fake_server import Control, open_site
from tests.agent.processes import gone
from tests.agent.test_agent import ROOT, Agents, free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

TOKENS = 400


@pytest.fixture(scope="module")
def server() -> str:
    found = os.environ.get("LLMGW_LLAMA_SERVER", "")
    if not found:
        pytest.skip("LLMGW_LLAMA_SERVER names no llama-server")
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    given = os.environ.get("LLMGW_LLAMA_MODEL", "")
    if given:
        return given
    tool = ROOT.parent / "shared" / "tools" / "tiny-model"
    if not tool.exists():
        pytest.skip("LLMGW_LLAMA_MODEL names no model, and there is no tool to make one")
    folder = tmp_path_factory.mktemp("model")
    size = ["--layers", "6", "--hidden", "768", "--heads", "12", "--kv-heads", "2"]
    ran = subprocess.run(
        [sys.executable, str(tool), str(folder), "--gguf", "--no-hf", *size], capture_output=True, check=False
    )
    if ran.returncode:
        pytest.skip(f"the model cannot be made: {ran.stderr.decode().splitlines()[-1]}")
    return str(folder / "model.gguf")


async def ask(facts: EndpointFacts, tokens: int, key: str) -> tuple[int, str]:
    """(status, finish reason) of one streamed completion."""
    world = RealWorld()
    client = Client(world)
    address = facts.url.removeprefix("http://")
    headers = (("authorization", f"Bearer {key}"), ("content-type", "application/json"))
    target = Target(endpoint="x", name="x", address=f"tcp:{address}", host=address, headers=headers)
    body = {"model": "llama", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens, "stream": True}
    try:
        answer = await client.request(target, "POST", "/v1/chat/completions", body=msgspec.json.encode(body))
    finally:
        client.close()
    text = answer.body.decode()
    return answer.status, "length" if '"finish_reason":"length"' in text and text.rstrip().endswith("[DONE]") else text[
        -200:
    ]


async def test_llama_server_through_the_agent(server: str, model: str, tmp_path: Path) -> None:
    """Started, serves, streams on while its agent is killed and comes back, is killed, comes back with back-off, stops."""
    weights, problems = inspect(model, (), account(""))
    assert (weights.format, problems) == ("gguf", [])
    control = Control()
    async with open_site(tmp_path, control) as site:
        agents = Agents(tmp_path, site, kind="llama-server", command=f"[{server}]")
        control.desired = (
            Desired(
                replica="llama-1", model="llama", epoch=1, generation=1, engine="llama-server", weights=model,
                ports=Ports(free_port(), 1), max_model_len=2048, max_num_seqs=2, flags=("-t", "1"),
            ),
        )  # fmt: skip
        control.weights = (model,)
        async with agents.agent(await site.token()) as process:
            await site.until(lambda: control.state("llama-1") in ("ready", "failed"), within=90)
            run = control.run("llama-1")
            assert run is not None
            assert run.state == "ready", run.failure
            facts = run.endpoint
            assert facts is not None
            assert run.pid is not None
            agents.pids.append(run.pid)
            installed = (
                next(e for e in control.observed.inventory.engines if e.name == "llama-server")
                if control.observed
                else None
            )
            assert installed is not None
            assert installed.version
            assert await ask(facts, 4, "") != (200, "length")
            assert await ask(facts, 4, facts.api_key) == (200, "length")
            assert facts.api_key not in (Root().text(f"/proc/{run.pid}/cmdline") or "?")

            outcome: list[tuple[int, str]] = []
            streamed = trio.Event()

            async def stream() -> None:
                outcome.append(await ask(facts, TOKENS, facts.api_key))
                streamed.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream)
                await trio.sleep(0.3)
                assert not outcome
                process.send_signal(signal.SIGKILL)
                await process.wait()
                async with agents.agent() as second:
                    seen = len(control.syncs)
                    await site.until(lambda: len(control.syncs) > seen and control.state("llama-1") == "ready")
                    again = control.run("llama-1")
                    assert again is not None
                    assert (again.pid, again.start_id) == (run.pid, run.start_id)
                    with trio.fail_after(60):
                        await streamed.wait()
                    assert outcome == [(200, "length")]

                    os.kill(run.pid, signal.SIGKILL)
                    await site.until(lambda: control.state("llama-1") == "failed")
                    failed = control.run("llama-1")
                    assert failed is not None
                    assert failed.failure is not None
                    assert failed.detail.startswith("next try at ")
                    await site.until(lambda: control.state("llama-1") == "ready", within=60)
                    third = control.run("llama-1")
                    assert third is not None
                    assert third.pid not in (None, run.pid)
                    assert third.pid is not None
                    assert start_time(Root(), third.pid) is not None
                    agents.pids.append(third.pid)
                    control.desired = ()
                    await site.until(
                        lambda: control.run("llama-1") is None or control.state("llama-1") == "gone", within=60
                    )
                    assert await gone(third.pid)
                    assert second.poll() is None
