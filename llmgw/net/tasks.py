"""The plain driver: a trio task a socket waits for readiness. Runs anywhere; the oracle that the pump is tested against."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from llmgw.net.channel import Channel


class Tasks:
    """Same contract as `llmgw.net.pump.Pump`, at a task switch an event."""

    def __init__(self) -> None:
        self.now = 0.0
        self._nursery: trio.Nursery | None = None
        self._channels: dict[int, Channel] = {}
        self._resumed: dict[int, trio.Event] = {}

    @property
    def registered(self) -> int:
        return len(self._channels)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self.now = trio.current_time()
            task_status.started()
            await trio.sleep_forever()

    def attach(self, channel: Channel) -> None:
        assert self._nursery is not None
        self._channels[channel.fd] = channel
        self._nursery.start_soon(self._reader, channel)

    def detach(self, channel: Channel) -> None:
        if self._channels.get(channel.fd) is channel:
            del self._channels[channel.fd]
            trio.lowlevel.notify_closing(channel.fd)

    def want_write(self, channel: Channel) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._writer, channel)

    def soon(self, call: Callable[[], None]) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._later, call)

    async def _later(self, call: Callable[[], None]) -> None:
        await trio.lowlevel.checkpoint()
        self.now = trio.current_time()
        try:
            call()
        except Exception as error:
            owner = getattr(call, "__self__", None)
            crashed = getattr(owner, "crashed", None)
            if crashed is None:
                raise
            crashed(error)

    async def _reader(self, channel: Channel) -> None:
        while not channel.closed:
            try:
                await trio.lowlevel.wait_readable(channel.fd)
            except trio.ClosedResourceError:
                return
            self.now = trio.current_time()
            try:
                channel.readable()
            except Exception as error:
                channel.crashed(error)
            if channel.finished:
                return  # readable for ever: whoever owns it has been told
            while channel.paused and not channel.closed:
                event = trio.Event()
                channel.on_resume = event.set
                await event.wait()

    async def _writer(self, channel: Channel) -> None:
        try:
            await trio.lowlevel.wait_writable(channel.fd)
        except (trio.ClosedResourceError, trio.BusyResourceError):
            return
        if not channel.closed:
            self.now = trio.current_time()
            try:
                channel.writable()
            except Exception as error:
                channel.crashed(error)
