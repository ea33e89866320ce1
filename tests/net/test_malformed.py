"""Malformed and hostile requests: each gets a clear 4xx, is never forwarded, and the connection is closed where it must be."""

from __future__ import annotations

import json

import pytest
import trio
from trio.testing import MockClock

from llmgw.config import ClientLimits
from llmgw.units import Size
from tests.net.rig import DRIVERS, DriverName, Wire, answers, json_answer, post, rig

pytestmark = pytest.mark.parametrize("driver", DRIVERS)

START = b"POST /v1/chat/completions HTTP/1.1\r\n"
BODY = b'{"model":"llama","messages":[]}'


def framed(*lines: bytes, start: bytes = START, host: bytes | None = b"Host: gw", body: bytes = BODY) -> bytes:
    fields = ([host] if host else []) + list(lines)
    return start + b"".join(line + b"\r\n" for line in fields) + b"\r\n" + body


LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    ("request_", "status", "code", "closes"),
    [
        (framed(LENGTH, CHUNKED), 400, "bad_http", True),
        (framed(LENGTH, LENGTH), 400, "bad_http", True),
        (framed(LENGTH, b"A: b", b" folded"), 400, "bad_http", True),
        (framed(LENGTH).replace(b"\r\n", b"\n"), 400, "bad_http", True),
        (framed(LENGTH, b"A: b\nC: d"), 400, "bad_http", True),
        (framed(b"Content-Length: 99999999999999999999"), 400, "bad_http", True),
        (framed(b"Content-Length: 31, 31"), 400, "bad_http", True),
        (framed(LENGTH, b"A: b\0c"), 400, "bad_http", True),
        (framed(LENGTH, host=None), 400, "bad_http", True),
        (framed(LENGTH, b"Host: other"), 400, "bad_http", True),
        (framed(LENGTH, host=b"Host: x/#@y"), 400, "bad_http", True),
        (framed(LENGTH, start=b"POST http://gw/v1/chat/completions HTTP/1.1\r\n"), 400, "bad_http", True),
        (framed(LENGTH, start=b"POST /v1/chat%2fcompletions HTTP/1.1\r\n"), 400, "bad_http", True),
        (framed(LENGTH, start=b"POST //v1/chat/completions HTTP/1.1\r\n"), 400, "bad_http", True),
        (framed(LENGTH, start=b"POST /v1/../v1/chat/completions HTTP/1.1\r\n"), 400, "bad_http", True),
        (framed(LENGTH, b"Upgrade: websocket", b"Connection: upgrade"), 400, "bad_http", True),
        (framed(LENGTH, b"Upgrade: h2c"), 400, "bad_http", True),
        (framed(*[b"X-%d: y" % i for i in range(5000)], LENGTH), 431, "headers_too_large", True),
        (framed(CHUNKED, start=b"POST /v1/chat/completions HTTP/1.0\r\n"), 400, "bad_http", True),
        (framed(b"Transfer-Encoding: gzip, chunked"), 400, "bad_http", True),
        (framed(CHUNKED, body=b"zz\r\n"), 400, "bad_http", True),
        (framed(CHUNKED, body=b"5\nhello\r\n0\r\n\r\n"), 400, "bad_http", True),
        (framed(CHUNKED, body=b"1;" + b"x" * 9000 + b"\r\na\r\n0\r\n\r\n"), 400, "bad_http", True),
        (framed(CHUNKED, body=b"0\r\nbad trailer\r\n\r\n"), 400, "bad_http", True),
        (framed(LENGTH, b"X-Llmgw-Band: a", b"x-llmgw-band: b"), 400, "bad_http", True),
        (framed(LENGTH, b"Content-Encoding: br"), 415, "unsupported_media", True),
        (framed(LENGTH, b"Content-Type: application/x-www-form-urlencoded"), 415, "unsupported_media", False),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\n", 400, "bad_http", True),
        (post(b""), 400, "bad_json", False),
        (post(b"[]"), 400, "bad_json", False),
        (post(b"nul"), 400, "bad_json", False),
        (post(b'{"model":"llama","model":"other","messages":[]}'), 400, "duplicate_field", False),
        (post(b'{"model":"llama","mod\\u0065l":"other","messages":[]}'), 400, "duplicate_field", False),
        (post(b'{"messages":[],"stream":true,"model":"llama","stre\\u0061m":false}'), 400, "duplicate_field", False),
        (post(b'{"model":"\\ud800","messages":[]}'), 400, None, False),
        (post(b'{"model":"a\xffb","messages":[]}'), 400, None, False),
        (post(b'{"model":7,"messages":[]}'), 400, "bad_field", False),
        (post(b'{"messages":[]}'), 400, "bad_field", False),
        (post(b'{"model":"llama","messages":[],"n":NaN}'), 400, None, False),
        (post(b'{"model":"llama","messages":[],"max_tokens":1e999}'), 400, None, False),
        (post(b'{"model":"llama","messages":[],"stream":"yes"}'), 400, "bad_field", False),
        (post(b'{"model":' + b"[" * 1000 + b"]" * 1000 + b"}"), 400, None, False),
        (post(b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), 400, None, False),
        (post(b'{"model":"llama","messages":[],"priority":1}'), 400, "forbidden_field", False),
        (post(b'{"model":"llama","messages":[],"kv_transfer_p\\u0061rams":{}}'), 400, "forbidden_field", False),
        (post(b'{"model":"llama","messages":[],"bootstrap_host":"evil"}'), 400, "forbidden_field", False),
        (post(b'{"model":"llama","messages":[],"routed_dp_rank":1}'), 400, "forbidden_field", False),
        (post(b'{"model":"llama","messages":[],"sampling_params":{"extra_args":{}}}'), 400, "forbidden_field", False),
    ],
)  # fmt: skip
async def test_is_refused_and_never_forwarded(
    driver: DriverName, autojump_clock: MockClock, request_: bytes, status: int, code: str | None, closes: bool
) -> None:
    async with rig(driver, answers(json_answer())) as r:
        client = await r.dial()
        await client.send(request_)
        got, head, body = await client.answer()
        error = json.loads(body)["error"]
        assert got == status, body
        assert error["code"] == code or (code is None and error["code"] in ("bad_json", "bad_field"))
        assert error["message"]
        assert (b"connection: close" in head.lower()) is closes
        if closes:
            assert await client.closed()
        else:  # the connection is as good as before
            await client.send(post())
            assert (await client.answer())[0] == 200
        client.close()
        await r.settled(1 if closes else 2)
        assert r.engines[0].connections == (0 if closes else 1)


@pytest.mark.parametrize("depth", [100, 1000, 100_000])
async def test_deep_prompts_are_the_engines_affair_or_refused(
    driver: DriverName, autojump_clock: MockClock, depth: int
) -> None:
    body = b'{"model":"llama","messages":' + b"[" * depth + b"]" * depth + b"}"
    async with rig(driver, answers(json_answer())) as r:
        status, _, _ = await r.ask(post(body))
        assert status in (200, 400)


async def test_text_that_looks_like_a_field_is_text(driver: DriverName, autojump_clock: MockClock) -> None:
    text = '"kv_transfer_params": {"model": "x", "model": "y"}, "priority": 1, \\"bootstrap_host\\"'
    async with rig(driver, answers(json_answer())) as r:
        assert (await r.ask(post(messages=[{"role": "user", "content": text}])))[0] == 200


async def test_trailers_never_become_headers(driver: DriverName, autojump_clock: MockClock) -> None:
    body = b"%x\r\n%b\r\n0\r\nhost: evil\r\nx-llmgw-band: batch\r\ncookie: a\r\n\r\n" % (len(BODY), BODY)
    seen: list[bytes] = []

    async def script(wire: Wire) -> None:
        head, sent = await wire.request()
        seen.append(head + sent)
        await wire.send(json_answer())

    async with rig(driver, script) as r:
        assert (await r.ask(framed(CHUNKED, b"Content-Type: application/json", body=body)))[0] == 200
        await r.settled()
        assert seen[0].endswith(b"\r\n\r\n" + BODY)
        assert b"evil" not in seen[0]
        assert b"batch" not in seen[0]


HOSTILE = [
    b"Authorization: Bearer k", b"Cookie: a=b", b"X-Forwarded-For: 1.1.1.1", b"X-Data-Parallel-Rank: 3",
    b"X-Conversation-Id: c", b"X-Override-Host: h", b"X-Smg-Target: t", b"Prefer: if-available", b"EPP-Profile: decode",
    b"X-Llmgw-Profile: chat", b"Accept-Encoding: gzip", b"Connection: keep-alive, x-hop", b"X-Hop: 1",
    b"X-Api-Key: k", b"TE: trailers", b"Proxy-Authorization: p", b"Keep-Alive: 5",
]  # fmt: skip


async def test_only_the_allowed_headers_travel(driver: DriverName, autojump_clock: MockClock) -> None:
    seen: list[bytes] = []

    async def script(wire: Wire) -> None:
        while (got := await wire.request())[0]:
            seen.append(got[0])
            await wire.send(json_answer())

    allowed = [
        b"Content-Type: application/json", b"Accept: */*", b"Accept-Language: de", b"User-Agent: t/1", b"Traceparent: 00-1",
        b"Tracestate: a=b",
    ]  # fmt: skip
    start = b"POST /v1/chat/completions?api-version=1&key=secret HTTP/1.1\r\n"
    async with rig(driver, script) as r:
        status, _, _ = await r.ask(framed(LENGTH, b"X-Request-Id: mine", *allowed, *HOSTILE, start=start))
        assert status == 200
    lines = seen[0].lower().split(b"\r\n")
    assert lines[0] == b"post /v1/chat/completions http/1.1"
    names = {line.partition(b":")[0] for line in lines[1:] if line}
    assert names == {
        b"host", b"content-length", b"x-request-id", b"content-type", b"accept", b"accept-language", b"user-agent",
        b"traceparent", b"tracestate",
    }  # fmt: skip
    upstream_id = next(line for line in lines if line.startswith(b"x-request-id"))
    assert upstream_id.startswith(b"x-request-id: mine-")
    assert len(upstream_id) == len(b"x-request-id: mine-") + 8


async def test_ill_formed_request_id_is_replaced(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, answers(json_answer())) as r:
        _, head, _ = await r.ask(post(headers=["x-request-id: has blanks and <tags>"]))
        assert b"tags" not in head
        assert b"x-request-id: " in head


async def test_slow_head_and_slow_body_end_with_408(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, answers(json_answer())) as r:
        client = await r.dial()
        start = trio.current_time()
        await client.send(b"POST /v1/chat/compl")
        assert (await client.answer())[0] == 408
        assert trio.current_time() - start == pytest.approx(10)
        client.close()

        client = await r.dial()
        start = trio.current_time()
        await client.send(framed(b"Content-Length: 100000", body=b"{"))
        assert (await client.answer())[0] == 408
        assert trio.current_time() - start == pytest.approx(10, abs=0.1)
        client.close()
        await r.settled(2)


async def test_body_above_the_limit_is_refused_before_it_is_read(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, answers(json_answer()), limits=ClientLimits(body=Size(1000))) as r:
        status, head, _ = await r.ask(framed(b"Content-Length: 1001", body=b""))
        assert status == 413
        assert b"connection: close" in head
        body = b"%x\r\n%b\r\n" % (1001, b"x" * 1001)
        assert (await r.ask(framed(CHUNKED, body=body)))[0] == 413


async def test_large_body_arrives_whole(driver: DriverName, autojump_clock: MockClock) -> None:
    seen: list[bytes] = []

    async def script(wire: Wire) -> None:
        _, body = await wire.request()
        seen.append(body)
        await wire.send(json_answer())

    text = "x" * (3 << 20)
    async with rig(driver, script) as r:
        request = post(messages=[{"role": "user", "content": text}])
        assert (await r.ask(request))[0] == 200
        assert seen[0] == request.partition(b"\r\n\r\n")[2]


async def test_expect_continue(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, answers(json_answer())) as r:
        client = await r.dial()
        await client.send(framed(LENGTH, b"Expect: 100-continue", body=b""))
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(BODY)
        assert (await client.answer())[0] == 200
        client.close()


async def test_pipelined_requests_are_answered_in_order(driver: DriverName, autojump_clock: MockClock) -> None:
    async with rig(driver, answers(json_answer())) as r:
        client = await r.dial()
        ask = b"".join(
            post(headers=[f"x-request-id: r{i}"]) + b"GET /health HTTP/1.1\r\nHost: a\r\nX-Request-Id: h%d\r\n\r\n" % i
            for i in range(40)
        )
        await client.send(ask)
        for i in range(40):
            for name in ("r", "h"):
                status, head, _ = await client.answer()
                assert status == 200
                assert f"x-request-id: {name}{i}\r\n".encode() in head
        client.close()
        await r.settled(80)
