"""A mover as a process: `python -m tests.seam.mover FD`. FD is its end of the seam; it prints the port it listens on."""

from __future__ import annotations

import socket
import sys

import trio

from llmgw.config import ClientLimits, Listener
from llmgw.net.relay import Relay
from llmgw.net.world import RealWorld, Tcp
from tests.seam.ends import RemoteBrain
from tests.seam.link import Link


async def main(number: int) -> None:
    world = RealWorld()
    brain = RemoteBrain(Link(socket.socket(fileno=number)), trio.current_time)
    relay = Relay(world, brain, limits=ClientLimits(), listener=Listener())
    sockets = await world.listen(Tcp("127.0.0.1", 0))
    async with trio.open_nursery() as nursery:
        await nursery.start(relay.run, sockets)
        print(sockets[0].getsockname()[1], flush=True)
        await brain.run(relay)
        relay.drain()  # nobody decides any more: what runs may end


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]))
