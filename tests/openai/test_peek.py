from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.openai import peek as module
from llmgw.openai.layout import drain
from llmgw.openai.peek import MEDIA_TOKENS, WHOLE, Allow, Peek, peek, peek_steps
from llmgw.openai.routes import Route, find
from llmgw.request import Refusal


def route(path: str) -> Route:
    found = find(path)
    assert found is not None
    return found


CHAT = route("/v1/chat/completions")
TEXT = route("/v1/completions")


def seen(body: bytes | dict[str, Any], to: Route = CHAT, **options: Allow) -> Peek:
    answer = peek(to, body if isinstance(body, bytes) else json.dumps(body).encode(), **options)
    assert isinstance(answer, Peek), answer
    return answer


def refused(body: bytes, to: Route = CHAT, **options: Allow) -> tuple[str, str | None]:
    answer = peek(to, body, **options)
    assert isinstance(answer, Refusal), answer
    return answer.reason, answer.param


def long(body: bytes) -> bytes:
    """The same object, but too long to be read at once."""
    return b'{"padding":"' + b"x" * WHOLE + b'",' + body.lstrip()[1:]


def test_reads_what_routing_needs() -> None:
    body = {
        "model": "m", "messages": [{"role": "user", "content": "x" * 400}], "stream": True, "n": 2,
        "max_tokens": 5, "max_completion_tokens": 9, "stream_options": {"include_usage": True},
    }  # fmt: skip
    for text in (json.dumps(body).encode(), long(json.dumps(body).encode())):
        got = seen(text)
        assert (got.model, got.stream, got.n, got.max_tokens, got.include_usage) == ("m", True, 2, 9, True)
        assert got.prompt_tokens == len(json.dumps(body["messages"])) // 4
        assert not got.token_ids
        assert got.media == 0
        assert (got.layout is not None) == (len(text) > WHOLE)


def test_defaults_and_nulls() -> None:
    nulls = {"stream": None, "n": None, "max_tokens": None, "max_completion_tokens": None, "stream_options": None}
    for more in ({}, nulls):
        assert seen({"model": "m"} | more) == Peek(model="m")
    assert seen({"model": "m", "max_tokens": -1}).max_tokens is None
    assert seen({"model": "m", "max_tokens": 0}).max_tokens == 0


@pytest.mark.parametrize("prompt", [[1, 22, 333], [[1, 22], [333]], [1]])
def test_token_ids_are_counted(prompt: list[Any]) -> None:
    count = len(str(prompt).split(","))
    for body in (json.dumps({"model": "m", "prompt": prompt}).encode(),):
        for text in (body, long(body)):
            got = seen(text, TEXT)
            assert (got.token_ids, got.prompt_tokens) == (True, count)
    many = seen({"model": "m", "prompt": list(range(400_000))}, TEXT)
    assert (many.token_ids, many.prompt_tokens) == (True, 400_000)


def test_text_is_not_token_ids() -> None:
    assert not seen({"model": "m", "prompt": "1,2,3"}, TEXT).token_ids
    assert not seen({"model": "m", "prompt": ["1", "2"]}, TEXT).token_ids
    assert not seen({"model": "m", "prompt": [1, "2"]}, TEXT).token_ids


@pytest.mark.parametrize("size", [1_000, 3_000_000])
def test_media_are_counted_and_their_data_is_no_text(size: int) -> None:
    content = [
        {"type": "text", "text": 'what is "image_url": here?'},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}},
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
        {"type": "input_audio", "input_audio": {"data": "B" * size, "format": "wav"}},
    ]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}, separators=(",", ":"))
    got = seen(body.encode())
    assert got.media == 3
    assert 3 * MEDIA_TOKENS < got.prompt_tokens < 3 * MEDIA_TOKENS + 200


@pytest.mark.parametrize(
    ("body", "reason", "param"),
    [
        (b"", "bad_json", None),
        (b"[]", "bad_json", None),
        (b'"x"', "bad_json", None),
        (b'{"model":"m"', "bad_json", None),
        (b'{"model":"m"} x', "bad_json", None),
        (b'\xef\xbb\xbf{"model":"m"}', "bad_json", None),
        (b'{"model":"m","n":NaN}', "bad_json", None),
        (b'{"model":"\xff"}', "bad_json", None),
        (b'{"model":"\\ud800"}', "bad_json", None),
        (b'{"model":"m","n":1e999}', "bad_field", "n"),
        (b'{"model":"m","n":0}', "bad_field", "n"),
        (b'{"model":"m","n":1.5}', "bad_field", "n"),
        (b'{"model":"m","max_tokens":18446744073709551617}', "bad_field", "max_tokens"),
        (b'{"model":"m","max_completion_tokens":"9"}', "bad_field", "max_completion_tokens"),
        (b'{"model":1}', "bad_field", "model"),
        (b'{"model":null}', "bad_field", "model"),
        (b'{"model":""}', "bad_field", "model"),
        (b"{}", "bad_field", "model"),
        (b'{"model":"' + b"m" * 513 + b'"}', "bad_field", "model"),
        (b'{"model":"m","stream":"true"}', "bad_field", "stream"),
        (b'{"model":"m","stream_options":[]}', "bad_field", "stream_options"),
        (b'{"model":"m","stream_options":{"include_usage":1}}', "bad_field", "stream_options.include_usage"),
        (b'{"model":"a","model":"b"}', "duplicate_field", "model"),
        (b'{"model":"a","model":"a"}', "duplicate_field", "model"),
        (b'{"model":"a","mod\\u0065l":"b"}', "duplicate_field", "model"),
        (b'{"mod\\u0065l":"a","\\u006dodel":"b"}', "duplicate_field", "model"),
        (b'{"model":"a","stream":true,"stream":false}', "duplicate_field", "stream"),
        (b'{"model":"a","n":1, "n" :1}', "duplicate_field", "n"),
        (b'{"model":"a","max_tokens":1,"max_tokens":2}', "duplicate_field", "max_tokens"),
        (b'{"model":"a","messages":[1],"messages":[2]}', "duplicate_field", "messages"),
        (b'{"model":"a","messages":[1],"messages":[1]}', "duplicate_field", "messages"),
        (b'{"model":"a","m\\u0065ssages":[1],"messages":[1]}', "duplicate_field", "messages"),
        (b'{"model":"a","x":{"messages":[1]},"messages":[2],"messages":[1]}', "duplicate_field", "messages"),
        (b'{"model":"a","stream_options":{},"stream_options":{}}', "duplicate_field", "stream_options"),
        (
            b'{"model":"a","stream_options":{"include_usage":true,"include_usage":false}}',
            "duplicate_field",
            "stream_options.include_usage",
        ),
    ],
)
def test_refusals(body: bytes, reason: str, param: str | None) -> None:
    assert refused(body) == (reason, param)
    if b"}" in body and body.startswith(b"{") and len(body) > 2:
        assert refused(long(body)) == (reason, param)


@pytest.mark.parametrize(
    ("text", "param"),
    [
        (b'"kv_transfer_params":{"do_remote_decode":true}', "kv_transfer_params"),
        (b'"kv_transfer_params":null', "kv_transfer_params"),
        (b'"ec_transfer_params":{}', "ec_transfer_params"),
        (b'"bootstrap_host":"h"', "bootstrap_host"),
        (b'"bootstrap_port":1', "bootstrap_port"),
        (b'"bootstrap_room":[1]', "bootstrap_room"),
        (b'"bootstrap_anything":1', "bootstrap_anything"),
        (b'"routed_dp_rank":0', "routed_dp_rank"),
        (b'"dp_rank":0', "dp_rank"),
        (b'"data_parallel_rank":0', "data_parallel_rank"),
        (b'"sampling_params":{"extra_args":{}}', "sampling_params.extra_args"),
        (b'"sampling_params":{"extra_\\u0061rgs":{}}', "sampling_params.extra_args"),
        (b'"vllm_xargs":{"kv_transfer_params":"x"}', "vllm_xargs.kv_transfer_params"),
        (b'"priority":-5', "priority"),
    ],
)
@pytest.mark.parametrize("to", [CHAT, TEXT], ids=["chat", "completions"])
def test_forbidden_fields(text: bytes, param: str, to: Route) -> None:
    escaped = text.replace(b'"' + text[1:2], b'"\\u%04x' % text[1], 1)
    for member in (text, escaped):
        for body in (b'{"model":"m",' + member + b"}", b"{" + member + b',"model":"m"}'):
            assert refused(body, to) == ("forbidden_field", param)
            assert refused(long(body), to) == ("forbidden_field", param)


def test_priority_can_be_allowed() -> None:
    assert seen(b'{"model":"m","priority":1}', allow=Allow(priority=True)).model == "m"
    assert seen(long(b'{"model":"m","priority":1}'), allow=Allow(priority=True)).model == "m"


def test_text_of_a_prompt_forbids_nothing() -> None:
    text = '"kv_transfer_params":{},"bootstrap_host":1,"dp_rank":1,"priority":3,"model":"b","\\u006dodel":1'
    inner = {"role": "user", "content": text, "priority": 1, "bootstrap_host": 1, "model": "c", "n": 7}
    for more in ({}, {"metadata": inner, "user": "messages"}, {"user": text}):
        body = json.dumps(more | {"model": "m", "messages": [inner]}).encode()
        for one in (body, long(body)):
            assert (seen(one).model, seen(one).n) == ("m", 1)


@pytest.mark.parametrize("depth", [1_000, 100_000, 2_000_000])
def test_depth(depth: int) -> None:
    assert refused(b'{"model":"m","messages":' + b"[" * depth + b"]" * depth + b"}")[0] == "bad_json"


keys = st.sampled_from(["model", "mod\\u0065l", "n", "messages", "stream", "x", "priority", "prompt"])
texts = st.sampled_from(['"m"', "1", "true", "[1]", '{"model":"y"}', '"\\"model\\":"', '[{"messages":[1]}]', "null"])


@given(st.lists(st.tuples(keys, texts), max_size=5), st.sampled_from([CHAT, TEXT]))
def test_never_lets_a_duplicate_or_a_forbidden_key_through(members: list[tuple[str, str]], to: Route) -> None:
    body = "{" + ",".join(f'"{key}":{text}' for key, text in members) + "}"
    answer = peek(to, body.encode())
    names = [json.loads(f'"{key}"') for key, _ in members]
    if isinstance(answer, Peek):
        routed = [n for n in names if n in module.SHAPES[to.shape].routed]
        assert len(set(routed)) == len(routed)
        assert "priority" not in names
        assert json.loads(body)["model"] == answer.model
    assert type(peek(to, long(body.encode()) if members else body.encode())) is type(answer)


@given(st.binary(max_size=40))
def test_any_bytes_get_an_answer(body: bytes) -> None:
    peek(CHAT, body)
    peek(CHAT, b'{"model":"m","messages":' + body + b"}")


@pytest.mark.parametrize("pad", [0, 2 << 20])
def test_what_a_pipeline_takes_out_is_let_through_for_it(pad: int) -> None:
    body = b'{"kv_transfer_params":{},"bootstrap_room":1,"x_dp_rank":0,"priority":1,"messages":"%b"}' % (b"x" * pad)
    assert seen(body, allow=Allow(transfer=True)).model == ""
    assert refused(body)[0] == "forbidden_field"


def test_tokens_in() -> None:
    to = find("/inference/v1/generate")
    assert to is not None
    found = seen(b'{"model":"m","token_ids":[1,2,3],"sampling_params":{"max_tokens":5}}', to)
    assert (found.prompt_tokens, found.token_ids) == (3, True)
    assert refused(b'{"model":"m","token_ids":[1],"sampling_params":{"extra_args":{}}}', to)[0] == "forbidden_field"


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(
    ("part", "fetches"),
    [
        ('{"type":"image_url","image_url":{"url":"https://example.org/a.png"}}', True),
        ('{"type":"image_url","image_url":{"url": "http:\\/\\/10.0.0.1"}}', True),
        ('{"type":"image_url","image_url":{"\\u0075rl":"https://example.org"}}', True),
        ('{"type":"image_url","image_url":{"url":"\\u0068ttp://x"}}', True),
        ('{"type":"image_url","image_url":{"url":"file:///etc/passwd"}}', True),
        ('{"type":"input_image","image_url":"https://example.org/a.png"}', True),
        ('{"type":"image","source":{"type":"url","url":"https://example.org/a.png"}}', True),
        ('{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}', False),
        ('{"type":"text","text":"see \\"url\\": \\"https://example.org\\""}', False),
        ('{"type":"text","text":"gr\\u00fcn: \\u00e4"}', False),
        ('{"type":"text","text":"https://example.org"}', False),
    ],
)
def test_what_must_be_fetched(part: str, fetches: bool, long: bool) -> None:
    filler = '{"type":"text","text":"' + "x" * (2 << 20) + '"},' if long else ""
    body = f'{{"model":"m","messages":[{{"role":"user","content":[{filler}{part}]}}]}}'.encode()
    route = find("/v1/chat/completions")
    assert route is not None
    found = drain(peek_steps(route, body))
    assert isinstance(found, Peek)
    assert found.fetches == fetches
