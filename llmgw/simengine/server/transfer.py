"""Moving KV and encoder outputs between engines: who may take what, and when it is there.

NIXL's way (vLLM, pull): the prefill answers with descriptors of pinned blocks; the decode gets them with its own request
and fetches. SGLang's way (bootstrap): both legs are in flight together and meet in a room. Both happen here as small HTTP
requests to the engine that has the KV, so that an engine that died is really out of reach; the bytes themselves are time,
charged by a link model. A descriptor carries a check value over engine and prompt: one that was altered or belongs to
another prompt is found out, the decode computes the prompt itself, and its metrics say so.

    pull a request   known and pinned → 200, unpinned · else 404
    enter a room     waits until the prefill in it is done → 200, unpinned · nobody comes in ROOM_SECONDS → 404
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from zlib import crc32

import attrs
import msgspec
import trio

from llmgw.errors import ConfigError
from llmgw.net.world import Address, Tcp, World, parse_address
from llmgw.simengine.server.http import Connection, Request
from llmgw.simengine.wire import Ask, Body

if TYPE_CHECKING:
    from llmgw.simengine.core import Job
    from llmgw.simengine.options import Options
    from llmgw.simengine.server.engine import Engine

PULL, ROOM = "/sim/kv/pull", "/sim/kv/room"

PULL_SECONDS = 5.0
"""A prefill that does not answer for so long is out of reach."""
ROOM_SECONDS = 300.0
"""How long one leg waits for the other; SGLang's own limit."""
MAX_ROOMS = 10_000
MEDIUM_BYTES = 576 * 4096 * 2
"""Size of one encoded medium: its tokens, hidden size, two bytes each."""


def check_value(engine_id: str, prompt: Sequence[int]) -> str:
    return f"{crc32(msgspec.msgpack.encode(list(prompt)), crc32(engine_id.encode())):08x}"


def host_and_port(address: str, host: str) -> tuple[str, int]:
    """Where others reach an engine that listens on *address*; *host* overrides. Port 0: the host is an address."""
    if address.startswith("unix:"):
        return address, 0
    bound, _, port = address.rpartition(":")
    if not host:
        host = "127.0.0.1" if bound in ("0.0.0.0", "[::]", "") else bound.strip("[]")
    return host, int(port)


def describe(engine: Engine, job: Job, cached: int) -> Body:
    """`kv_transfer_params` of a finished prefill."""
    host, port = host_and_port(engine.addresses[0], engine.options.side_channel_host)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [engine.core.pinned_blocks(job.id)],
        "remote_engine_id": engine.engine_id,
        "remote_request_id": job.id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": len(job.prompt),
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": cached,
    }


def descriptors(engine: Engine, ask: Ask) -> Body:
    """`ec_transfer_params` of an encoder: one entry a medium."""
    host, port = host_and_port(engine.addresses[0], engine.options.side_channel_host)
    return {content: {"peer_host": host, "peer_port": port, "size_bytes": MEDIUM_BYTES} for _, _, content in ask.media}


def is_sound(kv: Body, prompt: Sequence[int]) -> bool:
    """Whether descriptors are whole and belong to this prompt."""
    blocks, request_id, engine_id = (kv.get(f"remote_{what}") for what in ("block_ids", "request_id", "engine_id"))
    if not (isinstance(blocks, list) and blocks and isinstance(request_id, str) and isinstance(engine_id, str)):
        return False
    if kv.get("remote_num_tokens", len(prompt)) != len(prompt):
        return False
    return request_id.rpartition("-")[2] == check_value(engine_id, prompt)


def wire_time(options: Options) -> tuple[float, float]:
    """(seconds before the first byte, seconds a token) on the link between two engines."""
    return options.transfer_setup, options.kv_bytes() / (options.transfer_gbps * 1e9)


async def pull(world: World, kv: Body) -> bool:
    """Fetch what *kv* describes. False if it is not to be had."""
    host, port = str(kv.get("remote_host") or ""), kv.get("remote_port")
    try:
        address = parse_address(host) if host.startswith("unix:") else Tcp(host, int(port or 0))
    except (ConfigError, TypeError, ValueError):
        return False
    with trio.move_on_after(PULL_SECONDS):
        return await post(world, address, PULL, {"request_id": kv.get("remote_request_id")}) == 200
    return False


async def enter(world: World, host: str, port: int, room: str) -> bool:
    """Wait in *room* for the prefill's KV. False if nobody came or the host is out of reach."""
    with trio.move_on_after(ROOM_SECONDS):
        address = parse_address(host) if host.startswith("unix:") else Tcp(host.strip("[]"), port)
        return await post(world, address, ROOM, {"room": room}) == 200
    return False


async def post(world: World, address: Address, path: str, body: Body) -> int:
    """Status of one small request on a connection of its own; 0 if there is no answer."""
    raw = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nhost: sim\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    try:
        sock = await world.dial(address)
    except OSError:
        return 0
    try:
        sock.send(head.encode() + raw)  # a fresh socket takes far more than these few hundred bytes
        got = b""
        while b"\r\n" not in got:
            await trio.lowlevel.wait_readable(sock)
            try:
                data = sock.recv(4096)
            except BlockingIOError:
                continue
            if not data:
                return 0
            got += data
        return int(got.split(b" ", 2)[1])
    except (OSError, ValueError, IndexError):
        return 0
    finally:
        sock.close()


@attrs.define(eq=False)
class Room:
    """Where the two legs of a request meet."""

    job_id: str = ""
    ready: trio.Event = attrs.Factory(trio.Event)  # the prefill is done
    taken: trio.Event = attrs.Factory(trio.Event)  # the decode has the KV


def room_of(engine: Engine, name: str) -> Room:
    rooms = engine.rooms
    if name not in rooms and len(rooms) >= MAX_ROOMS:
        rooms.pop(next(iter(rooms)))
    return rooms.setdefault(name, Room())


def serve_pull(engine: Engine, request: Request, connection: Connection) -> None:
    given = msgspec.json.decode(request.body or b"{}")
    known = isinstance(given, dict) and engine.release(str(given.get("request_id")))
    engine.respond(connection, 200 if known else 404, b"{}")


def serve_room(engine: Engine, request: Request, connection: Connection) -> None:
    given = msgspec.json.decode(request.body or b"{}")
    name = str(given.get("room")) if isinstance(given, dict) else ""
    engine.spawn(_meet, engine, name, connection)


async def _meet(engine: Engine, name: str, connection: Connection) -> None:
    room = room_of(engine, name)
    with trio.move_on_after(ROOM_SECONDS):
        await room.ready.wait()
    engine.rooms.pop(name, None)
    known = room.ready.is_set() and engine.release(room.job_id)
    room.taken.set()
    engine.respond(connection, 200 if known else 404, b"{}")
