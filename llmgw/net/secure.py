"""A channel with TLS in it: an SSLObject over memory BIOs between the socket and whoever the channel is bound to.

    socket ──recv──► incoming BIO ──► SSLObject ──► on_bytes          write ──► SSLObject ──► outgoing BIO ──► out ──► socket

Invariants
- `out` holds ciphertext of at most one slice (`SIZE`); what is not encrypted yet waits as it came, and `out` is then
  not None, so that the owner sees one held write, as without TLS.
- Nothing is read from the socket while plaintext is left in the SSLObject, nor while paused: at most one read is held.
- An end without close_notify is the peer's end for a server (what is asked for is whole or not by its own framing) and
  an error for a client (an answer may end with its connection).
"""

from __future__ import annotations

import ssl
from collections import deque
from typing import TYPE_CHECKING

import trio

from llmgw.net.channel import READS, SIZE, Channel

if TYPE_CHECKING:
    import socket

    from llmgw.net.channel import Driver

HANDSHAKE_SECONDS = 10.0
"""For a client to finish its handshake."""

_PLAIN = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain\r\ncontent-length: 45\r\n\r\n"
    b"This port speaks TLS: ask it with https://.\r\n"
)


class SecureChannel(Channel):
    """See the module's text. *tls*: as `serve` or `connect` made it."""

    __slots__ = ("_drained", "_in", "_outgoing", "_plain", "_tls")

    def __init__(self, sock: socket.socket, driver: Driver, peer: str, tls: Session, *, opening: bool) -> None:
        super().__init__(sock, driver, peer)
        self._tls, self._in, self._outgoing = tls
        self._plain: deque[memoryview] = deque()
        self._drained = False  # the socket gave less than was asked for: the next edge says when there is more
        self.opening = opening  # the handshake is not over

    def readable(self, ending: bool = False) -> None:
        if self.finished:
            return
        if ending:
            self._ending = True
        if self._halted():
            return
        self._drained = False
        for _ in range(READS):
            if not self._decrypt() or self._drained:
                return
            try:
                data = self.sock.recv(SIZE)
            except BlockingIOError:
                return
            except OSError as error:
                self._over(error)
                return
            if data:
                self._in.write(data)
                self._drained = len(data) < SIZE and not self._ending
            else:
                self._in.write_eof()
        if self._decrypt():
            self.driver.soon(self._read_on)

    def _decrypt(self) -> bool:
        """Deliver what lies in the SSLObject. False: paused, closed or over."""
        tls = self._tls
        try:
            if self.opening:
                tls.do_handshake()
                self.opening = False
                self._flush()
            while True:
                data = tls.read(SIZE)
                if not data:
                    self._over(None)
                    return False
                self.on_bytes(data)
                if self.closed or self.finished or self._halted():
                    return False
        except ssl.SSLWantReadError:
            self._flush()
            return True
        except ssl.SSLZeroReturnError:
            self._over(None)
        except ssl.SSLError as error:
            self._flush()  # the alert that says why
            if error.reason == "HTTP_REQUEST":
                self._put(_PLAIN)
            ended = isinstance(error, ssl.SSLEOFError) or error.reason == "UNEXPECTED_EOF_WHILE_READING"
            self._over(None if ended and tls.server_side else error)
        return False

    def _over(self, error: OSError | None) -> None:
        self.finished = True
        self.on_gone(error)

    def _flush(self) -> None:
        """Send what TLS itself has to say."""
        if self._outgoing.pending:
            self._put(self._outgoing.read())

    def _put(self, data: bytes) -> None:
        try:
            super().write(data)
        except OSError:
            pass  # the read side says so

    def write(self, data: bytes | bytearray | memoryview) -> bool:
        if self.out is not None:
            self._plain.append(memoryview(data))
            return False
        if len(data) <= SIZE:
            return super().write(self._encrypted(data))
        view = memoryview(data)
        for at in range(0, len(view), SIZE):
            if not super().write(self._encrypted(view[at : at + SIZE])):
                if at + SIZE < len(view):
                    self._plain.append(view[at + SIZE :])
                return False
        return True

    def _encrypted(self, data: bytes | bytearray | memoryview) -> bytes:
        self._tls.write(data)
        return self._outgoing.read()

    def _drain(self) -> bool:
        while super()._drain():
            if not self._plain:
                return True
            piece = self._plain[0]
            if len(piece) > SIZE:
                self._plain[0] = piece[SIZE:]
            else:
                self._plain.popleft()
            self.out = deque((memoryview(self._encrypted(piece[:SIZE])),))
        return False

    def shutdown(self) -> None:
        self._say_goodbye()
        super().shutdown()

    def close(self, *, reset: bool = False) -> None:
        if not self.closed and not reset:
            self._say_goodbye()
        self._plain.clear()
        super().close(reset=reset)

    def _say_goodbye(self) -> None:
        """close_notify, if it can go at once: for close-delimited answers it is what says that they are whole."""
        if self.opening or self.out is not None:
            return
        try:
            self._tls.unwrap()
        except (ssl.SSLError, ValueError):
            pass  # it waits for the peer's, or has been sent
        if self._outgoing.pending:
            try:
                self.sock.send(self._outgoing.read())
            except OSError:
                pass


Session = tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]


def _session(context: ssl.SSLContext, *, host: str | None = None) -> Session:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    return (
        context.wrap_bio(incoming, outgoing, server_side=host is None, server_hostname=host),
        incoming,
        outgoing,
    )


def serve(sock: socket.socket, driver: Driver, peer: str, context: ssl.SSLContext) -> SecureChannel:
    """A channel to a client; the handshake is done as its bytes come."""
    return SecureChannel(sock, driver, peer, _session(context), opening=True)


async def connect(sock: socket.socket, driver: Driver, peer: str, context: ssl.SSLContext, host: str) -> SecureChannel:
    """A channel to an engine called *host*, after the handshake. Raises OSError (ssl.SSLError); closes nothing."""
    session = tls, incoming, outgoing = _session(context, host=host)
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            await _send(sock, outgoing.read())
        else:
            break
        await trio.lowlevel.wait_readable(sock)
        try:
            data = sock.recv(SIZE)
        except BlockingIOError:
            continue
        if data:
            incoming.write(data)
        else:
            incoming.write_eof()
    await _send(sock, outgoing.read())
    return SecureChannel(sock, driver, peer, session, opening=False)


async def _send(sock: socket.socket, data: bytes) -> None:
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            await trio.lowlevel.wait_writable(sock)
