"""The engine behind its sockets, in virtual time."""

from __future__ import annotations

import json
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from llmgw.errors import ConfigError
from llmgw.net.world import RealWorld
from llmgw.simengine.options import Options
from llmgw.simengine.server import serve
from tests.simengine.client import Client, metric
from tests.simengine.conftest import Bench

SAY = {"messages": [{"role": "user", "content": "Say hello"}], "max_tokens": 4}


async def test_a_stream_costs_prefill_and_then_one_step_a_token(bench: Bench, autojump_clock: MockClock) -> None:
    engine = await bench.engine(prefill_tps=1000.0, decode_tps=10.0)
    client = bench.client(engine)
    prompt = engine.tokenizer.encode("a b c d e f g h i j")
    start = trio.current_time()

    got = await client.ask("/v1/completions", {"prompt": prompt, "max_tokens": 4, "stream": True})

    times = [round(at - start, 9) for at, _ in got.events]
    assert times == [0.01, 0.11, 0.21, 0.31, 0.31]
    assert got.events[-1][1] == b"[DONE]"
    assert got.payloads()[-1]["choices"][0]["finish_reason"] == "length"


async def test_stream_and_plain_answer_say_the_same(bench: Bench, autojump_clock: MockClock) -> None:
    one, two = await bench.engine(seed=5), await bench.engine(seed=5)

    plain = await bench.client(one).ask("/v1/chat/completions", SAY)
    stream = await bench.client(two).ask("/v1/chat/completions", {**SAY, "stream": True})

    text = "".join(p["choices"][0]["delta"]["content"] for p in stream.payloads())
    assert plain.json()["choices"][0]["message"]["content"] == text
    assert plain.json()["usage"]["completion_tokens"] == 4


async def test_usage_comes_in_an_event_of_its_own(bench: Bench, autojump_clock: MockClock) -> None:
    engine = await bench.engine()

    got = await bench.client(engine).ask(
        "/v1/chat/completions", {**SAY, "stream": True, "stream_options": {"include_usage": True}}
    )

    last = got.payloads()[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert all("usage" not in payload for payload in got.payloads()[:-1])


async def test_a_body_without_model_is_served_and_a_wrong_one_is_not(bench: Bench, autojump_clock: MockClock) -> None:
    client = bench.client(await bench.engine(served_model_name=("shown", "alias")))

    assert (await client.ask("/v1/chat/completions", SAY)).json()["model"] == "shown"
    assert (await client.ask("/v1/chat/completions", {**SAY, "model": "alias"})).json()["model"] == "alias"
    wrong = await client.ask("/v1/chat/completions", {**SAY, "model": "nope"})

    assert wrong.status == 404
    assert wrong.json()["error"]["message"] == "The model `nope` does not exist. Valid aliases: shown, alias, llama."


async def test_a_client_that_leaves_is_worked_for_no_longer(bench: Bench, autojump_clock: MockClock) -> None:
    engine = await bench.engine(decode_tps=10.0, max_num_seqs=1)
    running, waiting, watcher = bench.client(engine), bench.client(engine), bench.client(engine)
    for client in (running, waiting):
        await client.request("POST", "/v1/chat/completions", {**SAY, "max_tokens": 1000, "stream": True})
        await client.head()
    await trio.sleep(1.05)
    assert (engine.core.running, engine.core.waiting) == (1, 1)

    waiting.close()
    await trio.sleep(0.001)
    assert (engine.core.running, engine.core.waiting) == (1, 0)
    running.close()
    await trio.sleep(0.1)

    assert (engine.core.running, engine.core.pool.used) == (0, 0)
    page = (await watcher.get("/metrics")).body
    assert metric(page, "vllm:request_success_total", finished_reason="abort") == 2
    assert metric(page, "vllm:num_requests_running") == 0
    ends = [json.loads(line) for line in bench.journal]
    assert [line["finish"] for line in ends] == ["abort", "abort"]
    assert [line["tokens"] for line in ends] == [0, 11]


async def test_metrics_have_the_contract(bench: Bench, autojump_clock: MockClock) -> None:
    engine = await bench.engine(num_gpu_blocks=101, block_size=16, max_model_len=1000, decode_tps=10.0)
    client, watcher = bench.client(engine), bench.client(engine)
    await client.request("POST", "/v1/completions", {"prompt": list(range(100, 164)), "max_tokens": 30, "stream": True})
    await trio.sleep(0.5)

    page = (await watcher.get("/metrics")).body

    assert metric(page, "vllm:num_requests_running", engine="0", model_name="llama") == 1
    assert metric(page, "vllm:kv_cache_usage_perc") == 0.05
    assert metric(page, "vllm:cache_config_info", block_size="16", num_gpu_blocks="101") == 1


async def test_an_idle_connection_is_closed_after_five_seconds(bench: Bench, autojump_clock: MockClock) -> None:
    client = bench.client(await bench.engine())
    await client.get("/health")
    start = trio.current_time()

    with pytest.raises(EOFError):
        await client.until(b"never")

    assert pytest.approx(trio.current_time() - start) == 5.0


async def test_pipelined_requests_are_answered_in_order(bench: Bench, autojump_clock: MockClock) -> None:
    client = bench.client(await bench.engine())
    for count in (3, 2, 1):
        await client.request("POST", "/v1/chat/completions", {**SAY, "max_tokens": count})

    found = [(await client.answer()).json()["usage"]["completion_tokens"] for _ in range(3)]

    assert found == [3, 2, 1]


async def test_it_listens_on_tcp_and_on_a_path_at_once() -> None:
    world = RealWorld(1)
    async with trio.open_nursery() as nursery:
        options = Options(listen=("127.0.0.1:0", "unix:@sim-two-addresses"), decode_tps=1000.0)
        addresses = await nursery.start(partial(serve, options, world))
        for address in addresses:
            client = Client(world, address)
            assert (await client.get("/health")).status == 200
            assert (await client.ask("/v1/chat/completions", SAY)).status == 200
            client.close()
        nursery.cancel_scope.cancel()


async def test_a_port_that_is_taken_is_told_with_its_name() -> None:
    world = RealWorld(1)
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(partial(serve, Options(listen=("127.0.0.1:0",)), world))
        with pytest.RaisesGroup(ConfigError, flatten_subgroups=True) as caught:
            await serve(Options(listen=(addresses[0], "unix:/no/such/folder")), world)
        nursery.cancel_scope.cancel()

    (error,) = caught.value.exceptions
    assert isinstance(error, ConfigError)
    problems = error.problems
    assert [problem.message.rpartition(": ")[0] for problem in problems] == [
        f"cannot listen on {addresses[0]}",
        "cannot listen on unix:/no/such/folder",
    ]


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Options(max_num_seqs=0, fail_rate=2.0, failure_mode="burn").check()

    assert [p.where for p in caught.value.problems] == ["--max-num-seqs", "--fail-rate", "--failure-mode"]


def test_a_model_longer_than_the_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 2048 KV blocks, but only 99 can be used"):
        Options(num_gpu_blocks=100).check()
