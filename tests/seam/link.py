"""Frames over one end of a socketpair: four bytes of length, then so many bytes. Writing never waits.

Invariants
- A frame is at most FRAME bytes; a peer that announces more is out of step, and the link ends.
- While more than BACKLOG bytes wait for the peer, nothing is read of it: what it asks for would only add to them.
- `closed` turns true once, when the peer has ended or broken; what is posted afterwards goes nowhere.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import trio

FRAME = 1 << 20
"""Bytes of one message. The longest are requests (blocks of a long prompt) and pages (the list of models)."""

BACKLOG = 4 << 20
"""Bytes that wait for the peer, from which on nothing new is begun: a few thousand requests."""

PIECE = 64 << 10


class TooLong(ValueError):
    """A message is longer than FRAME."""


class Link:
    """One end. Owns *sock* from `run` on."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._out = bytearray()
        self._more = trio.Event()  # there is something to write
        self._less = trio.Event()  # something has been written
        self.closed = False

    @property
    def full(self) -> bool:
        return len(self._out) > BACKLOG

    def post(self, message: bytes) -> None:
        """Send now, or as soon as the peer takes it. Raises TooLong."""
        if len(message) > FRAME:
            raise TooLong(f"a message of {len(message)} bytes; at most {FRAME} are allowed")
        if self.closed:
            return
        frame = len(message).to_bytes(4, "big") + message
        if not self._out:
            try:
                frame = frame[self._sock.send(frame) :]
            except BlockingIOError:
                pass
            except OSError:
                return  # the reading side finds out
        if frame:
            self._out += frame
            self._more.set()

    def shut(self) -> None:
        """End our side; the peer's `run` returns, and then ours."""
        self._sock.shutdown(socket.SHUT_WR)

    async def run(self, handle: Callable[[bytes], None]) -> None:
        """Pass on messages until the peer ends. *handle* is synchronous; what it raises ends the program."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                await self._read(handle)
                nursery.cancel_scope.cancel("the peer has ended")
        finally:
            self.closed = True
            self._sock.close()

    async def _write(self) -> None:
        while True:
            await self._more.wait()
            self._more = trio.Event()
            while self._out:
                await trio.lowlevel.wait_writable(self._sock)
                try:
                    del self._out[: self._sock.send(self._out[:PIECE])]
                except BlockingIOError:
                    continue
                except OSError:
                    return
                self._less.set()

    async def _read(self, handle: Callable[[bytes], None]) -> None:
        buffer = bytearray()
        while True:
            while self.full:
                self._less = trio.Event()
                await self._less.wait()
            await trio.lowlevel.wait_readable(self._sock)
            try:
                data = self._sock.recv(PIECE)
            except BlockingIOError:
                continue
            except OSError:
                return
            if not data:
                return
            buffer += data
            at = 0
            while len(buffer) >= at + 4:
                end = at + 4 + int.from_bytes(buffer[at : at + 4], "big")
                if end - at - 4 > FRAME:
                    return
                if len(buffer) < end:
                    break
                handle(bytes(buffer[at + 4 : end]))
                at = end
            del buffer[:at]
