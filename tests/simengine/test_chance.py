"""Failures, determinism, the journal, KV events, speed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from llmgw.errors import ConfigError
from llmgw.kvcache.events import ExactIndex, Feed, Removed, Stored, decode
from llmgw.net.world import RealWorld
from llmgw.simengine.core import Job
from llmgw.simengine.options import Options
from llmgw.simengine.server import Engine, serve
from tests.simengine.client import Client
from tests.simengine.conftest import Bench

CHAT = "/v1/chat/completions"


def ask(text: str, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


# Oracle 7


async def test_what_is_said_depends_on_seed_request_and_repetition_alone(
    bench: Bench, autojump_clock: MockClock
) -> None:
    async def said(engine: Engine, order: list[str]) -> dict[tuple[str, int], str]:
        found: dict[tuple[str, int], str] = {}

        async def one(text: str, delay: float) -> None:
            await trio.sleep(delay)
            got = (await bench.client(engine).ask(CHAT, ask(text))).json()
            number = sum(1 for seen, _ in found if seen == text)
            found[text, number] = got["choices"][0]["message"]["content"]

        async with trio.open_nursery() as nursery:
            for position, text in enumerate(order):
                nursery.start_soon(one, text, position * 0.005)
        return found

    texts = ["a", "b", "a", "c", "d", "a"]
    first = await said(await bench.engine(seed=1, fail_rate=0.0), texts)
    again = await said(await bench.engine(seed=1, max_num_seqs=1), ["d", "c", "a", "a", "b", "a"])
    other = await said(await bench.engine(seed=2), texts)

    assert first == again
    assert len(set(first.values())) == len(texts)
    assert not set(first.values()) & set(other.values())


# Oracle 8


async def test_the_share_that_fails(bench: Bench, autojump_clock: MockClock) -> None:
    client = bench.client(await bench.engine(fail_rate=0.3, seed=9))

    found = [await client.ask(CHAT, ask(str(number), max_tokens=1)) for number in range(200)]

    failed = [got for got in found if got.status == 500]
    assert 40 <= len(failed) <= 80
    assert all(got.headers["x-sim-failure"] == "refuse" for got in failed)
    assert all(got.json()["error"]["code"] == 500 for got in failed)


async def test_an_error_inside_the_stream(bench: Bench, autojump_clock: MockClock) -> None:
    engine = await bench.engine(fail_rate=1.0, failure_mode="error", fail_after=3)

    got = await bench.client(engine).ask(CHAT, ask("x", stream=True))

    assert got.status == 200
    assert got.headers["x-sim-failure"] == "error"
    payloads = got.payloads()
    assert payloads[0]["choices"][0]["delta"]["content"] == ""
    assert len(payloads) == 1 + 3 + 1
    assert payloads[-1]["error"]["type"] == "InternalServerError"
    assert got.events[-1][1] == b"[DONE]"
    assert (engine.core.running, engine.load, engine.core.telemetry.finished["error"]) == (0, 0, 1)


@pytest.mark.parametrize("mode", ["reset", "garbage"])
async def test_a_connection_that_breaks(mode: str, bench: Bench, autojump_clock: MockClock) -> None:
    engine = await bench.engine(fail_rate=1.0, failure_mode=mode, fail_after=2)
    client = bench.client(engine)
    await client.request("POST", CHAT, ask("x", stream=True))

    with pytest.raises((EOFError, OSError, ValueError)):
        await client.answer()

    await trio.sleep(0.1)
    assert (engine.core.running, engine.load, len(engine.connections)) == (0, 0, 0)


async def test_a_stall_is_silence_until_the_client_leaves(bench: Bench, autojump_clock: MockClock) -> None:
    engine = await bench.engine(fail_rate=1.0, failure_mode="stall", fail_after=2)
    client = bench.client(engine)
    await client.request("POST", CHAT, ask("x", stream=True))

    with trio.move_on_after(1000) as scope:
        await client.answer()

    assert scope.cancelled_caught
    client.close()
    await trio.sleep(0.1)
    assert (engine.core.running, engine.load, len(engine.connections)) == (0, 0, 0)


async def test_a_whole_engine_that_stalls_answers_health_and_goes_on_later(
    bench: Bench, autojump_clock: MockClock
) -> None:
    engine = await bench.engine()
    client = bench.client(engine)
    engine.stall(True)
    await client.request("POST", CHAT, ask("x"))
    await trio.sleep(100)
    assert (await bench.client(engine).get("/health")).status == 200
    assert engine.load == 1

    engine.stall(False)

    assert (await client.answer()).status == 200


async def test_a_full_queue_is_a_503(bench: Bench, autojump_clock: MockClock) -> None:
    engine = await bench.engine(max_num_seqs=1, max_num_queued_reqs=1)
    for _ in range(2):
        await bench.client(engine).request("POST", CHAT, ask("x"))
        await trio.sleep(0.001)

    got = await bench.client(engine).ask(CHAT, ask("x"))

    assert (got.status, got.json()["error"]["type"]) == (503, "Service Unavailable")
    assert engine.core.telemetry.rejections["max_num_queued_reqs"] == 1


# Journal


async def test_the_journal_has_a_line_for_every_choice(bench: Bench, autojump_clock: MockClock) -> None:
    client = bench.client(await bench.engine())

    await client.ask(CHAT, ask("x", n=2, stream=True), {"x-request-id": "gw-1"})
    await client.ask(CHAT, ask("y", max_tokens=3), {"x-request-id": "gw-2"})

    lines = [json.loads(line) for line in bench.journal]
    assert [(line["id"], line["index"], line["tokens"], line["finish"]) for line in lines] == [
        ("chatcmpl-gw-1", 0, 8, "length"),
        ("chatcmpl-gw-1", 1, 8, "length"),
        ("chatcmpl-gw-2", 0, 3, "length"),
    ]


async def test_a_journal_file_and_kv_events_over_zmq(tmp_path: Path) -> None:
    zmq = pytest.importorskip("zmq")
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    port = subscriber.bind_to_random_port("tcp://127.0.0.1")
    path = tmp_path / "journal"
    options = Options(
        listen=("127.0.0.1:0",), journal=str(path), kv_events=f"tcp://127.0.0.1:{port}", decode_tps=1000.0
    )
    try:
        async with trio.open_nursery() as nursery:
            addresses = await nursery.start(partial(serve, options, RealWorld()))
            client = Client(RealWorld(), addresses[0])
            for start in range(100, 100_000, 50):  # until PUB and SUB have found each other
                await client.ask("/v1/completions", {"prompt": list(range(start, start + 40)), "max_tokens": 2})
                if subscriber.poll(20):
                    break
            client.close()
            topic, number, payload = subscriber.recv_multipart(flags=zmq.NOBLOCK)
            nursery.cancel_scope.cancel()
    finally:
        context.destroy(linger=0)

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (topic, int.from_bytes(number, "big")) == (b"kv-events", len(lines) - 1)
    event = decode(payload)[0]
    assert isinstance(event, Stored)
    assert len(event.hashes) == 2
    assert all(line["tokens"] == 2 for line in lines)


@pytest.mark.parametrize("maps", [True, False])
async def test_kv_events_tell_exactly_what_is_cached(maps: bool, bench: Bench, autojump_clock: MockClock) -> None:
    index = ExactIndex()
    feed = Feed(index, "e1")
    messages: list[bytes] = []

    def take(topic: bytes, number: int, payload: bytes) -> None:
        messages.append(payload)
        feed.message(number, payload)

    options = Options(listen=("unix:@sim-test-events",), num_gpu_blocks=12, max_model_len=160, kv_events_maps=maps)
    engine = Engine(options, bench.world, None, take)
    await bench.nursery.start(engine.serve)
    client = bench.client(engine)
    for start in (100, 300, 500, 100):
        await client.ask("/v1/completions", {"prompt": list(range(start, start + 70)), "max_tokens": 1})

    assert index.blocks("e1") == engine.core.pool.findable > 0
    cached = []
    for start in (100, 300, 500):
        prompt = list(range(start, start + 70))
        cached.append(engine.core.cached_tokens(Job(id="x", prompt=prompt)))
        assert index.match(prompt) == ({"e1": cached[-1]} if cached[-1] else {})
    assert cached[0] == 64
    assert sum(cached) < 3 * 64
    assert any(isinstance(event, Removed) for payload in messages for event in decode(payload))


def test_bad_addresses_are_told() -> None:
    with pytest.raises(ConfigError, match="--journal"):
        trio.run(partial(serve, Options(journal="/nowhere/at/all"), RealWorld()))
