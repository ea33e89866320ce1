"""The configuration file: its schema, its loader, its reference page.

One attrs class a section; every key carries its meaning (`key(...)`), from which docs/configuration.md is made. The
loader reports *all* problems at once, each with file, line and dotted path. `ModelPolicy` is the one schema of how a
model is served: the server's file and the catalogue both use it.

    text ──compose──► nodes ──construct──► dicts + lines by path ──cattrs──► Server ──cross-checks──► Server

Secrets are never in the file: a key names the file that holds one (`api_key_file`), and only that name is printed.
"""

# ruff: noqa: RUF009 -- `key` is attrs.field, which ruff does not recognise through a call

from __future__ import annotations

import difflib
import functools
import ipaddress
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import attrs
import cattrs
import yaml
from cattrs.gen import make_dict_structure_fn, override

from llmgw.admission.bands import DEFAULTS as DEFAULT_BANDS
from llmgw.admission.bands import Band
from llmgw.admission.bands import problems as band_problems
from llmgw.endpoint import Endpoint, Model
from llmgw.engines.base import MetricNames
from llmgw.errors import ConfigError, Problem
from llmgw.kvcache.events import parse_source
from llmgw.pipeline.config import PipelineConfig, is_coordinator, translate
from llmgw.pipeline.config import build as build_pipeline
from llmgw.request import Limits, Phase
from llmgw.routing.profiles import DEFAULT as DEFAULT_PROFILE
from llmgw.routing.profiles import profiles
from llmgw.routing.report import Reader, kinds
from llmgw.schema import Check, a_name, key, not_empty, not_negative, positive
from llmgw.units import Duration, Size, Unix, format_duration, format_size, parse_address, parse_duration, parse_size

VERSION = 1
NODES = 100_000  # YAML nodes after aliases are expanded: 200 engines need 5,000; a bomb of aliases needs millions
DEPTH = 32  # levels of nesting; the schema has 5

HeaderNames = tuple[str, ...]
EngineKind = Literal["auto", "vllm", "sglang", "llama-server", "tgi", "trtllm", "sim"]
Driver = Literal["pump", "tasks"]

TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

NEVER_FORWARDED = frozenset(
    [
        "authorization",
        "cookie",
        "proxy-authorization",
        "x-data-parallel-rank",
        "x-conversation-id",
        "prefer",
        "epp-profile",
        "host",
        "connection",
        "content-length",
        "transfer-encoding",
        "accept-encoding",
        "upgrade",
        "te",
        "trailer",
        "keep-alive",
        "expect",
        "x-request-id",
    ]
)
NEVER_FORWARDED_PREFIXES = ("x-forwarded-", "x-override-", "x-smg-", "x-llmgw-")


# -- checks --------------------------------------------------------------------------------------------------------


def an_address(value: str) -> str | None:
    try:
        parse_address(value)
    except ConfigError as error:
        return error.problems[0].message
    return None


def forwardable(value: tuple[str, ...]) -> str | None:
    for name in value:
        if not TOKEN.fullmatch(name):
            return f"{name!r} is not a header name"
        low = name.lower()
        if low in NEVER_FORWARDED or low.startswith(NEVER_FORWARDED_PREFIXES):
            return f"{name!r} is never forwarded: it would carry a secret, or steer the engine past the gateway"
    return None


def a_url(value: str) -> str | None:
    """http(s)://HOST[:PORT][/prefix] or unix:/path. Never prints what may be a password."""
    if value.startswith("unix:"):
        return an_address(value)
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https"):
        return "must be http://HOST[:PORT], https://HOST[:PORT] or unix:/path"
    if "@" in parts.netloc:
        return "must not contain a user or password; use api_key_file"
    if parts.query or parts.fragment:
        return "must not have a query or a fragment"
    try:
        port = parts.port
    except ValueError:
        port = -1
    if not parts.hostname or port == -1:
        return "must name a host and, if not the scheme's own, a port: http://gpu-1:8000"
    return None


def phases_known(value: tuple[str, ...]) -> str | None:
    return not_empty(value) or (None if len(set(value)) == len(value) else "names a phase twice")


def kv_source(value: str) -> str | None:
    try:
        if value:
            parse_source(value)
    except ValueError as error:
        return str(error)
    return None


def a_path(value: str) -> str | None:
    return None if value.startswith("/") and " " not in value else "must be a path: /metrics"


def shares(value: dict[str, float]) -> str | None:
    good = all(share > 0 for share in value.values()) and sum(value.values()) <= 1
    return None if good else "each share must be more than 0, and all together at most 1"


def proxies(value: tuple[str, ...]) -> str | None:
    for text in value:
        try:
            if text != "unix":
                ipaddress.ip_network(text, strict=False)
        except ValueError:
            return f"{text!r} is no address or network: 10.0.0.0/8, 192.0.2.7, 2001:db8::/32, or unix"
    return None


def hosts(value: tuple[str, ...]) -> str | None:
    return next((f"{h!r} is not a host name" for h in value if not re.fullmatch(r"[A-Za-z0-9._:\[\]-]+", h)), None)


# -- the schema ----------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ClientLimits:
    """What a client may send, and how slowly."""

    body: Size = key("Largest request body; 413 before it is read.", Size(64 << 20), check=positive)
    headers: Size = key("Largest header section; 431.", Size(64 << 10), check=positive)
    header_count: int = key("Most header lines; 431.", 256, check=positive)
    head_timeout: Duration = key("Time from the first byte of a head to its end; 408.", Duration(10.0), check=positive)
    body_min_rate: Size = key("Bytes a second below which a body is too slow; 408.", Size(1024), check=not_negative)
    body_grace: Duration = key("Time before `body_min_rate` is applied.", Duration(10.0), check=not_negative)
    keep_alive: Duration = key("How long an idle client connection is kept.", Duration(75.0), check=positive)
    connections: int | None = key(
        "Most client connections at once. Unset: what RLIMIT_NOFILE allows, less a reserve for engines.",
        None,
        check=positive,
    )


@attrs.frozen(kw_only=True)
class TlsFiles:
    """A listener's certificate. Read again on SIGHUP; open connections keep theirs."""

    cert: str = key("PEM file: the certificate, then its intermediates.", check=not_empty)
    key: str = key("PEM file of its private key, not encrypted.", check=not_empty)


@attrs.frozen(kw_only=True)
class Listener:
    """One address of the client port."""

    address: str = key("`:8080` (all interfaces), `HOST:PORT`, `[IPV6]:PORT`, `unix:/path`.", ":8080", check=an_address)
    half_close: Literal["allow", "close"] = key(
        "What a client's FIN means: `close` = it has left, its request is cancelled; `allow` = it only stopped sending.",
        "close",
    )
    tls: TlsFiles | None = key("Speak TLS (1.2 or newer) with this certificate. Unset: plain HTTP.", None)
    trusted_proxies: tuple[str, ...] = key(
        "Load balancers: addresses, networks, or `unix`. From these, and only these, `x-forwarded-for` says who the client is.",
        (),
        check=proxies,
    )
    proxy_protocol: bool = key(
        "Connections begin with a PROXY header (v1 or v2), from `trusted_proxies` only; all others are closed.", False
    )
    allow_priority: bool = key(
        "Let the body field `priority` through. Engines disagree on its direction: only for one kind.", False
    )
    internal: bool = key(
        "Legs of pipelines are served here: `EPP-Profile` chooses the phase, transfer fields pass. Loopback or unix only.",
        False,
    )
    bands: tuple[str, ...] = key("Bands that its clients may claim in `x-llmgw-band`. Empty: all of them.", ())
    forward_headers: HeaderNames = key(
        "Request headers that reach engines besides content-type, accept, accept-language, user-agent, traceparent, tracestate, anthropic-version, anthropic-beta.",
        (),
        check=forwardable,
    )


@attrs.frozen(kw_only=True)
class Timeouts:
    """Time limits of a request. Three different things, never one 'timeout'."""

    connect: Duration = key("Until an engine accepts a connection.", Duration(5.0), check=positive)
    idle: Duration = key(
        "No byte, and no other sign of life from the engine; 504 `idle_timeout`.", Duration(120.0), check=positive
    )
    generation: Duration | None = key(
        "Budget for a whole answer; 504 `generation_timeout`. Unset: no limit.", None, check=positive
    )
    drain: Duration = key(
        "After SIGTERM: how long running requests may finish before they are cut.", Duration(30.0), check=not_negative
    )


@attrs.frozen(kw_only=True)
class ModelTimeouts:
    """Time limits of one model. What is unset is the server's."""

    connect: Duration | None = key("As `timeouts.connect`.", None, check=positive)
    idle: Duration | None = key("As `timeouts.idle`.", None, check=positive)
    generation: Duration | None = key("As `timeouts.generation`.", None, check=positive)


@attrs.frozen(kw_only=True)
class Admin:
    """The admin port: metrics, health, debugging, `llmgw ctl`."""

    addresses: tuple[str, ...] = key(
        "Where it listens; empty = nowhere. Whoever reaches it may operate the gateway: keep it on loopback or a Unix socket.",
        ("127.0.0.1:9090",),
        check=lambda v: next(filter(None, map(an_address, v)), None),
    )
    hosts: tuple[str, ...] = key(
        "Host names it answers to besides loopback and the addresses it listens on (a guard against DNS rebinding).",
        (),
        check=hosts,
    )


@attrs.frozen(kw_only=True)
class Probe:
    """How the health of engines is found out."""

    interval: Duration = key("Between two probes of one engine, ± 10 %.", Duration(5.0), check=positive)
    timeout: Duration = key(
        "Of one probe. SGLang's `/health` generates a token and takes a second and more.", Duration(5.0), check=positive
    )
    failures: int = key("Failed probes in a row after which an engine gets no requests.", 3, check=positive)
    quarantine: Duration = key(
        "Longest pause before an engine that failed is probed again (it doubles from 1s).",
        Duration(30.0),
        check=positive,
    )


@attrs.frozen(kw_only=True)
class MetricMapping:
    """Where a kind of engine's figures stand on its metrics page: `NAME`, `NAME{LABEL=VALUE}` or `NAME@LABEL`; first found wins."""

    running: tuple[str, ...] = key("Requests in execution.", ())
    waiting: tuple[str, ...] = key("Requests waiting.", ())
    kv_usage: tuple[str, ...] = key("Share of the KV cache in use, 0 to 1.", ())
    block_size: tuple[str, ...] = key("Tokens a KV block.", ())
    blocks: tuple[str, ...] = key("KV blocks in all.", ())
    progress: tuple[str, ...] = key("Counters that rise while the engine works.", ())
    path: str = key("Of the page.", "/metrics", check=a_path)


@attrs.frozen(kw_only=True)
class Scrape:
    """Reading engines' metrics pages."""

    interval: Duration = key("Between two readings of one engine; `0` = never.", Duration(1.0), check=not_negative)
    timeout: Duration = key("Of one reading.", Duration(0.9), check=positive)
    metrics: dict[str, MetricMapping] = key("Names by kind of engine, in place of ours.", attrs.Factory(dict))


@attrs.frozen(kw_only=True)
class Routing:
    """How endpoints are chosen."""

    profile: str = key("Profile of requests and models that name none.", DEFAULT_PROFILE)
    profiles: dict[str, dict[str, Any]] = key(
        "Profiles beside ours, each with `filters`, `scorers`, `picker`; see docs/routing.md.", attrs.Factory(dict)
    )
    scrape: Scrape = key("Reading engines' metrics pages.", attrs.Factory(Scrape))
    explain_header: bool = key(
        "Answer `x-llmgw-explain: 1` with the decision. It names endpoints and their load: for debugging.", False
    )


@attrs.frozen(kw_only=True)
class Log:
    """The log: one JSON object a line."""

    file: str | None = key("Appended to. Unset: standard output.", None, check=not_empty)
    requests: bool = key("One line for every request; process events are logged in any case.", True)


@attrs.frozen(kw_only=True)
class ModelConfig:
    """One model as an endpoint serves it. A plain string is its name."""

    name: str = key("As clients ask for it and as the engine knows it.", check=not_empty)
    aliases: tuple[str, ...] = key("Other names that clients may use for it here.", ())
    loras: tuple[str, ...] = key("Adapters that the engine has loaded.", ())
    max_model_len: int | None = key("Context length in tokens. Unset: learned from the engine.", None, check=positive)


@attrs.frozen(kw_only=True)
class EndpointConfig:
    """One engine that runs already."""

    name: str = key("In logs, metrics and explanations. Unique.", check=a_name)
    url: str = key("`http(s)://HOST[:PORT][/prefix]` or `unix:/path`.", check=a_url)
    models: tuple[ModelConfig, ...] = key("What it serves. Empty: learned from its `/v1/models`.", ())
    phases: tuple[Phase, ...] = key(
        "What it does of a request: encode, prefill, decode.", ("prefill", "decode"), check=phases_known
    )
    fabrics: tuple[str, ...] = key("Fabrics it is on; a prefill/decode pair needs one in common.", ())
    engine: EngineKind = key("What runs there. `auto`: found out by the probe.", "auto")
    host: str = key("Machine it runs on, for explanations and for spreading.", "")
    api_key_file: str | None = key(
        "File that holds the key the engine asks for; sent as `Authorization: Bearer`. The key is never printed.",
        None,
        check=not_empty,
    )
    labels: dict[str, str] = key("Free labels, for people.", attrs.Factory(dict))
    weight: float = key("Share of the load against others of its model.", 1.0, check=positive)
    max_concurrency: int | None = key("Most requests at once. Unset: no limit.", None, check=positive)
    block_size: int | None = key("Tokens a KV block. Unset: learned.", None, check=positive)
    blocks: int | None = key("KV blocks in all. Unset: learned.", None, check=positive)
    kv_events: str = key(
        "Where its KV events are: `connect tcp://HOST:PORT` or `bind tcp://*:PORT`, then perhaps `replay tcp://HOST:PORT`."
        " Needs the extra `kv-events`.",
        "",
        check=kv_source,
    )
    side_channel: str = key("`HOST:PORT` of NIXL's handshake.", "")
    bootstrap: str = key("`HOST:PORT` of SGLang's bootstrap server.", "")

    def endpoint(self, source: str = "static", start: str = "") -> Endpoint:
        """What routing sees of it. *start* tells incarnations of the engine apart ("" = unknown)."""
        return Endpoint(
            id=endpoint_id(self.name, self.url, start),
            name=self.name,
            url=self.url,
            engine=self.engine,
            models=tuple(
                Model(name=m.name, aliases=m.aliases, loras=m.loras, max_model_len=m.max_model_len) for m in self.models
            ),
            phases=frozenset(self.phases),
            fabrics=frozenset(self.fabrics),
            host=self.host or (urlsplit(self.url).hostname or ""),
            labels=self.labels,
            weight=self.weight,
            max_concurrency=self.max_concurrency,
            auth=self.api_key_file or "",
            block_size=self.block_size,
            blocks=self.blocks,
            kv_events=self.kv_events,
            side_channel=self.side_channel,
            bootstrap=self.bootstrap,
            source=source,
        )


@attrs.frozen(kw_only=True)
class ModelPolicy:
    """How one model is served, wherever it runs. Used by this file and by the catalogue."""

    aliases: tuple[str, ...] = key("Other names that clients may use for it.", ())
    usage: Literal["count", "ask"] = key(
        "How tokens of streams are known. `count`: content deltas are counted, nothing is changed; `ask`: the engine is"
        " asked (`stream_options.include_usage`) and its extra event is taken out again.",
        "count",
    )
    timeouts: ModelTimeouts = key("Time limits of this model.", attrs.Factory(ModelTimeouts))
    pipeline: str = key("Which of `pipelines` its requests go through. Unset: the server's.", "")
    profile: str | None = key("Routing profile. Unset: `routing.profile`.", None, check=not_empty)
    canary: dict[str, float] = key(
        "Share of its requests that other models get instead, 0 to 1, by name; a session keeps its side.",
        attrs.Factory(dict),
        check=shares,
    )
    media_urls: Literal["pass", "refuse"] = key(
        "Images, sounds and videos given as http(s) URLs. `pass`: the engine (or a pipeline's media step) fetches them, from"
        " inside your network, whatever host a client names; `refuse`: 400, only `data:` URLs are served.",
        "pass",
    )
    fallback: tuple[str, ...] = key("Models that serve, in this order, while it cannot.", ())


STATE = "/var/lib/llmgw/server"


@attrs.frozen(kw_only=True)
class StoreConfig:
    """Where the control plane keeps what it knows."""

    kind: Literal["sqlite", "etcd", "memory"] = key(
        "`sqlite`: one file, for one server; `etcd`: for several servers; `memory`: nothing outlives the process.",
        "sqlite",
    )
    path: str = key("File of `sqlite`. Unset: `store.db` in `cluster.state`.", "")
    endpoints: tuple[str, ...] = key(
        "Of `etcd`: `https://HOST:2379`.", (), check=lambda v: next(filter(None, map(a_url, v)), None)
    )
    ca_file: str | None = key("Certificates that etcd's is verified against.", None, check=not_empty)
    cert_file: str | None = key("Certificate shown to etcd.", None, check=not_empty)
    key_file: str | None = key("Its key.", None, check=not_empty)


@attrs.frozen(kw_only=True)
class ClusterConfig:
    """The control plane. Its port opens when there is a certificate authority (`llmgw ctl ca init`)."""

    state: str = key("Folder of the server's identity (`identity/`) and of its store.", STATE, check=not_empty)
    address: str = key("The cluster port, where nodes join and report.", ":9443", check=an_address)
    names: tuple[str, ...] = key(
        "Host names and addresses that nodes reach this server by; they stand in its certificate. Unset: the host's name and"
        " addresses.",
        (),
        check=hosts,
    )
    heartbeat: Duration = key("How often nodes report.", Duration(5.0), check=positive)
    lost_after: Duration = key(
        "A node that was silent for so long is lost: nothing new is placed there.", Duration(30.0), check=positive
    )
    reschedule_after: Duration = key(
        "Silent for so long: copies of its replicas are made elsewhere. Loading weights takes minutes, so patience is cheap.",
        Duration(120.0),
        check=positive,
    )


@attrs.frozen(kw_only=True)
class Server:
    """The whole file."""

    version: Literal[1] = key("Of this schema: always 1, always there.")
    listeners: tuple[Listener, ...] = key("The client port.", (Listener(),), check=not_empty)
    admin: Admin = key("The admin port.", attrs.Factory(Admin))
    limits: ClientLimits = key("What a client may send.", attrs.Factory(ClientLimits))
    timeouts: Timeouts = key("Time limits of a request.", attrs.Factory(Timeouts))
    probe: Probe = key("Health of engines.", attrs.Factory(Probe))
    routing: Routing = key("How endpoints are chosen.", attrs.Factory(Routing))
    bands: tuple[Band, ...] = key(
        "Priority classes, the highest first; docs/admission.md explains them. Given: instead of the three built in.",
        DEFAULT_BANDS,
    )
    log: Log = key("The log.", attrs.Factory(Log))
    driver: Driver = key("How bytes are moved: `pump` (Linux, fast) or `tasks` (anywhere).", "pump")
    endpoints: tuple[EndpointConfig, ...] = key("Engines that run already.", ())
    engine_ca: str | None = key(
        "PEM file of the only authorities that certificates of https endpoints may lead to. Unset: the system's.",
        None,
        check=not_empty,
    )
    models: dict[str, ModelPolicy] = key("How models are served, by name.", attrs.Factory(dict))
    pipelines: dict[str, PipelineConfig] = key("Chains of phases over specialised engines.", attrs.Factory(dict))
    pipeline: str = key("Which of `pipelines` requests go through, unless their model says. Unset: none.", "")
    store: StoreConfig | None = key("Where the control plane keeps what it knows. Unset: `sqlite`.", None)
    cluster: ClusterConfig | None = key("The control plane. Unset: none, endpoints are static.", None)

    def limits_of(self, model: str) -> Limits:
        """Time limits of a leg that serves *model*."""
        policy = self.models.get(model)
        own = policy.timeouts if policy else ModelTimeouts()
        return Limits(
            connect=own.connect or self.timeouts.connect,
            idle=own.idle or self.timeouts.idle,
            generation=own.generation or self.timeouts.generation,
        )


def endpoint_id(name: str, url: str, start: str = "") -> str:
    """One incarnation: same name, URL and start keep their counters across reloads."""
    return f"{name}@{url}" + (f"#{start}" if start else "")


# -- text to plain values, with lines ------------------------------------------------------------------------------

Path_ = tuple["str | int", ...]


class _Loader(yaml.SafeLoader):
    """Knows where every value stands, and refuses what YAML lets pass in silence."""

    def __init__(self, text: str, file: str) -> None:
        super().__init__(text)
        self.file = file
        self.lines: dict[Path_, int] = {}
        self.problems: list[Problem] = []
        self._seen = 0

    def read(self) -> Any:
        node = self.get_single_node()
        return {} if node is None else self._value(node, ())

    def _bad(self, message: str, path: Path_, node: yaml.Node) -> None:
        self.problems.append(Problem(message, dotted(path), self.file, node.start_mark.line + 1))

    def _value(self, node: yaml.Node, path: Path_) -> Any:
        self._seen += 1
        if self._seen > NODES or len(path) > DEPTH:
            raise ConfigError([Problem(f"more than {NODES} values or {DEPTH} levels", dotted(path), self.file)])
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(child, (*path, i)) for i, child in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            found: dict[str, Any] = {}
            for name_node, child in node.value:
                name = name_node.value
                if not isinstance(name_node, yaml.ScalarNode) or name_node.tag != "tag:yaml.org,2002:str":
                    self._bad(f"key {name!r} is not a string; quote it", path, name_node)
                    continue
                here = (*path, name)
                if name in found:
                    self._bad(f"key {name!r} occurs twice (first in line {self.lines[here]})", here, name_node)
                    continue
                self.lines[here] = name_node.start_mark.line + 1
                found[name] = self._value(child, here)
            return found
        try:
            return self.construct_object(node)
        except yaml.YAMLError:
            self._bad(f"tag {node.tag} is not allowed here", path, node)
            return None


def dotted(path: Path_) -> str:
    """``endpoints[0].url``"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


# -- plain values to the schema ------------------------------------------------------------------------------------


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool) else type(value).__name__
    kinds = {dict: "a mapping", list: "a list", type(None): "nothing"}
    return kinds.get(type(value), text if len(text) < 60 else text[:57] + "…'")


Hook = Callable[[Any, Any], Any]


def _exactly(what: str, *accepted: type) -> Hook:
    def hook(value: Any, _: Any) -> Any:
        if type(value) not in accepted:
            raise ValueError(f"expected {what}, found {_shown(value)}")
        return value

    return hook


def _written(what: str, parse: Callable[[str], Any], *plain: type) -> Hook:
    def hook(value: Any, _: Any) -> Any:
        if type(value) in plain or (type(value) is int and value == 0):
            return value
        if not isinstance(value, str):
            raise ValueError(f"expected {what}, found {_shown(value)}")
        return parse(value)

    return hook


def _literal(value: Any, kind: Any) -> Any:
    for one in get_args(kind):
        if value == one and type(value) is type(one):
            return value
    raise ValueError(f"expected {' or '.join(map(str, get_args(kind)))}, found {_shown(value)}")


def _mapping_first(cls: Any, converter: cattrs.Converter) -> Hook:
    hints = get_type_hints(cls)
    checked: dict[str, Any] = {
        f.name: override(struct_hook=_checked(converter, hints[f.name], f.metadata["check"]))
        for f in attrs.fields(cls)
        if f.metadata["check"]
    }
    made: Any = make_dict_structure_fn  # its type has no room for overrides beside named options
    inner = made(cls, converter, _cattrs_forbid_extra_keys=True, **checked)

    def hook(value: Any, kind: Any) -> Any:
        if cls is ModelConfig and isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, dict):
            raise ValueError(f"expected a mapping with the keys of {cls.__name__}, found {_shown(value)}")
        return inner(value, kind)

    return hook


def _checked(converter: cattrs.Converter, kind: Any, check: Check) -> Hook:
    """Here and not in a validator of the class: attrs stops at the first, and does not start if a type is wrong."""

    def hook(value: Any, _: Any) -> Any:
        made = converter.structure(value, kind)
        if made is not None and (wrong := check(made)):
            raise ValueError(wrong)
        return made

    return hook


def _list_first(kind: Any, converter: cattrs.Converter) -> Hook:
    item = get_args(kind)[0]

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, list):
            raise ValueError(f"expected a list, found {_shown(value)}")
        return tuple(_each(((i, v) for i, v in enumerate(value)), item, converter))

    return hook


def _dict_first(kind: Any, converter: cattrs.Converter) -> Hook:
    item = get_args(kind)[1]

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"expected a mapping, found {_shown(value)}")
        return dict(zip(value, _each(iter(value.items()), item, converter), strict=True))

    return hook


def _each(items: Iterator[tuple[Any, Any]], kind: Any, converter: cattrs.Converter) -> list[Any]:
    """Structure every item; what is wrong with any of them is raised together."""
    found, failed = [], []
    for index, value in items:
        try:
            found.append(converter.structure(value, kind))
        except Exception as error:
            note = cattrs.IterableValidationNote(f"item {index}", index, kind)
            error.__notes__ = [*getattr(error, "__notes__", []), note]
            failed.append(error)
    if failed:
        raise cattrs.IterableValidationError("items", failed, kind)
    return found


def _is(origin: object) -> Callable[[Any], bool]:
    return lambda kind: get_origin(kind) is origin


@functools.cache
def converter() -> cattrs.Converter:
    """Strict: no value is bent into another type, unknown keys are refused, all problems are collected."""
    made = cattrs.Converter(detailed_validation=True, forbid_extra_keys=True)
    made.register_structure_hook(str, _exactly("a string", str))
    made.register_structure_hook(int, _exactly("a whole number", int))
    made.register_structure_hook(bool, _exactly("true or false", bool))
    made.register_structure_hook(float, _exactly("a number", int, float))
    made.register_structure_hook_func(lambda kind: kind is Any, lambda value, _: value)
    made.register_structure_hook(Duration, _written("a duration such as 30s", parse_duration))
    made.register_structure_hook(Size, _written("a size such as 64MiB", parse_size, int))
    made.register_structure_hook_func(_is(Literal), _literal)
    made.register_structure_hook_factory(attrs.has, _mapping_first)
    made.register_structure_hook_factory(_is(tuple), _list_first)
    made.register_structure_hook_factory(_is(dict), _dict_first)
    return made


def _unknown(name: str, cls: type) -> str:
    known = [f.name for f in attrs.fields(cls)]
    near = difflib.get_close_matches(name, known, 1)
    return f"unknown key {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")


def _problems(error: BaseException, path: Path_) -> Iterator[tuple[Path_, str]]:
    """Path and text of every single problem in cattrs' tree of exceptions."""
    if isinstance(error, cattrs.ClassValidationError | cattrs.IterableValidationError):
        noted, plain = error.group_exceptions()
        for inner, note in noted:
            part = note.name if isinstance(note, cattrs.AttributeValidationNote) else note.index
            yield from _problems(inner, (*path, part))
        for inner in plain:
            yield from _problems(inner, path)
    elif isinstance(error, cattrs.ForbiddenExtraKeysError):
        for name in sorted(error.extra_fields):
            yield (*path, name), _unknown(name, error.cl)
    elif isinstance(error, KeyError):
        yield path, "is missing"
    else:
        yield path, str(error)


T = TypeVar("T")


class Document:
    """A parsed file: plain values, and the line of each."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        try:
            loader = _Loader(text, file)
            try:
                self.data: Any = loader.read()
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            message = f"not YAML: {error.problem or error.context}"
            raise ConfigError([Problem(message, "", file, mark.line + 1 if mark else 0)]) from error
        except yaml.YAMLError as error:
            raise ConfigError([Problem(f"not YAML: {error}", "", file)]) from error
        except RecursionError:
            raise ConfigError([Problem(f"not YAML that can be read: more than {DEPTH} levels", "", file)]) from None
        self.lines = loader.lines
        self.problems = loader.problems

    def problem(self, path: Path_, message: str) -> Problem:
        """*path* need not exist: the line is then that of what it would stand in."""
        at = path
        while at and at not in self.lines:
            at = at[:-1]
        return Problem(message, dotted(path), self.file, self.lines.get(at, 0))

    def structure(self, cls: type[T]) -> tuple[T | None, list[Problem]]:
        """The value, if it is sound, and all problems found so far."""
        try:
            return converter().structure(self.data, cls), self.problems
        except (cattrs.BaseValidationError, ValueError) as error:
            return None, self.problems + [self.problem(path, text) for path, text in _problems(error, ())]


def _at(data: Any, *path: str) -> Any:
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _twice(document: Document) -> Iterator[Problem]:
    """Names that must be unique and are not. Looks at plain values, so that it works beside any other problem."""
    seen: dict[str, int] = {}
    endpoints = _at(document.data, "endpoints")
    for i, one in enumerate(endpoints if isinstance(endpoints, list) else ()):
        name = _at(one, "name")
        if isinstance(name, str) and seen.setdefault(name, i) != i:
            first = document.lines[("endpoints", seen[name])]
            yield document.problem(
                ("endpoints", i, "name"), f"endpoint {name!r} is defined twice (first in line {first})"
            )
    models = _at(document.data, "models")
    owner: dict[str, str] = {name: name for name in models} if isinstance(models, dict) else {}
    for name, policy in models.items() if isinstance(models, dict) else ():
        aliases = _at(policy, "aliases")
        for i, alias in enumerate(aliases if isinstance(aliases, list) else ()):
            if isinstance(alias, str) and owner.setdefault(alias, name) != name:
                yield document.problem(
                    ("models", name, "aliases", i), f"alias {alias!r} is taken by model {owner[alias]!r}"
                )


def _is_loopback(address: str) -> bool:
    where = parse_address(address)
    return isinstance(where, Unix) or where.host in ("localhost", "::1") or where.host.startswith("127.")


def _pipelines(server: Server, document: Document) -> Iterator[Problem]:
    """What is wrong with pipelines whose keys are sound, and names that mean none."""
    for i, listener in enumerate(server.listeners):
        if listener.proxy_protocol and not listener.trusted_proxies:
            yield document.problem(
                ("listeners", i, "proxy_protocol"), "needs trusted_proxies: who may say who the client is?"
            )
        if listener.internal and not _is_loopback(listener.address):
            yield document.problem(
                ("listeners", i, "address"),
                f"an internal listener lets requests aim engines at hosts: {listener.address} must be loopback or unix",
            )
    for name, pipeline in server.pipelines.items():
        try:
            build_pipeline(pipeline)
        except ConfigError as error:
            for problem in error.problems:
                path = ("pipelines", name, *undotted(problem.where))
                yield document.problem(path, problem.message)
    asked: list[tuple[Path_, str]] = [(("pipeline",), server.pipeline)]
    asked += [(("models", name, "pipeline"), policy.pipeline) for name, policy in server.models.items()]
    for place, name in asked:
        if name and name not in server.pipelines:
            known = ", ".join(server.pipelines) or "none"
            yield document.problem(place, f"there is no pipeline {name!r}; defined: {known}")


def _bands(server: Server, document: Document) -> Iterator[Problem]:
    """What bands that are sound one by one get wrong together."""
    for where, message in band_problems(server.bands):
        yield document.problem(undotted("bands" + where), message)
    known = [band.name for band in server.bands]
    for i, listener in enumerate(server.listeners):
        for j, name in enumerate(listener.bands):
            if name not in known:
                message = f"there is no band {name!r}; there are: {', '.join(known)}"
                yield document.problem(("listeners", i, "bands", j), message)


def undotted(text: str) -> Path_:
    """The path that `dotted` wrote."""
    return tuple(int(part[1:-1]) if part.startswith("[") else part for part in text.replace("[", ".[").split("."))


def _impatient(document: Document, cluster: ClusterConfig | None) -> Iterator[Problem]:
    if cluster is None:
        return
    if cluster.lost_after < 2 * cluster.heartbeat:
        yield document.problem(("cluster", "lost_after"), "must be at least two heartbeats: one may get lost")
    if cluster.reschedule_after < cluster.lost_after:
        yield document.problem(("cluster", "reschedule_after"), "must not be less than `lost_after`")


def _unstorable(document: Document, server: Server) -> Iterator[Problem]:
    store = server.store
    if store is None:
        return
    if server.cluster is None:
        yield document.problem(("store",), "there is no control plane to store anything; add `cluster: {}`")
    if (store.kind == "etcd") != bool(store.endpoints):
        text = "etcd needs `endpoints`" if store.kind == "etcd" else f"are for etcd, and the kind is {store.kind}"
        yield document.problem(("store", "endpoints"), text)
    if store.path and store.kind != "sqlite":
        yield document.problem(("store", "path"), f"is for sqlite, and the kind is {store.kind}")
    if (store.cert_file is None) != (store.key_file is None):
        yield document.problem(("store", "cert_file"), "a certificate and its key come together")


def _unroutable(document: Document, server: Server) -> Iterator[Problem]:
    """What routing cannot use: its plug-ins know, not this schema."""
    known = set()
    try:
        known = set(profiles(server.routing.profiles))
    except ConfigError as error:
        for problem in error.problems:
            yield document.problem(("routing", *problem.where.split(".")), problem.message)
    for name, mapping in server.routing.scrape.metrics.items():
        where = ("routing", "scrape", "metrics", name)
        if name not in kinds():
            yield document.problem(where, f"unknown kind of engine {name!r}; known: {', '.join(sorted(kinds()))}")
        try:
            Reader(MetricNames(**attrs.asdict(mapping)))
        except ValueError as error:
            yield document.problem(where, str(error))
    named: list[tuple[Path_, str]] = [(("routing", "profile"), server.routing.profile)]
    named += [(("models", name, "profile"), m.profile) for name, m in server.models.items() if m.profile]
    for path, profile in named:
        if known and profile not in known:
            yield document.problem(path, f"unknown profile {profile!r}; known: {', '.join(sorted(known))}")
    for name, policy in server.models.items():
        if name in policy.fallback or name in policy.canary:
            yield document.problem(("models", name), "names itself as its fallback or canary")


def _unsaid(_: str) -> None:
    return None


def parse(
    text: str,
    file: str = "",
    *,
    environ: Mapping[str, str] | None = None,
    endpoints: bool = False,
    tell: Callable[[str], None] = _unsaid,
) -> Server:
    """The configuration in *text*. Raises ConfigError with every problem.

    The Coordinator's file is recognised and translated, with the overrides in *environ*; *endpoints* says that engines
    are named elsewhere, so that it needs no gateway; *tell* gets what has no effect here.
    """
    document = Document(text, file)
    if is_coordinator(document.data) and not document.problems:
        found = translate(document.data, environ or {}, endpoints=endpoints)
        for note in found.notes:
            tell(f"{file}: {note}" if file else note)
        if found.document is None:
            raise ConfigError(sorted((document.problem(at, said) for at, said in found.problems), key=lambda p: p.line))
        document.data = found.document
    server, problems = document.structure(Server)
    problems = [*problems, *_twice(document)]
    if server is not None:
        problems += _pipelines(server, document)
        problems += _bands(server, document)
        problems += _unroutable(document, server)
        problems += _unstorable(document, server)
        problems += _impatient(document, server.cluster)
    if server is None or problems:
        raise ConfigError(sorted(problems, key=lambda p: p.line))
    return server


def load(
    path: str,
    *,
    environ: Mapping[str, str] | None = None,
    endpoints: bool = False,
    tell: Callable[[str], None] = _unsaid,
) -> Server:
    """The configuration in the file at *path*. Raises ConfigError, also for a file that cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError([Problem(f"cannot be read: {reason}", "", path)]) from error
    return parse(text, path, environ=environ, endpoints=endpoints, tell=tell)


# -- flags ---------------------------------------------------------------------------------------------------------

_OPTIONS = {"phases": "phases", "phase": "phases", "fabric": "fabrics", "fabrics": "fabrics", "engine": "engine"}


def parse_endpoints(texts: Sequence[str]) -> tuple[EndpointConfig, ...]:
    """Values of ``--endpoint NAME=URL[=MODEL][,phases=prefill+decode][,fabric=a][,engine=vllm]``, in their order.

    The same NAME and URL again adds a model (its options must not contradict). Without MODEL the engine is asked.
    Raises ConfigError with every problem.
    """
    plain: dict[str, dict[str, Any]] = {}
    problems: list[Problem] = []
    for text in texts:
        where = f"--endpoint {text}"
        head, *options = text.split(",")
        name, _, rest = head.partition("=")
        url, _, model = rest.partition("=")
        if not name or not url:
            problems.append(Problem("expected NAME=URL=MODEL[,phases=prefill][,fabric=a][,engine=vllm]", _safe(where)))
            continue
        given: dict[str, Any] = {}
        for option in options:
            left, equals, value = option.partition("=")
            field = _OPTIONS.get(left)
            if not equals or not value or field is None:
                problems.append(Problem(f"unknown option {option!r}; known: phases=, fabric=, engine=", _safe(where)))
            elif field == "engine":
                given[field] = value
            else:
                given.setdefault(field, []).extend(value.split("+"))
        one = plain.setdefault(name, {"name": name, "url": url, "models": [], **given})
        if one["url"] != url:
            problems.append(
                Problem(f"{name} already has another URL; a second engine needs a name of its own", _safe(where))
            )
            continue
        for field, value in given.items():
            if one.get(field) != value:
                problems.append(Problem(f"{field} of {name} contradicts an earlier --endpoint {name}=…", _safe(where)))
        if model and {"name": model} not in one["models"]:
            one["models"].append({"name": model})
    found = []
    for one in plain.values():
        try:
            found.append(converter().structure(one, EndpointConfig))
        except cattrs.BaseValidationError as error:
            problems += [
                Problem(text, f"--endpoint {one['name']}: {dotted(path)}") for path, text in _problems(error, ())
            ]
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def _safe(text: str) -> str:
    """A flag's text with what may be a password taken out."""
    return re.sub(r"//[^/@]*@", "//***@", text)


def with_flags(
    server: Server,
    *,
    endpoints: Sequence[str] = (),
    listen: Sequence[str] = (),
    admin: Sequence[str] = (),
    log_file: str | None = None,
    driver: Driver | None = None,
    state: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
) -> Server:
    """*server* with what the command line adds (endpoints) or replaces (all else). Raises ConfigError."""
    problems: list[Problem] = []
    added: tuple[EndpointConfig, ...] = ()
    try:
        added = parse_endpoints(endpoints)
    except ConfigError as error:
        problems += error.problems
    for flag, values in (("--listen", listen), ("--admin", admin)):
        problems += [Problem(wrong, flag) for wrong in map(an_address, values) if wrong]
    names = {e.name for e in server.endpoints}
    problems += [
        Problem(f"endpoint {e.name!r} is in the configuration file too", "--endpoint") for e in added if e.name in names
    ]
    if (tls_cert is None) != (tls_key is None):
        problems.append(Problem("give both or neither", "--tls-cert, --tls-key"))
    if problems:
        raise ConfigError(problems)
    changes: dict[str, Any] = {"endpoints": server.endpoints + added}
    listeners = server.listeners
    if listen:
        listeners = tuple(attrs.evolve(listeners[0], address=address) for address in listen)
    if tls_cert is not None and tls_key is not None:
        pair = TlsFiles(cert=tls_cert, key=tls_key)
        listeners = tuple(attrs.evolve(one, tls=pair) for one in listeners)
    changes["listeners"] = listeners
    if admin:
        changes["admin"] = attrs.evolve(server.admin, addresses=tuple(admin))
    if log_file is not None:
        changes["log"] = attrs.evolve(server.log, file=log_file)
    if driver is not None:
        changes["driver"] = driver
    if state is not None:
        changes["cluster"] = attrs.evolve(server.cluster or ClusterConfig(), state=state)
    return attrs.evolve(server, **changes)


# -- printing ------------------------------------------------------------------------------------------------------


def plain(value: Any, kind: Any) -> Any:
    """Back to what the file says, in the file's notation."""
    if value is None or kind is Any:
        return value
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(k for k in get_args(kind) if k is not type(None))
    if kind is Duration:
        return format_duration(value)
    if kind is Size:
        return format_size(value)
    if attrs.has(type(value)):
        hints = get_type_hints(type(value))
        return {f.name: plain(getattr(value, f.name), hints[f.name]) for f in attrs.fields(type(value))}
    if isinstance(value, tuple):
        return [plain(item, get_args(kind)[0]) for item in value]
    if isinstance(value, dict):
        return {name: plain(item, get_args(kind)[1]) for name, item in value.items()}
    return value


def dump(server: Server) -> str:
    """*server* as YAML that `parse` reads back to the same. Holds no secret: files of keys appear by name."""
    return str(yaml.safe_dump(plain(server, Server), sort_keys=False, allow_unicode=True, width=120))


def _kind(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        return _kind(next(k for k in get_args(kind) if k is not type(None)))
    if get_origin(kind) is Literal:
        return " or ".join(f"`{v}`" for v in get_args(kind))
    if get_origin(kind) is tuple:
        return f"list of {_kind(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"mapping of {_kind(get_args(kind)[1])}"
    names = {
        str: "string",
        int: "whole number",
        float: "number",
        Any: "any value",
        bool: "true/false",
        Duration: "duration",
        Size: "size",
    }
    return names.get(kind) or f"[{kind.__name__}](#{kind.__name__.lower()})"


def sections(root: type = Server) -> list[type]:
    """Every class of the schema *root*, in the order in which the file mentions them."""
    found: list[type] = [root]
    for cls in found:
        for kind in get_type_hints(cls).values():
            for inner in (kind, *get_args(kind)):
                if isinstance(inner, type) and attrs.has(inner) and inner not in found:
                    found.append(inner)
    return found


def reference() -> str:
    """The text of docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "`llmgw server --config FILE` reads one YAML file; `examples/server.yaml` shows every key. Unknown keys, keys that",
        "occur twice and values of another type are refused: all problems at once, each with file, line and path, exit",
        "code 2. `--print-config` prints what is in force. Flags: `--endpoint` adds engines, `--listen`, `--admin`,",
        "`--log-file`, `--tls-cert` with `--tls-key`, `--driver` and `--state` replace what the file says.",
        "",
        f"Durations are written as in Go: {', '.join(f'`{d}`' for d in ('100ms', '30s', '1m30s'))}. Sizes: `64MiB`,"
        " `64KB` (decimal), or bytes. Secrets",
        "are not in the file: `api_key_file` names the file that holds one. Made by `python -m llmgw.config`.",
    ]
    return "\n".join([*lines, *tables(Server, "##")]) + "\n"


def tables(root: type, heading: str) -> list[str]:
    """Lines of Markdown: a heading and a table of keys for every class of the schema *root*."""
    lines = []
    for cls in sections(root):
        lines += ["", f"{heading} {cls.__name__}", "", (cls.__doc__ or "").split("\n")[0], ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        hints = get_type_hints(cls)
        for f in attrs.fields(cls):
            lines.append(f"| `{f.name}` | {_kind(hints[f.name])} | {_default(f, hints)} | {f.metadata['meaning']} |")
    return lines


def _default(f: attrs.Attribute[Any], hints: dict[str, Any]) -> str:
    if f.default is attrs.NOTHING:
        return "required"
    value: Any = f.default
    if hasattr(value, "factory"):
        value = value.factory()
    if value is None:
        return "unset"
    if attrs.has(type(value)) or (isinstance(value, tuple) and value and attrs.has(type(value[0]))):
        return "see there"
    text = yaml.safe_dump(plain(value, hints[f.name]), default_flow_style=True).splitlines()[0]
    return f"`{text}`"


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201
