"""What agent and server say to each other in `POST /agent/v1/sync`, and how a ready replica becomes an endpoint.

    agent → server   Sync      who I am, the digest of what I see; the body only when the digest is new to the server
    server → agent   Answer    the term of the one who speaks, and all that this node shall run

Level-triggered: there is no "start" and no "stop" message, only the full set. What runs and is not in the set is to be
stopped; what is in it under another epoch is to be replaced. Rules that the agent keeps, whoever asks:

    1. An `Answer` with a lower term than the highest ever seen is refused (a server that was replaced still speaks).
    2. A `Desired` with a lower epoch than the highest ever seen for its replica is refused (a message that came late).
    3. Starting and stopping are idempotent by (replica, epoch).

Times are seconds since 1970 where they cross the wire; durations are seconds; sizes bytes.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from llmgw.endpoint import Endpoint, Model
from llmgw.placement.inventory import GIB, Inventory
from llmgw.request import PHASES, Phase

LOG_LINES = 40  # of a failure: enough for a Python traceback, little enough to store with every transition
VRAM_STEP = 256 << 20  # free GPU memory is compared in such steps: less would send the whole body at every poll

RunState = Literal["fetching", "starting", "canary", "ready", "stopping", "gone", "failed"]
"""What the agent sees of a replica on its node. `failed` = the process ended by itself or never began."""


class Ports(msgspec.Struct, frozen=True, gc=False):
    """A block of contiguous ports of one node, for one replica alone. *base* is the API's."""

    base: int
    count: int = 32

    def range(self) -> range:
        return range(self.base, self.base + self.count)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The place of this rank in a replica that spans nodes."""

    rank: int  # 0 leads and serves the API
    size: int
    leader: str  # address of rank 0
    port: int  # where ranks meet, out of rank 0's block
    fabric: str = ""
    hcas: tuple[str, ...] = ()  # this node's ports on the fabric, "mlx5_0:1"


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """One replica (or one rank of it) as it shall run on this node."""

    replica: str
    model: str  # name it is served under
    epoch: int  # rises with every (re)assignment of this replica
    generation: int  # of the model's specification that it is built from
    goal: Literal["run", "stop"] = "run"  # stop = end what runs, waiting *grace* for requests in flight
    grace: float = 30.0
    engine: str
    weights: str  # the catalogue's reference; the agent knows where it lies
    dtype: str = ""
    quantisation: str = ""
    max_model_len: int | None = None
    gpus: tuple[str, ...] = ()  # UUIDs; empty = on the CPU
    tp: int = 1
    pp: int = 1
    dp: int = 1
    memory_fraction: float | None = None  # of each GPU, for engines that take one
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    ports: Ports
    phases: tuple[Phase, ...] = ("prefill", "decode")
    kv_events: bool = False  # the engine publishes what its KV cache holds
    group: Group | None = None
    env: dict[str, str] = {}
    flags: tuple[str, ...] = ()  # appended to the engine's command line as they are
    start_deadline: float = 600.0  # without any progress (bytes read, log lines) for so long = failed


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """How far weights have come."""

    done: int
    total: int | None = None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a replica ended. *deterministic*: the same start on the same node would end the same way."""

    cause: str  # stable: a preflight id ("ENG-2", "WGT-3") or a death of the engine's table ("cuda_oom")
    message: str  # one line, for people
    deterministic: bool = False
    exit_code: int | None = None
    signal: int | None = None
    log: tuple[str, ...] = ()  # the last lines, at most LOG_LINES
    at: float = 0.0


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine said of itself when it had loaded; the next placement uses it instead of the estimate."""

    weights: int | None = None  # bytes a rank
    kv: int | None = None  # bytes a rank
    kv_tokens: int | None = None
    load: float | None = None  # seconds from start to ready
    host: int | None = None  # peak of resident memory


class EndpointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What routing must know of a ready replica. Nothing of it is typed by anybody: the agent reads it off the engine."""

    url: str
    version: str = ""
    phases: tuple[Phase, ...] = ("prefill", "decode")
    fabrics: tuple[str, ...] = ()
    max_model_len: int | None = None
    block_size: int | None = None
    blocks: int | None = None
    kv_events: str = ""
    side_channel: str = ""
    bootstrap: str = ""
    api_key: str = ""  # of the engine; travels inside mTLS only, is kept in memory, never printed

    def __repr__(self) -> str:  # a key must not get into a log through a traceback
        return f"EndpointFacts({self.url!r})"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A replica (or a rank of it) as the agent sees it on its node."""

    replica: str
    model: str
    epoch: int
    generation: int
    state: RunState
    engine: str = ""
    rank: int = 0
    since: float = 0.0  # in this state
    detail: str = ""  # phase of the start: "loading shard 3 of 8"
    fetch: Fetch | None = None
    start_id: str = ""  # names one life of the engine's process
    gpus: tuple[str, ...] = ()
    ports: Ports | None = None
    pid: int | None = None
    endpoint: EndpointFacts | None = None  # of rank 0, once ready
    failure: Failure | None = None  # the last one, also while a new try is under way
    measured: Measured | None = None


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """All that an agent sees."""

    inventory: Inventory
    runs: tuple[Run, ...] = ()


class LogLines(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of an engine's log that somebody follows. *first*: number of the first one, in one life of the engine."""

    replica: str
    start_id: str
    first: int
    lines: tuple[str, ...]


class Sync(msgspec.Struct, frozen=True, kw_only=True):
    """The heartbeat. *observed* is left out while *digest* is the one that the last `Answer` confirmed."""

    node: str
    boot: str  # boot id of the machine
    agent: str  # names one life of the agent's process
    term: int = 0  # highest ever seen, kept on the node's disk
    digest: str = ""
    observed: Observed | None = None
    refused: tuple[str, ...] = ()  # replicas whose last desired epoch was too low
    sent: float = 0.0  # wall clock, to see how far clocks are apart
    logs: tuple[LogLines, ...] = ()  # of the replicas that the last `Answer` asked for


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the node shall do. *digest*: the last body the server has; another than the agent's = send the body."""

    term: int
    revision: int
    digest: str = ""
    desired: tuple[Desired, ...] = ()
    settled: bool = True  # False = the server has just started: keep what runs, even if it is not in *desired*
    weights: tuple[str, ...] = ()  # references of the catalogue, to be looked for and verified
    heartbeat: float = 5.0
    logs: dict[
        str, int
    ] = {}  # replica → number of the next line wanted, while somebody follows its log; -1 = the last ones
    received: float = 0.0  # wall clock when the Sync came
    sent: float = 0.0


_ENCODER = msgspec.json.Encoder(order="deterministic")


def digest(observed: Observed) -> str:
    """Names what is worth sending: equal for two observations that differ only in temperatures, times and the like."""
    inventory = observed.inventory
    host = inventory.host
    calm = msgspec.structs.replace(
        inventory,
        devices=tuple(
            msgspec.structs.replace(
                d,
                memory_free=None if d.memory_free is None else d.memory_free // VRAM_STEP,
                temperature=None,
                power=None,
                utilisation=None,
                processes=tuple(msgspec.structs.replace(p, memory=None) for p in d.processes),
            )
            for d in inventory.devices
        ),
        host=msgspec.structs.replace(
            host,
            memory_available=None if host.memory_available is None else host.memory_available // GIB,
            shm_free=None if host.shm_free is None else host.shm_free // GIB,
        ),
        disks=tuple(msgspec.structs.replace(d, free=d.free // GIB, inodes_free=None) for d in inventory.disks),
        checks=tuple(msgspec.structs.replace(c, at=0.0, took=0.0, evidence={}) for c in inventory.checks),
    )
    text = _ENCODER.encode(msgspec.structs.replace(observed, inventory=calm))
    return hashlib.sha256(text).hexdigest()[:32]


def endpoint(run: Run, model: Model, inventory: Inventory) -> Endpoint | None:
    """The endpoint that routing sees of *run*, or None while it has none to show.

    Model policy (aliases, adapters, limits) is the caller's, in *model*; the engine's own maximum length wins where it
    is shorter. The key stays behind: `auth` is the replica's id, under which the server keeps it.
    """
    facts = run.endpoint
    if run.state != "ready" or facts is None:
        return None
    lengths = [n for n in (model.max_model_len, facts.max_model_len) if n is not None]
    return Endpoint(
        id=f"{run.replica}@{run.start_id or run.epoch}",
        name=run.replica,
        url=facts.url,
        engine=run.engine or "auto",
        models=(msgspec.structs.replace(model, max_model_len=min(lengths, default=None)),),
        phases=frozenset(p for p in PHASES if p in facts.phases),
        fabrics=frozenset(facts.fabrics),
        host=inventory.node,
        labels=dict(inventory.labels),
        auth=run.replica if facts.api_key else "",
        block_size=facts.block_size,
        blocks=facts.blocks,
        kv_events=facts.kv_events,
        side_channel=facts.side_channel,
        bootstrap=facts.bootstrap,
        replica=run.replica,
        source="catalogue",
    )
