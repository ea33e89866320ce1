"""Downloads media that clients name, without letting them reach what only this host can reach.

`llmgw.pipeline.media` says what may be fetched; here it is done. The name is resolved by us, every address is checked, and the
checked address is what is dialled (a second look-up could answer differently), at every hop of a redirect. Nothing of the
client travels: no headers, no cookies, no proxy of the environment.

    fetch(urls) ── one task a URL, at most `at_once` ──► cache ─► in flight already? wait for it ─► download
                                                                                          (a task of the service)

A download belongs to the service, not to who asked first: others may wait for the same one. It is cancelled when nobody
waits any more. The cache is bounded in bytes, and an entry lives `FRESH` seconds.
"""

from __future__ import annotations

import base64
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterable, Collection, Iterable
from typing import Any, cast
from urllib.parse import quote, urljoin, urlsplit

import attrs
import httpcore
import trio

from llmgw.errors import Refused
from llmgw.net.world import Tcp, World
from llmgw.pipeline.commands import Failed, FetchLimits, Media
from llmgw.pipeline.media import MAX_REDIRECTS, PORTS, SCHEMES, Network, check_url, may_dial, sniff

FRESH = 300.0  # seconds: conversations send the same image with every turn; a picture that changes faster is rare
CACHE = 256 << 20  # bytes of base64
DOWNLOADS = 64  # at once in this process: 64 × 10 MB at the default size
SLICE = 3 << 18  # bytes encoded to base64 at a time; a multiple of 3, under a millisecond


HEAD = 128 << 10  # bytes that an answer may have beside its body: header section, chunk framing


class Blocked(Exception):
    """No address of the host may be dialled."""


class TooLarge(Exception):
    """The origin sent more than it may.

    Raised below httpcore, inside the read: leaving its generators early from above would leave them to the collector.
    """


class _Stream(httpcore.AsyncNetworkStream):
    """httpcore's stream over a trio one, that reads at most *most* bytes."""

    def __init__(self, stream: trio.abc.Stream, most: int) -> None:
        self._stream = stream
        self._left = most

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 -- httpcore's signature
        try:
            data = bytes(await self._stream.receive_some(max_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise httpcore.ReadError(str(error)) from error
        self._left -= len(data)
        if self._left < 0:
            raise TooLarge
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        try:
            await self._stream.send_all(buffer)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise httpcore.WriteError(str(error)) from error

    async def aclose(self) -> None:
        await trio.aclose_forcefully(self._stream)

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore.AsyncNetworkStream:
        tls = trio.SSLStream(self._stream, ssl_context, server_hostname=server_hostname, https_compatible=True)
        try:
            await tls.do_handshake()
        except trio.BrokenResourceError as error:
            await self.aclose()
            raise httpcore.ConnectError(f"TLS: {error.__cause__ or error}") from error
        return _Stream(tls, self._left)

    def get_extra_info(self, info: str) -> Any:
        return None


class _Dialler(httpcore.AsyncNetworkBackend):
    """Resolves, checks, dials what was checked."""

    def __init__(self, world: World, limits: FetchLimits, opened: Collection[Network]) -> None:
        self._world = world
        self._limits = limits
        self._opened = opened

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            found = await self._world.resolve(host, port)
        except OSError as error:
            raise httpcore.ConnectError(f"{host} has no address: {error}") from error
        allowed = [a for a, _ in found if may_dial(a, allow_private=self._limits.allow_private, also=self._opened)]
        if not allowed:
            raise Blocked
        failed: OSError | None = None
        for address in allowed:
            try:
                sock = await self._world.dial(Tcp(address, port))
            except OSError as error:
                failed = error
                continue
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
            return _Stream(stream, self._limits.max_bytes + HEAD)
        raise httpcore.ConnectError(f"{host} cannot be connected to: {failed}")

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise Blocked

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)


@attrs.define(eq=False)
class _Download:
    """One that is in flight. *waiting*: who still wants it."""

    scope: trio.CancelScope = attrs.Factory(trio.CancelScope)
    done: trio.Event = attrs.Factory(trio.Event)
    waiting: int = 0
    result: Media | Failed = attrs.Factory(lambda: Failed(reason="cancelled"))


Key = tuple[str, FetchLimits]


class MediaClient:
    """Fetches for all requests of a process. `run` must be running while `fetch` is called."""

    def __init__(
        self,
        world: World,
        *,
        ports: Collection[int] = PORTS,
        opened: Collection[Network] = (),
        cache_bytes: int = CACHE,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """*opened*: networks that may be dialled although they are not public (a media store of the cluster's own)."""
        self._world = world
        self._ports = ports
        self._opened = opened
        self._room = cache_bytes
        self._tls = ssl_context or ssl.create_default_context()
        self._cache: OrderedDict[Key, tuple[Media, float]] = OrderedDict()
        self._cached_bytes = 0
        self._flights: dict[Key, _Download] = {}
        self._limiter = trio.CapacityLimiter(DOWNLOADS)
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the downloads. Cancelling it cancels them."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._nursery = None

    async def fetch(self, urls: tuple[str, ...], limits: FetchLimits) -> tuple[Media | Failed, ...]:
        """All of *urls*, in their order. The first failure cancels the others, which answer ``Failed("cancelled")``.

        A failure with reason ``bad_field`` is the client's fault (blocked, too large, no image), ``phase_failed`` the origin's.
        """
        results: list[Media | Failed] = [Failed(reason="cancelled")] * len(urls)
        at_once = trio.CapacityLimiter(limits.at_once)
        async with trio.open_nursery() as nursery:

            async def one(index: int) -> None:
                async with at_once:
                    results[index] = await self._one(urls[index], limits)
                if isinstance(results[index], Failed):
                    nursery.cancel_scope.cancel()

            for index in range(len(urls)):
                nursery.start_soon(one, index)
        return tuple(results)

    async def _one(self, url: str, limits: FetchLimits) -> Media | Failed:
        key = (url, limits)
        if (found := self._cached(key)) is not None:
            return found
        flight = self._flights.get(key)
        if flight is None:
            assert self._nursery is not None, "MediaClient.run is not running"
            flight = self._flights[key] = _Download()
            self._nursery.start_soon(self._download, key, flight)
        flight.waiting += 1
        try:
            with trio.move_on_after(limits.timeout):
                await flight.done.wait()
                return flight.result
            return Failed(reason="phase_failed", detail=f"not fetched within {limits.timeout:g} s")
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.done.is_set():
                self._flights.pop(key, None)  # whoever comes now begins anew
                flight.scope.cancel()

    async def _download(self, key: Key, flight: _Download) -> None:
        url, limits = key
        try:
            with flight.scope:
                async with self._limiter:
                    flight.result = await self._get(url, limits)
        finally:
            flight.done.set()
            if self._flights.get(key) is flight:
                del self._flights[key]

    async def _get(self, url: str, limits: FetchLimits) -> Media | Failed:
        backend = _Dialler(self._world, limits, self._opened)
        pool = httpcore.AsyncConnectionPool(
            ssl_context=self._tls, network_backend=backend, max_keepalive_connections=0, http2=False
        )
        async with pool:
            try:
                return await self._hops(pool, url, limits)
            except Blocked:
                return Failed(
                    reason="bad_field", detail="the host of a media URL has no address that may be fetched from"
                )
            except TooLarge:
                return _too_large(limits)
            except Refused as error:
                return Failed(reason="bad_field", detail=error.refusal.message)
            except (httpcore.NetworkError, httpcore.ProtocolError, ValueError) as error:
                return Failed(reason="phase_failed", detail=f"{type(error).__name__}: {error}"[:200])

    async def _hops(self, pool: httpcore.AsyncConnectionPool, url: str, limits: FetchLimits) -> Media | Failed:
        for _ in range(MAX_REDIRECTS + 1):
            request = _request(url, *check_url(url, limits.domains, self._ports))
            response = await pool.handle_async_request(request)
            try:
                headers = {name.lower(): value for name, value in reversed(response.headers)}
                if response.status in (301, 302, 303, 307, 308) and b"location" in headers:
                    url = urljoin(url, headers[b"location"].decode("ascii"))
                    continue
                if response.status != 200:
                    return Failed(reason="phase_failed", status=None, detail=f"HTTP {response.status}")
                return await self._body(headers, response, (url, limits))
            finally:
                with trio.move_on_after(1.0, shield=True):
                    await response.aclose()
        return Failed(reason="bad_field", detail=f"a media URL redirects more than {MAX_REDIRECTS} times")

    async def _body(self, headers: dict[bytes, bytes], response: httpcore.Response, key: Key) -> Media | Failed:
        limits = key[1]
        if headers.get(b"content-encoding", b"identity") != b"identity":
            return Failed(reason="phase_failed", detail="the origin chose a content encoding that was not asked for")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limits.max_bytes:
            return _too_large(limits)
        data = bytearray()
        async for chunk in cast("AsyncIterable[bytes]", response.stream):
            data += chunk  # bounded by the stream
        if len(data) > limits.max_bytes:
            return _too_large(limits)
        kind = sniff(bytes(data[:16]))
        if kind is None:
            return Failed(reason="bad_field", detail="a medium is no image of a type that engines read")
        encoded = []
        for at in range(0, len(data), SLICE):
            encoded.append(base64.b64encode(data[at : at + SLICE]).decode("ascii"))
            await trio.lowlevel.checkpoint()
        media = Media(kind, "".join(encoded))
        control = headers.get(b"cache-control", b"").lower()
        if b"no-store" not in control and b"private" not in control:
            self._keep(key, media)
        return media

    def _cached(self, key: Key) -> Media | None:
        found = self._cache.get(key)
        if found is None:
            return None
        if trio.current_time() > found[1]:
            self._drop(key)
            return None
        self._cache.move_to_end(key)
        return found[0]

    def _keep(self, key: Key, media: Media) -> None:
        size = len(media.base64)
        if size > self._room:
            return
        if key in self._cache:
            self._drop(key)
        while self._cached_bytes + size > self._room:
            self._drop(next(iter(self._cache)))
        self._cache[key] = media, trio.current_time() + FRESH
        self._cached_bytes += size

    def _drop(self, key: Key) -> None:
        self._cached_bytes -= len(self._cache.pop(key)[0].base64)


def _too_large(limits: FetchLimits) -> Failed:
    return Failed(reason="bad_field", detail=f"a medium is larger than {limits.max_bytes} bytes")


def _request(url: str, scheme: str, host: str, port: int) -> httpcore.Request:
    """A GET of *url* with nothing of the client in it. Raises ValueError (UnicodeError) for a host that is no name."""
    parts = urlsplit(url)
    name = host.encode("ascii") if ":" in host else host.encode("idna")
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    if parts.query:
        target += "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
    host_field = b"[%s]" % name if b":" in name else name
    if port != SCHEMES[scheme]:
        host_field += b":%d" % port
    return httpcore.Request(
        "GET",
        httpcore.URL(scheme=scheme.encode(), host=name, port=port, target=target.encode()),
        headers=[
            (b"Host", host_field),
            (b"User-Agent", b"llmgw"),
            (b"Accept", b"image/*"),
            (b"Accept-Encoding", b"identity"),
            (b"Connection", b"close"),
        ],
    )
