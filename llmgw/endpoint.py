"""What routing sees: endpoints, their views, and the snapshot of both that every decision is made from.

An `Endpoint` says what a place can do and never changes; its `id` names one incarnation (name, URL and start id), so
that counters survive a reload and never survive a restart of the engine. An `EndpointView` says how it is doing.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from llmgw.request import Phase

Health = Literal["joining", "ready", "degraded", "quarantined", "draining", "gone"]


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One model as an endpoint serves it."""

    name: str
    aliases: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    max_model_len: int | None = None  # tokens; None = unknown


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A place that serves models. Frozen: a change makes a new one (same id if it is the same incarnation)."""

    id: str
    name: str
    url: str  # http(s)://HOST[:PORT][/prefix] or unix:/path
    engine: str = "auto"  # vllm, sglang, llama-server, sim, … ; auto = found out by the probe
    models: tuple[Model, ...] = ()
    phases: frozenset[Phase] = frozenset({"prefill", "decode"})
    fabrics: frozenset[str] = frozenset()  # a prefill/decode pair needs one in common
    host: str = ""
    labels: dict[str, str] = {}
    weight: float = 1.0
    max_concurrency: int | None = None
    auth: str = ""  # reference to the key (a file's path or a replica's name), never the key
    block_size: int | None = None  # tokens a KV block
    blocks: int | None = None  # KV blocks in all
    kv_events: str = ""  # "connect tcp://…" or "bind tcp://…"
    side_channel: str = ""  # HOST:PORT of NIXL's handshake
    bootstrap: str = ""  # HOST:PORT of SGLang's bootstrap server
    replica: str = ""  # set where control placed it
    source: str = "static"


class Report(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What an engine last said of itself. None = it did not say: unknown, never zero."""

    at: float  # when it was read
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None  # 0..1


class EndpointView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How an endpoint is doing, as decisions see it."""

    health: Health = "joining"
    since: float = 0.0
    inflight: int = 0  # requests of ours that it has
    queued: int = 0  # of these, the ones whose first token has not come
    prefill_tokens: int = 0  # uncached prompt tokens of those
    decode_tokens: int = 0  # tokens still expected of it
    report: Report | None = None
    prefill_rate: float | None = None  # learned, tokens a second
    decode_rate: float | None = None  # learned, tokens a second that one more sequence would get
    contention: float = 0.0002  # seconds that one more sequence adds to a step; learned
    overhead: float | None = None  # learned, seconds that a request costs before its first token beside its prefill
    foreign: float = 0.0  # requests that its report counts and that are not ours (another gateway's)
    ahead: float | None = None  # seconds of work before it would turn to one more request, at the learned rates
    head: float = 0.0  # of these, what the prompt under way takes in all
    begun: float = 0.0  # when that was begun


class Snapshot(msgspec.Struct, frozen=True):
    """All that a decision sees. The two tuples run in step: views[i] is endpoints[i]'s."""

    revision: int
    endpoints: tuple[Endpoint, ...]
    views: tuple[EndpointView, ...]


class EndpointSink(Protocol):
    """Where sources put what they know. Level-triggered: the full set, every time."""

    def replace(self, source: str, endpoints: tuple[Endpoint, ...]) -> None:
        """*source* now knows exactly *endpoints*. A source that fails does not call: its last set stays."""
        ...
