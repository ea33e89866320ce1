"""Gateway mode: legs to one address with `EPP-Profile`; a recording gateway, and llmgw being that gateway."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from llmgw import config
from llmgw.errors import ConfigError
from tests.pipeline.cluster import CHAT, LONG, Cluster, cluster
from tests.pipeline.test_driver import D, P, pulled
from tests.server.raw import Engine as Raw
from tests.server.raw import engine as raw
from tests.server.raw import response

KV = {"remote_engine_id": "e1", "remote_block_ids": [[1]], "opaque": 9007199254740993}


def answer(body: Any, status: str = "200 OK") -> bytes:
    return response(json.dumps(body).encode(), status, "content-type: application/json")


def parts(request: bytes) -> tuple[str, dict[str, str], Any]:
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(": ")
        assert name.lower() not in headers, f"two headers {name}"
        headers[name.lower()] = value
    return first.split()[1], headers, json.loads(body) if body else None


async def gateway(fake: Raw, stream: trio.SocketStream, request: bytes) -> None:
    path, headers, _ = parts(request)
    profile = headers.get("epp-profile")
    if path == "/health":
        await stream.send_all(answer({}))
    elif path.endswith("/render"):
        found = {"token_ids": [1, 2], "features": None}
        await stream.send_all(answer(found if "chat" in path else [found]))
    elif profile == "prefill":
        await stream.send_all(answer({"kv_transfer_params": KV}, fake.pages.get("prefill", b"200 OK").decode()))  # type: ignore[union-attr]
    elif headers.get("prefer") == "if-available" and "prefer" in fake.pages:
        await stream.send_all(answer({}, "412 Precondition Failed"))
    else:
        await stream.send_all(answer({"from": profile}, fake.pages.get("decode", b"200 OK").decode()))  # type: ignore[union-attr]


def legs(fake: Raw) -> list[tuple[str, dict[str, str], Any]]:
    return [found for found in map(parts, fake.requests) if found[0] != "/health"]


def pipeline(address: str, *, steps: str = "[{type: prefill}, {type: decode}]", more: str = "") -> str:
    return f"gateway: {address}\nkv_connector: kv-nixl\ntransfer_fields: strip\n{more}steps: {steps}\n"


HEADERS = {
    "authorization": "Bearer client", "cookie": "c=1", "traceparent": "00-a-b-01", "prefer": "if-available",
    "accept-encoding": "gzip", "epp-profile": "encode", "x-data-parallel-rank": "3", "x-request-id": "r1",
    "x-llm-d-slo-ttft-ms": "100",
}  # fmt: skip


async def test_legs_of_a_recording_gateway() -> None:
    async with raw(script=gateway) as fake:
        steps = f"[{{type: render, params: {{address: '{fake.url}'}}}}, {{type: prefill}}, {{type: decode}}]"
        async with cluster(pipeline(fake.url, steps=steps), {}) as found:
            body = {
                "model": "any",
                "messages": [],
                "seed": 9007199254740993,
                "kv_transfer_params": {"remote_host": "evil"},
            }
            got = await found.client().ask(CHAT, body, HEADERS)
            assert got.status == 200
            assert got.json() == {"from": "decode"}
            render, prefill, decode = legs(fake)
            assert render[0] == "/v1/chat/completions/render"
            assert "epp-profile" not in render[1]
            for leg, profile in ((prefill, "prefill"), (decode, "decode")):
                path, headers, _ = leg
                assert path == CHAT
                assert headers["epp-profile"] == profile
                assert headers["content-type"] == "application/json"
                assert headers["authorization"] == "Bearer client"
                assert headers["cookie"] == "c=1"
                assert headers["x-llm-d-slo-ttft-ms"] == "100"
                assert headers["x-request-id"].startswith(f"r1-{profile}-")
                assert not {"prefer", "accept-encoding", "x-data-parallel-rank"} & set(headers)
            assert prefill[2]["kv_transfer_params"]["do_remote_decode"] is True
            assert prefill[2]["max_tokens"] == 1
            assert decode[2]["kv_transfer_params"] == {**KV, "do_remote_decode": False, "do_remote_prefill": True}
            assert decode[2]["seed"] == 9007199254740993
            assert "evil" not in json.dumps([leg[2] for leg in legs(fake)])
            found.quiet()


async def test_an_answer_of_the_decode_leg_is_the_clients_whatever_it_says() -> None:
    async with (
        raw({"decode": b"503 Service Unavailable"}, script=gateway) as fake,
        cluster(pipeline(fake.url), {}) as found,
    ):
        got = await found.client().ask(CHAT, LONG)
        assert got.status == 503
        assert got.json() == {"from": "decode"}
        assert len(legs(fake)) == 2
        found.quiet()


@pytest.mark.parametrize(
    ("status", "seen"), [("422 Unprocessable", 422), ("503 Unavailable", 502), ("201 Created", 502)]
)
async def test_an_answer_of_the_prefill_leg_is_not(status: str, seen: int) -> None:
    async with (
        raw({"prefill": status.encode()}, script=gateway) as fake,
        cluster(pipeline(fake.url, more="on_failure: {prefill_failed: fail, attempts: 1}\n"), {}) as found,
    ):
        got = await found.client().ask(CHAT, LONG)
        assert got.status == seen
        assert b"remote_engine_id" not in got.body
        found.quiet()


async def test_a_probe_that_is_declined_goes_on_and_one_that_is_not_ends() -> None:
    steps = "[{type: conditional-decode}, {type: prefill}, {type: decode}]"
    for declines, count in ((True, 3), (False, 1)):
        async with (
            raw({"prefer": b""} if declines else {}, script=gateway) as fake,
            cluster(pipeline(fake.url, steps=steps), {}) as found,
        ):
            assert (await found.client().ask(CHAT, LONG)).status == 200
            assert len(legs(fake)) == count
            assert legs(fake)[0][1]["prefer"] == "if-available"
            found.quiet()


async def test_readiness_follows_the_address() -> None:
    async with raw(script=gateway) as fake, cluster(pipeline(fake.url), {}, tail="probe: {interval: 50ms}") as found:
        await trio.sleep(0.05)
        assert (await found.client().get("/readyz")).status == 200
        fake.stop()
        await trio.sleep(0.2)
        assert (await found.client().get("/readyz")).status == 503


def internal(found: Cluster) -> str:
    return f"http://{found.gateway.addresses[1]}"


@pytest.mark.parametrize("connector", ["kv-nixl", "kv-sglang"])
async def test_llmgw_is_the_gateway(connector: str, autojump_clock: MockClock) -> None:
    """One gateway with all roles: pools behind an internal listener, a Coordinator in front of it."""
    tail = "listeners: [{address: '127.0.0.1:0'}, {address: '127.0.0.1:0', internal: true}]"
    async with cluster("steps: [{type: decode}]\n", {"p": dict(P), "d": dict(D)}, tail=tail) as pools:
        front = pipeline(internal(pools)).replace("kv-nixl", connector)
        if connector == "kv-sglang":
            front += f"bootstrap_port: {pools.engines['p'].addresses[0].rpartition(':')[2]}\n"
        async with cluster(front, {}) as found:
            with trio.fail_after(30):
                got = await found.client().ask(CHAT, {**LONG, "stream": True})
            assert got.status == 200, got.body
            assert pulled(await pools.page("d")) > 300
            assert pools.engines["p"].core.pinned == 0
            found.quiet()
            pools.quiet()


async def test_three_gateways_behind_a_dispatch(autojump_clock: MockClock) -> None:
    """One gateway a role; a fourth one sends each leg to the gateway of its phase."""
    tail = "listeners: [{address: '127.0.0.1:0'}, {address: '127.0.0.1:0', internal: true}]"
    whole = "steps: [{type: decode}]\n"
    async with (
        cluster(whole, {"p": dict(P)}, tail=tail) as prefill,
        cluster(whole, {"d": dict(D)}, tail=tail) as decode,
    ):
        places = [
            {"name": "gw-p", "url": internal(prefill), "models": ["m"], "phases": ["prefill"]},
            {"name": "gw-d", "url": internal(decode), "models": ["m"], "phases": ["decode"]},
        ]
        async with (
            cluster(whole, {}, tail=tail, places=places) as dispatch,
            cluster(pipeline(internal(dispatch)), {}) as found,
        ):
            got = await found.client().ask(CHAT, LONG)
            assert got.status == 200, got.body
            assert pulled(await decode.page("d")) > 300
            found.quiet()


async def test_an_internal_listener_and_the_client_port(autojump_clock: MockClock) -> None:
    tail = "listeners: [{address: '127.0.0.1:0'}, {address: '127.0.0.1:0', internal: true}]"
    async with cluster("steps: [{type: decode}]\n", {"p": dict(P), "d": dict(D)}, tail=tail) as found:
        inside = found.client(found.gateway.addresses[1])
        got = await inside.ask(CHAT, LONG, {"epp-profile": "nonsense"})
        assert (got.status, got.json()["error"]["param"]) == (400, "epp-profile")
        got = await inside.ask(CHAT, LONG, {"prefer": "respond-async, If-Available; x=1"})
        assert got.status == 412
        got = await inside.ask(CHAT, LONG, {"prefer": "reserve-endpoint", "epp-profile": "prefill"})
        assert got.headers["x-gateway-destination-endpoint"] == found.engines["p"].addresses[0]
        outside = await found.client().ask(CHAT, LONG, {"epp-profile": "prefill"})
        assert outside.status == 200, "the header means nothing on the client port"
        outside = await found.client().ask(CHAT, {**LONG, "kv_transfer_params": {}})
        assert outside.json()["error"]["code"] == "forbidden_field"


def test_an_internal_listener_is_never_open_to_the_network() -> None:
    for address in (":8080", "0.0.0.0:1", "10.0.0.1:1", "[::]:1"):
        with pytest.raises(ConfigError, match="must be loopback or unix"):
            config.parse(f"version: 1\nlisteners: [{{address: '{address}', internal: true}}]\n")
    for address in ("127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/run/x"):
        config.parse(f"version: 1\nlisteners: [{{address: '{address}', internal: true}}]\n")
