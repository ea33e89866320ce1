"""The whole server over real sockets: it serves, drains, is ended by force, and says what it cannot do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
import trio

from llmgw import config, logs
from llmgw.errors import ConfigError
from llmgw.net.world import RealWorld, parse_address
from llmgw.server.gateway import Gateway
from tests.server.raw import Engine, engine, response
from tests.server.test_probes import OK, listing
from tests.server.worlds import Lines

ROOT = Path(__file__).parent.parent.parent
ANSWER = response(
    b'{"id":"x","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}',
    "200 OK",
    "content-type: application/json",
)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PAGES: dict[str, bytes | None] = {
    "/metrics": response(b"", "404 Not Found"),
    "/health": OK,
    "/v1/models": listing({"id": "m"}),
    "/v1/chat/completions": ANSWER,
}


def made(*urls: str, text: str = "") -> tuple[Gateway, Lines]:
    endpoints = [f"e{i}={url}=m" for i, url in enumerate(urls)]
    server = config.with_flags(
        config.parse("version: 1\n" + text), endpoints=endpoints, listen=["127.0.0.1:0"], admin=["127.0.0.1:0"]
    )
    lines = Lines()
    return Gateway(server, RealWorld(), lines), lines


@asynccontextmanager
async def running(gateway: Gateway) -> AsyncIterator[httpx2.AsyncClient]:
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.run)
        with trio.fail_after(5):
            await gateway.wait_serving()
        async with httpx2.AsyncClient(base_url=f"http://{gateway.addresses[0]}") as client:
            yield client
        gateway.close()


@pytest.mark.parametrize("driver", ["pump", "tasks"])
async def test_it_serves_and_accounts(driver: str) -> None:
    async with engine(dict(PAGES)) as one, engine(dict(PAGES)) as two:
        gateway, lines = made(one.url, two.url, text=f"driver: {driver}\nrouting: {{profile: round-robin}}\n")
        async with running(gateway) as client:
            for _ in range(4):
                answer = await client.post("/v1/chat/completions", json=CHAT)
                assert answer.status_code == 200, answer.text
                assert answer.json()["usage"]["completion_tokens"] == 2
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "m"
            assert (await client.get("/readyz")).status_code == 200
            assert (await client.get("/health")).content == b""
            assert (await client.post("/v1/chat/completions", json=CHAT | {"model": "n"})).status_code == 404
            admin = f"http://{gateway.admin_addresses[0]}"
            metrics = (await client.get(admin + "/metrics")).text
            assert 'llmgw_requests_total{model="m",reason="",route="/v1/chat/completions",status="200"} 4.0' in metrics
            assert "llmgw_connections 1.0" in metrics
    chats = [r for e in (one, two) for r in e.requests if b"/v1/chat" in r]
    assert len(chats) == 4
    assert sum(b"/v1/chat" in r for r in one.requests) in (1, 2, 3)
    found = [json.loads(line) for line in lines.data.splitlines()]
    requests = [line for line in found if line["kind"] == "request"]
    assert [line["status"] for line in requests] == [200] * 4 + [200, 404]
    assert [line["completion_tokens"] for line in requests[:4]] == [2] * 4
    assert found[-1]["event"] == "stopped"
    assert gateway.brain.inflight == 0
    assert gateway.metrics.bugs == 0


async def test_another_endpoint_takes_over() -> None:
    async with engine(dict(PAGES)) as one:
        async with engine(dict(PAGES)) as two:
            gateway, lines = made(one.url, two.url)
            async with running(gateway) as client:
                with trio.fail_after(5):
                    await gateway.wait_serving(2)
                two.stop()
                await trio.sleep(0.01)
                for _ in range(4):
                    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert b"endpoint_quarantined" in lines.data


@pytest.mark.parametrize("driver", ["pump", "tasks"])
async def test_a_body_that_kills_engines_reaches_no_third_one(driver: str) -> None:
    async def die(fake: Engine, stream: trio.SocketStream, request: bytes) -> None:
        if b"kill" in request:
            await stream.aclose()
        else:
            await stream.send_all(PAGES[request.split()[1].decode()] or b"")

    async with engine(script=die) as one, engine(script=die) as two:
        gateway, _ = made(one.url, two.url, text=f"driver: {driver}\n")
        async with running(gateway) as client:
            await gateway.wait_serving(2)
            killer = CHAT | {"user": "kill"}
            codes = []
            for _ in range(4):
                answer = await client.post("/v1/chat/completions", json=killer)
                codes.append((answer.status_code, answer.json()["error"]["code"]))
            assert codes == [(502, "upstream_closed"), (503, "poison"), (503, "poison"), (503, "poison")]
            assert (await client.post("/v1/chat/completions", json=CHAT | {"user": "bill"})).status_code == 200
    assert [sum(b"kill" in r for r in e.requests) for e in (one, two)] == [1, 1]


async def slow(fake: Engine, stream: trio.SocketStream, request: bytes) -> None:
    if b"/v1/chat" not in request:
        await stream.send_all(PAGES[request.split()[1].decode()] or b"")
        return
    await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(40):
        event = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
        await stream.send_all(b"%x\r\n%b\r\n" % (len(event), event))
        await trio.sleep(0.01)
    await stream.send_all(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize(("drain", "whole"), [("5s", True), ("100ms", False)])
async def test_drain(drain: str, whole: bool) -> None:
    async with engine(script=slow) as one:
        gateway, lines = made(one.url, text=f"timeouts: {{drain: {drain}}}\n")
        text = ""
        async with trio.open_nursery() as nursery:
            await nursery.start(gateway.run)
            with trio.fail_after(5):
                await gateway.wait_serving()
            address, admin = gateway.addresses[0], gateway.admin_addresses[0]
            async with httpx2.AsyncClient() as client:
                url = f"http://{address}/v1/chat/completions"
                try:
                    async with client.stream("POST", url, json=CHAT | {"stream": True}) as answer:
                        async for piece in answer.aiter_text():
                            if not text:
                                gateway.drain()
                                await trio.sleep(0.01)
                                with pytest.raises(httpx2.ConnectError):
                                    await client.get(f"http://{address}/health")
                                assert (await client.get(f"http://{admin}/readyz")).status_code == 503
                            text += piece
                except httpx2.RemoteProtocolError:
                    assert not whole
        assert ("[DONE]" in text) == whole
        assert ('"draining"' in text) == (not whole)
        line = next(x for x in map(json.loads, lines.data.splitlines()) if x["kind"] == "request")
        assert line.get("reason", "") == ("" if whole else "draining")


async def test_addresses_in_use_are_all_named() -> None:
    world = RealWorld()
    (taken,) = await world.listen(parse_address("127.0.0.1:0"))
    with taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        server = config.with_flags(config.Server(version=1), listen=[address], admin=[address])
        with pytest.raises(ConfigError) as caught:
            await Gateway(server, world, Lines()).run()
    assert [str(p).split(":")[0] for p in caught.value.problems] == ["cannot listen on 127.0.0.1"] * 2


def test_unreadable_keys_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    text = "version: 1\nendpoints:\n" + "".join(
        f"  - {{name: {n}, url: 'http://x', api_key_file: {tmp_path / n}}}\n" for n in ("absent", "empty")
    )
    with pytest.raises(ConfigError) as caught:
        Gateway(config.parse(text), RealWorld(), Lines())
    assert [p.where for p in caught.value.problems] == [f"endpoints[{i}].api_key_file" for i in (0, 1)]


async def test_a_socket_file_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = config.with_flags(config.Server(version=1), listen=[f"unix:{path}"], admin=[f"unix:{tmp_path / 'a'}"])
    gateway = Gateway(server, RealWorld(), Lines())
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.run)
        assert "s" in os.listdir(tmp_path)
        gateway.close()
    assert not os.listdir(tmp_path)


async def test_everything_is_documented() -> None:
    page = await trio.Path(ROOT / "docs" / "operations.md").read_text()
    gateway, _ = made()
    for family in gateway.metrics.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        assert f"`{name}`" in page, name
    for field in logs.FIELDS:
        assert f"| `{field}` |" in page, field


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "llmgw", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_the_demo_as_a_process() -> None:
    process = start("server", "--demo", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(b"curl "):
                break
        address = line.split(b"http://")[1].split(b"/")[0].decode()
        with httpx2.stream(
            "POST",
            f"http://{address}/v1/chat/completions",
            json={"model": "demo", "stream": True, "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]},
        ) as answer:
            assert "".join(answer.iter_text()).endswith("data: [DONE]\n\n")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=10)
        assert (process.returncode, errors) == (0, b"")
    finally:
        process.kill()
        process.wait()


def test_a_second_signal_ends_it_at_once() -> None:
    process = start("server", "--demo", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(b"curl "):
                break
        address = line.split(b"http://")[1].split(b"/")[0].decode()
        chat = {"model": "demo", "stream": True, "max_tokens": 4000, "messages": [{"role": "user", "content": "Hi"}]}
        with httpx2.stream("POST", f"http://{address}/v1/chat/completions", json=chat) as answer:
            pieces = answer.iter_text()
            next(pieces)
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            text = ""
            try:
                for piece in pieces:
                    text += piece
            except httpx2.RemoteProtocolError:
                pass
        assert '"draining"' in text
        process.communicate(timeout=10)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("server", "--endpoint", "x"), 2, "expected NAME=URL=MODEL"),
        (("server", "--config", "/absent"), 2, "/absent: cannot be read"),
        (("server", "--nonsense"), 2, "No such option"),
        (("server", "--listen", "127.0.0.1:1", "--admin", "127.0.0.1:1", "--log-file", "/absent/x"), 2, "/absent/x"),
        (("sim-engine", "--fail-rate", "7"), 2, "fail-rate"),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], code: int, said: str) -> None:
    process = start(*arguments)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == code, errors
    assert said in errors.decode()


def test_print_config_reads_back() -> None:
    process = start("server", "--config", "examples/server.yaml", "--endpoint", "x=http://x=m", "--print-config")
    out, _ = process.communicate(timeout=20)
    again = config.parse(out.decode())
    assert [e.name for e in again.endpoints] == ["gpu-1", "gpu-2", "x"]


async def test_a_decision_is_shown_to_a_client_where_that_is_allowed() -> None:
    async with engine(dict(PAGES)) as one, engine(dict(PAGES)) as two:
        for text, shown in (("", False), ("routing: {explain_header: true}\n", True)):
            gateway, _ = made(one.url, two.url, text=text)
            async with running(gateway) as client:
                answer = await client.post("/v1/chat/completions", json=CHAT, headers={"x-llmgw-explain": "1"})
                assert ("x-llmgw-explain" in answer.headers) is shown
                plain = await client.post("/v1/chat/completions", json=CHAT)
                assert "x-llmgw-explain" not in plain.headers
            if shown:
                assert answer.headers["x-llmgw-explain"].startswith("profile=auto; winner=")


async def test_a_request_s_decision_is_found_by_its_id_with_what_came_true() -> None:
    async with engine(dict(PAGES)) as one:
        gateway, _ = made(one.url)
        async with running(gateway) as client:
            await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"})
            admin = f"http://{gateway.admin_addresses[0]}/api/v1"
            found = (await client.get(admin + "/decisions/mine-1")).json()
            assert found["came_true"]["status"] == 200
            assert (await client.get(admin + "/decisions")).json()["items"][0]["request_id"] == "mine-1"
            assert (await client.get(admin + "/decisions/other")).status_code == 404
