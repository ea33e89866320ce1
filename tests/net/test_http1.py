"""Heads are read strictly, and a chunked body ends where it ends, however it is cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.net import http1
from llmgw.net.http1 import Chunked, Malformed, RequestReader, parse_response

POST = b"POST /v1/completions HTTP/1.1\r\n"


def request(*lines: bytes, start: bytes = POST, host: bool = True) -> http1.RequestHead:
    fields = [b"Host: a", *lines] if host else list(lines)
    return RequestReader(field_count=64)(start + b"".join(line + b"\r\n" for line in fields) + b"\r\n")


def test_reads_what_routing_needs() -> None:
    head = request(
        b"Content-Length: 5", b"X-Session-Id: s", b"Cookie: secret", b"Accept: */*", b"Authorization: Bearer k"
    )

    assert (head.method, head.path, head.length, head.keep_alive) == ("POST", "/v1/completions", 5, True)
    assert head.text(b"x-session-id") == "s"
    assert head.forward == b"accept: */*\r\n"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([b"Content-Length: 5", b"Transfer-Encoding: chunked"], "Transfer-Encoding can't be present"),
        ([b"Content-Length: 5", b"Content-Length: 5"], "Duplicate Content-Length"),
        ([b"Content-Length: +5"], "Content-Length"),
        ([b"Content-Length: 99999999999999999999"], "overflow"),
        ([b"Transfer-Encoding: gzip, chunked"], "exactly 'chunked'"),
        ([b"Transfer-Encoding: xchunked"], "Transfer-Encoding"),
        ([b"A: b", b" c"], "whitespace"),
        ([b"A : b"], "header token"),
        ([b"A: b\0c"], "header value"),
        ([b"A: b\nC: d"], "CR"),
        ([b"Upgrade: h2c"], "Upgrade"),
        ([b"Upgrade: h2c", b"Connection: upgrade", b"Content-Length: 3"], "Upgrade"),
        ([b"Host: b"], "host occurs twice"),
        ([b"X-Llmgw-Band: a", b"x-llmgw-band: b"], "x-llmgw-band occurs twice"),
    ],
)
def test_refuses_malformed_fields(lines: list[bytes], says: str) -> None:
    with pytest.raises(Malformed, match=says):
        request(*lines)


@pytest.mark.parametrize("host", [b"x/#@y", b"a b", b"a:b", b"user@a", b"a:123456"])
def test_refuses_malformed_host(host: bytes) -> None:
    with pytest.raises(Malformed, match="malformed Host"):
        request(b"Host: " + host, host=False)


def test_refuses_missing_host() -> None:
    with pytest.raises(Malformed, match="no Host"):
        request(host=False)


@pytest.mark.parametrize("host", [b"a", b"a:1", b"[::1]:80", b"127.0.0.1:8080", b""])
def test_takes_usual_hosts(host: bytes) -> None:
    request(b"Host: " + host, host=False)


@pytest.mark.parametrize(
    "target",
    [
        b"http://a/x",
        b"//x",
        b"/a//b",
        b"/a/../b",
        b"/a/..",
        b"/a%2fb",
        b"/a%2Fb",
        b"/%2e%2e/b",
        b"/a%5cb",
        b"/a%00",
        b"*",
    ],
)
def test_refuses_targets_that_two_readers_read_differently(target: bytes) -> None:
    with pytest.raises(Malformed):
        request(start=b"POST " + target + b" HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "start", [b"GET /x HTTP/2.0\r\n", b"GET /x HTTP/1.2\r\n", b"get /x HTTP/1.1\r\n", b"CONNECT a:1 HTTP/1.1\r\n"]
)
def test_refuses_other_versions_and_methods(start: bytes) -> None:
    with pytest.raises(Malformed):
        request(start=start)


def test_transfer_encoding_on_http_1_0_is_refused() -> None:
    with pytest.raises(Malformed):
        request(b"Transfer-Encoding: chunked", start=b"POST /x HTTP/1.0\r\n")


def test_too_many_fields_have_their_own_reason() -> None:
    with pytest.raises(Malformed) as caught:
        request(*[b"A: b"] * 65)
    assert caught.value.reason == "headers_too_large"


@pytest.mark.parametrize(
    ("value", "kept"), [(b"abc-1", "abc-1"), (b"", ""), (b"a b", ""), (b"x" * 129, ""), (b"a\xff", "")]
)
def test_request_ids_are_kept_if_well_formed(value: bytes, kept: str) -> None:
    assert http1.request_id(value) == kept


def test_response_head_keeps_end_to_end_fields_only() -> None:
    head = parse_response(
        b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\nConnection: keep-alive, x-hop\r\nx-hop: 1\r\nKeep-Alive: timeout=5\r\n"
        b"transfer-encoding: chunked\r\nX-Request-Id: theirs\r\ncontent-type: Text/Event-Stream\r\n\r\n"
    )

    assert head.lines == b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: Text/Event-Stream\r\n"
    assert (head.length, head.keep_alive, head.content_type) == (-1, True, b"text/event-stream")


def test_response_without_length_ends_with_its_connection() -> None:
    head = parse_response(b"HTTP/1.0 200 OK\r\n\r\n")
    assert (head.length, head.keep_alive, head.lines) == (-2, False, b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 99 X\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
    ],
)
def test_bad_responses_are_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse_response(data)


def encode(chunks: list[bytes], trailer: bytes = b"", extension: bytes = b"") -> bytes:
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(c), extension, c) for c in chunks)
    return body + b"0\r\n" + trailer + b"\r\n"


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=5),
    trailer=st.sampled_from([b"", b"X-A: b\r\n", b"host: evil\r\nx-llmgw-band: x\r\n"]),
    extension=st.sampled_from([b"", b";a=b", b" ; x"]),
    surplus=st.binary(max_size=5),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_any_cut_gives_the_same_payload_and_end(
    chunks: list[bytes], trailer: bytes, extension: bytes, surplus: bytes, cuts: list[int]
) -> None:
    whole = encode(chunks, trailer, extension)
    data = whole + surplus
    places = sorted({0, *(c for c in cuts if c < len(data)), len(data)})
    reader, payload, consumed = Chunked(), b"", 0
    for start, stop in itertools.pairwise(places):
        payload += reader.feed(data[start:stop])
        if reader.done:
            consumed = start + reader.end
            break

    assert reader.done
    assert payload == b"".join(chunks)
    assert consumed == len(whole)
    assert reader.trailers == len(trailer)


def test_last_tells_where_the_trailer_begins() -> None:
    reader = Chunked()
    reader.feed(b"1\r\na\r\n0\r\nX: y\r\n\r\nrest")
    assert (reader.last, reader.end, reader.done) == (9, 17, True)


@pytest.mark.parametrize(
    "data",
    [
        b"zz\r\n", b"+5\r\n", b"0x5\r\n", b"1_0\r\n", b"-1\r\n", b"\r\n", b"5\nhello\r\n", b"1\r\nabc", b"1\r\na\n\n",
        b"ffffffffffffffff\r\n", b"5;\x00\r\n", b"0\r\nbad trailer\r\n\r\n", b"0\r\nA: \x01\r\n\r\n", b"g",
    ],
)  # fmt: skip
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        Chunked().feed(data)
    with pytest.raises(Malformed):  # one byte at a time, too
        feed_all(data[i : i + 1] for i in range(len(data)))


def feed_all(pieces: Iterable[bytes]) -> None:
    reader = Chunked()
    for piece in pieces:
        reader.feed(piece)


def test_extensions_and_trailers_are_bounded() -> None:
    with pytest.raises(Malformed):
        feed_all([b"1;" + b"x" * 100 + b"\r\na\r\n"] * 100)
    with pytest.raises(Malformed):
        Chunked().feed(b"0\r\n" + b"A: b\r\n" * 5000)
    with pytest.raises(Malformed):
        Chunked().feed(b"1;" + b"x" * 10_000)


HEAD_BYTES = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nAccept: */*\r\n\r\n"


@pytest.mark.parametrize(
    ("other", "length"),
    [
        (HEAD_BYTES, 5),
        (HEAD_BYTES.replace(b": 5", b": 12345"), 12345),
        (HEAD_BYTES.replace(b": 5", b": 007"), 7),
        (HEAD_BYTES.replace(b": 5", b": 5, 5"), None),
        (HEAD_BYTES.replace(b": 5", b": "), None),
        (HEAD_BYTES.replace(b": 5", b": +5"), None),
        (HEAD_BYTES.replace(b": 5", b": 5\r\nX: y"), None),
        (HEAD_BYTES.replace(b": 5", b": 5\r\nContent-Length: 6"), None),
        (HEAD_BYTES.replace(b": 5", b": 9999999999999999"), None),
        (HEAD_BYTES.replace(b"Host: a", b"Host: b"), None),
        (HEAD_BYTES.replace(b"*/*", b"*"), None),
        (HEAD_BYTES.replace(b"POST", b"PUT"), None),
    ],
)
def test_a_head_is_known_again_only_if_nothing_but_its_length_differs(other: bytes, length: int | None) -> None:
    head = RequestReader(field_count=64)(HEAD_BYTES)
    assert head.again(other) is (length is not None)
    if length is not None:
        assert head.length == length


def test_a_field_that_ends_like_content_length_is_not_taken_for_it() -> None:
    head = RequestReader(field_count=64)(
        b"POST /x HTTP/1.1\r\nHost: a\r\nX-Content-Length: 5\r\ncontent-length: 5\r\n\r\n"
    )
    assert head.before.endswith(b"X-Content-Length: 5\r\ncontent-length: ")
