"""A plain HTTP client for tests: one connection, bytes in and out, the time of every event."""

from __future__ import annotations

import json
import socket
from typing import Any

import attrs
import trio

from llmgw.net.world import World, parse_address


@attrs.define
class Got:
    """One answer. *events*: payloads of a stream with the time each came."""

    status: int
    headers: dict[str, str]
    body: bytes
    events: list[tuple[float, bytes]] = attrs.Factory(list)

    def json(self) -> Any:
        return json.loads(self.body)

    def payloads(self) -> list[Any]:
        return [json.loads(data) for _, data in self.events if data != b"[DONE]"]


class Client:
    """Requests over one connection to *address*, one after the other."""

    def __init__(self, world: World, address: str) -> None:
        self.world = world
        self.address = address
        self.sock: socket.socket | None = None
        self.buffer = b""

    async def open(self) -> None:
        self.sock = await self.world.dial(parse_address(self.address))

    def close(self) -> None:
        if self.sock is not None:
            trio.lowlevel.notify_closing(self.sock)
            self.sock.close()
            self.sock = None

    async def send(self, data: bytes) -> None:
        if self.sock is None:
            await self.open()
        assert self.sock is not None
        while data:
            await trio.lowlevel.wait_writable(self.sock)
            data = data[self.sock.send(data) :]

    async def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> None:
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = {"host": "engine", "content-length": str(len(raw)), "content-type": "application/json"}
        lines.update(headers or {})
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n"
        await self.send(head.encode() + raw)

    async def more(self) -> bool:
        assert self.sock is not None
        while True:
            await trio.lowlevel.wait_readable(self.sock)
            try:
                data = self.sock.recv(65536)
            except BlockingIOError:
                continue
            self.buffer += data
            return bool(data)

    async def until(self, mark: bytes) -> bytes:
        while mark not in self.buffer:
            if not await self.more():
                raise EOFError(self.buffer)
        found, _, self.buffer = self.buffer.partition(mark)
        return found

    async def exactly(self, count: int) -> bytes:
        while len(self.buffer) < count:
            if not await self.more():
                raise EOFError(self.buffer)
        found, self.buffer = self.buffer[:count], self.buffer[count:]
        return found

    async def head(self) -> Got:
        lines = (await self.until(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:])
        return Got(int(lines[0].split()[1]), fields, b"")

    async def answer(self) -> Got:
        got = await self.head()
        if got.headers.get("transfer-encoding") != "chunked":
            got.body = await self.exactly(int(got.headers["content-length"]))
            return got
        while size := int(await self.until(b"\r\n"), 16):
            data = await self.exactly(size)
            await self.exactly(2)
            got.body += data
            for line in data.split(b"\n"):
                if line.startswith(b"data: "):
                    got.events.append((trio.current_time(), line[6:]))
        await self.until(b"\r\n")
        return got

    async def ask(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Got:
        await self.request("POST", path, body, headers)
        return await self.answer()

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Got:
        await self.request("GET", path, None, headers)
        return await self.answer()


def metric(page: bytes, name: str, **labels: str) -> float:
    """The value of one series; several that match are summed."""
    found = [
        float(line.rsplit(" ", 1)[1])
        for line in page.decode().splitlines()
        if line.split("{")[0].split(" ")[0] == name and all(f'{k}="{v}"' in line for k, v in labels.items())
    ]
    assert found, f"no series {name} {labels}"
    return sum(found)
