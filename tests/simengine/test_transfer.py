"""Engines that work together: remote prefill, bootstrap rooms, encoders, and what happens when one is lost."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from llmgw.simengine.server import Engine
from tests.simengine.client import Got, metric
from tests.simengine.conftest import Bench

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "word " * 320}]}
RATES = {"prefill_tps": 1000.0, "decode_tps": 100.0}


async def prefill(bench: Bench, engine: Engine, body: dict[str, Any] = LONG) -> Any:
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    got = await bench.client(engine).ask(CHAT, {**body, "max_tokens": 1, "kv_transfer_params": asked})
    return got.json()["kv_transfer_params"]


async def decode(bench: Bench, engine: Engine, kv: Any, body: dict[str, Any] = LONG) -> tuple[Got, float]:
    start = trio.current_time()
    got = await bench.client(engine).ask(CHAT, {**body, "max_tokens": 6, "kv_transfer_params": kv})
    return got, trio.current_time() - start


async def page(bench: Bench, engine: Engine) -> bytes:
    return (await bench.client(engine).get("/metrics")).body


async def test_a_decode_takes_the_kv_of_a_prefill(bench: Bench, autojump_clock: MockClock) -> None:
    one, two = await bench.engine(phases=("prefill",), **RATES), await bench.engine(phases=("decode",), **RATES)

    kv = await prefill(bench, one)
    assert list(kv) == [
        "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id",
        "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens",
        "remote_blocks_expiry_time", "transfer_mode", "remote_prefill_cached_tokens",
    ]  # fmt: skip
    size = kv["remote_num_tokens"]
    assert len(kv["remote_block_ids"][0]) == one.core.pinned == -(-size // 16)

    got, seconds = await decode(bench, two, kv)

    assert got.json()["usage"]["completion_tokens"] == 6
    transfer = 0.001 + size * two.options.kv_bytes() / 40e9
    assert seconds == pytest.approx(transfer + 0.001 + 5 * 0.01, abs=1e-6)
    assert one.core.pinned == one.core.pool.used == 0
    assert metric(await page(bench, two), "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == size


async def test_both_legs_say_the_same(bench: Bench, autojump_clock: MockClock) -> None:
    one, two = await bench.engine(seed=4), await bench.engine(seed=4)
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    first = await bench.client(one).ask(CHAT, {**LONG, "max_tokens": 1, "kv_transfer_params": asked})

    got, _ = await decode(bench, two, first.json()["kv_transfer_params"])

    start = first.json()["choices"][0]["message"]["content"]
    assert got.json()["choices"][0]["message"]["content"].startswith(start)


@pytest.mark.parametrize("field", ["remote_request_id", "remote_engine_id", "remote_num_tokens", "remote_block_ids"])
async def test_altered_descriptors_are_computed_here_and_counted(
    field: str, bench: Bench, autojump_clock: MockClock
) -> None:
    one, two = await bench.engine(**RATES), await bench.engine(**RATES)
    kv = await prefill(bench, one)
    size = kv["remote_num_tokens"]

    kv[field] = {"remote_num_tokens": 7, "remote_block_ids": None}.get(field, "x-12345678")
    got, seconds = await decode(bench, two, kv)

    assert got.status == 200
    assert seconds == pytest.approx(size / 1000 + 0.05, rel=0.01)
    told = await page(bench, two)
    assert metric(told, "vllm:nixl_num_failed_transfers_total", reason="wrong") == 1
    assert metric(told, "vllm:external_prefix_cache_queries_total") == size
    assert metric(told, "vllm:external_prefix_cache_hits_total") == 0
    assert metric(told, "vllm:prompt_tokens_by_source_total", source="local_compute") == size


async def test_descriptors_of_another_prompt_are_found_out(bench: Bench, autojump_clock: MockClock) -> None:
    one, two = await bench.engine(**RATES), await bench.engine(**RATES)
    other = {"messages": [{"role": "user", "content": "text " * 320}]}

    await decode(bench, two, await prefill(bench, one, other))

    assert metric(await page(bench, two), "vllm:nixl_num_failed_transfers_total", reason="wrong") == 1


async def test_kv_can_be_taken_once_and_not_after_its_time(bench: Bench, autojump_clock: MockClock) -> None:
    one, two = await bench.engine(pin_seconds=30.0, **RATES), await bench.engine(prefix_cache_blocks=0, **RATES)
    kv = await prefill(bench, one)
    await decode(bench, two, kv)
    await decode(bench, two, kv)
    assert metric(await page(bench, two), "vllm:nixl_num_failed_transfers_total", reason="lost") == 1

    kv = await prefill(bench, one)
    assert one.core.pinned > 0
    await trio.sleep(31)
    assert one.core.pinned == one.core.pool.used == 0
    await decode(bench, two, kv)
    assert metric(await page(bench, two), "vllm:nixl_num_failed_transfers_total", reason="lost") == 2


async def test_a_prefill_that_died_is_out_of_reach(bench: Bench, autojump_clock: MockClock) -> None:
    two = await bench.engine(**RATES)
    async with trio.open_nursery() as nursery:
        other = Bench(nursery)
        kv = await prefill(other, await other.engine(**RATES))
        for client in other.clients:
            client.close()
        nursery.cancel_scope.cancel()

    got, _ = await decode(bench, two, kv)

    assert got.status == 200
    assert metric(await page(bench, two), "vllm:nixl_num_failed_transfers_total", reason="lost") == 1


async def test_bootstrap_legs_meet_whoever_comes_first(bench: Bench, autojump_clock: MockClock) -> None:
    for delays in ((0.0, 0.2), (0.2, 0.0)):
        one = await bench.engine(phases=("prefill",), **RATES)
        two = await bench.engine(phases=("decode",), **RATES)
        body = {
            **LONG,
            "max_tokens": 5,
            "bootstrap_host": one.addresses[0],
            "bootstrap_port": 8998,
            "bootstrap_room": 7,
        }
        ends: dict[str, float] = {}

        async def leg(name: str, engine: Engine, delay: float, body: dict[str, Any], ends: dict[str, float]) -> None:
            await trio.sleep(delay)
            got = await bench.client(engine).ask(CHAT, body)
            assert got.status == 200
            assert got.json()["usage"]["completion_tokens"] == (1 if name == "prefill" else 5)
            ends[name] = trio.current_time()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leg, "prefill", one, delays[0], body, ends)
            nursery.start_soon(leg, "decode", two, delays[1], body, ends)

        assert ends["prefill"] < ends["decode"]
        assert one.core.pool.used == two.core.pool.used == 0
        assert one.rooms == {}
        assert two.core.telemetry.external_hits > 300


async def test_a_bootstrap_host_that_is_not_there_fails_the_decode(bench: Bench, autojump_clock: MockClock) -> None:
    two = await bench.engine(phases=("decode",))
    body = {**LONG, "bootstrap_host": "unix:@sim-test-nobody", "bootstrap_port": 1, "bootstrap_room": 7}

    got = await bench.client(two).ask(CHAT, body)

    assert (got.status, two.load) == (500, 0)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
SEEN = {"messages": [{"role": "user", "content": [{"type": "text", "text": "what is it"}, IMAGE]}], "max_tokens": 1}


async def test_an_encoder_describes_what_it_encoded_and_a_prefill_uses_it(
    bench: Bench, autojump_clock: MockClock
) -> None:
    encoder = await bench.engine(phases=("encode",), encode_seconds=0.5)
    rendered = (await bench.client(encoder).ask(CHAT + "/render", SEEN)).json()["features"]
    alone = {"messages": [{"role": "user", "content": [IMAGE]}], "max_tokens": 1}

    described = (await bench.client(encoder).ask(CHAT, alone)).json()["ec_transfer_params"]

    assert list(described) == rendered["mm_hashes"]["image"]
    for given, took in ((described, 0.0), ({next(iter(described)): {"size_bytes": 1}}, 0.5), (None, 0.5)):
        engine = await bench.engine(phases=("prefill",), encode_seconds=0.5, prefill_tps=1e6)
        start = trio.current_time()
        await bench.client(engine).ask(CHAT, {**SEEN, "ec_transfer_params": given})
        assert trio.current_time() - start == pytest.approx(took, abs=0.01)
        assert engine.core.telemetry.media_hits == (1 if not took else 0)


async def test_prefer_if_available(bench: Bench, autojump_clock: MockClock) -> None:
    client = bench.client(await bench.engine())
    wish = {"prefer": 'respond-async, If-Available; x="1"'}

    assert (await client.ask(CHAT, {**LONG, "max_tokens": 1}, wish)).status == 412
    assert (await client.ask(CHAT, {**LONG, "max_tokens": 1})).status == 200
    assert (await client.ask(CHAT, {**LONG, "max_tokens": 1}, wish)).status == 200
