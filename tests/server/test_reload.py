"""SIGHUP: all or nothing, while requests run; and TLS on the client port, whose certificate it renews."""

from __future__ import annotations

import json
import os
import signal
import ssl
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio

from llmgw import config
from llmgw.errors import ConfigError
from llmgw.net.world import RealWorld
from llmgw.server.gateway import Gateway, serve
from llmgw.server.reload import merge
from tests.pki.certs import Certs, make_certs
from tests.server.raw import engine
from tests.server.test_gateway import CHAT, PAGES, made, running, slow
from tests.server.worlds import Lines


@pytest.fixture(name="certs", scope="module")
def _certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return make_certs(tmp_path_factory.mktemp("certs"), time.time())


def parsed(*urls: str, text: str = "", **flags: Any) -> config.Server:
    return config.with_flags(
        config.parse("version: 1\n" + text),
        endpoints=[f"e{i}={url}=m" for i, url in enumerate(urls)],
        listen=["127.0.0.1:0"],
        admin=["127.0.0.1:0"],
        **flags,
    )


async def test_endpoints_come_and_go_and_those_that_stay_keep_their_requests() -> None:
    async with engine(script=slow) as one, engine(dict(PAGES)) as two:
        gateway, lines = made(one.url)
        async with running(gateway) as client:
            async with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
                pieces = answer.aiter_text()
                text = await anext(pieces)
                place = next(iter(gateway.fleet.places.values()))
                gateway.reload(parsed(one.url, two.url, text="models: {m: {aliases: [mm]}}\nlimits: {body: 200}\n"))
                assert gateway.fleet.places[place.endpoint.id] is place
                assert gateway.fleet.inflight(place) == 1
                await gateway.wait_serving(2)
                assert (await client.post("/v1/chat/completions", json=CHAT | {"model": "mm"})).status_code == 200
                large = await client.post("/v1/chat/completions", json=CHAT | {"user": "x" * 200})
                assert large.status_code == 413
                gateway.reload(parsed(two.url))
                async for piece in pieces:
                    text += piece
            assert text.endswith("data: [DONE]\n\n")
            assert [p.endpoint.url for p in gateway.fleet.places.values()] == [two.url]
    assert gateway.brain.inflight == 0
    assert gateway.metrics.bugs == 0
    assert lines.data.count(b'"reloaded"') == 2


async def test_what_is_learned_stays() -> None:
    async with engine(dict(PAGES)) as one:
        server = config.with_flags(
            config.Server(version=1), endpoints=[f"e={one.url}"], listen=["127.0.0.1:0"], admin=["127.0.0.1:0"]
        )
        gateway = Gateway(server, RealWorld(), Lines())
        async with running(gateway) as client:
            gateway.reload(server)
            gateway.reload(config.with_flags(config.parse("version: 1\nmodels: {m: {aliases: [z]}}"), endpoints=[f"e={one.url}"], listen=["127.0.0.1:0"]))  # fmt: skip
            for name in ("m", "z"):
                assert (await client.post("/v1/chat/completions", json=CHAT | {"model": name})).status_code == 200
            gateway.reload(server)
            assert (await client.post("/v1/chat/completions", json=CHAT | {"model": "z"})).status_code == 404


def test_what_waits_for_a_restart() -> None:
    old = parsed("http://a")
    new = config.parse(
        "version: 1\ndriver: tasks\nlisteners: [{address: ':1'}]\nrouting: {scrape: {interval: 9s}, profile: batch}\n"
        "timeouts: {idle: 7s}\nlog: {requests: false}\n"
    )
    made_, waits = merge(old, new)
    assert sorted(waits) == ["admin", "driver", "listeners", "log", "routing.scrape"]
    assert (made_.driver, made_.listeners, made_.routing.scrape) == (old.driver, old.listeners, old.routing.scrape)
    assert (made_.timeouts, made_.routing.profile, made_.endpoints) == (new.timeouts, "batch", ())


async def test_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    async with engine(dict(PAGES)) as one:
        gateway, _ = made(one.url)
        async with running(gateway) as client:
            before = gateway._config
            text = f"endpoints: [{{name: x, url: 'http://x', api_key_file: {tmp_path / 'absent'}}}]\n"
            with pytest.raises(ConfigError):
                gateway.reload(parsed(one.url, text=text))
            assert gateway._config is before
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


@pytest.mark.parametrize("driver", ["pump", "tasks"])
async def test_a_certificate_is_renewed_under_running_streams(driver: str, certs: Certs, tmp_path: Path) -> None:
    cert, key = (str(p) for p in certs.server_files())
    trust = certs.client_context()

    async def serial(port: int) -> int:
        stream = await trio.open_ssl_over_tcp_stream("127.0.0.1", port, ssl_context=trust, https_compatible=True)
        await stream.do_handshake()
        found = stream.getpeercert()
        await stream.aclose()
        return int(found["serialNumber"], 16)

    async with engine(script=slow) as one:
        server = parsed(one.url, text=f"driver: {driver}\n", tls_cert=cert, tls_key=key)
        gateway = Gateway(server, RealWorld(), Lines())
        async with trio.open_nursery() as nursery:
            await nursery.start(gateway.run)
            await gateway.wait_serving()
            port = int(gateway.addresses[0].rpartition(":")[2])
            async with (
                httpx2.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=trust) as client,
                client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer,
            ):
                pieces = answer.aiter_text()
                text = await anext(pieces)
                before = await serial(port)
                certs.server_files()  # another certificate in the same files
                gateway.reload(server)
                assert await serial(port) != before
                await trio.Path(key).write_text("no key")
                with pytest.raises(ConfigError, match=r"server\.key"):
                    gateway.reload(server)
                assert await serial(port) != before
                async for piece in pieces:
                    text += piece
            assert text.endswith("data: [DONE]\n\n")
            gateway.close()


@pytest.mark.parametrize("kind", ["absent", "mismatch", "expired"])
def test_unusable_certificates_are_named(kind: str, certs: Certs, tmp_path: Path) -> None:
    folder = tmp_path
    now = time.time() - (400 * 86400 if kind == "expired" else 0)
    cert, key = make_certs(folder, now).server_files()
    if kind == "mismatch":
        key = certs.server_files()[1]
    if kind == "absent":
        cert.unlink()
    with pytest.raises(
        ConfigError, match={"absent": "cannot be read", "mismatch": "belong", "expired": "expired"}[kind]
    ):
        Gateway(parsed("http://a", tls_cert=str(cert), tls_key=str(key)), RealWorld(), Lines())


async def test_an_engine_with_a_private_authority(certs: Certs) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certs.server_files())

    async def serve_one(stream: trio.SocketStream) -> None:
        tls = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
        try:
            while data := bytes(await tls.receive_some(65536)):
                await tls.send_all(PAGES[data.split()[1].decode()] or b"")
        except trio.BrokenResourceError:
            pass
        finally:
            await trio.aclose_forcefully(tls)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve_one, 0, host="127.0.0.1"))
        url = f"https://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        gateway = Gateway(parsed(url, text=f"engine_ca: {certs.roots}\n"), RealWorld(), Lines())
        async with running(gateway) as client:
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        nursery.cancel_scope.cancel()


async def test_the_signal(tmp_path: Path) -> None:
    file, log = tmp_path / "server.yaml", tmp_path / "log"
    texts = iter(["version: 1\nmodels: {x: {}}\n", "version: 2\nnonsense: 1\n"])

    def reread() -> config.Server:
        file.write_text(next(texts))
        return config.with_flags(config.load(str(file)), listen=["127.0.0.1:0"], admin=["127.0.0.1:0"])

    server = config.with_flags(
        config.Server(version=1), listen=["127.0.0.1:0"], admin=["127.0.0.1:0"], log_file=str(log)
    )
    async with trio.open_nursery() as nursery:
        gateway = await nursery.start(partial(serve, server, RealWorld(), reread=reread))
        for event in ("reloaded", "reload_refused"):
            os.kill(os.getpid(), signal.SIGHUP)
            with trio.fail_after(5):
                while f'"{event}"' not in log.read_text():  # noqa: ASYNC110, ASYNC240
                    await trio.sleep(0.02)
        gateway.close()
    refused = next(x for x in map(json.loads, log.read_text().splitlines()) if x.get("event") == "reload_refused")  # noqa: ASYNC240
    assert len(refused["problems"]) == 2
    assert str(file) in refused["problems"][0]
