"""The pump: one task with an epoll of its own serves every socket of the data plane (Linux).

A socket is registered once for its life, edge-triggered, both directions. One wake-up of the task serves a whole batch;
a request that needs nothing but ready sockets is served here from head to settlement, without a task switch.

Rules, each of which broke a real run when it was missing
- No exception leaves a handler: it ends that exchange, the rest of the batch is served.
- Events are hints: what `recv` and `send` say decides.
- An event with RDHUP, HUP or ERR: read until ``b""`` or an error, since data and FIN can share one edge.
- Detach first: forget the number, then unregister, then close; unregistering never raises.
- Bounded work a visit, and bounded visits before other tasks get their turn.
- No fork while sockets exist: a copy would keep a dead registration alive under a recycled number.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from llmgw.net.channel import Channel

EVENTS = 512
"""Events a poll: a batch of this size takes some milliseconds, the most that a timer can be late by."""

ROUNDS = 4
"""Polls before the task yields: under load the next events are there already, and a poll costs less than a yield."""

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_ENDING = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_READING = _IN | _ENDING
_ALL = _IN | _OUT | select.EPOLLRDHUP | select.EPOLLET


class Pump:
    """The edge-triggered driver. `run` must live in a nursery that ends after the last connection."""

    def __init__(self) -> None:
        self.now = 0.0
        self._epoll = select.epoll()
        self._channels: dict[int, Channel] = {}
        self._soon: list[Callable[[], None]] = []
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._visiting = False
        self._epoll.register(self._bell, _IN | select.EPOLLET)

    @property
    def registered(self) -> int:
        """Sockets registered now: back at its base when nothing runs."""
        return len(self._channels)

    def attach(self, channel: Channel) -> None:
        self._epoll.register(channel.fd, _ALL)
        self._channels[channel.fd] = channel

    def detach(self, channel: Channel) -> None:
        if self._channels.get(channel.fd) is channel:
            del self._channels[channel.fd]
            try:
                self._epoll.unregister(channel.fd)
            except (OSError, ValueError):
                pass  # closed under us, or the pump has ended: the kernel has forgotten it

    def want_write(self, channel: Channel) -> None:
        """Nothing to do: EPOLLOUT is registered for life, its edge comes when the socket takes more."""

    def soon(self, call: Callable[[], None]) -> None:
        self._soon.append(call)
        if not self._visiting:
            os.eventfd_write(self._bell, 1)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve for ever. Cancel it when no channel is left."""
        task_status.started()
        try:
            await self._serve()
        finally:
            self._epoll.close()
            os.close(self._bell)
            self._channels.clear()

    async def _serve(self) -> None:
        poll, channels = self._epoll.poll, self._channels
        fd = self._epoll.fileno()
        while True:
            if self._soon:
                await trio.lowlevel.checkpoint()
            else:
                await trio.lowlevel.wait_readable(fd)
            self._visiting = True
            for _ in range(ROUNDS):
                events = poll(0, EVENTS)
                if not events and not self._soon:
                    break
                self.now = trio.current_time()
                for number, event in events:
                    channel = channels.get(number)
                    if channel is None:
                        continue  # the bell, or closed by a handler of this batch
                    try:
                        if event & _OUT and channel.out is not None:
                            channel.writable()
                        if event & _READING:
                            channel.readable(bool(event & _ENDING))
                    except Exception as error:
                        channel.crashed(error)
                self._run_soon()
            self._visiting = False

    def _run_soon(self) -> None:
        calls, self._soon = self._soon, []
        for call in calls:
            try:
                call()
            except Exception as error:
                owner = getattr(call, "__self__", None)
                crashed = getattr(owner, "crashed", None)
                if crashed is None:
                    raise
                crashed(error)
