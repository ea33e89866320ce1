"""Reading and writing bodies: nothing is lost, whatever its size, and what aims a worker is removed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.errors import Refused
from llmgw.pipeline import wire

LONG = "data:image/png;base64," + "QUJD" * (wire.BLOB // 4)

values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from([LONG, "data:", "data:,blob-0-0", "blob-0-"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(max_size=4), values, max_size=4), st.booleans())
def test_reading_and_writing_changes_nothing(body: dict[str, Any], escaped: bool) -> None:
    raw = json.dumps(body, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    try:
        raw.decode()
    except UnicodeDecodeError:
        return  # a lone surrogate, which is no JSON that an engine reads
    parsed = wire.parse(raw)
    assert json.loads(wire.encode(parsed)) == json.loads(raw)


def test_a_long_data_uri_is_not_copied_through_the_parser() -> None:
    body = wire.parse(json.dumps({"messages": [{"content": [{"image_url": {"url": LONG}}]}]}).encode())
    url = body["messages"][0]["content"][0]["image_url"]["url"]
    assert isinstance(url, wire.Blob)
    assert wire.text_head(url, 30) == LONG[:30]
    before, literal, after = wire.encode_parts(body)
    assert literal is url.literal
    assert bytes(before) + bytes(literal) + bytes(after) == wire.encode(body)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "say \\"data:' + "x" * wire.BLOB + '\\" twice"}',  # inside a string
        '{"a": "data:' + "\\/" * wire.BLOB + '"}',  # escapes
        '{"a": "data:' + "é" * wire.BLOB + '"}',  # beyond ASCII
        '{"a": "\\\\", "b": "data:' + "x" * wire.BLOB + '"}',  # an escaped backslash before a quote
    ],
)
def test_what_only_looks_like_a_data_uri(text: str) -> None:
    assert json.loads(wire.encode(wire.parse(text.encode()))) == json.loads(text)


@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b"1", b"{", b'{"a":1} x', b'{"a":NaN}', b'{"a":1e999}', b"\xff"])
def test_no_json_object(raw: bytes) -> None:
    with pytest.raises(Refused) as caught:
        wire.parse(raw)
    assert caught.value.refusal.reason == "bad_json"


def test_nesting_beyond_the_stack_is_bad_json() -> None:
    with pytest.raises(Refused):
        wire.parse(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_integers_of_any_size() -> None:
    raw = b'{"a":18446744073709551617,"b":-9223372036854775809,"c":9007199254740993}'
    assert wire.encode(wire.parse(raw)) == raw


def test_what_aims_a_worker_is_removed() -> None:
    aiming = {
        "kv_transfer_params": {}, "ec_transfer_params": {}, "bootstrap_host": "h", "bootstrap_port": 1,
        "bootstrap_room": 2, "data_parallel_rank": 0, "routed_dp_rank": 1, "disagg_prefill_dp_rank": 2,
    }  # fmt: skip
    body: dict[str, Any] = {
        "model": "m",
        **aiming,
        "vllm_xargs": {"kv_transfer_params": {}, "mine": 1},
        "sampling_params": {"seed": 1, "extra_args": {"ec_transfer_params": {}, "mine": 2}, "routed_dp_rank": 3},
    }
    removed = wire.strip_transfer_fields(body)
    assert body == {
        "model": "m",
        "vllm_xargs": {"mine": 1},
        "sampling_params": {"seed": 1, "extra_args": {"mine": 2}},
    }
    assert set(removed) == {
        *aiming, "vllm_xargs.kv_transfer_params", "sampling_params.extra_args.ec_transfer_params",
        "sampling_params.routed_dp_rank",
    }  # fmt: skip
    assert wire.strip_transfer_fields(body) == ()


@pytest.mark.parametrize(
    ("path", "openai", "expected"),
    [
        ("/v1/chat/completions", True, "chat"),
        ("/v1/chat/completions", False, "generate"),
        ("/v1/completions", True, "completions"),
        ("/v1/completions", False, "completions"),
        ("/inference/v1/generate", True, "generate"),
        ("/inference/v1/generate", False, "generate"),
    ],
)
def test_format_of_a_leg(path: str, openai: bool, expected: str) -> None:
    assert wire.leg_format(path, openai) == expected
    assert wire.PATHS[wire.client_format(path)] == path


def test_cap_leaves_the_clients_own_dicts_alone() -> None:
    sampling = {"max_tokens": 9, "min_tokens": 3, "top_p": 0.5}
    body = {"sampling_params": sampling, "stream": True, "stream_options": {}}
    wire.cap_to_one_token(body, "generate")
    assert body == {"sampling_params": {"max_tokens": 1, "top_p": 0.5}, "stream": False}
    assert sampling == {"max_tokens": 9, "min_tokens": 3, "top_p": 0.5}
