"""Engines that break, in every way that engines break: the client gets a whole answer, an error, or a cut; never a lie."""

from __future__ import annotations

import json

import pytest
import trio
from trio.testing import MockClock

from llmgw.request import Limits, Refusal
from tests.net.rig import (
    DONE,
    DRIVERS,
    SSE,
    DriverName,
    Rig,
    Script,
    Wire,
    answers,
    chunk,
    event,
    json_answer,
    post,
    rig,
    streams,
)

pytestmark = pytest.mark.parametrize("driver", DRIVERS)


def once(data: bytes, *, end: str = "close") -> Script:
    """Read a request, send *data*, then close, reset, or wait for the peer to leave."""

    async def script(wire: Wire) -> None:
        await wire.request()
        if data:
            await wire.send(data)
        if end == "reset":
            wire.reset()
        elif end == "half":
            wire.shutdown()
            await wire.closed()
        elif end == "stay":
            await wire.closed()

    return script


def code_of(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


async def ask_for(r: Rig) -> tuple[int, bytes]:
    status, _, body = await r.ask(post())
    await r.settled()
    return status, body


@pytest.mark.parametrize(
    ("data", "end", "status", "code"),
    [
        (b"", "close", 502, "upstream_closed"),
        (b"", "reset", 502, "upstream_closed"),
        (b"", "half", 502, "upstream_closed"),
        (b"HTTP/1.1 200 OK\r\ncontent-", "close", 502, "upstream_closed"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", "reset", 502, "upstream_closed"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nshort", "close", 502, "upstream_closed"),
        (SSE, "close", 502, "upstream_closed"),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "stay", 502, "upstream_protocol"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n", "stay", 502, "upstream_protocol"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n", "stay", 502, "upstream_protocol"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000, "stay", 502, "upstream_protocol"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "stay", 502, "upstream_protocol"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", "stay", 502, "upstream_protocol"),
    ],
)
async def test_what_breaks_before_the_first_byte_is_an_error_with_a_status(
    driver: DriverName, autojump_clock: MockClock, data: bytes, end: str, status: int, code: str
) -> None:
    async with rig(driver, once(data, end=end)) as r:
        got, body = await ask_for(r)
        assert (got, code_of(body)) == (status, code)
        assert (r.brain.outcomes[0].status, r.brain.outcomes[0].reason) == (status, code)


async def test_connection_refused(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, answers(json_answer())) as r:
        r.brain.targets = [
            t.__class__(endpoint="x", name="x", address="tcp:127.0.0.1:1", host="x") for t in r.brain.targets
        ]
        status, body = await ask_for(r)
        assert (status, code_of(body)) == (502, "connect_failed")
        assert r.brain.outcomes[0].attempts == 3


@pytest.mark.parametrize("end", ["close", "reset", "half"])
async def test_stream_cut_on_a_boundary_gets_an_error_event_and_no_end(
    driver: DriverName, autojump_clock: MockClock, end: str
) -> None:
    async with rig(driver, once(SSE + chunk(event("a")), end=end)) as r:
        client = await r.dial()
        await client.send(post(stream=True))
        await client.until(b"\r\n\r\n")
        got = await client.rest()
        client.close()
        await r.settled()
        assert got.startswith(chunk(event("a")))
        error = got.removeprefix(chunk(event("a")))
        size, _, rest = error.partition(b"\r\n")
        assert rest.startswith(b'data: {"error":')
        assert len(rest) == int(size, 16) + 2  # a whole chunk, and nothing behind it
        assert (r.brain.outcomes[0].status, r.brain.outcomes[0].reason) == (200, "upstream_closed")


@pytest.mark.parametrize(
    "tail",
    [b"5\r\nda", b"a", chunk(b'data: {"choices"'), chunk(b"data: {}\n"), b"1f"],
    ids=["chunk", "size", "event", "line", "size2"],
)
async def test_stream_cut_within_an_event_or_chunk_is_just_cut(
    driver: DriverName, autojump_clock: MockClock, tail: bytes
) -> None:
    async with rig(driver, once(SSE + chunk(event("a")) + tail, end="reset")) as r:
        client = await r.dial()
        await client.send(post(stream=True))
        await client.until(b"\r\n\r\n")
        got = await client.rest()
        client.close()
        await r.settled()
        assert b"error" not in got
        assert (chunk(event("a")) + tail).startswith(got)
        assert r.brain.outcomes[0].reason == "upstream_closed"


async def test_garbage_chunk_header_ends_its_stream_only(driver: DriverName, autojump_clock: MockClock) -> None:
    async def script(wire: Wire) -> None:
        _, body = await wire.request()
        await wire.send(SSE + chunk(event("a")))
        await trio.sleep(1)
        if b"bad" in body:
            await wire.send(b"xyz\r\n\r\n")
            await wire.closed()
            return
        for _ in range(20):
            await trio.sleep(0.1)
            await wire.send(chunk(event("b")))
        await wire.send(chunk(DONE) + b"0\r\n\r\n")

    async with rig(driver, script) as r, trio.open_nursery() as nursery:

        async def good() -> None:
            status, _, body = await r.ask(post(stream=True))
            assert status == 200
            assert body.count(b"data: ") == 22

        async def bad() -> None:
            client = await r.dial()
            await client.send(post(stream=True, user="bad"))
            assert b"upstream_protocol" in await client.rest()
            client.close()

        for _ in range(100):
            nursery.start_soon(good)
        nursery.start_soon(bad)
    assert sorted(o.reason for o in r.brain.outcomes) == [""] * 100 + ["upstream_protocol"]


async def test_pooled_connection_that_its_engine_has_closed_is_not_used(
    driver: DriverName, autojump_clock: MockClock
) -> None:
    """As llama-server does after every stream."""
    async with rig(driver, once(json_answer())) as r:
        for _ in range(5):
            assert (await r.ask(post()))[0] == 200
        await r.settled(5)
        assert [o.attempts for o in r.brain.outcomes] == [1] * 5


async def test_engine_that_closes_just_as_it_is_reused_is_asked_again_once(
    driver: DriverName, autojump_clock: MockClock
) -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(json_answer())
        await wire.until(b"\r\n\r\n")  # the second request has come: close without a byte

    async with rig(driver, script) as r:
        client = await r.dial()
        for _ in range(2):
            await client.send(post())
            assert (await client.answer())[0] == 200
        client.close()
        await r.settled(2)
        assert [o.attempts for o in r.brain.outcomes] == [1, 2]


async def test_fresh_connection_that_dies_is_not_retried_since_the_work_may_have_begun(
    driver: DriverName, autojump_clock: MockClock
) -> None:
    async with rig(driver, once(b""), answers(json_answer())) as r:
        assert (await ask_for(r))[0] == 502
        assert r.engines[1].connections == 0


@pytest.mark.parametrize("status", [503, 429])
async def test_full_engines_are_left_for_another_and_the_last_refusal_is_ours(
    driver: DriverName, autojump_clock: MockClock, status: int
) -> None:
    full = answers(json_answer(b'{"error":{"message":"busy"}}', status))
    async with rig(driver, full, full, full) as r:
        got, body = await ask_for(r)
        assert (got, code_of(body)) == (503, "no_endpoint")
        assert r.brain.outcomes[0].attempts == 3
        assert r.brain.outcomes[0].upstream_status == status


@pytest.mark.parametrize("status", [400, 404, 422, 500])
async def test_other_errors_of_an_engine_are_relayed_as_they_are(
    driver: DriverName, autojump_clock: MockClock, status: int
) -> None:
    text = b'{"error":{"message":"theirs","code":%d}}' % status
    async with rig(driver, answers(json_answer(text, status))) as r:
        got, body = await ask_for(r)
        assert (got, body) == (status, text)
        assert (r.brain.outcomes[0].attempts, r.brain.outcomes[0].upstream_status) == (1, status)


@pytest.mark.parametrize(
    "surplus",
    [
        json_answer() + b"surplus",
        json_answer() + json_answer(b"second"),
        SSE + chunk(DONE) + b"0\r\n\r\n" + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        SSE + chunk(DONE) + b"0\r\n\r\n\r\n",
    ],
)
async def test_surplus_bytes_close_the_upstream_and_never_reach_the_client(
    driver: DriverName, autojump_clock: MockClock, surplus: bytes
) -> None:
    async with rig(driver, once(surplus, end="stay")) as r:
        client = await r.dial()
        for _ in range(3):
            await client.send(post(stream=surplus.startswith(SSE)))
            status, _, body = await client.answer()
            assert status == 200
            assert b"surplus" not in body
            assert b"second" not in body
        client.shutdown()
        assert await client.closed()
        client.close()
        assert r.engines[0].connections == 3
        assert r.relay.idle_upstreams == 0


async def test_second_response_unasked_closes_the_idle_connection(
    driver: DriverName, autojump_clock: MockClock
) -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(json_answer())
        await trio.sleep(1)
        await wire.send(json_answer(b"unasked"))
        await wire.closed()

    async with rig(driver, script) as r:
        client = await r.dial()
        await client.send(post())
        await client.answer()
        assert r.relay.idle_upstreams == 1
        await trio.sleep(2)
        assert r.relay.idle_upstreams == 0
        await client.send(post())
        _, _, body = await client.answer()
        assert body != b"unasked"
        client.close()


async def test_interim_answers_are_passed_over(driver: DriverName, autojump_clock: MockClock) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n"
    async with rig(driver, answers(interim + json_answer())) as r:
        status, head, _ = await r.ask(post())
        assert status == 200
        assert b"link" not in head


async def test_close_delimited_answer_ends_with_its_connection(driver: DriverName, autojump_clock: MockClock) -> None:
    body = b'{"usage":{"prompt_tokens":1,"completion_tokens":7,"total_tokens":8}}'
    async with rig(driver, once(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + body)) as r:
        client = await r.dial()
        await client.send(post())
        head = await client.until(b"\r\n\r\n")
        assert b"connection: close" in head
        assert await client.rest() == body
        client.close()
        await r.settled()
        assert r.brain.outcomes[0].completion_tokens == 7


async def test_close_delimited_answer_that_is_reset_is_reset_for_the_client(
    driver: DriverName, autojump_clock: MockClock
) -> None:
    async with rig(driver, once(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100_000, end="reset")) as r:
        client = await r.dial()
        await client.send(post())
        await client.until(b"\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            await client.drained()
        client.close()


async def test_long_silence_is_no_death_while_the_engine_shows_life(
    driver: DriverName, autojump_clock: MockClock
) -> None:
    """A 20-minute non-streaming generation passes; the brain is asked every two minutes."""

    async def script(wire: Wire) -> None:
        await wire.request()
        await trio.sleep(20 * 60 - 1)
        await wire.send(json_answer())

    async with rig(driver, script, leg=Limits(idle=120), patience=1000) as r:
        assert (await r.ask(post()))[0] == 200
        await r.settled()
        assert r.brain.asked_quiet == 9


async def test_generation_budget_ends_a_stream(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, streams(1000, gap=1.0), leg=Limits(generation=10)) as r:
        client = await r.dial()
        start = trio.current_time()
        await client.send(post(stream=True))
        assert b"generation_timeout" in await client.rest()
        assert trio.current_time() - start == pytest.approx(10)
        client.close()
        await r.settled()


async def test_abandoned_leases_end_with_the_refusal_given(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, once(b"", end="stay")) as r:
        client = await r.dial()
        await client.send(post())
        await trio.sleep(1)
        (lease,) = r.brain.open
        r.mover.abandon(lease, Refusal(reason="idle_timeout", message="the engine hangs"))
        status, _, body = await client.answer()
        assert (status, code_of(body)) == (504, "idle_timeout")
        client.close()


async def test_engine_that_answers_before_the_body_is_sent(driver: DriverName, autojump_clock: MockClock) -> None:
    """A 413 from the engine while it does not read on: its answer is the client's, its connection is not reused."""

    async def script(wire: Wire) -> None:
        await wire.until(b"\r\n\r\n")
        await wire.send(json_answer(b'{"error":"too large"}', 413))
        await wire.sock.recv(1)
        await trio.sleep(5)

    async with rig(driver, script) as r:
        request = post(messages=[{"role": "user", "content": "x" * (8 << 20)}])
        assert (await r.ask(request))[0] == 413
        await r.settled()
        assert r.relay.idle_upstreams == 0
