"""The brain here, the mover in a process of its own: requests are served, and nothing outlives either."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import attrs
import trio

from tests.net.brains import RoundRobin
from tests.net.rig import DONE, Engine, Script, Wire, answers, chunk, json_answer, post, streams
from tests.seam.ends import MoverEnd
from tests.seam.link import Link


@attrs.define
class Two:
    brain: RoundRobin
    end: MoverEnd
    link: Link
    process: trio.Process
    port: int

    async def dial(self) -> Wire:
        wire = Wire(socket.socket())
        await wire.sock.connect(("127.0.0.1", self.port))
        return wire

    async def settled(self, count: int) -> None:
        while len(self.brain.outcomes) < count:  # noqa: ASYNC110 -- a brain without a bell
            await trio.sleep(0.01)


@asynccontextmanager
async def two(*scripts: Script) -> AsyncIterator[Two]:
    engines = [Engine(script) for script in scripts]
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for engine in engines:
                await nursery.start(engine.run)
            brain = RoundRobin([e.target() for e in engines])
            ours, theirs = socket.socketpair()
            link = Link(ours)
            end = MoverEnd(link, brain, trio.current_time)
            with theirs:
                number = theirs.fileno()
                start = partial(
                    trio.run_process,
                    [sys.executable, "-m", "tests.seam.mover", str(number)],
                    pass_fds=(number,),
                    stdout=subprocess.PIPE,
                    check=False,
                )
                process: trio.Process = await nursery.start(start)
            assert process.stdout is not None
            port = int(await process.stdout.receive_some(100))
            nursery.start_soon(end.run)
            yield Two(brain, end, link, process, port)
            process.terminate()
            await process.wait()
            nursery.cancel_scope.cancel()


async def test_requests_are_served_and_their_times_are_the_brains() -> None:
    start = trio.current_time()
    async with two(answers(json_answer(b"{}", 503)), streams(3, gap=0.01)) as t:
        client = await t.dial()
        for _ in range(4):
            await client.send(post(stream=True))
            status, _, body = await client.answer()  # the full engine is left for the other one
            assert status == 200
            assert body.count(b'"content"') == 3
            assert body.endswith(DONE)
        await client.send(post(model="nope"))
        status, _, body = await client.answer()
        assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
        await client.send(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await client.answer())[0] == 200
        client.close()
        await t.settled(6)
        assert (t.brain.open, t.end.open) == ({}, 0)
        for outcome in t.brain.outcomes[:4]:
            times = outcome.accepted, outcome.admitted, outcome.sent, outcome.first, outcome.last
            known = [at for at in times if at is not None]
            assert len(known) == 5
            assert known == sorted(known)
            assert start < known[0] < known[-1] < trio.current_time() + 1


async def test_client_that_leaves_ends_the_lease_and_the_work() -> None:
    begun, gone = trio.Event(), trio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        begun.set()
        await wire.closed()
        gone.set()

    async with two(script) as t:
        client = await t.dial()
        await client.send(post())
        await begun.wait()
        client.close()
        await t.settled(1)
        await gone.wait()
        assert (t.brain.outcomes[0].reason, t.brain.open) == ("client_gone", {})


async def test_leases_end_with_a_mover_that_is_killed() -> None:
    begun = gone = 0

    async def script(wire: Wire) -> None:
        nonlocal begun, gone
        await wire.request()
        begun += 1
        await wire.closed()
        gone += 1

    async with two(script) as t:
        clients = [await t.dial() for _ in range(5)]
        for client in clients:
            await client.send(post(stream=True))
        while begun < 5:  # noqa: ASYNC110 -- as above
            await trio.sleep(0.01)
        os.kill(t.process.pid, 9)
        await t.settled(5)
        assert [o.reason for o in t.brain.outcomes] == ["internal"] * 5
        assert (t.brain.open, t.end.open) == ({}, 0)
        while gone < 5:  # noqa: ASYNC110 -- the engines see it through their own sockets
            await trio.sleep(0.01)
        for client in clients:
            client.close()


async def test_streams_outlive_a_brain_and_new_requests_are_refused() -> None:
    go_on = trio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await wire.send(chunk(b"data: 1\n\n"))
        await go_on.wait()
        await wire.send(chunk(DONE) + b"0\r\n\r\n")

    async with two(script) as t:
        client = await t.dial()
        await client.send(post(stream=True))
        await client.until(b"data: 1\n\n")
        t.link.shut()
        await trio.sleep(0.2)
        go_on.set()
        assert (await client.rest()).endswith(chunk(DONE) + b"0\r\n\r\n")
        client.close()
        assert await t.process.wait() == 0
