"""KV events over real ZMQ sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import trio

from llmgw.kvcache.events import END
from llmgw.server.kv_events import Subscriber
from tests.server.worlds import Bench, bench

zmq = pytest.importorskip("zmq")

IDS = tuple(range(500, 564))


def payload(*hashes: int, parent: int | None = None) -> bytes:
    size = len(hashes) * 16
    start = 0 if parent is None else 16
    event = ["BlockStored", list(hashes), parent, list(IDS[start : start + size]), 16, None]
    return msgspec.msgpack.encode([1.0, [event], 0])


@pytest.fixture
def publisher() -> Iterator[tuple[Any, int]]:
    with zmq.Context.instance().socket(zmq.PUB) as socket:
        socket.linger = 0
        yield socket, socket.bind_to_random_port("tcp://127.0.0.1")


def subscribed(source: str) -> Bench:
    text = f"endpoints: [{{name: a, url: 'http://a:1', models: [m], kv_events: '{source}'}}]\n"
    return bench(text=text)


async def send(socket: Any, seq: int, body: bytes) -> None:
    socket.send_multipart([b"kv@a@m", seq.to_bytes(8, "big"), body])
    await trio.sleep(0.02)


async def soon(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        await trio.sleep(0.01)
    raise AssertionError("not within 5 s")


async def until(one: Bench, depth: int) -> None:
    exact = one.fleet.router.affinity.exact
    await soon(lambda: exact.match(IDS).get(one.place("a").endpoint.id, 0) == depth)


async def test_what_an_engine_stores_is_found(publisher: tuple[Any, int], nursery: trio.Nursery) -> None:
    socket, port = publisher
    one = subscribed(f"connect tcp://127.0.0.1:{port}")
    await nursery.start(Subscriber(one.fleet, one.fleet.router.affinity.exact, one.log).run)
    await trio.sleep(0.2)
    await send(socket, 0, payload(1, 2))
    await until(one, 32)
    await send(socket, 1, msgspec.msgpack.encode([1.0, [["AllBlocksCleared"]], 0]))
    await until(one, 0)
    nursery.cancel_scope.cancel()


async def test_a_gap_is_closed_by_a_replay(publisher: tuple[Any, int], nursery: trio.Nursery) -> None:
    socket, port = publisher
    with zmq.Context.instance().socket(zmq.ROUTER) as router:
        router.linger = 0
        replay = router.bind_to_random_port("tcp://127.0.0.1")
        one = subscribed(f"connect tcp://127.0.0.1:{port} replay tcp://127.0.0.1:{replay}")
        await nursery.start(Subscriber(one.fleet, one.fleet.router.affinity.exact, one.log).run)
        await trio.sleep(0.2)
        await send(socket, 0, payload(1))
        await until(one, 16)
        await send(socket, 2, payload(3, parent=2))
        await soon(lambda: bool(router.poll(0)))
        client, _, start = router.recv_multipart()
        assert int.from_bytes(start, "big") == 1
        for seq, body in ((1, payload(2, parent=1)), (2, msgspec.msgpack.encode([1.0, [], 0])), (END, b"")):
            router.send_multipart([client, b"", b"kv@a@m", seq.to_bytes(8, "big"), body])
        await until(one, 32)
    nursery.cancel_scope.cancel()


async def test_an_address_that_cannot_be_bound_is_told_and_tried_again(
    publisher: tuple[Any, int], nursery: trio.Nursery
) -> None:
    _, port = publisher
    one = subscribed(f"bind tcp://127.0.0.1:{port}")
    await nursery.start(Subscriber(one.fleet, one.fleet.router.affinity.exact, one.log).run)
    await trio.sleep(0.2)
    assert one.logged("kv_events_failed")
    nursery.cancel_scope.cancel()
