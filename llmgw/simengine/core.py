"""The engine itself: continuous batching over paged KV blocks, without a clock, sockets or chance.

The caller drives it and owns time:

    seq = core.submit(job, now)            a request; refused by `core.reject(job)` if it can never run
    end = core.begin(now)                  schedules one step; when it will end, or None: nothing to run before `wake`
    produced = core.end(now)               that step is over: the sequences that got exactly one token each
    core.abort(seq, now)                   its client has gone; its blocks are back within the step

States of a sequence, and what moves it:

    ARRIVING  --ready-->            WAITING       tokenising and HTTP take `overhead` seconds
    WAITING   --begin-->            RUNNING       a batch slot, token budget and blocks for its first chunk are there
    WAITING   --begin, remote KV--> TRANSFER      blocks for the whole prompt are there; the KV is on its way
    TRANSFER  --arrived-->          WAITING       all but the last prompt token counts as computed
    RUNNING   --begin, no blocks--> WAITING       preempted: blocks back, computes again from zero, at the head
    RUNNING   --end-->              DONE          its last token, or (pooling) its prompt
    any       --abort-->            DONE

Scheduling is that of vLLM's V1 engine. Each step has one token budget. Running sequences come first, in order; who
cannot get blocks preempts the last one (or, by priority, the worst). Waiting ones follow only if nobody was preempted,
until budget or slots are used up or *the head cannot get blocks*: those behind it wait too. Sequences whose KV is in
transfer are passed over.

Invariants: running <= max_num_seqs · blocks held = sum over sequences of theirs (shared ones once) + what is pinned for
a remote decode · every submitted sequence becomes DONE exactly once · tokens produced never shrink.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import ceil, inf

import attrs

from llmgw.simengine.blocks import ROOT_KEY, BlockPool, Extra, Stored, block_key
from llmgw.simengine.latency import StepModel
from llmgw.simengine.telemetry import Gauges, Telemetry


class State(enum.Enum):
    ARRIVING = "arriving"
    WAITING = "waiting"
    TRANSFER = "transfer"
    RUNNING = "running"
    DONE = "done"


@attrs.frozen(kw_only=True)
class Shape:
    """Sizes of one engine. Defaults are vLLM's on a large GPU, but for the number of blocks."""

    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    long_prefill: int = 0  # longest prefill chunk of one sequence; 0 = the budget
    num_blocks: int = 16384
    block_size: int = 16
    keep_blocks: int | None = None  # unreferenced blocks kept findable; None = all, 0 = no prefix caching
    max_model_len: int = 4096
    by_priority: bool = False
    overhead: float = 0.0  # seconds before a request can be scheduled: tokenising, HTTP


@attrs.frozen(kw_only=True)
class Job:
    """One sequence to run. *output* is what it will say: its length is how long it runs."""

    id: str
    prompt: Sequence[int]  # token ids
    output: Sequence[int] = ()  # token ids; empty: pooling, done with the prompt
    finish: str = "length"  # why it ends after its output: length or stop
    priority: int = 0  # lower is earlier; read only if the engine schedules by priority
    salt: str = ""
    lora: str = ""
    media: tuple[tuple[int, int, str], ...] = ()  # offset, length in the prompt, content hash
    reuse: bool = True  # may use cached blocks (prompt logprobs forbid it)
    transfer: tuple[float, float] | None = None  # remote KV: seconds, and seconds a token
    delay: float = 0.0  # seconds before it can be scheduled, besides the engine's overhead (encoding media)
    pin: bool = False  # keep the blocks after the end, until `release`
    n: int = 1  # choices of the request that it belongs to, for the histograms
    max_tokens: int | None = None  # as asked, for the histograms


@attrs.define(eq=False, slots=True)
class Seq:
    """A job under way. Callers read it; only the core writes it (but for *owner*, which is the caller's)."""

    job: Job
    number: int
    arrival: float
    owner: object = None
    state: State = State.ARRIVING
    finish: str = ""  # set with DONE: stop, length, abort, error
    size: int = 0  # prompt tokens
    want: int = 0  # tokens to produce
    produced: int = 0
    total: int = 0  # size + produced
    computed: int = 0  # tokens whose KV is there
    chunk: int = 0  # tokens of the step under way
    cached: int = -1  # prompt tokens found in the cache when first admitted; -1 = not admitted yet
    external: int = 0  # prompt tokens that came by transfer
    blocks: list[int] = attrs.Factory(list)
    keys: list[int] = attrs.Factory(list)  # of full blocks, as far as known
    published: int = 0  # blocks of this sequence that are findable
    fetched: float = 0.0  # when the transfer ends; 0 = none begun
    preemptions: int = 0
    admitted: float = -1.0
    first: float = -1.0  # time of the first token
    last: float = -1.0  # time of the latest token
    ended: float = -1.0


class EngineCore:
    """See the module."""

    def __init__(self, shape: Shape, model: StepModel) -> None:
        self.shape = shape
        self.model = model
        self.pool = BlockPool(shape.num_blocks, shape.keep_blocks)
        self.telemetry = Telemetry(shape.max_model_len)
        self.awake = True
        self.slowdown = 1.0  # factor on step time (a throttled GPU)
        self.silent: list[Seq] = []
        """Those that became DONE without a token and without `abort`, since the caller last cleared it."""
        self._running: list[Seq] = []
        self._waiting: list[tuple[float, int, Seq]] = []  # heap; entries of others' state are stale
        self._arriving: list[tuple[float, int, Seq]] = []  # heap, likewise
        self._transfers: list[Seq] = []
        self._batch: list[Seq] = []
        self._waiting_count = 0
        self._pinned: dict[str, list[int]] = {}
        self._numbers = 0
        self._began = 0.0

    # What others may know

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Arrived, not running; transfers not counted."""
        return self._waiting_count

    @property
    def idle(self) -> bool:
        return not (self._running or self._waiting_count or self._arriving or self._transfers)

    @property
    def pinned(self) -> int:
        """Blocks held for remote decodes."""
        return len({block for blocks in self._pinned.values() for block in blocks})

    @property
    def wake(self) -> float:
        """After `begin` gave None: when to call it again, unless an event comes first; inf if never."""
        times = [seq.fetched for seq in self._transfers]
        if self._arriving:
            times.append(self._arriving[0][0])
        return min(times, default=inf)

    def sequences(self) -> Iterator[Seq]:
        """All that is not done, running first."""
        yield from self._running
        yield from (s for _, _, s in sorted(self._waiting, key=lambda e: e[:2]) if s.state is State.WAITING)
        yield from self._transfers
        yield from (s for _, _, s in self._arriving if s.state is State.ARRIVING)

    def gauges(self) -> Gauges:
        loras = [{s.job.lora for s in group if s.job.lora} for group in (self._running, self.sequences())]
        return Gauges(
            running=len(self._running),
            waiting=self._waiting_count,
            deferred=len(self._transfers),
            kv_usage=self.pool.usage(),
            awake=self.awake,
            running_loras=tuple(sorted(loras[0])),
            waiting_loras=tuple(sorted(loras[1] - loras[0])),
        )

    def pinned_blocks(self, job_id: str) -> list[int]:
        """Blocks that are held for the remote decode of *job_id*; empty if none are."""
        return list(self._pinned.get(job_id, ()))

    def reject(self, job: Job) -> str:
        """Why *job* can never run here, or ""."""
        need = ceil(len(job.prompt) / self.shape.block_size)
        if need > self.pool.usable:
            return f"The prompt needs {need} KV blocks, but this engine has {self.pool.usable}."
        return ""

    def cached_tokens(self, job: Job) -> int:
        """How many tokens of the prompt would be found in the cache now."""
        return len(self._hits(self._keys(job), len(job.prompt))) * self.shape.block_size if job.reuse else 0

    # Events

    def submit(self, job: Job, now: float, owner: object = None) -> Seq:
        self._numbers += 1
        seq = Seq(job, self._numbers, now, owner)
        seq.size = seq.total = len(job.prompt)
        seq.want = len(job.output)
        if overhead := self.shape.overhead + job.delay:
            heappush(self._arriving, (now + overhead, seq.number, seq))
        else:
            self._enqueue(seq)
        return seq

    def abort(self, seq: Seq, now: float, reason: str = "abort") -> None:
        """Ends *seq* wherever it is. Idempotent. Blocks of a running one come back when the step ends."""
        if seq.state is State.DONE:
            return
        if seq.state is State.TRANSFER:
            self._transfers.remove(seq)
        elif seq.state is State.WAITING:
            self._waiting_count -= 1
        elif seq.state is State.RUNNING and not seq.chunk:
            self._running.remove(seq)
        self._done(seq, reason, now)
        if not seq.chunk:  # else the step under way still writes to its blocks
            self._free(seq)
        if not self._waiting_count:
            self._waiting.clear()
        if self._arriving and all(s.state is State.DONE for _, _, s in self._arriving):
            self._arriving.clear()

    def release(self, job_id: str) -> bool:
        """The remote decode has the KV of *job_id*: unpin it. False if nothing was pinned."""
        blocks = self._pinned.pop(job_id, None)
        if blocks is None:
            return False
        self.pool.give_back(blocks)
        return True

    # Steps

    def begin(self, now: float) -> float | None:
        """Schedule a step. Returns when it ends; None if nothing can run before `wake` or another `submit`."""
        if self._arriving or self._transfers:
            self._arrive(now)
        self._began = now
        budget = self.shape.max_batched_tokens
        threshold = self.shape.long_prefill or budget
        running = self._running
        batch = self._batch
        decodes = prefills = prefill_tokens = context = 0
        pairs = 0.0
        preempted = False
        index = 0
        bs = self.shape.block_size
        while index < len(running) and budget > 0:
            seq = running[index]
            computed = seq.computed
            chunk = seq.total - computed
            if chunk > 1:
                chunk = min(chunk, budget, threshold)
            after = computed + chunk
            held = len(seq.blocks)
            if after > held * bs:
                more = self.pool.take(ceil(after / bs) - held)
                if more is None:
                    victim = self._victim()
                    if victim is seq and len(running) == 1 and not self._pinned and not self._transfers:
                        self._done(seq, "length", now)  # it has the pool for itself and outgrew it
                        self.silent.append(seq)
                        self._free(seq)
                        running.clear()
                        break
                    if victim.chunk:  # by priority: already in this step's batch
                        batch.remove(victim)
                        budget += victim.chunk
                        index -= 1
                        victim.chunk = 0
                    self._preempt(victim)
                    preempted = True
                    continue
                seq.blocks += more
            if after // bs > seq.published:
                self._publish(seq, after)
            seq.chunk = chunk
            budget -= chunk
            batch.append(seq)
            index += 1
        if not preempted and self.awake and self._waiting_count:
            self._admit(budget, threshold, now)
        for seq in batch:
            chunk = seq.chunk
            if seq.produced and chunk == 1:
                decodes += 1
                context += seq.computed + 1
            else:
                prefills += 1
                prefill_tokens += chunk
                context += seq.computed
                pairs += chunk * (seq.computed + chunk / 2)
        if not batch:
            return None
        duration = self.model.step(decodes, prefills, prefill_tokens, context, pairs) * self.slowdown
        telemetry = self.telemetry
        telemetry.steps += 1
        telemetry.busy += duration
        telemetry.step_tokens.observe(decodes + prefill_tokens)
        return now + duration

    def end(self, now: float) -> list[Seq]:
        """The step is over. Returns the sequences that got a token, in batch order; some of them are DONE by it."""
        produced: list[Seq] = []
        steady = 0
        gone = False
        began = self._began
        telemetry = self.telemetry
        for seq in self._batch:
            if seq.state is State.DONE:  # aborted meanwhile
                self._free(seq)
                seq.chunk = 0
                gone = True
                continue
            seq.computed += seq.chunk
            seq.chunk = 0
            if seq.computed < seq.total:
                continue
            if seq.want == 0:
                self._prefilled(seq, now)
                self._done(seq, "stop", now)
                self._free(seq)
                self.silent.append(seq)
                gone = True
                continue
            seq.total += 1
            seq.produced += 1
            produced.append(seq)
            if seq.last == began:
                steady += 1
            elif seq.produced > 1:
                telemetry.itl.observe(now - seq.last)
            else:
                self._prefilled(seq, now)
            seq.last = now
            if seq.produced >= seq.want:
                self._done(seq, seq.job.finish, now)
                self._free(seq)
                gone = True
        self._batch.clear()
        if steady:
            telemetry.itl.observe(now - began, steady)
        telemetry.generation_tokens += len(produced)
        if gone:
            self._running = [s for s in self._running if s.state is State.RUNNING]
        return produced

    # Inside

    def _enqueue(self, seq: Seq) -> None:
        seq.state = State.WAITING
        self._waiting_count += 1
        # Whose KV has come holds its blocks already: ahead of all, or it could wait for blocks that wait for it.
        rank = -inf if seq.fetched else seq.job.priority if self.shape.by_priority else 0
        heappush(self._waiting, (rank, seq.number, seq))

    def _arrive(self, now: float) -> None:
        arriving = self._arriving
        while arriving and arriving[0][0] <= now:
            seq = heappop(arriving)[2]
            if seq.state is State.ARRIVING:
                self._enqueue(seq)
        for seq in [s for s in self._transfers if s.fetched <= now]:
            self._transfers.remove(seq)
            seq.computed = seq.size - 1
            self._publish(seq, seq.size)
            self._enqueue(seq)

    def _admit(self, budget: int, threshold: int, now: float) -> None:
        waiting, running, batch, bs = self._waiting, self._running, self._batch, self.shape.block_size
        while waiting and budget > 0 and len(running) < self.shape.max_num_seqs:
            seq = waiting[0][2]
            if seq.state is not State.WAITING:
                heappop(waiting)
                continue
            shared: list[int] = []
            local = 0
            if not seq.fetched:  # else its blocks are there already
                if not seq.keys:
                    seq.keys = self._keys(seq.job)
                shared = self._hits(seq.keys, seq.total) if seq.job.reuse else []
                local = len(shared) * bs
                seq.computed = local
            fetch = seq.job.transfer is not None and not seq.fetched and seq.preemptions == 0
            chunk = seq.size - local if fetch else min(seq.total - seq.computed, budget, threshold)
            need = ceil((seq.computed + chunk) / bs) - len(shared) - len(seq.blocks)
            blocks = self.pool.take(max(0, need), shared)
            if blocks is None:
                seq.computed = 0
                if need + len(shared) <= self.pool.usable:
                    return  # the head waits, and all behind it
                heappop(waiting)  # preempted, and meanwhile longer than the pool
                self._waiting_count -= 1
                self._done(seq, "length", now)
                self.silent.append(seq)
                continue
            heappop(waiting)
            self._waiting_count -= 1
            seq.blocks += blocks
            seq.published = max(seq.published, len(shared))
            if seq.cached < 0:
                self._admitted(seq, local, now)
            if fetch:
                assert seq.job.transfer is not None
                seq.external = seq.size - local
                seq.fetched = now + seq.job.transfer[0] + seq.external * seq.job.transfer[1]
                seq.state = State.TRANSFER
                self._transfers.append(seq)
                self.telemetry.external_queries += seq.external
                self.telemetry.external_hits += seq.external
                continue
            seq.state = State.RUNNING
            seq.chunk = chunk
            budget -= chunk
            if (seq.computed + chunk) // bs > seq.published:
                self._publish(seq, seq.computed + chunk)
            running.append(seq)
            batch.append(seq)

    def _admitted(self, seq: Seq, local: int, now: float) -> None:
        telemetry = self.telemetry
        seq.cached = local
        seq.admitted = now
        telemetry.prompt_tokens += seq.size
        if seq.job.reuse:
            telemetry.prefix_queries += seq.size
            telemetry.prefix_hits += local

    def _victim(self) -> Seq:
        if self.shape.by_priority:
            return max(self._running, key=lambda s: (s.job.priority, s.number))
        return self._running[-1]

    def _preempt(self, seq: Seq) -> None:
        self._running.remove(seq)
        self._free(seq)
        seq.computed = seq.published = 0
        seq.fetched = 0.0
        seq.preemptions += 1
        self.telemetry.preemptions += 1
        self._enqueue(seq)

    def _hits(self, keys: list[int], total: int) -> list[int]:
        """Cached blocks that can be used: the last token is always computed."""
        return self.pool.find(keys, (total - 1) // self.shape.block_size)

    def _extra(self, job: Job, index: int) -> Extra | None:
        """What besides tokens makes the content of block *index* differ."""
        start = index * self.shape.block_size
        end = start + self.shape.block_size
        parts: list[object] = [job.lora] if job.lora else []
        parts += [(content, at - start) for at, size, content in job.media if at < end and at + size > start]
        if job.salt and index == 0:
            parts.append(job.salt)
        return tuple(parts) or None

    def _keys(self, job: Job) -> list[int]:
        """Keys of the prompt's full blocks."""
        bs = self.shape.block_size
        parent = ROOT_KEY
        keys: list[int] = []
        prompt = job.prompt
        plain = not (job.lora or job.media or job.salt)
        for index in range(len(prompt) // bs):
            extra = None if plain else self._extra(job, index)
            parent = block_key(parent, prompt[index * bs : (index + 1) * bs], extra)
            keys.append(parent)
        return keys

    def _tokens(self, seq: Seq, index: int) -> Sequence[int]:
        bs = self.shape.block_size
        start, end, size = index * bs, (index + 1) * bs, seq.size
        prompt, output = seq.job.prompt, seq.job.output
        if end <= size:
            return prompt[start:end]
        return (*prompt[start:size], *output[max(0, start - size) : end - size])

    def _publish(self, seq: Seq, computed: int) -> None:
        """Blocks that *computed* tokens fill can be found from now on."""
        keys = seq.keys
        for index in range(seq.published, computed // self.shape.block_size):
            parent = keys[index - 1] if index else ROOT_KEY
            extra = self._extra(seq.job, index)
            if index == len(keys):
                keys.append(block_key(parent, self._tokens(seq, index), extra))
            fresh = self.pool.publish(seq.blocks[index], keys[index])
            if fresh and self.pool.log is not None:
                self.pool.log.append(Stored(keys[index], parent, tuple(self._tokens(seq, index)), seq.job.lora, extra))
            seq.published = index + 1

    def _prefilled(self, seq: Seq, now: float) -> None:
        seq.first = now
        self.telemetry.ttft.observe(now - seq.arrival)

    def _free(self, seq: Seq) -> None:
        if seq.blocks:
            if seq.job.pin and seq.finish in ("stop", "length"):
                self.release(seq.job.id)  # of an earlier request with the same id, which nobody can fetch any more
                self._pinned[seq.job.id] = seq.blocks
            else:
                self.pool.give_back(seq.blocks)
            seq.blocks = []

    def _done(self, seq: Seq, reason: str, now: float) -> None:
        seq.state = State.DONE
        seq.finish = reason
        seq.ended = now
        t = self.telemetry
        t.finished[reason] += 1
        t.request_prompt.observe(seq.size)
        t.request_generation.observe(seq.produced)
        t.params_n.observe(seq.job.n)
        t.request_max.observe(max(seq.produced, 1))
        if seq.job.max_tokens is not None:
            t.params_max.observe(seq.job.max_tokens)
        t.e2e.observe(now - seq.arrival)
        t.request_preemptions.observe(seq.preemptions)
        if seq.admitted >= 0:
            t.queued.observe(seq.admitted - seq.arrival)
            t.inference.observe(now - seq.admitted)
            t.request_computed.observe(max(0, seq.size - seq.cached - seq.external))
        if seq.first >= 0:
            t.prefill.observe(seq.first - seq.admitted)
            t.decode.observe(seq.last - seq.first if seq.last >= 0 else 0.0)
            t.tpot.observe((seq.last - seq.first) / (seq.produced - 1) if seq.produced > 1 else 0.0)
