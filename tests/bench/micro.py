"""Where a request's time goes, without sockets: exchange, decision, settlement, log. Microseconds of processor time."""

from __future__ import annotations

import random
import time
import timeit
from collections.abc import Callable
from typing import Any

from llmgw.config import ClientLimits
from llmgw.net import http1
from llmgw.net.exchange import Exchange, State
from llmgw.openai import peek
from llmgw.request import InferenceRequest, Lease, Outcome, Target
from tests.bench.page import spread, table
from tests.server.worlds import Bench, bench

CLIENT = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: gw\r\nContent-Type: application/json\r\nContent-Length: 78\r\n\r\n"
    b'{"model":"llama","messages":[{"role":"user","content":"hello"}],"stream":%b}'
)
ANSWER = b'{"id":"c","choices":[{"index":0,"message":{"content":"some words"}}],"usage":{"prompt_tokens":9,"completion_tokens":6,"total_tokens":15}}'
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"chatcmpl-5f2a8c","object":"chat.completion.chunk","created":1760000000,"model":"llama",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)


class End:
    """A channel whose peer takes everything at once."""

    out = None
    closed = finished = paused = opening = False

    def bind(self, *_: Any) -> None:
        return None

    def write(self, data: bytes) -> bool:
        return True

    def nothing(self, **_: Any) -> None:
        return None

    pause = resume = shutdown = close = nothing


class Clock:
    now = 100.0


class Surroundings:
    """An exchange's host without a driver: one pooled connection that is always there."""

    internal = strips = half_close = draining = False
    bands: tuple[str, ...] = ()
    proxies = None
    clock = Clock()
    rng = random.Random(1)
    limits = ClientLimits()
    allow = peek.Allow()
    read_request = http1.RequestReader(field_count=100, forward=http1.TO_ENGINE)

    def __init__(self, brain: Any) -> None:
        self.brain = brain
        self.engine: Any = End()

    def take(self, _: Target) -> Any:
        return self.engine

    def nothing(self, *_: Any) -> None:
        return None

    give = schedule = ended = forget = nothing

    def gaps(self, _: str) -> Callable[[float], None]:
        return self.nothing

    def bug(self, _: str, error: BaseException) -> None:
        raise error


class Yes:
    """A brain that costs nothing."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    def admit(self, _: InferenceRequest) -> Lease:
        return self.lease

    def nothing(self, *_: Any) -> None:
        return None

    settle = progress = made = nothing


def served(surroundings: Surroundings, request: bytes, *pieces: bytes) -> Callable[[], None]:
    client: Any = End()
    host: Any = surroundings
    exchange = Exchange(host, client, "127.0.0.1")

    def once() -> None:
        exchange.client_bytes(request)
        for piece in pieces:
            exchange.upstream_bytes(piece)
        assert exchange.state is State.IDLE, "the answer is not whole"

    return once


def whole(endpoints: int) -> Bench:
    """A brain as the server has it, all endpoints ready."""
    made = bench(
        *(f"e{i}=http://10.0.{i >> 8}.{i & 255}:8000=llama" for i in range(endpoints)),
        text="routing: {profile: auto}\n",
    )
    made.ready()
    return made


def cost(call: Callable[[], object], rounds: int, calls: float, logs: Bench | None = None) -> list[float]:
    """*calls* a round. *logs*: whose log is emptied between rounds: a full one costs less."""
    call()
    number = max(int(calls), 1)
    found = timeit.repeat(call, logs.forget if logs else "pass", number=number, repeat=rounds, timer=time.process_time)
    return [t / number * 1e6 for t in found]


def measure(rounds: int, scale: float = 1.0) -> str:
    """*scale*: of the number of calls."""
    size = len(CLIENT % b"false") - CLIENT.index(b"\r\n\r\n") - 4
    ask_json = (CLIENT % b"false").replace(b"Content-Length: 78", b"Content-Length: %d" % size)
    ask_stream = (CLIENT % b"true").replace(b"Content-Length: 78", b"Content-Length: %d" % (size - 1))
    one = whole(8)
    lease = one.lease("llama")
    bare = Surroundings(Yes(lease))
    rows = []

    def row(what: str, found: list[float], must: str = "") -> None:
        rows.append([what, spread(found, 1), must])

    row(
        "exchange: a JSON request, head to settlement, no brain",
        cost(served(bare, ask_json, JSON), rounds, scale * 2000),
    )
    short = cost(served(bare, ask_stream, SSE, CHUNK, b"0\r\n\r\n"), rounds, scale * 1000)
    more = cost(served(bare, ask_stream, SSE, *[CHUNK] * 51, b"0\r\n\r\n"), rounds, scale * 200)
    row("exchange: a streamed event", [(b - a) / 50 for a, b in zip(short, more, strict=True)])
    row(
        "exchange and brain: a JSON request",
        cost(served(Surroundings(one.brain), ask_json, JSON), rounds, scale * 1000, one),
        "≤ 53",
    )
    for count, number in ((8, 1000), (64, 500), (1000, 30)):
        made = whole(count)

        def turn(made: Bench = made) -> None:
            made.settle(made.lease("llama", prompt_tokens=100), first=100.2, last=101.0, completion_tokens=6)

        row(f"brain: admit and settle, {count} endpoints", cost(turn, rounds, scale * number, made))
    outcome = Outcome(
        request_id="0123456789abcdef01234567", route="/v1/chat/completions", status=200, model="llama", served="llama",
        endpoints={"prefill": "e1", "decode": "e1"}, attempts=1, prompt_tokens=9, completion_tokens=6, usage="engine",
        bytes_in=78, bytes_out=600, accepted=100.0, admitted=100.0, sent=100.0, first=100.2, last=101.0,
    )  # fmt: skip

    row("metrics of a request", cost(lambda: one.metrics.settled(outcome, "llama"), rounds, scale * 2000), "≤ 6")
    row("log line of a request", cost(lambda: one.log.request(outcome, "e1"), rounds, scale * 2000, one), "≤ 2")
    return table(["step", "µs", "budget"], rows)
