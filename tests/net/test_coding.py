"""Compressed request bodies, and the corners of HTTP that real clients use."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable

import pytest
import trio
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from llmgw.config import ClientLimits
from llmgw.openai.coding import decoded
from llmgw.openai.layout import drain
from llmgw.request import Refusal
from llmgw.units import Size
from tests.net.rig import DRIVERS, DriverName, answers, json_answer, post, rig, streams
from tests.net.test_routes import keeps

CODERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstandard.compress}
BODY = json.dumps({"model": "llama", "messages": [{"role": "user", "content": "hi " * 1000}]}).encode()

every_coding = pytest.mark.parametrize("coding", CODERS)
both = pytest.mark.parametrize("driver", DRIVERS)


def encoded(data: bytes, coding: str) -> bytes:
    return post(data, headers=[f"Content-Encoding: {coding}"])


@both
@every_coding
async def test_engines_get_the_plain_body(driver: DriverName, coding: str, autojump_clock: MockClock) -> None:
    seen: list[tuple[bytes, bytes]] = []
    async with rig(driver, keeps(json_answer(), seen=seen)) as r:
        client = await r.dial()
        for _ in range(2):
            await client.send(encoded(CODERS[coding](BODY), coding))
            assert (await client.answer())[0] == 200
        client.close()
        assert [body for _, body in seen] == [BODY, BODY]
        assert b"encoding" not in seen[0][0].lower()


@both
@every_coding
async def test_bombs_and_lies(driver: DriverName, coding: str, autojump_clock: MockClock) -> None:
    bomb = CODERS[coding](b" " * (64 << 20))
    coded = CODERS[coding](BODY)
    other = CODERS["zstd" if coding == "gzip" else "gzip"](BODY)
    async with rig(driver, answers(json_answer()), limits=ClientLimits(body=Size(1 << 20))) as r:
        client = await r.dial()
        for data, status in (
            (bomb, 413),
            (BODY, 400),
            (other, 400),
            (coded[:-5], 400),
            (coded + b"x", 400),
            (coded * 2, 400),
        ):
            await client.send(encoded(data, coding))
            got, _, body = await client.answer()
            assert (got, json.loads(body)["error"]["code"]) == (
                status,
                "too_large" if status == 413 else "bad_encoding",
            )
        await client.send(encoded(coded, coding))  # the connection has survived all of it
        assert (await client.answer())[0] == 200
        client.close()


@every_coding
@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=3000), cut=st.integers(0, 100), garbage=st.binary(max_size=20))
def test_any_body(coding: str, data: bytes, cut: int, garbage: bytes) -> None:
    coded = CODERS[coding](data)
    assert drain(decoded(coded, coding, 1 << 20)) == data
    broken = drain(decoded(coded[:cut] + garbage, coding, 1 << 20))
    assert isinstance(broken, Refusal) or broken == data


def test_steps_are_small() -> None:
    steps = decoded(zlib.compress(bytes(10 << 20), wbits=31), "gzip", 64 << 20)
    assert sum(1 for _ in steps) >= 40


@both
async def test_head_pipelining_and_keep_alive_after_errors(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, answers(json_answer())) as r:
        client = await r.dial()
        await client.send(
            b"HEAD /v1/models HTTP/1.1\r\nHost: g\r\n\r\n"
            + post(b"{")
            + b"GET /nope HTTP/1.1\r\nHost: g\r\n\r\n"
            + post() * 2
        )
        head = await client.until(b"\r\n\r\n")
        assert b"content-length: 27" in head
        assert [(await client.answer())[0] for _ in range(4)] == [400, 404, 200, 200]
        client.close()
        await r.settled(5)
        assert r.engines[0].connections == 1


@both
async def test_http_1_0(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, streams(2)) as r:
        client = await r.dial()
        await client.send(post(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        got = await client.rest()
        assert b"connection: close" in got
        assert b"transfer-encoding" not in got
        assert got.endswith(b"data: [DONE]\n\n")
        client.close()


@both
async def test_expect_100_continue(driver: DriverName, autojump_clock: MockClock) -> None:
    request = post(headers=["Expect: 100-continue"])
    head, _, body = request.partition(b"\r\n\r\n")
    async with rig(driver, answers(json_answer())) as r:
        client = await r.dial()
        await client.send(head + b"\r\n\r\n")
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await trio.sleep(1)
        await client.send(body)
        assert (await client.answer())[0] == 200
        client.close()
