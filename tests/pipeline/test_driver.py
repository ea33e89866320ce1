"""Pipelines through the real server: simulated engines that really hand over blocks, in virtual time."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from llmgw.pipeline import explain
from llmgw.simengine.server import Engine
from tests.pipeline.cluster import CHAT, LONG, cluster
from tests.server.raw import engine as raw
from tests.server.raw import response
from tests.simengine.client import metric

NIXL = "kv_connector: kv-nixl\ndisaggregate: always\n"
P: dict[str, Any] = {"phases": ("prefill",), "fabric": "a"}
D: dict[str, Any] = {"phases": ("decode",), "fabric": "a"}


def pulled(page: bytes) -> float:
    return metric(page, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


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
        assert got.status == 200, (got.body, found.logged("phase_failed"))
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
        admin = found.client(found.gateway.admin_addresses[0])
        told = (await admin.get(f"/api/v1/decisions/{line['request_id']}", {"host": "127.0.0.1"})).json()
        assert told["winner"] == "d"
        shown = explain.text(told["pipeline"])
        assert "p -> d on fabric a" in shown
        assert "prefill " in shown
        page = (await admin.get("/metrics", {"host": "127.0.0.1"})).body.decode()
        assert 'llmgw_pipeline_step_seconds_count{step="prefill"} 1.0' in page
        assert 'llmgw_pipeline_events_total{detail="split",event="pair"} 1.0' in page
        assert f"llmgw_pipeline_handover_seconds_count {1.0 if stream else 0.0}" in page


async def test_a_short_prompt_is_not_split(autojump_clock: MockClock) -> None:
    async with cluster("kv_connector: kv-nixl\n", {"p": dict(P), "d": dict(D)}) as found:
        got = await found.client().ask(CHAT, {**LONG, "messages": [{"role": "user", "content": "hi"}]})
        assert got.status == 200
        assert pulled(await found.page("d")) == 0
        assert metric(await found.page("p"), "vllm:prompt_tokens_total") == 0
        assert found.gateway.pipelines is not None
        assert found.gateway.pipelines.counts[("pair", "one endpoint")] == 1
        found.quiet()


async def test_no_request_crosses_fabrics(autojump_clock: MockClock) -> None:
    engines = {
        "pa": {**P, "fabric": "a"}, "pb": {**P, "fabric": "b"}, "da": {**D, "fabric": "a"}, "db": {**D, "fabric": "b"},
    }  # fmt: skip
    async with cluster(NIXL, engines) as found:
        async with trio.open_nursery() as nursery:
            for i in range(12):
                body = {**LONG, "messages": [{"role": "user", "content": f"{i} word " * 200}]}
                nursery.start_soon(found.client().ask, CHAT, body)
        pipelines = found.gateway.pipelines
        assert pipelines is not None
        pairs = {(t["pair"]["prefill"], t["pair"]["decode"]) for t in pipelines.traces.values()}
        assert pairs == {("pa", "da"), ("pb", "db")}
        found.quiet()


async def test_sglangs_legs_meet_in_a_room(autojump_clock: MockClock) -> None:
    async with cluster("kv_connector: kv-sglang\ndisaggregate: always\n", {"p": dict(P), "d": dict(D)}) as found:
        with trio.fail_after(20):  # one after the other would wait 300 s for each other
            got = await found.client().ask(CHAT, {**LONG, "stream": True})
        assert got.status == 200
        assert pulled(await found.page("d")) > 300
        assert found.engines["p"].core.pinned == 0
        found.quiet()


async def test_tokens_in(autojump_clock: MockClock) -> None:
    async with cluster(NIXL, {"p": dict(P), "d": dict(D)}) as found:
        body = {"model": "m", "token_ids": list(range(100, 420)), "sampling_params": {"max_tokens": 5}}
        got = await found.client().ask("/inference/v1/generate", body)
        assert got.status == 200, (got.body, found.logged("phase_failed"))
        assert len(got.json()["choices"][0]["token_ids"]) == 5
        assert pulled(await found.page("d")) == 320
        found.quiet()


async def test_prefill_dies_and_another_one_does_it(autojump_clock: MockClock) -> None:
    async with cluster(NIXL, {"p1": dict(P), "p2": dict(P), "d": dict(D)}) as found:
        client = found.client()
        got: list[Any] = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                got.append(await client.ask(CHAT, LONG))

            nursery.start_soon(ask)
            await trio.sleep(0.1)
            found.die(next(name for name, e in found.engines.items() if name[0] == "p" and e.core.running))
        assert got[0].status == 200
        assert pulled(await found.page("d")) > 300
        (line,) = found.logged()
        assert line["status"] == 200
        found.quiet()


async def test_prefill_is_gone_and_decode_does_it_all(autojump_clock: MockClock) -> None:
    async with cluster(NIXL, {"p": dict(P), "d": dict(D)}) as found:
        found.die("p")
        got = await found.client().ask(CHAT, LONG)
        assert got.status == 200
        assert pulled(await found.page("d")) == 0
        assert found.gateway.pipelines is not None
        assert ("aggregated", "prefill_failed") in found.gateway.pipelines.counts
        found.quiet()


async def test_policy_fail_says_which_phase(autojump_clock: MockClock) -> None:
    async with cluster(NIXL + "on_failure: {prefill_failed: fail}\n", {"p": dict(P), "d": dict(D)}) as found:
        found.die("p")
        got = await found.client().ask(CHAT, LONG)
        assert got.status == 502
        error = got.json()["error"]
        assert error["code"] == "phase_failed"
        assert error["message"].startswith("prefill failed")
        (line,) = found.logged()
        assert (line["status"], line["reason"]) == (502, "phase_failed")
        found.quiet()


async def test_decode_refuses_and_another_fetches_the_same_blocks(autojump_clock: MockClock) -> None:
    async with cluster(NIXL, {"p": dict(P), "d1": dict(D), "d2": dict(D)}) as found:
        got: list[Any] = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                got.append(await found.client().ask(CHAT, LONG))

            nursery.start_soon(ask)
            await trio.sleep(0.1)  # prefill is at work; the pair was chosen
            made = found.gateway.pipelines
            assert made is not None
            (job,) = set(made._jobs.values())
            assert job.decision is not None
            found.die(job.decision.decode.name)
            other = "d2" if job.decision.decode.name == "d1" else "d1"
        assert got[0].status == 200
        assert pulled(await found.page(other)) > 300
        assert metric(await found.page("p"), "vllm:prompt_tokens_total") < 500, "prefill computed it once"
        found.quiet()


async def test_no_decode_is_left_and_prefill_is_freed(autojump_clock: MockClock) -> None:
    async with cluster(NIXL, {"p": dict(P), "d": dict(D)}) as found:
        got: list[Any] = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                got.append(await found.client().ask(CHAT, LONG))

            nursery.start_soon(ask)
            await trio.sleep(0.1)
            found.die("d")
        assert got[0].status == 503, got[0].body
        await trio.sleep(1)  # the release was tried, too
        found.quiet()


@pytest.mark.parametrize("after", [0.1, 0.35, 0.40])
@pytest.mark.parametrize("connector", ["kv-nixl", "kv-sglang"])
async def test_a_client_that_leaves_ends_all_legs(connector: str, after: float, autojump_clock: MockClock) -> None:
    pipeline = f"kv_connector: {connector}\ndisaggregate: always\n"
    async with cluster(pipeline, {"p": dict(P), "d": {**D, "transfer_gbps": 1.0}}) as found:
        client = found.client()
        await client.request("POST", CHAT, {**LONG, "max_tokens": 500, "stream": True})
        await trio.sleep(after)
        client.close()
        await trio.sleep(5.0)
        for name, engine in found.engines.items():
            assert engine.core.running == 0, name
            assert engine.core.pinned == 0, f"{name} still holds blocks"
        (line,) = found.logged()
        assert line["reason"] == "client_gone"
        found.quiet()


PNG = "data:image/png;base64,iVBORw0KGgo="


async def test_images_are_encoded_apart(autojump_clock: MockClock) -> None:
    engines: dict[str, dict[str, Any]] = {
        "e1": {"phases": ("encode",)}, "e2": {"phases": ("encode",)}, "p": dict(P), "d": dict(D), "r": {"phases": ("encode",)},
    }  # fmt: skip
    async with cluster("steps: [{type: decode}]\n", {"r": {}}) as service:
        render = f"{{type: render, params: {{address: 'http://{service.engines['r'].addresses[0]}'}}}}"
        steps = (
            f"steps: [{{type: replace-media-urls}}, {render}, {{type: encode}}, {{type: prefill}}, {{type: decode}}]\n"
        )
        del engines["r"]
        async with cluster(NIXL + "ec_connector: ec-nixl\n" + steps, engines) as found:
            parts = [{"type": "text", "text": "what is this " * 40}] + [
                {"type": "image_url", "image_url": {"url": PNG + "A" * (4 * i)}} for i in range(3)
            ]
            body = {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
            got = await found.client().ask(CHAT, body)
            assert got.status == 200, (got.body, found.logged("phase_failed"))
            pipelines = found.gateway.pipelines
            assert pipelines is not None
            await trio.sleep(0.01)  # the last step is noted when its task runs
            (trace,) = pipelines.traces.values()
            legs = [step["leg"] for step in trace["phases"] if "leg" in step]
            assert sorted(legs[1:4]) == ["encode-0", "encode-1", "encode-2"]
            assert [legs[0], *legs[4:]] == ["render", "prefill", "decode"]
            starts = {step["start"] for step in trace["phases"] if step.get("leg", "").startswith("encode")}
            assert len(starts) == 1, "all at once"
            assert pulled(await found.page("d")) > 0
            found.quiet()


async def test_a_link_that_fell_back_to_tcp_is_found_and_avoided(autojump_clock: MockClock) -> None:
    engines: dict[str, dict[str, Any]] = {
        "p1": {**P, "prefill_tps": 20_000.0}, "d1": {**D, "transfer_gbps": 0.05}, "d2": {**D, "transfer_gbps": 20.0},
    }  # fmt: skip
    async with cluster(NIXL, engines) as found:
        pipelines = found.gateway.pipelines
        assert pipelines is not None
        when: list[float] = []

        async def ask(i: int) -> None:
            body = {**LONG, "stream": True, "messages": [{"role": "user", "content": f"{i} " + "word " * 400}]}
            assert (await found.client().ask(CHAT, body)).status == 200

        async with trio.open_nursery() as nursery:
            begun = trio.current_time()
            for i in range(60):
                nursery.start_soon(ask, i)
                await trio.sleep(0.2)
                if not when and found.logged("link_degraded"):
                    when.append(trio.current_time() - begun)
        assert when, "nobody noticed"
        assert when[0] < 5.0
        (event,) = found.logged("link_degraded")
        assert "d1@" in event["decode"]
        late = [t["pair"]["decode"] for t in list(pipelines.traces.values())[-20:]]
        assert late.count("d2") >= 19
        found.quiet()


@pytest.mark.parametrize(("created", "counted"), [(0, 0), (128, 1)])
async def test_a_decode_that_computed_the_prompt_again_is_counted(created: int, counted: int) -> None:
    usage = {
        "prompt_tokens": 134, "completion_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": created},
    }  # fmt: skip
    page = response(json.dumps({"choices": [], "usage": usage}).encode(), "200 OK", "content-type: application/json")
    models = response(b'{"data":[{"id":"m"}]}', "200 OK", "content-type: application/json")
    pages = {"/health": response(b""), "/v1/models": models, CHAT: page}
    async with raw(dict(pages)) as decode:
        places = [{"name": "d", "url": decode.url, "models": ["m"], "phases": ["decode"], "fabrics": ["a"]}]
        async with cluster(NIXL, {"p": dict(P)}, places=places) as found:
            got = await found.client().ask(CHAT, LONG)
            assert got.status == 200
            (line,) = found.logged()
            assert line["prompt_tokens"] == 134
            assert found.gateway.pipelines is not None
            assert found.gateway.pipelines.counts.get(("recompute", "engine"), 0) == counted
            found.quiet()
