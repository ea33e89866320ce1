"""KV events of engines, over ZMQ: one task an endpoint that publishes them.

A SUB socket brings messages to the endpoint's `kvcache.events.Feed`; what that asks for again is fetched over a DEALER. pyzmq's
sockets are used without its own event loop: their descriptor says when to look, and reading goes on until nothing is left, since
it tells of an edge only. Others run between two messages, so that a flood of events stalls no stream.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import trio

from llmgw.kvcache.events import END, PAYLOAD, ExactIndex, Feed, Source, parse_source
from llmgw.logs import Log
from llmgw.server.fleet import Fleet, Place
from llmgw.server.watching import each_place

if TYPE_CHECKING:
    import zmq

QUEUED = 10_000  # messages that ZMQ holds for us: half a minute of a busy engine
REPLAY = 5.0  # seconds for a whole replay
AGAIN = 1.0  # seconds until a socket that failed is made anew


def available() -> bool:
    """Whether the extra `kv-events` (pyzmq) is installed."""
    return importlib.util.find_spec("zmq") is not None


class Subscriber:
    """Keeps one task for every place; those without `kv_events` end at once."""

    def __init__(self, fleet: Fleet, index: ExactIndex, log: Log) -> None:
        self._fleet = fleet
        self._index = index
        self._log = log

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Subscribe until cancelled."""
        task_status.started()
        await each_place(self._fleet, self._watch)

    async def _watch(self, place: Place) -> None:
        """Until *place* is gone."""
        text = place.endpoint.kv_events
        if not text:
            await trio.lowlevel.checkpoint()
            return
        if not available():
            self._log.event(
                "kv_events_off", "error", endpoint=place.endpoint.name, why="install the extra llmgw[kv-events]"
            )
            await trio.lowlevel.checkpoint()
            return
        try:
            source = parse_source(text)
        except ValueError as error:
            self._log.event("kv_events_off", "error", endpoint=place.endpoint.name, why=str(error))
            await trio.lowlevel.checkpoint()
            return
        import zmq

        feed = Feed(self._index, place.endpoint.id)
        while place.index >= 0:
            try:
                await self._subscribe(place, source, feed)
            except zmq.ZMQError as error:  # an address that cannot be bound, or is none
                feed.disconnected()
                self._log.event("kv_events_failed", "warning", endpoint=place.endpoint.name, why=str(error))
                await trio.sleep(AGAIN)

    async def _subscribe(self, place: Place, source: Source, feed: Feed) -> None:
        import zmq

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        with context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.rcvhwm = QUEUED
            socket.maxmsgsize = PAYLOAD + 1024
            socket.subscribe(b"")
            (socket.connect if source.mode == "connect" else socket.bind)(source.address)
            topic: bytes | None = None
            while place.index >= 0:
                frames = await _receive(socket)
                if len(frames) != 3 or len(frames[1]) != 8:
                    feed.malformed += 1
                    continue
                if topic is None:
                    topic = frames[0]
                elif topic != frames[0]:
                    continue  # another data-parallel rank: its cache is another one
                feed.message(int.from_bytes(frames[1], "big"), frames[2])
                if feed.replay_from is not None:
                    await self._replay(source, feed)

    async def _replay(self, source: Source, feed: Feed) -> None:
        """Fetch what was missed. Live messages wait in ZMQ meanwhile."""
        import zmq

        start, feed.replay_from = feed.replay_from or 0, None
        if source.replay:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
            with context.socket(zmq.DEALER) as socket, trio.move_on_after(REPLAY):
                socket.linger = 0
                socket.maxmsgsize = PAYLOAD + 1024
                socket.connect(source.replay)
                socket.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
                while True:
                    frames = await _receive(socket)
                    if len(frames) not in (3, 4) or len(frames[-2]) != 8:
                        break
                    seq = int.from_bytes(frames[-2], "big")
                    feed.replayed(seq, frames[-1])
                    if seq == END:
                        return
        feed.no_replay()


async def _receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The next message. Raises zmq.ZMQError."""
    import zmq

    await trio.lowlevel.checkpoint()
    while True:
        try:
            return socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            pass
        # The descriptor tells of edges: what came between the attempt and this wait is seen by looking at EVENTS.
        if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            await trio.lowlevel.wait_readable(int(socket.getsockopt(zmq.FD)))
