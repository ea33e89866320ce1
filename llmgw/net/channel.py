"""One non-blocking socket, client's or engine's: reads when told that it may, writes at once, keeps what did not go.

A channel belongs to a *driver* (pump or tasks), which tells it about readiness, and is *bound* to whoever is to get its
bytes: an exchange, or the pool while idle. Readiness is a hint; only the result of `recv` and `send` decides.

Invariants
- `on_gone` is called at most once a binding, and never after `close`.
- What is held for writing comes from at most one read of the other side (`SIZE`): the other side is paused meanwhile.
- `close` releases everything once: it may be called again, and from inside any callback.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable
from typing import Protocol

SIZE = 64 << 10
"""Bytes a read, and so the most that one stream can hold for a slow reader."""

READS = 8
"""Reads a visit; then the channel queues itself again, so that one fast engine does not starve the rest of a batch."""


class Driver(Protocol):
    """Who waits for readiness."""

    now: float

    def attach(self, channel: Channel) -> None: ...

    def detach(self, channel: Channel) -> None:
        """Forget it. Called before its socket is closed; never raises."""
        ...

    def want_write(self, channel: Channel) -> None:
        """It holds bytes: call `writable` when the socket takes more."""
        ...

    def soon(self, call: Callable[[], None]) -> None:
        """Run *call* after what else is ready now. An exception in it ends nothing but itself."""
        ...


def _nothing(_: object) -> None:
    return None


class Channel:
    """See the module's text. *peer* is for logs. *opening*: a handshake is under way, nothing can be said yet."""

    __slots__ = (
        "_again", "_ending", "_paused", "closed", "crashed", "driver", "fd", "finished", "on_bytes", "on_gone",
        "on_resume", "on_writable", "opening", "out", "peer", "since", "sock",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, driver: Driver, peer: str = "") -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.driver = driver
        self.peer = peer
        self.out: deque[memoryview] | None = None
        self.closed = False
        self.opening = False
        self.finished = False  # the peer's side has ended or broken, and the owner has been told
        self.on_resume: Callable[[], None] | None = None  # of the driver
        self.since = 0.0  # of the pool: when it became idle
        self._paused = False
        self._ending = False  # the peer has finished sending: read until b"", data and FIN can share one edge
        self._again = False
        self.on_bytes: Callable[[bytes], None] = _nothing
        self.on_gone: Callable[[OSError | None], None] = _nothing
        self.on_writable: Callable[[], None] | None = None
        self.crashed: Callable[[Exception], None] = _nothing

    def bind(
        self,
        on_bytes: Callable[[bytes], None],
        on_gone: Callable[[OSError | None], None],
        on_writable: Callable[[], None] | None,
        crashed: Callable[[Exception], None],
    ) -> None:
        """From now on these get what happens. *on_gone*: None = the peer ended its side, else the error."""
        self.on_bytes = on_bytes
        self.on_gone = on_gone
        self.on_writable = on_writable
        self.crashed = crashed

    # what the driver calls

    def readable(self, ending: bool = False) -> None:
        """There may be something to read. *ending*: the peer has shut down or broken."""
        if self.finished:
            return
        if ending:
            self._ending = True
        if self._halted():
            return
        recv = self.recv
        for _ in range(READS):
            try:
                data = recv(SIZE)
            except BlockingIOError:
                return
            except OSError as error:
                self.finished = True
                self.on_gone(error)
                return
            if not data:
                self.finished = True
                self.on_gone(None)
                return
            self.on_bytes(data)
            if self.closed or (len(data) < SIZE and not self._ending):
                return  # edge-triggered: a short read has emptied the socket, more to come makes a new edge
            if self._halted():
                return
        self.driver.soon(self._read_on)

    def _halted(self) -> bool:
        if self._paused:
            self._again = True
        return self._paused

    def writable(self) -> None:
        """The socket may take more of what is held."""
        if self.out and self._drain() and self.on_writable is not None:
            self.on_writable()

    def _drain(self) -> bool:
        """Send what is held. True: all of it went."""
        out = self.out
        while out:
            piece = out[0]
            try:
                sent = self.send(piece)
            except BlockingIOError:
                return False
            except OSError as error:
                self.out = None
                self.finished = True
                self.on_gone(error)
                return False
            if sent < len(piece):
                out[0] = piece[sent:]
                self.driver.want_write(self)
                return False
            out.popleft()
        self.out = None
        return True

    # what the owner calls

    def recv(self, size: int) -> bytes:
        return self.sock.recv(size)

    def send(self, data: bytes | bytearray | memoryview) -> int:
        return self.sock.send(data)

    def write(self, data: bytes | bytearray | memoryview) -> bool:
        """Send *data*; True = all of it went, False = the rest is held. Raises OSError if the peer is gone."""
        out = self.out
        if out is not None:
            out.append(memoryview(data))
            return False
        try:
            sent = self.send(data)
        except BlockingIOError:
            sent = 0
        if sent == len(data):
            return True
        self.out = deque((memoryview(data)[sent:],))
        self.driver.want_write(self)
        return False

    @property
    def paused(self) -> bool:
        return self._paused

    def pause(self) -> None:
        """Read no more until `resume`. What has already been read is delivered."""
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if self._again:
                self._again = False
                self.driver.soon(self._read_on)
            if self.on_resume is not None:
                self.on_resume()

    def _read_on(self) -> None:
        if not self.closed:
            self.readable()

    def shutdown(self) -> None:
        """End our side; the peer's bytes still come. Never raises."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it is gone already: the read side will say so

    def unsent(self) -> int:
        """Bytes that the peer has not acknowledged yet: whether a stalled reader still moves. 0 if unknown."""
        try:
            return int(struct.unpack("i", fcntl.ioctl(self.fd, termios.TIOCOUTQ, b"\0\0\0\0"))[0])
        except OSError:
            return 0

    def close(self, *, reset: bool = False) -> None:
        """Detach, unbind, close. *reset*: RST instead of FIN, where a clean end would make a cut answer look whole."""
        if self.closed:
            return
        self.closed = True
        self.driver.detach(self)
        self.out = None
        self.on_bytes = self.on_gone = self.crashed = _nothing
        self.on_writable = None
        if self.on_resume is not None:
            self.on_resume()
        if reset:
            try:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            except OSError:
                pass
        self.sock.close()
