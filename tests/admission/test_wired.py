"""Admission inside the server: real relay, real sockets, virtual time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
import trio
from trio.testing import MockClock

from llmgw import config
from llmgw.net.world import RealWorld
from llmgw.server.gateway import Gateway
from tests.server.raw import Engine, engine
from tests.server.test_gateway import CHAT, PAGES
from tests.server.worlds import Lines

DRIVERS = ["pump", "tasks"]
WORK = 10.0  # seconds that the engine works on a request


async def works(fake: Engine, stream: trio.SocketStream, request: bytes) -> None:
    """An engine that needs `WORK` for every answer."""
    if b"/v1/chat" in request:
        await trio.sleep(WORK)
    await stream.send_all(PAGES[request.split()[1].decode()] or b"")


@asynccontextmanager
async def server(
    fake: Engine, driver: str, text: str = "", cap: int = 1
) -> AsyncIterator[tuple[Gateway, httpx2.AsyncClient, Lines]]:
    found = config.with_flags(
        config.parse(
            f"version: 1\ndriver: {driver}\nrouting: {{scrape: {{interval: 0s}}}}\n"
            f"endpoints: [{{name: e, url: '{fake.url}', models: [m], max_concurrency: {cap}}}]\n{text}"
        ),
        listen=["127.0.0.1:0"],
        admin=["127.0.0.1:0"],
    )
    lines = Lines()
    gateway = Gateway(found, RealWorld(), lines)
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.run)
        await gateway.wait_serving()
        async with httpx2.AsyncClient(base_url=f"http://{gateway.addresses[0]}", timeout=None) as client:
            yield gateway, client, lines
        gateway.close()
    assert gateway.metrics.bugs == 0
    gate = gateway.brain.admission.gate
    assert all(room.used == 0 for room in gate.rooms.values())
    assert all(count == 0 for _, count, _ in gate.depth)


async def ask(client: httpx2.AsyncClient, done: list[str], name: str, band: str) -> None:
    answer = await client.post("/v1/chat/completions", json=CHAT, headers={"x-llmgw-band": band, "x-request-id": name})
    done.append(name if answer.status_code == 200 else f"{name} {answer.json()['error']['code']}")


@pytest.mark.parametrize("driver", DRIVERS)
async def test_higher_bands_go_first_and_the_cap_holds(driver: str, autojump_clock: MockClock) -> None:
    done: list[str] = []
    async with engine(script=works) as fake, server(fake, driver) as (gateway, client, _):
        begun = trio.current_time()
        async with trio.open_nursery() as nursery:
            for name, band in (("first", "batch"), ("b", "batch"), ("s", "standard"), ("i", "interactive")):
                nursery.start_soon(ask, client, done, name, band)
                await trio.sleep(0.1)
            admin = f"http://{gateway.admin_addresses[0]}/api/v1"
            rows = (await client.get(admin + "/queue")).json()
            assert {r["band"]: r["waiting"] for r in rows["items"]} == {"interactive": 1, "standard": 1, "batch": 1}
            assert rows["engines"][0]["limit"] == 1
            why = (await client.get(admin + "/admissions/b")).json()
            assert why["state"] == "queued"
            assert why["before_it"] == {"interactive": 1, "standard": 1, "batch": 1}
            assert why["engines"]["e"].startswith("full: 1 of 1")
            assert (await client.get(admin + "/admissions/nobody")).status_code == 404
        assert done == ["first", "i", "s", "b"]
        assert trio.current_time() - begun == pytest.approx(4 * WORK, abs=0.5)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_who_leaves_the_queue_costs_no_engine_call(driver: str, autojump_clock: MockClock) -> None:
    done: list[str] = []
    async with engine(script=works) as fake, server(fake, driver) as (gateway, client, lines):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, client, done, "stays", "standard")
            await trio.sleep(0.1)
            with trio.move_on_after(1):
                await ask(client, done, "leaves", "standard")
            await trio.sleep(0.1)
            assert gateway.brain.admission.gate.depth[1][1] == 0
        assert done == ["stays"]
        assert sum(b"/v1/chat" in r for r in fake.requests) == 1
        gateway.log._write(b"")
    found = [json.loads(line) for line in lines.data.splitlines()]
    (gone,) = (line for line in found if line.get("request_id") == "leaves")
    assert (gone["status"], gone["reason"], gone["band"]) == (499, "client_gone", "standard")


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_deadline_ends_the_wait_with_429(driver: str, autojump_clock: MockClock) -> None:
    done: list[str] = []
    text = "bands: [{name: only, default: true, deadline: 3s, max_queue: 1}]\n"
    async with engine(script=works) as fake, server(fake, driver, text) as (_, client, _):
        async with trio.open_nursery() as nursery:
            for name in ("served", "late", "full"):
                nursery.start_soon(ask, client, done, name, "only")
                await trio.sleep(0.1)
            with trio.fail_after(4):
                while len(done) < 2:  # noqa: ASYNC110 -- virtual time
                    await trio.sleep(0.1)
            assert done == ["full queue_full", "late queue_timeout"]
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={"x-llmgw-band": "other"})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unknown_band"
        assert "only" in answer.json()["error"]["message"]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_preempted_work_waits_again_and_is_served(driver: str, autojump_clock: MockClock) -> None:
    """`requeue`: the batch requests that nothing of was shown make way when interactive work comes to their engine."""
    done: list[str] = []
    text = "bands: [{name: interactive, max_slowdown: 1.01}, {name: batch, default: true, preempt: requeue}]\n"
    async with (
        engine(script=works) as fake,
        server(fake, driver, text, cap=3) as (gateway, client, lines),
    ):
        async with trio.open_nursery() as nursery:
            for name, band in (("b1", "batch"), ("b2", "batch"), ("i", "interactive")):
                nursery.start_soon(ask, client, done, name, band)
                await trio.sleep(0.1)
        gateway.log._write(b"")
        assert sorted(done) == ["b1", "b2", "i"]
        assert gateway.brain.admission.gate.preemptions >= 1
    found = [json.loads(line) for line in lines.data.splitlines()]
    assert any(line.get("event") == "preempted" for line in found)
