"""The shell around one engine core: routes, the step loop, failures, the journal.

All that happens between two awaits happens at one instant: a request is parsed, submitted and its headers written inside
the task that read it; a step's tokens are written to all their clients by the step loop. Time is `trio.current_time()`, so
the whole engine runs under a virtual clock.
"""

from __future__ import annotations

import random
import socket
import uuid
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from math import inf
from typing import Any

import attrs
import msgspec
import trio

from llmgw.errors import ConfigError, Problem
from llmgw.net.world import World, parse_address
from llmgw.simengine import text, wire
from llmgw.simengine.core import EngineCore, Job, Seq, State
from llmgw.simengine.options import Options
from llmgw.simengine.replies import ENGINE_DIED, REPLIES, VERSION, Choice, Reply, error_event
from llmgw.simengine.server import small, transfer
from llmgw.simengine.server.http import Connection, Request, accept_loop
from llmgw.simengine.server.kvevents import Announcer, Feed
from llmgw.simengine.telemetry import HttpCounts, page
from llmgw.simengine.text import Tokenizer
from llmgw.simengine.wire import ApiError, Ask

Journal = Callable[[bytes], None]

MAX_LAG = 0.1
"""Seconds that the step loop may be late (a busy machine) and still catch up; beyond, the lost time is lost."""
MAX_OCCURRENCES = 100_000
"""Distinct bodies whose repetitions are counted; the one not seen for longest starts anew."""
MAX_MEDIA = 1024
"""Encoded media that an engine keeps."""
STREAMED = (wire.CHAT, wire.COMPLETIONS, wire.GENERATE, wire.MESSAGES, wire.RESPONSES)
GATED = ("/v1", "/v2", "/inference")
"""Prefixes that an API key protects."""


@attrs.define(eq=False)
class Stream:
    """One choice on its way to its client: what the step loop calls for each token."""

    answer: Answer
    choice: Choice
    seq: Seq | None = None
    frame: tuple[bytes, bytes] | None = None
    size: int = 0  # bytes of the frame
    sent: int = 0  # tokens that went out
    opened: bool = False


class Answer:
    """One request under way."""

    def __init__(self, engine: Engine, connection: Connection, ask: Ask, reply: Reply, request: Request) -> None:
        self.engine = engine
        self.connection = connection
        self.ask = ask
        self.reply = reply
        self.request = request
        self.streams: list[Stream] = []
        self.open = 0  # choices not finished
        self.failure = ""  # how it shall fail, once `fail_after` tokens are out
        self.room = ""  # SGLang: where the decode leg fetches the KV of this prefill
        self.vectors: list[Any] = []
        self.over = False

    def gone(self) -> None:
        """The client has left: the engine stops working for it."""
        if self.over:
            return
        self.over = True
        now = trio.current_time()
        for stream in self.streams:
            if stream.seq is not None and stream.seq.state is not State.DONE:
                self.engine.core.abort(stream.seq, now)
                self.engine.note(stream)
        self.engine.leave()

    def token(self, stream: Stream, seq: Seq) -> None:
        """*seq* has one token more."""
        choice = stream.choice
        produced = choice.tokens = seq.produced
        done = seq.state is State.DONE
        if self.failure and produced > self.engine.options.fail_after:
            self.engine.fail(self)
            return
        if not self.ask.stream:
            if done:
                self._finish(stream, seq)
            return
        engine = self.engine
        connection = self.connection
        if not stream.opened:
            self._open()
        if done:
            choice.reason = seq.finish
            choice.cached = max(seq.cached, 0)
            pieces = choice.output[stream.sent : produced]
            data = self.reply.content(choice, engine.tokenizer.decode(pieces), pieces)
            connection.chunk(data)
            self._close(stream)
            return
        if 1 < produced < stream.sent + engine.options.stream_interval:
            return  # the first token goes out at once
        if stream.frame is not None and produced == stream.sent + 1:
            piece = engine.escaped(choice.output[stream.sent])
            head, tail = stream.frame
            connection.write(b"%x\r\n%b%b%b\r\n" % (stream.size + len(piece), head, piece, tail))
        else:
            pieces = choice.output[stream.sent : produced]
            connection.chunk(self.reply.content(choice, engine.tokenizer.decode(pieces), pieces))
        stream.sent = produced

    def _open(self) -> None:
        """First token of the request: the opening events of all choices, then the frames of the rest."""
        for stream in self.streams:
            stream.opened = True
            if opening := self.reply.opening(stream.choice):
                self.connection.chunk(opening)
            stream.frame = self.reply.frame(stream.choice)
            stream.size = sum(map(len, stream.frame)) if stream.frame else 0

    def ended(self, stream: Stream, seq: Seq) -> None:
        """*seq* is done without a further token."""
        if self.ask.stream and not self.over:
            if not stream.opened:
                self._open()
            stream.choice.reason = seq.finish
            self.connection.chunk(self.reply.content(stream.choice, "", ()))
            self._close(stream)
        else:
            self._finish(stream, seq)

    def _close(self, stream: Stream) -> None:
        """A streamed choice is complete."""
        self.open -= 1
        self.engine.note(stream)
        if not self.open:
            self.over = True
            self.engine.leave()
            self.engine.prefilled(self)
            self.connection.finish(self.reply.closing())

    def _finish(self, stream: Stream, seq: Seq) -> None:
        choice = stream.choice
        choice.reason = seq.finish
        choice.cached = max(seq.cached, 0)
        self.open -= 1
        self.engine.note(stream)
        if self.open == 0 and not self.over:
            self.over = True
            self.engine.leave()
            self.engine.complete(self)


class Engine:
    """One simulated engine. `serve` runs it until cancelled; the fault switches are for rehearsals."""

    def __init__(
        self, options: Options, world: World, journal: Journal | None = None, feed: Feed | None = None
    ) -> None:
        options.check()
        self.options = options
        self.world = world
        self.core = EngineCore(options.shape(), options.step_model())
        self.tokenizer = Tokenizer()
        self.http = HttpCounts()
        self.addresses: list[str] = []
        self.keep_alive = options.keep_alive
        self.load = 0  # requests inside, as /load tells
        self.mute = False  # fault: /metrics answers 503
        self.connections: set[Connection] = set()
        self.rooms: dict[str, transfer.Room] = {}
        self._announcer: Announcer | None = None
        if feed is not None:
            self._announcer = Announcer(feed, options.block_size, maps=options.kv_events_maps)
            self.core.pool.log = []
        self._nursery: trio.Nursery | None = None
        self._pins: deque[tuple[float, str]] = deque()  # when, and of which job, pinned blocks are given up
        self._media: OrderedDict[str, None] = OrderedDict()  # what is encoded here already
        self._journal = journal
        self._kick = trio.Event()
        self._stalled: trio.Event | None = None
        self._escaped: dict[int, bytes] = {}
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        self._requests = 0
        self._identity = random.Random(f"{options.seed}/{options.model}/{'/'.join(options.listen)}")
        self._fingerprint = f"{self._identity.getrandbits(32):08x}"
        self.engine_id = str(uuid.UUID(int=self._identity.getrandbits(128), version=4))
        self._created = world.wall()

    # Life

    async def serve(self, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen and serve until cancelled; started with the bound addresses.

        Raises ConfigError for addresses that cannot be listened on: all of them.
        """
        await trio.sleep(self.options.startup_delay)
        listeners: list[socket.socket] = []
        try:
            problems: list[Problem] = []
            for address in self.options.listen:
                try:
                    found = await self.world.listen(parse_address(address))
                except OSError as error:
                    problems.append(Problem(f"cannot listen on {address}: {error.strerror or error}", where="--listen"))
                    continue
                listeners += found
                self.addresses += [_spell(listener.getsockname()) for listener in found]
            if problems:
                raise ConfigError(problems)
            self._created = self.world.wall()
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for listener in listeners:
                    nursery.start_soon(accept_loop, listener, self, nursery, self.connections)
                nursery.start_soon(self._steps)
                task_status.started(list(self.addresses))
        finally:
            for listener in listeners:
                listener.close()

    def stall(self, on: bool) -> None:
        """Fault: steps take for ever; what was accepted stays open, health says nothing of it."""
        if on and self._stalled is None:
            self._stalled = trio.Event()
        elif not on and self._stalled is not None:
            self._stalled.set()
            self._stalled = None

    def slow(self, factor: float) -> None:
        """Fault: steps take *factor* times as long (1 = healthy)."""
        self.core.slowdown = factor

    async def _steps(self) -> None:
        core = self.core
        now = trio.current_time()
        while True:
            end = core.begin(now)
            self._drain()
            if end is None:
                self._kick = trio.Event()
                wake = min(core.wake, self._pins[0][0]) if self._pins else core.wake
                if wake == inf:
                    await self._kick.wait()
                else:
                    with trio.move_on_at(wake):
                        await self._kick.wait()
                now = trio.current_time()
                while self._pins and self._pins[0][0] <= now:
                    core.release(self._pins.popleft()[1])
                continue
            await trio.sleep_until(end)
            if self._stalled is not None:
                await self._stalled.wait()
                end = trio.current_time()
            for seq in core.end(end):
                stream = seq.owner
                assert isinstance(stream, Stream)
                stream.answer.token(stream, seq)
            self._drain()
            late = trio.current_time()
            now = end if late - end < MAX_LAG else late

    def _drain(self) -> None:
        for seq in self.core.silent:
            stream = seq.owner
            assert isinstance(stream, Stream)
            stream.answer.ended(stream, seq)
        self.core.silent.clear()
        if self._announcer is not None and self.core.pool.log:
            self._announcer.announce(self.core.pool.log, self.wall())
            self.core.pool.log.clear()

    def leave(self) -> None:
        """A request is over."""
        self.load -= 1

    def wall(self) -> float:
        return self.world.wall()

    def spawn(self, task: Callable[..., Awaitable[Any]], *given: Any) -> None:
        """Runs beside the engine, and ends with it."""
        assert self._nursery is not None
        self._nursery.start_soon(task, *given)

    def release(self, job_id: str) -> bool:
        """Unpin the blocks of a prefill. False if there are none."""
        known = self.core.release(job_id)
        self._kick.set()
        return known

    def escaped(self, token: int) -> bytes:
        """The piece of *token* as it stands inside a JSON string."""
        piece = self._escaped.get(token)
        if piece is None:
            piece = self._escaped[token] = msgspec.json.encode(self.tokenizer.piece(token))[1:-1]
        return piece

    def note(self, stream: Stream) -> None:
        """The journal line of a finished choice."""
        if self._journal is None or stream.seq is None:
            return
        seq, answer = stream.seq, stream.answer
        self._journal(
            msgspec.json.encode(
                {
                    "id": answer.reply.id,
                    "index": stream.choice.index,
                    "route": answer.ask.route,
                    "model": answer.ask.model,
                    "prompt_tokens": seq.size,
                    "cached_tokens": max(seq.cached, 0),
                    "external_tokens": seq.external,
                    "tokens": seq.produced,
                    "finish": seq.finish,
                    "failure": answer.failure,
                    "preemptions": seq.preemptions,
                    "arrival": round(seq.arrival, 6),
                    "first": round(seq.first, 6),
                    "end": round(seq.ended, 6),
                    "digest": blake2b(
                        self.tokenizer.decode(stream.choice.output[: seq.produced]).encode(), digest_size=8
                    ).hexdigest(),
                }
            )
            + b"\n"
        )

    # Requests

    def handle(self, request: Request, connection: Connection) -> None:
        connection.on_done = self._count
        try:
            self._route(request, connection)
        except ApiError as error:
            self.respond(connection, error.status, error.body())

    def _count(self, request: Request, status: int, size: int) -> None:
        path = request.path
        if path in ("/metrics", "/health", "/ping", "/load", "/version"):
            return
        known = path in _GET or path in _POST
        seconds = trio.current_time() - request.received
        self.http.note(path if known else "none", request.method, status, len(request.body), size, seconds, self.wall())

    def respond(self, connection: Connection, status: int, body: bytes, kind: str = "application/json", *, before: str = "", failure: str = "") -> None:  # fmt: skip
        connection.respond(status, body, kind, before, self._after(failure))

    def _after(self, failure: str = "", request_id: str = "") -> str:
        fields = ""
        if self.options.request_id_headers:
            fields += f"x-request-id: {request_id or f'{self._identity.getrandbits(128):032x}'}\r\n"
        if failure:
            fields += f"x-sim-failure: {failure}\r\n"
        return fields

    def _route(self, request: Request, connection: Connection) -> None:
        path, method = request.path, request.method
        key = self.options.api_key
        if key and path.startswith(GATED) and request.headers.get("authorization") != f"Bearer {key}":
            self.respond(connection, 401, b'{"error":"Unauthorized"}')
            return
        wanted = "GET" if path in _GET else "POST" if path in _POST else ""
        if not wanted:
            self.respond(connection, 404, b'{"detail":"Not Found"}')
        elif method != wanted and not (path == "/ping" and method == "POST"):
            self.respond(connection, 405, b'{"detail":"Method Not Allowed"}', before=f"allow: {wanted}\r\n")
        elif wanted == "GET":
            _GET[path](self, connection)
        else:
            _POST[path](self, request, connection)

    def _health(self, connection: Connection) -> None:
        self.respond(connection, 200, b"", "")

    def _version(self, connection: Connection) -> None:
        self.respond(connection, 200, msgspec.json.encode({"version": VERSION}))

    def _load(self, connection: Connection) -> None:
        self.respond(connection, 200, msgspec.json.encode({"server_load": self.load}))

    def _models(self, connection: Connection) -> None:
        names = self.options.names
        created = int(self.wall())
        data = []
        for name in (*names, *self.options.loras):
            lora = name in self.options.loras
            data.append(
                {
                    "id": name,
                    "object": "model",
                    "created": created,
                    "owned_by": "vllm",
                    "root": name if lora else self.options.model,
                    "parent": names[0] if lora else None,
                    "max_model_len": None if lora else self.options.max_model_len,
                    "permission": [
                        {
                            "id": f"modelperm-{blake2b(name.encode(), digest_size=8).hexdigest()}",
                            "object": "model_permission",
                            "created": created,
                            "allow_create_engine": False,
                            "allow_sampling": True,
                            "allow_logprobs": True,
                            "allow_search_indices": False,
                            "allow_view": True,
                            "allow_fine_tuning": False,
                            "organization": "*",
                            "group": None,
                            "is_blocking": False,
                        }
                    ],
                }
            )
        self.respond(connection, 200, msgspec.json.encode({"object": "list", "data": data}))

    def _metrics(self, connection: Connection) -> None:
        if self.mute:
            self.respond(connection, 503, b"", "")
            return
        shape = self.core.shape
        cache = {
            "block_size": str(shape.block_size),
            "num_gpu_blocks": str(shape.num_blocks),
            "kv_cache_size_tokens": str(shape.num_blocks * shape.block_size),
            "enable_prefix_caching": str(shape.keep_blocks != 0),
            "cache_dtype": "auto",
            "gpu_memory_utilization": "0.92",
            "num_cpu_blocks": "None",
            "num_gpu_blocks_override": str(self.options.num_gpu_blocks),
            "prefix_caching_hash_algo": "sha256",
            "sliding_window": "None",
        }
        gauges = attrs.evolve(self.core.gauges(), max_loras=len(self.options.loras))
        body = page(self.core.telemetry, gauges, self.options.names[0], cache, self._created, self.http)
        self.respond(connection, 200, body.encode(), "text/plain; version=1.0.0; charset=utf-8")

    # Generation

    def parse(self, request: Request) -> Ask:
        kind = request.headers.get("content-type", "application/json")
        return wire.parse(request.path, request.body, kind, self.options, self.tokenizer)

    def _rng(self, ask: Ask) -> random.Random:
        """Chance of this request alone: from the seed, what it asks, and how often it was asked before."""
        return self._rng_of(wire.canonical(ask.body))

    def _rng_of(self, digest: bytes) -> random.Random:
        occurrence = self._seen.pop(digest, -1) + 1
        self._seen[digest] = occurrence
        if len(self._seen) > MAX_OCCURRENCES:
            self._seen.popitem(last=False)
        return random.Random(digest + b"%d.%d" % (self.options.seed, occurrence))

    def _say(self, ask: Ask, rng: random.Random) -> tuple[list[int], str, str | int | None]:
        """What one choice will say, why it ends, and `stop_reason`."""
        room = ask.room
        if ask.tool is not None or ask.schema is not None:
            schema = (ask.tool.get("parameters") or {}) if ask.tool is not None else ask.schema or {}
            value = wire.instance(schema, rng.randint)
            output = self.tokenizer.encode(msgspec.json.encode(value).decode())
            return (output[:room], "length", None) if len(output) > room else (output, "stop", 2)
        natural = ask.max_tokens is None and not ask.ignore_eos
        count = max(text.natural_length(rng), ask.min_tokens) if natural else room
        output = text.say(rng, min(count, room))
        for word in ask.stop:
            said = self.tokenizer.decode(output)
            at = said.find(word)
            if at >= 0:
                output = self.tokenizer.encode(said[:at]) or output[:1]
                return output, "stop", word
        return output, "stop" if count < room else "length", None

    def unique(self) -> str:
        """A request id, where the client gave none."""
        self._requests += 1
        return blake2b(b"%d" % self._requests, key=self._fingerprint.encode(), digest_size=8).hexdigest()

    def _generate(self, request: Request, connection: Connection) -> None:
        if not self.options.scale_out and request.path == wire.GENERATE:
            raise ApiError(403, "PermissionDeniedError", "This endpoint needs --enable-scale-out.")
        ask = self.parse(request)
        limit = self.options.max_num_queued_reqs
        if limit and self.core.waiting + ask.n > limit:
            self.core.telemetry.rejections["max_num_queued_reqs"] += 1
            message = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
            raise ApiError(503, "Service Unavailable", message)
        rng = self._rng(ask)
        failure = self.options.failure_mode if rng.random() < self.options.fail_rate else ""
        if failure == "refuse":
            message, kind, status = ENGINE_DIED
            self.respond(connection, status, ApiError(status, kind, message).body(), failure=failure)
            return
        given = request.headers.get("x-request-id") or ask.request_id
        reply = REPLIES[request.path](
            ask,
            given or self.unique(),
            int(self.wall()),
            self.tokenizer,
            self._fingerprint,
            self.options.prompt_tokens_details,
        )
        answer = Answer(self, connection, ask, reply, request)
        answer.failure = failure
        jobs = self._jobs(ask, reply, rng)
        for job, _ in jobs:
            if why := self.core.reject(job):
                raise wire.bad_request(why, "input_tokens")
        if "if-available" in _preferences(request) and not self.core.cached_tokens(jobs[0][0]):
            raise ApiError(412, "PreconditionFailedError", "No block of this prompt is cached here.")
        self.load += 1
        connection.on_gone = answer.gone
        if ask.stream:
            connection.start(self._after(failure, given))
        prefill, decode = "prefill" in self.options.phases, "decode" in self.options.phases
        if ask.bootstrap is not None and prefill and not decode:
            answer.room = ask.bootstrap[2]
            transfer.room_of(self, answer.room)
            self._submit(answer, [(_only_prefill(job), choice) for job, choice in jobs[:1]])
        elif ask.bootstrap is not None and decode and not prefill:
            self.spawn(self._join, answer, jobs)
        elif ask.kv is not None and ask.kv.get("do_remote_prefill"):
            self.spawn(self._fetch, answer, jobs)
        else:
            if ask.kv is not None and ask.kv.get("do_remote_decode"):
                jobs[0] = (attrs.evolve(jobs[0][0], pin=True), jobs[0][1])
            self._submit(answer, jobs)

    def _embed(self, request: Request, connection: Connection) -> None:
        ask = self.parse(request)
        answer = Answer(
            self, connection, ask, Reply(ask, self.unique(), int(self.wall()), self.tokenizer, "", False), request
        )
        answer.vectors = small.vectors(ask, [self._rng_of(msgspec.msgpack.encode(prompt)) for prompt in ask.prompts])
        self.load += 1
        connection.on_gone = answer.gone
        jobs = [(Job(id=f"embd-{i}", prompt=prompt), Choice(i, (), prompt)) for i, prompt in enumerate(ask.prompts)]
        answer.reply.choices += [choice for _, choice in jobs]
        self._submit(answer, jobs)

    def _jobs(self, ask: Ask, reply: Reply, rng: random.Random) -> list[tuple[Job, Choice]]:
        jobs = []
        delay = self._encode(ask)
        for index in range(len(ask.prompts) * ask.n):
            prompt = ask.prompts[index // ask.n]
            output, finish, stop_reason = self._say(ask, rng)
            choice = Choice(index, output, prompt, stop_reason=stop_reason)
            reply.choices.append(choice)
            check = transfer.check_value(self.engine_id, prompt) if ask.kv is not None or ask.bootstrap else index
            job = Job(
                id=f"{reply.id}-{check}",
                prompt=prompt,
                output=output,
                finish=finish,
                priority=ask.priority,
                salt=ask.salt,
                lora=ask.lora,
                media=ask.media,
                reuse=not ask.prompt_logprobs,
                delay=delay,
                n=ask.n,
                max_tokens=ask.max_tokens,
            )
            jobs.append((job, choice))
        return jobs

    def _encode(self, ask: Ask) -> float:
        """Seconds that encoding takes for the media of *ask* that are neither here nor described by it."""
        seconds = 0.0
        telemetry = self.core.telemetry
        for _, _, content in ask.media:
            telemetry.media_queries += 1
            known = content in self._media
            described = (ask.ec or {}).get(content)
            if not known and described is not None:
                known = isinstance(described, dict) and described.get("size_bytes") == transfer.MEDIUM_BYTES
                if known:
                    seconds += transfer.MEDIUM_BYTES / (self.options.transfer_gbps * 1e9)
                else:
                    telemetry.transfer_failures["wrong"] += 1
            if known:
                telemetry.media_hits += 1
            else:
                seconds += self.options.encode_seconds
            self._media[content] = None
            self._media.move_to_end(content)
            if len(self._media) > MAX_MEDIA:
                self._media.popitem(last=False)
        return seconds

    def _submit(self, answer: Answer, jobs: list[tuple[Job, Choice]]) -> None:
        now = trio.current_time()
        answer.open = len(jobs)
        for job, choice in jobs:
            stream = Stream(answer, choice)
            answer.streams.append(stream)
            stream.seq = self.core.submit(job, now, stream)
        self._kick.set()

    async def _fetch(self, answer: Answer, jobs: list[tuple[Job, Choice]]) -> None:
        """The KV of this prompt is elsewhere: get it, or compute the prompt here."""
        kv = answer.ask.kv
        assert kv is not None
        job, choice = jobs[0]
        telemetry = self.core.telemetry
        if not transfer.is_sound(kv, job.prompt):
            telemetry.transfer_failures["wrong"] += 1
            telemetry.external_queries += len(job.prompt)
        elif not await transfer.pull(self.world, kv):
            telemetry.transfer_failures["lost"] += 1
            telemetry.external_queries += len(job.prompt)
        else:
            jobs[0] = (attrs.evolve(job, transfer=transfer.wire_time(self.options)), choice)
        if not answer.over:
            self._submit(answer, jobs)

    async def _join(self, answer: Answer, jobs: list[tuple[Job, Choice]]) -> None:
        """SGLang's decode leg: nothing starts before the prefill leg has the KV."""
        assert answer.ask.bootstrap is not None
        there = await transfer.enter(self.world, *answer.ask.bootstrap)
        if answer.over:
            return
        if there:
            job, choice = jobs[0]
            jobs[0] = (attrs.evolve(job, transfer=transfer.wire_time(self.options)), choice)
            self._submit(answer, jobs)
            return
        self.core.telemetry.transfer_failures["lost"] += 1
        answer.failure = "error"
        self.fail(answer)

    def prefilled(self, answer: Answer) -> None:
        """A prompt's KV is ready to be fetched, if somebody is to fetch it."""
        seq = answer.streams[0].seq
        if seq is None or not seq.job.pin:
            return
        if answer.room:
            room = transfer.room_of(self, answer.room)
            room.job_id = seq.job.id
            room.ready.set()
        else:
            answer.reply.kv = transfer.describe(self, seq.job, max(seq.cached, 0))
        self._pins.append((trio.current_time() + self.options.pin_seconds, seq.job.id))

    async def _wait_taken(self, answer: Answer, room: transfer.Room) -> None:
        with trio.move_on_after(transfer.ROOM_SECONDS):
            await room.taken.wait()
        self.respond(answer.connection, 200, answer.reply.whole(), failure=answer.failure)

    def complete(self, answer: Answer) -> None:
        """A plain answer is ready."""
        ask = answer.ask
        if ask.route == wire.EMBEDDINGS:
            self.respond(answer.connection, 200, answer.reply.embeddings(answer.vectors))
            return
        self.prefilled(answer)
        if ask.media and "encode" in self.options.phases and "decode" not in self.options.phases:
            answer.reply.ec = transfer.descriptors(self, ask)
        if answer.room:  # SGLang's prefill answers once its KV is taken
            self.spawn(self._wait_taken, answer, transfer.room_of(self, answer.room))
        else:
            self.respond(answer.connection, 200, answer.reply.whole(), failure=answer.failure)

    def fail(self, answer: Answer) -> None:
        """The failure that was drawn for this request happens now."""
        if answer.over:
            return
        answer.over = True
        self.leave()
        now = trio.current_time()
        mode, connection = answer.failure, answer.connection
        for stream in answer.streams:
            if stream.seq is not None and stream.seq.state is not State.DONE:
                self.core.abort(stream.seq, now, "error")
            self.note(stream)
        message, kind, status = ENGINE_DIED
        if mode == "stall":
            return  # the connection stays open and silent
        if mode == "reset":
            connection.reset()
        elif mode == "garbage":
            connection.write(b"\x00\xffnot http\r\n\r\n")
            connection.close()
        elif answer.ask.stream:
            connection.chunk(error_event(message, kind, status))
            connection.finish(b"data: [DONE]\n\n")
        else:
            self.respond(connection, status, ApiError(status, kind, message).body(), failure=mode)


_GET: dict[str, Callable[[Engine, Connection], None]] = {
    "/health": Engine._health,
    "/ping": Engine._health,
    "/version": Engine._version,
    "/load": Engine._load,
    "/metrics": Engine._metrics,
    "/v1/models": Engine._models,
    "/kv_event_sources": small.kv_event_sources,
}
_POST: dict[str, Callable[[Engine, Request, Connection], None]] = {
    **dict.fromkeys(STREAMED, Engine._generate),
    wire.EMBEDDINGS: Engine._embed,
    wire.COUNT_TOKENS: small.count_tokens,
    wire.TOKENIZE: small.tokenize,
    wire.DETOKENIZE: small.detokenize,
    wire.RENDER_CHAT: small.render,
    wire.RENDER_COMPLETIONS: small.render,
    transfer.PULL: transfer.serve_pull,
    transfer.ROOM: transfer.serve_room,
}


def _preferences(request: Request) -> set[str]:
    """Tokens of the Prefer header (RFC 7240), lower case, without their parameters."""
    return {part.split(";")[0].split("=")[0].strip().lower() for part in request.headers.get("prefer", "").split(",")}


def _only_prefill(job: Job) -> Job:
    """The prefill leg of a request that another engine decodes."""
    return attrs.evolve(job, output=job.output[:1], finish="length", pin=True)


def _spell(name: object) -> str:
    """A bound socket's address as `--listen` and URLs write it."""
    if isinstance(name, tuple):
        host, port = name[0], name[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if isinstance(name, bytes):
        return "unix:" + name.decode("utf-8", "surrogateescape").replace("\0", "@", 1)
    return f"unix:{name}"
