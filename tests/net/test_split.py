"""However an engine's answer is cut into reads, the client's bytes and the usage are the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.net.rig import DONE, DRIVERS, SSE, DriverName, Wire, chunk, event, post, rig

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13}}\n\n'
EVENTS = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n', event("a"), event("grün 🙂"),
    b": keep-alive\n\n", b"data:" + event("b")[6:], event("c"), USAGE,
]  # fmt: skip
CLOSING = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def with_length(body: bytes, kind: bytes = b"text/event-stream") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


def in_chunks(pieces: Sequence[bytes]) -> bytes:
    return SSE + b"".join(map(chunk, pieces)) + b"0\r\n\r\n"


LF = b"".join(EVENTS)
CRLF = LF.replace(b"\n", b"\r\n")
JSON = b'{"choices":[{"message":{"content":"h\xc3\xa9"}}],"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13}}'
ANSWERS: dict[str, tuple[bytes, bool]] = {  # name: answer, whether the connection's end ends it
    "chunked": (in_chunks([*EVENTS, DONE]), False),
    "chunked-crlf": (in_chunks([e.replace(b"\n", b"\r\n") for e in [*EVENTS, DONE]]), False),
    "chunked-odd": (in_chunks([LF[:30], LF[30:31], LF[31:200], LF[200:] + DONE]), False),
    "chunked-trailer": (SSE + chunk(LF + DONE) + b"0\r\nx-a: b\r\n\r\n", False),
    "chunked-extension": (SSE + b"5;a=b\r\ndata:\r\n" + chunk(b" 1\n\n" + LF) + b"0\r\n\r\n", False),
    "length": (with_length(LF + DONE), False),
    "close": (CLOSING + CRLF + DONE, True),
    "close-no-newline": (CLOSING + LF[:-2], True),
    "json": (with_length(JSON, b"application/json"), False),
    "json-chunked": (SSE.replace(b"text/event-stream", b"application/json") + chunk(JSON[:50]) + chunk(JSON[50:]) + b"0\r\n\r\n", False),
}  # fmt: skip


def scenario(pieces: Sequence[bytes], closes: bool) -> Any:
    async def script(wire: Wire) -> None:
        while (await wire.request())[0]:
            for piece in pieces:
                await wire.send(piece)
                await trio.sleep(0.001)
            if closes:
                return

    return script


async def relayed(
    driver: DriverName, pieces: Sequence[bytes], closes: bool, **options: Any
) -> tuple[bytes, dict[str, Any]]:
    """What the client got of one answer (its head without our id), and what the outcome says of usage."""
    async with rig(driver, scenario(pieces, closes), **options) as r:
        client = await r.dial()
        await client.send(post(stream=True, headers=["x-request-id: same", "connection: close"]))
        got = await client.rest()
        client.close()
        await r.settled()
        outcome = msgspec.structs.asdict(r.brain.outcomes[0])
        kept = ("status", "reason", "prompt_tokens", "completion_tokens", "usage", "bytes_out")
        return got, {k: outcome[k] for k in kept}


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(p for p in places if p < len(data))})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def run(driver: DriverName, pieces: Sequence[bytes], closes: bool, **options: Any) -> tuple[bytes, dict[str, Any]]:
    """In a virtual-time run of its own, so that it fits into a property test."""

    async def main() -> tuple[bytes, dict[str, Any]]:
        return await relayed(driver, pieces, closes, **options)

    return trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", ANSWERS)
def test_one_byte_at_a_time_is_the_same_as_at_once(driver: DriverName, name: str) -> None:
    answer, closes = ANSWERS[name]
    whole = run(driver, [answer], closes)
    assert run(driver, [answer[i : i + 1] for i in range(len(answer))], closes) == whole
    assert whole[1]["completion_tokens"] == 4
    assert whole[1]["usage"] == "engine"


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("usage", ["count", "ask"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(name=st.sampled_from(sorted(ANSWERS)), places=st.lists(st.integers(1, 1500), max_size=6))
def test_any_cut_is_the_same_as_none(driver: DriverName, usage: str, name: str, places: list[int]) -> None:
    answer, closes = ANSWERS[name]
    got, said = run(driver, cut(answer, places), closes, usage=usage)
    expected, told = run(driver, [answer], closes, usage=usage)
    if usage == "ask":  # re-framed: the payload is the same, chunk sizes may differ
        got, expected = unframed(got), unframed(expected)
        del said["bytes_out"], told["bytes_out"]
    assert (got, said) == (expected, told)


def unframed(answer: bytes) -> bytes:
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"chunked" not in head:
        return answer
    payload = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        payload += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return head + payload


@pytest.mark.parametrize("driver", DRIVERS)
def test_asked_for_usage_is_taken_out_and_known(driver: DriverName) -> None:
    answer, closes = ANSWERS["chunked"]
    got, said = run(driver, [answer], closes, usage="ask")
    payload = unframed(got)
    assert payload.endswith(event("c") + DONE)
    assert b"usage" not in payload
    assert (said["completion_tokens"], said["usage"]) == (4, "engine")


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_event_of_a_mebibyte(driver: DriverName) -> None:
    big = event("x" * (1 << 20))
    answer = in_chunks([event("a"), big, event("b"), DONE])
    got, said = run(driver, cut(answer, range(1000, len(answer), 50_021)), False)
    assert got.partition(b"\r\n\r\n")[2] == answer.partition(b"\r\n\r\n")[2]
    assert said["completion_tokens"] in (2, 3)  # an event above the cap counts as an event, its text is not read


@pytest.mark.parametrize("driver", DRIVERS)
async def test_http_1_0_client_gets_the_payload_without_chunks(driver: DriverName, autojump_clock: MockClock) -> None:
    answer, closes = ANSWERS["chunked"]
    async with rig(driver, scenario([answer], closes)) as r:
        client = await r.dial()
        await client.send(post(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        head = await client.until(b"\r\n\r\n")
        assert b"chunked" not in head
        assert await client.rest() == LF + DONE
        client.close()


def test_many_alike_events_in_large_reads_are_counted_exactly() -> None:
    """The bulk path: 64 KiB reads of one event again and again, with a different one here and there."""
    words = [f"w{i}" for i in range(3000)]
    words[1500] = 'quote " and \\ backslash'
    pieces = [event(w) for w in words] + [DONE]
    pieces.insert(2000, b": comment\n\n")
    pieces.insert(700, b'data: {"choices":[{"index":0,"delta":{}}]}\n\n')
    answer = in_chunks(pieces)
    got, said = run("pump", [answer], False)
    assert got.partition(b"\r\n\r\n")[2] == answer.partition(b"\r\n\r\n")[2]
    assert said["completion_tokens"] == 3000
    assert json.dumps(said["usage"]) == '"counted"'
