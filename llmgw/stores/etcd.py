"""etcd as the store, for more than one server: its v3 JSON gateway by httpx2. No gRPC.

- Keys and values travel as base64, 64-bit numbers as strings; what is zero, false or empty is absent.
- Several endpoints: a request that provably was not served goes to the next one. A write that was sent and not answered
  raises `OutcomeUnknown`; nobody here repeats it.
- A watch remembers how far it got. A broken or silent stream is opened anew from there, on the next endpoint.
- A lease that is gone answers 200 without a TTL.

Who may write is settled by `llmgw.stores.leader`: every write compares the create revision of the leader's key.
"""

from __future__ import annotations

import ssl
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec
import trio

from llmgw.errors import Unavailable
from llmgw.stores.base import (
    Changes,
    Compacted,
    Compare,
    Delete,
    Entry,
    Event,
    FutureRevision,
    LeaseLost,
    Op,
    OutcomeUnknown,
    Put,
    Range,
    StoreError,
    Txn,
    check,
    check_key,
    check_ttl,
    prefix_end,
)

NAMESPACE = "/llmgw"
"""Put before every key, so that an etcd may be shared with others."""

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 5.0  # etcd itself gives up on consensus after 7 s; a lease of 15 s needs an answer sooner
CLOSE_SECONDS = 1.0
SILENCE_SECONDS = 60.0  # of a watch; then it is opened anew, since a dead TCP peer looks like a quiet one
MAX_LINE = 8 << 20  # bytes of one message; etcd fragments what is above 1.5 MiB, base64 adds a third

RESULTS = {"==": "EQUAL", "!=": "NOT_EQUAL", "<": "LESS", ">": "GREATER"}
TARGETS = {
    "value": ("VALUE", "value"),
    "version": ("VERSION", "version"),
    "create": ("CREATE", "create_revision"),
    "mod": ("MOD", "mod_revision"),
}

Json = dict[str, Any]


def decode(status: int, body: bytes) -> Json:
    """The object of a unary answer. Raises Compacted (revision 0: the answer does not say), FutureRevision, LeaseLost,
    Unavailable (did not happen), OutcomeUnknown (may have happened), StoreError."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        answer = None
    if status == 200 and isinstance(answer, dict) and "error" not in answer:
        return answer
    raise _error(status, answer if isinstance(answer, dict) else {})


def _error(status: int, answer: Json) -> Exception:
    error = answer.get("error", "")
    message = str(error.get("message", "") if isinstance(error, dict) else error) or f"HTTP {status}"
    code = answer.get("code", error.get("grpc_code") if isinstance(error, dict) else None)
    if "required revision has been compacted" in message:
        return Compacted(0)
    if "future revision" in message:
        return FutureRevision(message)
    if "lease not found" in message:
        return LeaseLost(message)
    if "database space exceeded" in message:
        return Unavailable(f"etcd: {message}; compact and defragment it, then `etcdctl alarm disarm`")
    if message == "etcdserver: no leader" or code == 8:  # refused before consensus; 8 = resource exhausted
        return Unavailable(f"etcd: {message}")
    if code in (4, 14) or status >= 500:
        return OutcomeUnknown(f"etcd: {message}")
    return StoreError(f"etcd: {message}")


class WatchParser:
    """Bytes of a watch's stream → messages. Fragments of one message are put together."""

    def __init__(self) -> None:
        self._buffer = b""
        self._events: list[Json] = []

    def feed(self, data: bytes) -> list[Json]:
        """The `result` objects that are complete now. Raises StoreError for a line that is too long or no JSON."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > MAX_LINE:
            raise StoreError(f"etcd sent a message of more than {MAX_LINE} bytes")
        found = []
        for line in lines:
            if not line.strip():
                continue
            try:
                message = msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                raise StoreError(f"etcd sent a line that is no JSON: {line[:80]!r}") from error
            if "result" not in message:
                raise _error(200, message)
            result: Json = message["result"]
            self._events += result.get("events", ())
            if not result.get("fragment"):
                found.append({**result, "events": self._events})
                self._events = []
        return found


class EtcdStore:
    """See `llmgw.stores.base.Store`. Made by `open_etcd`."""

    def __init__(self, client: httpx2.AsyncClient, endpoints: Sequence[str], namespace: str) -> None:
        self._client = client
        self.endpoints = [e.rstrip("/") for e in endpoints]
        self._current = 0
        self._namespace = namespace

    async def get(self, key: str) -> Entry | None:
        answer = await self._call("kv/range", {"key": self._key(key)})
        return next((self._entry(kv) for kv in answer.get("kvs", ())), None)

    async def range(self, prefix: str, revision: int = 0) -> Range:
        try:
            answer = await self._call("kv/range", {**self._under(prefix), "revision": str(revision)})
        except Compacted:
            raise await self._compacted() from None
        return Range(_revision(answer), tuple(self._entry(kv) for kv in answer.get("kvs", ())))

    async def txn(
        self, compares: Sequence[Compare] = (), success: Sequence[Op] = (), failure: Sequence[Op] = ()
    ) -> Txn:
        check(compares, success, failure)
        answer = await self._call(
            "kv/txn",
            {
                "compare": [self._compare(c) for c in compares],
                "success": [self._op(op) for op in success],
                "failure": [self._op(op) for op in failure],
            },
            writes=True,
        )
        read = [r["response_range"].get("kvs", ()) for r in answer.get("responses", ()) if "response_range" in r]
        entries = tuple(self._entry(kvs[0]) if kvs else None for kvs in read)
        return Txn(bool(answer.get("succeeded")), _revision(answer), entries)

    async def grant(self, ttl: int) -> int:
        check_ttl(ttl)
        return int((await self._call("lease/grant", {"TTL": str(ttl)}, writes=True))["ID"])

    async def keepalive(self, lease: int) -> int:
        result = (await self._call("lease/keepalive", {"ID": str(lease)})).get("result", {})
        if "TTL" not in result:
            raise LeaseLost(f"lease {lease} does not exist")
        return int(result["TTL"])

    async def revoke(self, lease: int) -> None:
        await self._call("lease/revoke", {"ID": str(lease)}, writes=True)

    async def compact(self, revision: int) -> None:
        try:
            await self._call("kv/compaction", {"revision": str(revision)}, writes=True)
        except Compacted:
            raise await self._compacted() from None

    @asynccontextmanager
    async def watch(self, prefix: str, from_revision: int = 0) -> AsyncIterator[AsyncIterator[Changes]]:
        # Where "now" is has to be known before the stream is open, or a broken first connection would leave a gap.
        after = from_revision - 1 if from_revision else (await self.range(prefix + "\x01")).revision
        watch = _Watch(self, self._under(prefix), after)
        try:
            yield watch
        finally:
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await watch.close()

    async def _call(self, path: str, body: Json, *, writes: bool = False) -> Json:
        """POST to one endpoint after the other until one answers. Raises what `decode` raises."""
        failed: Exception | None = None
        for _ in self.endpoints:
            url = f"{self.endpoints[self._current]}/v3/{path}"
            try:
                response = await self._client.post(url, json=body)
                return decode(response.status_code, response.content)
            except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
                failed = error
            except httpx2.TransportError as error:
                if writes:
                    self.rotate()
                    raise OutcomeUnknown(f"etcd at {url} did not answer: {_why(error)}") from error
                failed = error
            except OutcomeUnknown as error:
                if writes:
                    self.rotate()
                    raise
                failed = error
            except Unavailable as error:
                failed = error
            self.rotate()
        raise Unavailable(f"no endpoint of etcd answers ({', '.join(self.endpoints)}): {_why(failed)}") from failed

    def rotate(self) -> None:
        self._current = (self._current + 1) % len(self.endpoints)

    async def open_watch(self, under: Json, start: int) -> httpx2.Response:
        """The stream of a watch. Raises httpx2.TransportError, or what `decode` raises."""
        create = {**under, "start_revision": str(start), "fragment": True, "progress_notify": True}
        request = self._client.build_request(
            "POST",
            f"{self.endpoints[self._current]}/v3/watch",
            json={"create_request": create},
            timeout=httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS, read=None),
        )
        response = await self._client.send(request, stream=True)
        if response.status_code != 200:
            try:
                decode(response.status_code, await response.aread())
            finally:
                with trio.move_on_after(CLOSE_SECONDS, shield=True):
                    await response.aclose()
        return response

    def changes(self, result: Json) -> Changes | None:
        """What a message of a watch says; None if nothing. Raises Compacted; Unavailable if etcd ended the watch."""
        if result.get("canceled"):
            if "compact_revision" in result:
                raise Compacted(int(result["compact_revision"]))
            raise Unavailable(f"etcd ended the watch: {result.get('cancel_reason', 'no reason given')}")
        if result["events"]:
            events = tuple(self._event(e) for e in result["events"])
            return Changes(events[-1].revision, events)
        return None if result.get("created") else Changes(_revision(result))

    async def _compacted(self) -> Compacted:
        """Since when there is history: only a watch says it."""
        try:
            async with self.watch("", 1) as changes:
                await anext(changes)
        except Compacted as error:
            return error
        return Compacted(0)

    def _key(self, key: str) -> str:
        return _encode(check_key(self._namespace + key))

    def _under(self, prefix: str) -> Json:
        low = (self._namespace + prefix).encode()
        return {"key": _encode(low), "range_end": _encode(prefix_end(low))}

    def _compare(self, compare: Compare) -> Json:
        target, field = TARGETS[compare.target]
        operand = _encode(compare.operand) if isinstance(compare.operand, bytes) else str(compare.operand)
        return {"key": self._key(compare.key), "target": target, "result": RESULTS[compare.op], field: operand}

    def _op(self, op: Op) -> Json:
        key = self._key(op.key)
        if isinstance(op, Put):
            return {"request_put": {"key": key, "value": _encode(op.value), "lease": str(op.lease)}}
        if isinstance(op, Delete):
            return {"request_delete_range": {"key": key}}
        return {"request_range": {"key": key}}

    def _name(self, kv: Json) -> str:
        return b64decode(kv["key"]).decode().removeprefix(self._namespace)

    def _entry(self, kv: Json) -> Entry:
        return Entry(
            self._name(kv),
            b64decode(kv.get("value", "")),
            int(kv["create_revision"]),
            int(kv["mod_revision"]),
            int(kv["version"]),
            int(kv.get("lease", 0)),
        )

    def _event(self, event: Json) -> Event:
        kv = event["kv"]
        entry = None if event.get("type") == "DELETE" else self._entry(kv)
        return Event(self._name(kv), int(kv["mod_revision"]), entry)


class _Watch:
    """Iterator of changes. Holds at most one connection; an interrupted wait closes it, and the next one resumes."""

    def __init__(self, store: EtcdStore, under: Json, after: int) -> None:
        self._store, self._under, self._after = store, under, after
        self._stream: AsyncGenerator[bytes, None] | None = None
        self._response: httpx2.Response
        self._parser = WatchParser()
        self._ready: list[Json] = []

    def __aiter__(self) -> _Watch:
        return self

    async def __anext__(self) -> Changes:
        failed: httpx2.TransportError | None = None
        for _ in range(len(self._store.endpoints) + 1):
            try:
                while True:
                    while self._ready:
                        if found := self._store.changes(self._ready.pop(0)):
                            self._after = max(self._after, found.revision)
                            return found
                    await self._read()
            except httpx2.TransportError as error:
                failed = error
                self._store.rotate()
        raise Unavailable(f"no endpoint of etcd keeps a watch open: {_why(failed)}") from failed

    async def _read(self) -> None:
        """Some more messages into `_ready`; opens the stream if there is none, and leaves none after any failure."""
        data = b""
        try:
            if self._stream is None:
                self._response = await self._store.open_watch(self._under, self._after + 1)
                self._stream = self._response.aiter_raw()
            with trio.move_on_after(SILENCE_SECONDS) as silence:
                data = await anext(self._stream, b"")
                self._ready += self._parser.feed(data)
        finally:
            if not data:
                with trio.move_on_after(CLOSE_SECONDS, shield=True):
                    await self.close()
        if not data and not silence.cancelled_caught:
            raise httpx2.RemoteProtocolError("the stream ended")

    async def close(self) -> None:
        """Ends the stream by a cancelled read: closed from outside, the generators nested in httpx would be left over."""
        stream, self._stream = self._stream, None
        self._parser, self._ready = WatchParser(), []
        if stream is not None:
            with trio.CancelScope() as scope:
                scope.cancel("the watch is over")
                async for _ in stream:
                    pass
            await self._response.aclose()


@asynccontextmanager
async def open_etcd(
    endpoints: Sequence[str], *, tls: ssl.SSLContext | None = None, namespace: str = NAMESPACE
) -> AsyncIterator[EtcdStore]:
    """The store in the etcd at *endpoints* (``https://10.0.0.1:2379``). *tls*: as `llmgw.net.tls.client_context` makes.

    Raises nothing for an etcd that is down: the first call does.
    """
    timeout = httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS, pool=None)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=8)
    async with httpx2.AsyncClient(
        verify=tls if tls is not None else False,  # plain http endpoints: no system store to load
        timeout=timeout,
        limits=limits,
        trust_env=False,
    ) as client:
        yield EtcdStore(client, endpoints, namespace)


def _why(error: BaseException | None) -> str:
    """What lies at the bottom of a chain of wrapped exceptions: there the certificate or the port is named."""
    text = ""
    while error is not None:
        text = str(error) or text or type(error).__name__
        error = error.__cause__ or error.__context__
    return text


def _encode(raw: bytes) -> str:
    return b64encode(raw).decode()


def _revision(answer: Json) -> int:
    return int(answer["header"]["revision"])
