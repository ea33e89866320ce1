"""`llmgw ctl` against a real admin port: output for people and programs, exit codes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner, Result

from llmgw.ctl.commands import ctl
from llmgw.net.world import Unix
from tests.server.raw import engine, response
from tests.server.test_admin import admin, served


@asynccontextmanager
async def server() -> AsyncIterator[str]:
    async with admin(served()) as url:
        yield url


async def run(*args: str) -> Result:
    """The command blocks, so it runs in a thread; the server answers meanwhile."""
    return await trio.to_thread.run_sync(lambda: CliRunner().invoke(ctl, args))


async def test_endpoints() -> None:
    async with server() as url:
        found = await run("--server", url, "endpoints")
        assert found.exit_code == 0, found.output
        header, a, b = found.stdout.splitlines()
        assert header.split()[:3] == ["NAME", "HEALTH", "SINCE"]
        assert a.split()[:2] == ["a", "ready"]
        assert b.split()[:2] == ["b", "joining"]
        assert "s3cret" not in found.output
        one = await run("--server", url, "endpoints", "b")
        assert len(one.stdout.splitlines()) == 2
        plain = json.loads((await run("--server", url, "endpoints", "--json")).stdout)
        assert (plain["kind"], len(plain["items"])) == ("endpoints", 2)


async def test_models() -> None:
    async with server() as url:
        found = await run("--server", url, "models")
        assert [line.split()[:2] for line in found.stdout.splitlines()[1:]] == [["m", "0/1"], ["org/m", "1/1"]]
        assert json.loads((await run("--server", url, "models", "gpt", "--json")).stdout)["name"] == "org/m"


async def test_drain_endpoint() -> None:
    async with server() as url:
        found = await run("--server", url, "drain-endpoint", "a")
        assert found.stdout == "a is draining, with 0 requests under way\n"
        found = await run("--server", url, "drain-endpoint", "a", "--undo")
        assert found.stdout.startswith("a is joining")


async def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "admin")
    async with admin(served(), Unix(path)):
        assert (await run("--server", f"unix:{path}", "models")).exit_code == 0


async def test_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server() as url:
        absent = await run("--server", url, "endpoints", "zzz")
        assert (absent.exit_code, absent.stderr) == (3, "llmgw ctl: There is no endpoint 'zzz'.\n")
        assert (await run("--server", url, "models", "zzz")).exit_code == 3
        assert (await run("--server", url, "nonsense")).exit_code == 2
        monkeypatch.setenv("LLMGW_SERVER", url)
        assert (await run("endpoints")).exit_code == 0
    gone = await run("--server", url, "endpoints")
    assert gone.exit_code == 1
    assert "does `llmgw server` run there?" in gone.stderr
    async with engine({"/api/v1/models": response(b"<html>")}) as other:
        wrong = await run("--server", other.url, "models")
        assert wrong.exit_code == 1
        assert "no llmgw admin port" in wrong.stderr


async def test_explain_route() -> None:
    async with server() as url:
        found = await run("--server", url, "explain-route", "gpt")
        assert found.exit_code == 0, found.output
        assert "profile" in found.stdout.splitlines()[0]
        assert "ENDPOINT" in found.stdout
        plain = json.loads((await run("--server", url, "explain-route", "gpt", "--json", "--profile", "chat")).stdout)
        assert (plain["kind"], plain["profile"], plain["winner"]) == ("decision", "chat", "a")
        nobody = await run("--server", url, "explain-route", "m")
        assert "nobody can serve it (no_endpoint)" in nobody.stdout
        assert (await run("--server", url, "explain-route")).exit_code == 2
        assert (await run("--server", url, "explain-route", "--request-id", "zzz")).exit_code == 3


async def test_top_shows_the_load_once() -> None:
    async with server() as url:
        found = await run("--server", url, "top", "--once")
        assert found.exit_code == 0, found.output
        assert found.stdout.splitlines()[0].split()[:4] == ["NAME", "HEALTH", "INFLIGHT", "QUEUED"]
