"""The relay end to end, on both drivers: what is asked for is sent on, what is answered comes back, once each."""

from __future__ import annotations

import json

import pytest
import trio
from trio.testing import MockClock

from llmgw.request import Limits
from tests.net.rig import DONE, DRIVERS, SSE, DriverName, Wire, answers, chunk, event, json_answer, post, rig, streams

pytestmark = pytest.mark.parametrize("driver", DRIVERS)


async def test_json_there_and_back(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, answers(json_answer())) as r:
        client = await r.dial()
        for i in range(3):  # one connection on both sides
            await client.send(post(headers=[f"x-request-id: r{i}"]))
            status, head, body = await client.answer()
            assert status == 200
            assert f"x-request-id: r{i}".encode() in head
            assert json.loads(body)["usage"]["completion_tokens"] == 2
        client.close()
        await r.settled(3)
        assert r.engines[0].connections == 1
        assert [(o.status, o.reason, o.completion_tokens, o.usage) for o in r.brain.outcomes] == [
            (200, "", 2, "engine")
        ] * 3


async def test_stream_comes_as_it_is_made(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, streams(4, gap=1.0)) as r:
        client = await r.dial()
        start = trio.current_time()
        await client.send(post(stream=True))
        await client.until(b"\r\n\r\n")
        seen = []
        for _ in range(4):
            await client.until(b"\n\n\r\n")
            seen.append(trio.current_time() - start)
        assert await client.until(b"0\r\n\r\n") == chunk(DONE) + b"0\r\n\r\n"
        client.close()
        await r.settled()
        assert seen == pytest.approx([1.0, 2.0, 3.0, 4.0])
        outcome = r.brain.outcomes[0]
        assert (outcome.status, outcome.completion_tokens, outcome.usage) == (200, 4, "counted")
        assert r.brain.progressed[0][1] == 1


async def test_bytes_of_a_stream_are_those_of_the_engine(driver: DriverName, autojump_clock: MockClock) -> None:
    body = chunk(event("héllo ")) + chunk(event("wörld")) + chunk(DONE) + b"0\r\n\r\n"
    async with rig(driver, answers(SSE + body)) as r:
        client = await r.dial()
        await client.send(post(stream=True))
        await client.until(b"\r\n\r\n")
        assert await client.exactly(len(body)) == body
        client.close()


async def test_engine_sees_the_disconnect_at_the_same_instant(driver: DriverName, autojump_clock: MockClock) -> None:
    gone: list[float] = []

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(SSE)
        with trio.move_on_after(100):
            await wire.closed()
            gone.append(trio.current_time())

    async with rig(driver, script) as r:
        client = await r.dial()
        await client.send(post(stream=True))
        await trio.sleep(3)
        left = trio.current_time()
        client.close()
        await r.settled()
        await trio.sleep(1)
        assert gone == [left]
        outcome = r.brain.outcomes[0]
        assert (outcome.status, outcome.reason, outcome.aborted) == (499, "client_gone", True)


async def test_engine_that_dies_mid_stream_becomes_an_error_event(
    driver: DriverName, autojump_clock: MockClock
) -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(SSE + chunk(event("a")))
        wire.reset()

    async with rig(driver, script) as r:
        client = await r.dial()
        await client.send(post(stream=True))
        got = await client.rest()
        client.close()
        await r.settled()
        assert b'"code":"upstream_closed"' in got
        assert b"[DONE]" not in got
        assert not got.endswith(b"0\r\n\r\n")
        assert r.brain.outcomes[0].reason == "upstream_closed"


async def test_full_engine_is_left_for_another(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, answers(json_answer(b"{}", 503)), answers(json_answer())) as r:
        assert (await r.ask(post()))[0] == 200
        await r.settled()
        assert r.brain.outcomes[0].attempts == 2


async def test_silent_engine_ends_in_an_idle_timeout(driver: DriverName, autojump_clock: MockClock) -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.closed()

    async with rig(driver, script, leg=Limits(idle=30), patience=2) as r:
        start = trio.current_time()
        status, _, body = await r.ask(post())
        assert status == 504
        assert json.loads(body)["error"]["code"] == "idle_timeout"
        assert trio.current_time() - start == pytest.approx(90)


async def test_waiting_request_is_served_when_granted_and_withdrawn_when_its_client_leaves(
    driver: DriverName, autojump_clock: MockClock
) -> None:
    async with rig(driver, answers(json_answer()), hold=True) as r:
        stays, leaves = await r.dial(), await r.dial()
        await stays.send(post())
        await leaves.send(post())
        await trio.sleep(1)
        assert len(r.brain.waiting) == 2
        leaves.close()
        await r.settled()
        assert r.brain.outcomes[0].status == 499
        for ticket, lease in r.brain.release():
            r.mover.granted(ticket, lease)
        assert (await stays.answer())[0] == 200
        stays.close()


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (b"GET /nope HTTP/1.1\r\nHost: a\r\n\r\n", 404, "unknown_path"),
        (b"GET /v1/chat/completions HTTP/1.1\r\nHost: a\r\n\r\n", 405, "method_not_allowed"),
        (post(b"{"), 400, "bad_json"),
        (post(model="nope"), 404, "model_not_found"),
        (post(kv_transfer_params={}), 400, "forbidden_field"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n", 413, "too_large"),
        (b"GET / HTTP/1.1\nHost: a\n\n", 400, "bad_http"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nA: " + b"x" * 70_000 + b"\r\n\r\n", 431, "headers_too_large"),
    ],
)
async def test_refusals(driver: DriverName, autojump_clock: MockClock, request_: bytes, status: int, code: str) -> None:
    async with rig(driver, answers(json_answer())) as r:
        got, _, body = await r.ask(request_)
        assert (got, json.loads(body)["error"]["code"]) == (status, code)
        await r.settled()
        assert (r.brain.outcomes[0].status, r.brain.outcomes[0].reason) == (status, code)
        assert r.engines[0].connections == 0
