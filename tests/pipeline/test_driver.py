"""Pipelines through the real server: simulated engines that really hand over blocks, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from llmgw.simengine.server import Engine
from tests.pipeline.cluster import CHAT, LONG, cluster
from tests.simengine.client import metric

NIXL = "kv_connector: kv-nixl\ndisaggregate: always\n"
P: dict[str, Any] = {"phases": ("prefill",), "fabric": "a"}
D: dict[str, Any] = {"phases": ("decode",), "fabric": "a"}


def pulled(page: bytes) -> float:
    return metric(page, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") or 0.0


async def alone(engine: Engine, found: Any, body: dict[str, Any]) -> str:
    got = await found.client(engine.addresses[0]).ask(CHAT, body)
    return str(got.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_takes_what_prefill_computed(stream: bool, autojump_clock: MockClock) -> None:
    async with cluster(
        NIXL, {"p": dict(P), "d": dict(D), "u": {"phases": ("prefill", "decode"), "fabric": "b"}}
    ) as found:
        expected = await alone(found.engines["u"], found, LONG)
        start = trio.current_time()
        got = await found.client().ask(CHAT, {**LONG, "stream": stream})
        took = trio.current_time() - start
        assert got.status == 200, got.body
        if stream:
            assert got.body.rstrip().endswith(b"data: [DONE]")
        else:
            assert got.json()["choices"][0]["message"]["content"] == expected
        size = pulled(await found.page("d"))
        assert size > 300, "the decode engine fetched the prompt"
        assert took == pytest.approx(size / 1000 + 0.06, rel=0.2), "once computed, once fetched"
        assert found.engines["p"].core.pinned == 0
        (line,) = found.logged()
        assert line["completion_tokens"] == 6
        await trio.lowlevel.checkpoint()
        found.quiet()
        pipelines = found.gateway.pipelines
        assert pipelines is not None
        trace = pipelines.trace(line["request_id"])
        assert trace is not None
        assert [step["step"] for step in trace["phases"] if "step" in step] == ["prefill", "decode"]
        assert trace["pair"]["fabric"] == "a"
        assert set(trace["endpoints"]) == {"prefill", "decode"}
