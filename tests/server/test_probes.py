"""Engines of every kind, seen through their probes, on virtual time and real sockets."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
import trio

from llmgw.config import Probe
from llmgw.net.client import Client
from llmgw.net.world import RealWorld
from llmgw.server.probes import Prober
from tests.server.raw import Engine, engine, free_port, response
from tests.server.worlds import Bench, bench

OK = response(b"")


def listing(*entries: dict[str, object]) -> bytes:
    return response(json.dumps({"object": "list", "data": entries}).encode())


async def watch(one: Bench, nursery: trio.Nursery) -> None:
    one.fleet._clock = trio.current_time
    client = Client(RealWorld())
    prober = Prober(one.fleet, client, Probe(), random.Random(1))

    async def close_at_the_end() -> None:
        try:
            await trio.sleep_forever()
        finally:
            client.close()

    nursery.start_soon(close_at_the_end)
    await nursery.start(prober.run)


def state(one: Bench) -> str:
    return one.place("a").health.state


async def test_a_loading_llama_server_is_waited_for(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    loading = response(
        b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}', "503 Service Unavailable"
    )
    async with engine({"/health": loading}) as fake:
        one = bench(f"a={fake.url}=m")
        await watch(one, nursery)
        await trio.sleep(20)
        assert state(one) == "joining"
        assert one.place("a").health.why == "/health says 503 Loading model"
        fake.pages = {
            "/health": response(b'{"status":"ok"}'),
            "/v1/models": listing({"id": "x.gguf", "owned_by": "llamacpp"}),
        }
        await trio.sleep(6)
        assert state(one) == "ready"
        assert one.place("a").endpoint.engine == "llama-server"
        assert [m.name for m in one.place("a").endpoint.models] == ["m"]  # what is configured holds
        nursery.cancel_scope.cancel()


async def test_an_engine_that_refuses_while_it_loads_then_dies_and_comes_back(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    port = free_port()
    one = bench(f"a=http://127.0.0.1:{port}=m")
    await watch(one, nursery)
    await trio.sleep(30)
    assert state(one) == "joining"
    assert "cannot connect" in one.place("a").health.why
    pages: dict[str, bytes | None] = {"/health": OK, "/v1/models": listing({"id": "m"})}
    async with engine(pages, port=port):
        await trio.sleep(6)
        assert state(one) == "ready"
    await trio.sleep(6)
    assert state(one) == "quarantined"
    async with engine(pages, port=port):
        await trio.sleep(31)
        assert state(one) == "ready"
    assert [line["event"] for line in one.logged("endpoint_ready")] == ["endpoint_ready"] * 2
    nursery.cancel_scope.cancel()


async def test_a_passive_ejection_asks_at_once(autojump_clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
    async with engine({"/health": OK, "/v1/models": listing({"id": "m"})}) as fake:
        one = bench(f"a={fake.url}=m")
        await watch(one, nursery)
        await trio.sleep(1)
        one.fleet.happened(one.place("a"), "connect_failed", "refused")
        assert state(one) == "quarantined"
        await trio.sleep(0.1)
        assert state(one) == "ready"
        nursery.cancel_scope.cancel()


async def test_a_slow_health_check_is_fine_a_hung_one_is_not(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    delay = 1.5  # SGLang generates a token

    async def slow(fake: Engine, stream: trio.SocketStream, request: bytes) -> None:
        await trio.sleep(delay)
        await stream.send_all(OK if b"/health" in request else listing({"id": "m"}))

    async with engine(script=slow) as fake:
        one = bench(f"a={fake.url}=m")
        await watch(one, nursery)
        await trio.sleep(4)
        assert state(one) == "ready"
        delay = 1000.0
        for _ in range(40):  # tokens flow: it is busy, not hung
            one.place("a").alive = trio.current_time()
            await trio.sleep(1)
        assert state(one) == "ready"
        await trio.sleep(60)
        assert state(one) == "quarantined"
        assert "within 5 s" in one.place("a").health.why
        nursery.cancel_scope.cancel()


async def test_models_are_learned(autojump_clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
    models = listing(
        {"id": "llama", "owned_by": "vllm", "max_model_len": 8192, "parent": None},
        {"id": "llama-sql", "owned_by": "vllm", "parent": "llama"},
    )
    async with engine({"/health": OK, "/v1/models": models}) as fake:
        one = bench(f"a={fake.url}", text="models: {llama: {aliases: [gpt]}}\n")
        await watch(one, nursery)
        await trio.sleep(1)
        (model,) = one.place("a").endpoint.models
        assert (model.name, model.loras, model.max_model_len, model.aliases) == (
            "llama",
            ("llama-sql",),
            8192,
            ("gpt",),
        )
        assert one.place("a").endpoint.engine == "vllm"
        assert one.lease("llama-sql").target.model == ""
        assert one.lease("gpt").target.model == "llama"
        revision = one.fleet.revision
        await trio.sleep(20)
        assert one.fleet.revision == revision  # the same again is no news
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("pages", "expected", "why"),
    [
        ({"/v1/models": listing({"id": "m"})}, "ready", ""),  # no /health route
        ({"/health": OK}, "joining", "its models are not configured, and /v1/models says 404"),
        (
            {"/health": OK, "/v1/models": response(b'{"error":"Unauthorized"}', "401 Unauthorized")},
            "joining",
            "401 Unauthorized",
        ),
        ({}, "joining", "/health says 404, /v1/models 404"),
        ({"/health": None}, "joining", "closed the connection"),
        ({"/health": b"nonsense\r\n\r\n"}, "joining", "does not answer in HTTP"),
        ({"/health": OK, "/v1/models": response(b"[" * 5000)}, "ready", ""),
        ({"/health": response(b'{"error":{}}', "500 Oops")}, "joining", "/health says 500"),
    ],
)
async def test_what_an_engine_may_say(
    autojump_clock: trio.testing.MockClock,
    nursery: trio.Nursery,
    pages: dict[str, bytes | None],
    expected: str,
    why: str,
) -> None:
    async with engine(pages) as fake:
        one = bench(f"a={fake.url}")
        await watch(one, nursery)
        await trio.sleep(1)
        assert state(one) == expected
        assert why in one.place("a").health.why
        nursery.cancel_scope.cancel()


async def test_the_key_is_sent(autojump_clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
    async with engine({"/health": OK, "/v1/models": listing({"id": "m"})}) as fake:
        text = f"endpoints: [{{name: a, url: '{fake.url}', api_key_file: /k}}]\n"
        one = bench(text=text, read_key=lambda _: "s3cret")
        await watch(one, nursery)
        await trio.sleep(1)
        assert all(b"authorization: Bearer s3cret" in r for r in fake.requests)
        assert b"s3cret" not in one.lines.data
        nursery.cancel_scope.cancel()


async def test_what_goes_is_not_asked_any_more(autojump_clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
    async with engine({"/health": OK, "/v1/models": listing({"id": "m"})}) as fake:
        one = bench(f"a={fake.url}=m")
        await watch(one, nursery)
        await trio.sleep(1)
        tasks = trio.lowlevel.current_statistics().tasks_living
        endpoint = one.place("a").endpoint
        one.fleet.replace("static", ())
        await trio.sleep(0.1)
        assert trio.lowlevel.current_statistics().tasks_living < tasks
        asked = len(fake.requests)
        await trio.sleep(60)
        assert len(fake.requests) == asked
        one.fleet.replace("static", (endpoint,))
        await trio.sleep(0.1)
        assert state(one) == "ready"
        nursery.cancel_scope.cancel()


async def test_probes_are_spread(autojump_clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
    at: list[float] = []

    async def note(fake: Engine, stream: trio.SocketStream, request: bytes) -> None:
        if b"/health" in request:
            at.append(trio.current_time())
        await stream.send_all(OK if b"/health" in request else listing({"id": "m"}))

    async with engine(script=note) as fake:
        one = bench(f"a={fake.url}=m")
        await watch(one, nursery)
        await trio.sleep(100)
        gaps = [b - a for a, b in pairwise(at)]
        assert all(4.5 <= gap <= 5.6 for gap in gaps)
        assert len({round(gap, 3) for gap in gaps}) > 5
        nursery.cancel_scope.cancel()
