"""The admin port over real sockets: what it shows, what it refuses, and that a key is never in it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio

from llmgw.net.doors import Door
from llmgw.net.world import Address, RealWorld, Tcp, Unix
from llmgw.server.admin import Admin
from tests.server.worlds import Bench, bench


@asynccontextmanager
async def admin(one: Bench, address: Address | None = None, hosts: tuple[str, ...] = ()) -> AsyncIterator[str]:
    """The URL of a running admin port."""
    world = RealWorld()
    sockets = await world.listen(address or Tcp("127.0.0.1", 0))
    door = Door(Admin(one.brain, one.metrics, trio.current_time).app(hosts), kind="admin", world=world)
    async with trio.open_nursery() as nursery:
        name = sockets[0].getsockname()
        await nursery.start(door.run, sockets)
        yield f"http://127.0.0.1:{name[1]}" if isinstance(name, tuple) else "http://localhost"
        door.close()


def served() -> Bench:
    one = bench(
        "b=http://b:1=m,phases=prefill,fabric=f",
        text="endpoints: [{name: a, url: 'http://a:1', models: [{name: org/m, aliases: [gpt]}], api_key_file: /k}]\n",
        read_key=lambda _: "s3cret",
    )
    one.fleet._clock = trio.current_time
    one.ready("a")
    return one


async def get(url: str, **known: Any) -> httpx2.Response:
    async with httpx2.AsyncClient() as client:
        return await client.get(url, **known)


async def test_endpoints_and_models() -> None:
    one = served()
    async with admin(one) as url:
        one.lease("gpt")
        found = (await get(url + "/api/v1/endpoints")).json()
        assert found["kind"] == "endpoints"
        assert found["revision"] == one.fleet.revision
        a, b = found["items"]
        assert (a["name"], a["health"]["state"], a["inflight"], a["auth"]) == ("a", "ready", 1, "/k")
        assert (b["phases"], b["fabrics"], b["health"]["state"]) == (["prefill"], ["f"], "joining")
        assert (await get(url + "/api/v1/endpoints/b")).json()["name"] == "b"
        models = (await get(url + "/api/v1/models")).json()
        assert [(m["name"], m["serving"], m["endpoints"]) for m in models["items"]] == [
            ("m", 0, ["b"]),
            ("org/m", 1, ["a"]),
        ]
        assert (await get(url + "/api/v1/models/gpt")).json()["name"] == "org/m"
        assert (await get(url + "/api/v1/models/org/m")).json()["kind"] == "model"
        everything = found, models, (await get(url + "/metrics")).text, (await get(url + "/debug/tasks")).text
        assert "s3cret" not in str(everything)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/", 404, "unknown_path"),
        ("/api/v1/endpoints/zzz", 404, "unknown_path"),
        ("/api/v1/models/zzz", 404, "model_not_found"),
        ("/api/v1/endpoints/a/drain", 405, "method_not_allowed"),
        ("/debug/profile?seconds=x", 400, "bad_field"),
        ("/debug/profile?seconds=61", 400, "bad_field"),
        ("/debug/profile?seconds=nan", 400, "bad_field"),
    ],
)
async def test_errors_have_the_shape_of_reasons(path: str, status: int, code: str) -> None:
    async with admin(served()) as url:
        answer = await get(url + path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil"}, 403),
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:9090"}, 403),
        ({"host": "[::2]:9090"}, 403),
        ({"host": "gateway.internal:9090"}, 200),
        ({"host": "GATEWAY.internal"}, 200),
        ({"host": "localhost:1"}, 200),
        ({"host": "[::1]"}, 200),
        ({"host": "[::1]:9090"}, 200),
    ],
)
async def test_only_names_that_a_browser_cannot_be_tricked_into(headers: dict[str, str], status: int) -> None:
    async with admin(served(), hosts=("gateway.internal",)) as url:
        for path in ("/metrics", "/api/v1/endpoints", "/debug/tasks"):
            assert (await get(url + path, headers=headers)).status_code == status


async def test_any_name_on_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "admin")
    async with (
        admin(served(), Unix(path)),
        httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=path)) as client,
    ):
        assert (await client.get("http://whatever/health")).status_code == 200
        assert (await client.get("http://whatever/health", headers={"origin": "x"})).status_code == 403


async def test_health_and_readiness() -> None:
    one = served()
    async with admin(one) as url:
        health = await get(url + "/health")
        assert (health.status_code, health.content) == (200, b"")
        assert (await get(url + "/readyz")).status_code == 200
        one.brain.draining = True
        assert (await get(url + "/readyz")).status_code == 503
        assert (await get(url + "/health")).status_code == 200


async def test_draining_an_endpoint() -> None:
    one = served()
    async with admin(one) as url, httpx2.AsyncClient(base_url=url + "/api/v1/endpoints/") as client:
        found = (await client.post("a/drain")).json()
        assert found["health"] == {
            "state": "draining",
            "seconds": found["health"]["seconds"],
            "why": "drained by an operator",
        }
        assert one.admit("gpt").reason == "none_healthy"
        assert (await client.post("a/undrain")).json()["health"]["state"] == "joining"
        assert (await client.post("a/explode")).status_code == 404


async def test_metrics_and_tasks() -> None:
    one = served()
    async with admin(one) as url:
        metrics = await get(url + "/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert 'llmgw_endpoint_state{endpoint="a",state="ready"} 1.0' in metrics.text
        assert "process_cpu_seconds_total" in metrics.text
        tree = (await get(url + "/debug/tasks")).text
        assert "doors.py" in tree
        assert "\n    " in tree


async def test_one_profile_at_a_time() -> None:
    async with admin(served()) as url:
        found: list[httpx2.Response] = []

        async def ask() -> None:
            found.append(await get(url + "/debug/profile?seconds=0.2"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
        assert sorted(r.status_code for r in found) == [200, 429]
        assert any("function calls" in r.text for r in found)
        assert (await get(url + "/debug/profile?seconds=0.01")).status_code == 200
