"""`llmgw sim-engine` as a server: an engine core behind sockets.

await nursery.start(partial(serve, Options(listen=("127.0.0.1:0",)), RealWorld()))    → ["127.0.0.1:43211"]
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import trio

from llmgw.errors import ConfigError, Problem
from llmgw.net.world import World
from llmgw.simengine.options import Options
from llmgw.simengine.server.engine import Engine, Journal
from llmgw.simengine.server.kvevents import Feed, publisher

__all__ = ["Engine", "Feed", "Journal", "open_journal", "serve"]


def open_journal(path: str) -> tuple[int, Journal]:
    """(descriptor to close at the end, what appends a line). Each line is one `write`, so it is whole or not there."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError([Problem(f"cannot append to {path!r}: {error.strerror}", where="--journal")]) from None
    return descriptor, lambda line: _append(descriptor, line)


def _append(descriptor: int, line: bytes) -> None:
    os.write(descriptor, line)


async def serve(
    options: Options, world: World, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run one simulated engine until cancelled. Started with the addresses that it is bound to.

    Raises ConfigError, in a group, for options that cannot be and for addresses that cannot be listened on.
    """
    options.check()
    with ExitStack() as stack:
        journal = feed = None
        if options.journal:
            descriptor, journal = open_journal(options.journal)
            stack.callback(os.close, descriptor)
        if options.kv_events:
            feed, close = publisher(options.kv_events)
            stack.callback(close)
        async with trio.open_nursery() as nursery:
            task_status.started(await nursery.start(Engine(options, world, journal, feed).serve))
