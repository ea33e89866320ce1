"""What the control plane remembers: replicas and where they are, nodes, drains. Plain data, kept in the store.

    pending ──► placed ──► fetching ──► starting ──► canary ──► ready ──► draining ──► stopping ──► (gone)
       ▲           │           │            │           │         │  ▲                     ▲
       │           └───────────┴────────────┴───────────┴────┬────┤  │                     │
       │  elsewhere                                     failed    unknown ─────────────────┘
       └──────────────────────────────────────────────────┘ └─► placed (again, same GPUs, next epoch)

Invariants, each a test:
  1. A replica has an assignment in every state but `pending`; its GPUs, ports and memory are reserved until its agent was
     seen without it (or says that it has ended). A GPU is in one assignment, or in several shared ones.
  2. Epochs rise, over the whole cluster, with every (re)start that is ordered; no two assignments have the same.
  3. A copy (`replaces`) stands in for one replica. The old one is stopped only once the copy is ready, unless the
     operator waived it; at most one copy a model is under way.
  4. `unknown` means that the node's lease lapsed: nothing is concluded about the engine, which may well serve.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from llmgw.control.observed import Desired, Observed
from llmgw.placement.snapshot import Cordon, Exclusion
from llmgw.placement.verdict import Assignment, Record

State = Literal[
    "pending", "placed", "fetching", "starting", "canary", "ready", "unknown", "draining", "stopping", "failed"
]

COMING: frozenset[State] = frozenset({"placed", "fetching", "starting", "canary"})
"""On their way to ready, on some node."""

LEAVING: frozenset[State] = frozenset({"draining", "stopping"})

TRANSITIONS: dict[State, frozenset[State]] = {
    "pending": frozenset({"placed"}),
    **dict.fromkeys(COMING, COMING | {"ready", "unknown", "failed", "stopping"}),
    "ready": COMING | {"draining", "unknown", "failed"},
    "unknown": COMING | {"ready", "failed", "draining"},
    "draining": frozenset({"stopping"}),
    "stopping": frozenset(),
    "failed": frozenset({"placed", "pending", "stopping"}),
}
"""From → to. A pending replica that is not wanted, and a stopping one that has ended, are removed."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One failure of a replica, as far as back-off needs it."""

    node: str
    cause: str
    deterministic: bool
    at: float  # wall clock


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica. *since*, *created*, *retry_at* are wall clock."""

    id: str
    model: str
    state: State = "pending"
    since: float = 0.0
    created: float = 0.0
    reason: str = ""  # why it is in this state, for people
    epoch: int = 0
    generation: int = 0  # of the model's specification that it was built from
    fingerprint: str = ""  # of what it was started with
    assignment: Assignment | None = None
    desired: tuple[Desired, ...] = ()  # by node of the assignment, as ordered: an edit does not reach a running one
    boots: tuple[str, ...] = ()  # boot ids of its nodes when it was last seen
    seen: bool = False  # the agent has reported it under this epoch
    faults: tuple[Fault, ...] = ()  # since it was last ready for long, the newest last
    retry_at: float | None = None  # failed: when it is started again; None = not by itself
    replaces: str = ""  # it is a copy, and stands in for this one
    why: str = ""  # of a copy: edit, drain NODE, NODE lost
    grace: float = 30.0  # for requests in flight when it is stopped
    record: Record | None = None  # the decision that placed it, or the last one that did not


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node that has joined, and what the operator said about it."""

    name: str
    cordon: Cordon | None = None
    draining: bool = False


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """The emptying of one node. It survives a restart of the server; a second order attaches to the first."""

    node: str
    by: str = ""
    started: float = 0.0  # wall clock
    done: tuple[str, ...] = ()  # replicas that have left
    current: tuple[str, ...] = ()  # replicas that are leaving
    blocked: str = ""  # why it does not proceed
    parallel: int = 1  # replicas at once, each of another model
    surge: bool = True  # False = stop first: the operator accepts the downtime
    was_cordoned: bool = False  # abort leaves it so
    finished: bool = False


class Nomination(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs that victims are leaving for a more important replica; nobody else slips in until *until* (wall clock)."""

    replica: str
    model: str
    node: str
    gpus: tuple[str, ...]
    until: float


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is remembered. The shell writes the difference in one transaction under the leader's term."""

    replicas: dict[str, Replica] = {}
    nodes: dict[str, NodeRecord] = {}
    drains: dict[str, Drain] = {}
    nominations: dict[str, Nomination] = {}
    exclusions: dict[str, Exclusion] = {}  # by "MODEL NODE"
    inputs: dict[str, str] = {}  # of an exclusion without end: what it depends on; another value ends it
    epoch: int = 0  # last one given out
    serial: dict[str, int] = {}  # model → number of its last replica
    generations: dict[str, int] = {}  # model → how often what it is started with was edited
    built: dict[str, str] = {}  # model → digest of that
    frozen: str = ""  # why rescheduling is stopped (mass failure); "" = it is not
    thawed: float = 0.0  # when that ended by itself, wall clock: those still lost get their chance as after a start


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What the server has heard of a node since it runs. Not stored; *at* is the server's monotonic clock."""

    at: float
    boot: str = ""
    agent: str = ""
    address: str = ""  # that it speaks from
    observed: Observed | None = None  # None = only heartbeats so far
    version: int = 0
    lapses: tuple[float, ...] = ()  # when its lease lapsed, within the last hour


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One thing that happened, for `ctl events` and the log."""

    kind: str
    subject: str  # replica, node or model
    text: str
    at: float  # wall clock


class Settings(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Timings, seconds. Weights take minutes to load, so patience is cheap and haste is not."""

    heartbeat: float = 5.0
    lost_after: float = 30.0  # six heartbeats missed
    reschedule_after: float = 120.0  # lost for so long: a copy is made elsewhere
    brake_nodes: int = 2  # more than so many …
    brake_share: float = 0.3  # … and than this share lost within one reschedule window: our own fault is likelier
    release_share: float = 0.1  # the brake is released when at most so many are still lost
    backoff: float = 10.0
    backoff_cap: float = 300.0
    jitter: float = 0.2
    healthy_after: float = 600.0  # ready for so long: earlier failures are forgotten
    same_cause: int = 3  # failures in a row on one node, then another node
    exclude: float = 1800.0  # for so long that node is left out
    failing_nodes: int = 3  # failed on so many nodes: stop, and tell
    placements: int = 8  # a round, at most: a round must not take longer than a heartbeat
    nomination: float = 600.0

    @property
    def settle(self) -> float:
        """After a start of the server: nothing is placed, evicted or collected until every agent had its chance."""
        return self.lost_after + 2 * self.heartbeat
