"""docs/coordinator.md and the examples say what the code does."""

from __future__ import annotations

import random
import re
from typing import Any

import attrs
import pytest
import trio
import yaml
from trio.testing import MockClock

from llmgw import config
from llmgw.net.world import RealWorld
from llmgw.pipeline.commands import Answer, Call, Note
from llmgw.pipeline.config import coordinator_keys
from llmgw.pipeline.context import Context
from llmgw.pipeline.policy import FailurePolicy
from llmgw.pipeline.run import run
from llmgw.pipeline.step import STEPS
from llmgw.plugins import Registry
from llmgw.server.gateway import Gateway
from llmgw.simengine.options import Options
from llmgw.simengine.server import Engine
from tests.pipeline.page import PAGE, made
from tests.pipeline.test_gateway_mode import gateway, legs
from tests.server.raw import engine as raw
from tests.server.worlds import Lines
from tests.simengine.client import Client

ROOT = PAGE.parent.parent
EXAMPLE = ROOT / "examples" / "coordinator.yaml"


def test_the_page_is_current() -> None:
    text = PAGE.read_text()
    assert text == made(text), "run: python -m tests.pipeline.page"


def test_the_example_shows_every_key() -> None:
    document = yaml.safe_load(EXAMPLE.read_text())
    for key, *_ in coordinator_keys():
        place: Any = document
        for part in key.split("."):
            assert part in place, key
            place = place[part]
    steps = {step["type"]: step.get("params", {}) for step in document["pipeline"]["steps"]}
    assert set(steps) == set(STEPS.all())
    common = {"kv_connector", "ec_connector", "use_openai_format"}
    for name, cls in STEPS.all().items():
        wanted = {f.name for f in attrs.fields(cls)} - common  # type: ignore[arg-type]
        assert wanted == set(steps[name]), name
    failure = {f.name for f in attrs.fields(FailurePolicy)}
    assert failure == set(document["pipeline"]["on_failure"])


async def test_the_coordinators_example_runs() -> None:
    async with raw(script=gateway) as fake, trio.open_nursery() as nursery:
        text = re.sub(r"http://127.0.0.1:808[12]", fake.url, EXAMPLE.read_text())
        server = config.parse(text, environ={"COORDINATOR_SERVER_LISTEN_ADDR": "127.0.0.1:0"})
        server = config.with_flags(server, admin=["127.0.0.1:0"])
        running = Gateway(server, RealWorld(1), Lines())
        await nursery.start(running.run)
        client = Client(RealWorld(1), running.addresses[0])
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        got = await client.ask("/v1/chat/completions", body)
        client.close()
        assert got.status == 200
        assert [headers.get("epp-profile") for _, headers, _ in legs(fake)] == [None, "decode"], (
            "the probe was answered"
        )
        nursery.cancel_scope.cancel()


async def test_the_native_example_runs(autojump_clock: MockClock) -> None:
    text = (ROOT / "examples" / "pd.yaml").read_text()
    world = RealWorld(1)
    async with trio.open_nursery() as nursery:
        for port, phase in ((8001, "prefill"), (8002, "decode")):
            engine = Engine(Options(listen=("127.0.0.1:0",), model="m", phases=(phase,)), world, lambda _: None)
            await nursery.start(lambda task_status, engine=engine: engine.serve(task_status=task_status))
            text = text.replace(f"http://127.0.0.1:{port}", f"http://{engine.addresses[0]}")
        text = text.replace("disaggregate: auto ", "disaggregate: always ")
        server = config.with_flags(config.parse(text), listen=["127.0.0.1:0"], admin=["127.0.0.1:0"])
        running = Gateway(server, world, Lines())
        await nursery.start(running.run)
        with trio.fail_after(10):
            await running.wait_serving(2)
        client = Client(world, running.addresses[0])
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
        got = await client.ask("/v1/chat/completions", body, {"x-request-id": "try-1"})
        client.close()
        assert got.status == 200
        assert running.pipelines is not None
        trace = running.pipelines.trace("try-1")
        assert trace is not None
        assert (trace["pair"]["prefill"], trace["pair"]["decode"]) == ("prefill-1", "decode-1")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("ok", [True, False])
def test_the_plugin_on_the_page_works(ok: bool) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    registry: Registry[Any] = Registry("step")
    registry.add(found["Moderate"])
    step = registry.make("moderate", {"address": "http://127.0.0.1:9"})
    ctx = Context(request_id="r", path="/v1/chat/completions", body={"messages": []}, rng=random.Random(1))
    work = run([step], ctx)
    command = work.send(None)
    assert isinstance(command, Note)
    command = work.send(None)
    assert isinstance(command, Call)
    assert (command.address, command.path) == ("http://127.0.0.1:9", "/check")
    with pytest.raises(StopIteration) as stop:
        work.send(Answer(body={"ok": ok}))
    assert stop.value.value.refusal.reason == ("internal" if ok else "forbidden_field")
