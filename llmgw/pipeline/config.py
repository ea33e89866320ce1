"""A pipeline as it is configured: the schema, what makes it usable, and the Coordinator's file translated to ours.

`PipelineConfig` is a section of the server's file. `build` makes its steps, or says everything that is wrong with it.
`translate` takes the Coordinator's document (`gateway`, `pipeline`, `steps`) and its environment overrides and gives the
plain document of a `server.yaml`. Problems carry their path into the document that the operator wrote.
"""

# ruff: noqa: RUF009 -- `option` is attrs.field, which ruff does not recognise through a call

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs

from llmgw.errors import ConfigError, Problem
from llmgw.pipeline import params
from llmgw.pipeline.params import option
from llmgw.pipeline.policy import FailurePolicy
from llmgw.pipeline.step import EC_CONNECTORS, KV_CONNECTORS, STEPS, Step
from llmgw.plugins import Registry
from llmgw.units import Duration, Size, parse_duration

Place = tuple[str | int, ...]
"""A path into the document."""

COMMON = ("kv_connector", "ec_connector", "use_openai_format")
"""Set for the whole pipeline, handed to every step that has them; a step's own win."""

TRANSLATED = "coordinator"
"""Name of the pipeline that a Coordinator's file becomes."""


def _positive(value: float) -> str | None:
    return None if value > 0 else "must be more than 0"


def _address_or_none(value: str) -> str | None:
    try:
        params.http_address(value)
    except ValueError as error:
        return str(error) if value else None
    return None


@attrs.frozen
class StepConfig:
    """One step: its type, and its parameters as docs/coordinator.md lists them."""

    type: str = option("Name of the step.")
    params: dict[str, Any] = option("Its parameters.", attrs.Factory(dict))


@attrs.frozen
class PipelineConfig:
    """A chain of phases over pools of specialised engines; docs/coordinator.md explains it."""

    steps: tuple[StepConfig, ...] = option(
        "In this order. The last one must answer (`decode`).",
        (StepConfig(type="prefill"), StepConfig(type="decode")),
    )
    gateway: str = option(
        "Unset: each phase goes to an endpoint chosen here. http://HOST:PORT: each phase is POSTed there with `EPP-Profile`.",
        "",
        check=_address_or_none,
    )
    kv_connector: str = option("How KV blocks get from prefill to decode.", "kv-shared-storage")
    ec_connector: str = option("How encoder outputs get to prefill.", "ec-shared-storage")
    use_openai_format: bool = option("Encode and prefill legs as OpenAI bodies; false: tokens in.", True)
    transfer_fields: Literal["refuse", "strip"] = option(
        "A client's own transfer, bootstrap and rank fields: 400 `forbidden_field`, or taken out.", "refuse"
    )
    disaggregate: Literal["auto", "always", "never"] = option(
        "Whether prefill and decode run on two endpoints: where that is quicker, always, or never.", "auto"
    )
    kv_bytes_per_token: Size = option(
        "KV cache of one token, all layers: what a hand-over moves (128 KiB: an 8B model with 8 KV heads in bf16).",
        Size(128 << 10),
        check=_positive,
    )
    link_speed: dict[str, Size] = option(
        "Bytes a second by fabric (`25GB`), until it has been measured. Unset: 12.5GB.", attrs.Factory(dict)
    )
    leg_timeout: Duration = option(
        "For a whole encode or prefill call. Decode has the model's own time limits.", Duration(60.0), check=_positive
    )
    bootstrap_port: int = option("Of kv-sglang and kv-mooncake, where an endpoint does not say.", 8998, check=_positive)
    on_failure: FailurePolicy = option("What happens when a phase fails.", attrs.Factory(FailurePolicy))


@attrs.frozen
class Pipeline:
    """Ready to run: `llmgw.pipeline.run.run(pipeline.steps, …)`."""

    config: PipelineConfig
    steps: tuple[Step, ...]


def build(config: PipelineConfig) -> Pipeline:
    """The steps of *config*. Raises ConfigError with every problem; `where` is its path inside the pipeline."""
    steps, found = _make(config)
    if found:
        raise ConfigError([Problem(message, _dotted(place)) for place, message in found])
    return Pipeline(config, tuple(steps))


def _make(config: PipelineConfig) -> tuple[list[Step], list[tuple[Place, str]]]:
    """The steps that can be made, and everything that is wrong."""
    found = list(_problems(config))
    steps: list[Step] = []
    for index, told in enumerate(config.steps):
        if told.type in STEPS.all():
            given = _parameters(config, told)
            bad = list(_wrong(told.type, given, ("steps", index, "params")))
            found += bad
            if not bad:
                steps.append(STEPS.make(told.type, given))
    return steps, found


def _parameters(config: PipelineConfig, told: StepConfig) -> dict[str, Any]:
    """What the step's constructor gets: its own parameters, the pipeline's where it has them."""
    accepted = inspect.signature(STEPS.all()[told.type]).parameters
    common: dict[str, tuple[str, Registry[Any]]] = {
        "kv_connector": (config.kv_connector, KV_CONNECTORS),
        "ec_connector": (config.ec_connector, EC_CONNECTORS),
    }
    given: dict[str, Any] = {
        key: name for key, (name, known) in common.items() if key in accepted and name in known.all()
    }
    if "use_openai_format" in accepted:
        given["use_openai_format"] = config.use_openai_format
    # a parameter of the whole pipeline may be written on any step: where it means nothing it is ignored
    given.update((k, v) for k, v in told.params.items() if v is not None and (k in accepted or k not in COMMON))
    for key, (_, known) in common.items():
        name = given.get(key)
        if isinstance(name, str) and (cls := known.all().get(name)) is not None:
            takes_port = "bootstrap_port" in inspect.signature(cls).parameters
            given[key] = cls(**({"bootstrap_port": config.bootstrap_port} if takes_port else {}))
    return given


def _wrong(kind: str, given: dict[str, Any], place: Place) -> Iterator[tuple[Place, str]]:
    """Everything that is wrong with a step's parameters, one by one: a constructor would stop at the first."""
    cls: Any = STEPS.all()[kind]
    signature = inspect.signature(cls).parameters
    fields = {field.name: field for field in attrs.fields(cls)} if attrs.has(cls) else {}
    for key in given:
        if key not in signature:
            yield (*place, key), f"step {kind} has no parameter {key!r}; known: {', '.join(signature) or 'none'}"
    for key, parameter in signature.items():
        if key not in given:
            if parameter.default is inspect.Parameter.empty:
                meaning = fields[key].metadata.get("meaning", "") if key in fields else ""
                yield (*place, key), f"step {kind} needs {key}. {meaning}".rstrip()
        elif key in fields and callable(convert := fields[key].converter):
            try:
                convert(given[key])
            except (ValueError, TypeError) as error:
                yield (*place, key), str(error)


def _problems(config: PipelineConfig) -> Iterator[tuple[Place, str]]:
    """What is wrong with the pipeline as a whole."""
    known = STEPS.all()
    rendered = False
    for index, told in enumerate(config.steps):
        if told.type not in known:
            yield ("steps", index, "type"), f"unknown step {told.type!r}; known: {', '.join(known)}"
            continue
        rendered = rendered or told.type == "render"
        own = told.params.get("use_openai_format")
        openai = config.use_openai_format if own is None else own
        if told.type in ("encode", "prefill") and openai is False and not rendered:
            yield (
                ("steps", index),
                f"use_openai_format false sends token ids, and nothing before {told.type} makes them: add a render step",
            )
    answering = [i for i, told in enumerate(config.steps) if getattr(known.get(told.type), "ends", False)]
    if not answering:
        yield ("steps",), "no step answers the client: add a decode step at the end"
    elif answering[0] != len(config.steps) - 1:
        yield ("steps", answering[0] + 1), "never runs: the decode step before it has answered"
    for name, registry in (("kv_connector", KV_CONNECTORS), ("ec_connector", EC_CONNECTORS)):
        value = getattr(config, name)
        if value not in registry.all():
            yield (name,), f"unknown {name} {value!r}; known: {', '.join(registry.all())}"
    if not 1 <= config.bootstrap_port <= 65535:
        yield ("bootstrap_port",), f"{config.bootstrap_port} is no port"


# -- the Coordinator's file ----------------------------------------------------------------------------------------

_SCALARS: dict[tuple[str, ...], str] = {
    ("log_level",): "int",
    ("server", "listen_addr"): "str",
    ("server", "read_timeout"): "duration",
    ("server", "write_timeout"): "duration",
    ("server", "shutdown_timeout"): "duration",
    ("server", "max_request_body_size"): "int",
    ("gateway", "address"): "str",
    ("gateway", "max_idle_conns_per_host"): "int",
    ("gateway", "idle_conn_timeout"): "duration",
    ("gateway", "timeout"): "duration",
    ("pipeline", "kv_connector"): "str",
    ("pipeline", "ec_connector"): "str",
    ("pipeline", "use_openai_format"): "bool",
}
"""Every scalar of the file, and its type. Each can be overridden: COORDINATOR_SERVER_LISTEN_ADDR, …"""

OURS = ("steps", "on_failure", "transfer_fields")
"""Keys of its `pipeline` section beside the scalars; the last two are llmgw's own."""

UNUSED: dict[tuple[str, ...], str] = {
    ("log_level",): "what is logged does not depend on a level here",
    (
        "server",
        "write_timeout",
    ): "an answer has as long as it takes; `timeouts` of server.yaml bounds what does not move",
    ("gateway", "max_idle_conns_per_host"): "the pool of connections needs no limit",
    ("gateway", "idle_conn_timeout"): "idle connections are kept for less than engines keep theirs",
}
"""Accepted, without effect, and why."""


def is_coordinator(document: object) -> bool:
    """Whether a parsed file is the Coordinator's: by its top-level keys."""
    return (
        isinstance(document, dict)
        and "version" not in document
        and ("pipeline" in document or "gateway" in document or "steps" in document)
        and not {"listeners", "endpoints", "models"} & set(document)
    )


@attrs.frozen
class Translated:
    """*document* is a server.yaml in plain values (None where there are problems); *notes* are worth a line of log."""

    document: dict[str, Any] | None
    problems: tuple[tuple[Place, str], ...]
    notes: tuple[str, ...]


def translate(document: Mapping[str, Any], environ: Mapping[str, str], *, endpoints: bool = False) -> Translated:
    """The Coordinator's *document* as ours. *endpoints*: engines are configured elsewhere, so no gateway is needed."""
    problems: list[tuple[Place, str]] = []
    notes: list[str] = []
    _section(document, "server", problems)
    _section(document, "gateway", problems)
    values, given = _scalars(document, environ, problems)
    pipeline = _section(document, "pipeline", problems)
    steps_at: Place = ("pipeline", "steps")
    told = pipeline.get("steps")
    if told is None and "steps" in document:
        steps_at, told = ("steps",), document["steps"]
    steps = list(_steps(told, steps_at, problems))
    problems += _unknown(document)
    notes += [f"{'.'.join(key)} has no effect: {UNUSED[key]}" for key in UNUSED if key in given]
    gateway = values[("gateway", "address")]
    if not gateway and not endpoints:
        problems.append(
            (("gateway", "address"), "is missing: name the gateway, or give engines (--endpoint) to route natively")
        )
    elif gateway and (wrong := _address_or_none(gateway)):
        problems.append((("gateway", "address"), wrong))
    size = values[("server", "max_request_body_size")]
    if not 0 <= size < 1 << 33:
        problems.append((("server", "max_request_body_size"), f"{size} MB is no size of a body"))
    made: dict[str, Any] = {
        "steps": steps,
        "gateway": gateway,
        "kv_connector": values[("pipeline", "kv_connector")] or "kv-shared-storage",
        "ec_connector": values[("pipeline", "ec_connector")] or "ec-shared-storage",
        "use_openai_format": values[("pipeline", "use_openai_format")],
        "transfer_fields": pipeline.get("transfer_fields", "strip"),
        "leg_timeout": values[("gateway", "timeout")],
        "bootstrap_port": _port(environ, notes),
        "on_failure": pipeline.get("on_failure", {"prefill_failed": "fail", "decode_lost": "fail"} if gateway else {}),
    }
    problems += _usable(made, steps_at, problems)
    if problems:
        return Translated(None, tuple(problems), tuple(notes))
    return Translated(
        {
            "version": 1,
            "listeners": [{"address": values[("server", "listen_addr")]}],
            "limits": {"body": (size or 64) << 20, "body_grace": values[("server", "read_timeout")]},
            "timeouts": {"drain": values[("server", "shutdown_timeout")]},
            "pipelines": {TRANSLATED: made},
            "pipeline": TRANSLATED,
        },
        (),
        tuple(notes),
    )


_DEFAULTS: dict[tuple[str, ...], Any] = {
    ("log_level",): 2,
    ("server", "listen_addr"): ":8080",
    ("server", "read_timeout"): "30s",
    ("server", "write_timeout"): "2m0s",
    ("server", "shutdown_timeout"): "25s",
    ("server", "max_request_body_size"): 64,
    ("gateway", "address"): "",
    ("gateway", "max_idle_conns_per_host"): 100,
    ("gateway", "idle_conn_timeout"): "1m30s",
    ("gateway", "timeout"): "60s",
    ("pipeline", "kv_connector"): "",
    ("pipeline", "ec_connector"): "",
    ("pipeline", "use_openai_format"): True,
}


def coordinator_keys() -> Iterator[tuple[str, str, Any, str]]:
    """(key, type, default, what becomes of it) of the Coordinator's scalars, for the reference page."""
    for key, kind in _SCALARS.items():
        yield ".".join(key), kind, _DEFAULTS[key], UNUSED.get(key, "")


def _section(document: Mapping[str, Any], key: str, problems: list[tuple[Place, str]]) -> dict[str, Any]:
    found = document.get(key)
    if found is not None and not isinstance(found, dict):
        problems.append(((key,), "is not a mapping"))
    return found if isinstance(found, dict) else {}


def _scalars(
    document: Mapping[str, Any], environ: Mapping[str, str], problems: list[tuple[Place, str]]
) -> tuple[dict[tuple[str, ...], Any], set[tuple[str, ...]]]:
    """Every scalar: the environment's, else the file's, else the default; and which were given at all."""
    values: dict[tuple[str, ...], Any] = {}
    given: set[tuple[str, ...]] = set()
    for key, kind in _SCALARS.items():
        name = "COORDINATOR_" + "_".join(key).upper()
        place: object = document.get(key[0]) if len(key) == 2 else document
        value = place.get(key[-1]) if isinstance(place, Mapping) else None
        source: Place = key
        if name in environ:
            value, source = _from_text(environ[name], kind), (name,)
        if value is None:
            values[key] = _DEFAULTS[key]
            continue
        given.add(key)
        try:
            _TYPES[kind](value)
        except ValueError as error:
            problems.append((source, str(error)))
            values[key] = _DEFAULTS[key]
            continue
        values[key] = int(value) if kind == "int" else value
    return values, given


def _duration(value: Any) -> float:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a duration; write a string with a unit: 30s, 1m30s, 100ms")
    return parse_duration(value)


_TYPES: dict[str, Any] = {
    "int": params.integer(-(1 << 53)),
    "str": params.string,
    "bool": params.boolean,
    "duration": _duration,
}


def _from_text(text: str, kind: str) -> Any:
    """The value of an environment variable; the text itself where it is none, so that its check says so."""
    if kind == "bool":
        return {"true": True, "1": True, "t": True, "false": False, "0": False, "f": False}.get(text.lower(), text)
    if kind == "int":
        return int(text) if text.strip().lstrip("-").isdecimal() else text
    return text


def _steps(told: Any, place: Place, problems: list[tuple[Place, str]]) -> Iterator[dict[str, Any]]:
    if not isinstance(told, list):
        problems.append((place, "is missing: name the steps of the pipeline" if told is None else "is not a list"))
        return
    for index, step in enumerate(told):
        if not isinstance(step, dict) or not isinstance(step.get("type"), str):
            problems.append(((*place, index), "is not a step: write `type: NAME`"))
            continue
        for key in step:
            if key not in ("type", "params"):
                problems.append(((*place, index, key), f"unknown key {key!r}; known: type, params"))
        given = step.get("params")
        if given is not None and not isinstance(given, dict):
            problems.append(((*place, index, "params"), "is not a mapping"))
            given = None
        yield {"type": step["type"], "params": dict(given or {})}


def _unknown(document: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    sections = {key[0] for key in _SCALARS if len(key) == 2}
    tops = {key[0] for key in _SCALARS} | {"steps"}
    for key in document:
        if key not in tops:
            yield (key,), f"unknown key {key!r}; known: {', '.join(sorted(tops))}"
    for top in sorted(sections):
        section = document.get(top)
        known = {key[1] for key in _SCALARS if key[0] == top} | set(OURS if top == "pipeline" else ())
        for key in section if isinstance(section, dict) else ():
            if key not in known:
                yield (top, key), f"unknown key {key!r}; known: {', '.join(sorted(known))}"


def _port(environ: Mapping[str, str], notes: list[str]) -> int:
    text = environ.get("SGLANG_BOOTSTRAP_PORT", "")
    if text.isdecimal() and 1 <= int(text) <= 65535:
        return int(text)
    if text:
        notes.append(f"SGLANG_BOOTSTRAP_PORT={text!r} is no port: 8998 is used")
    return 8998


def _usable(made: dict[str, Any], steps_at: Place, problems: list[tuple[Place, str]]) -> Iterator[tuple[Place, str]]:
    """What `build` would say, with places of the Coordinator's file; unless the steps cannot even be read."""
    if any(place[: len(steps_at)] == steps_at for place, _ in problems):
        return
    config = PipelineConfig(
        steps=tuple(StepConfig(**step) for step in made["steps"]),
        kv_connector=made["kv_connector"],
        ec_connector=made["ec_connector"],
        use_openai_format=made["use_openai_format"],
    )
    for place, message in _make(config)[1]:
        yield (*steps_at, *place[1:]) if place[0] == "steps" else ("pipeline", *place), message


def _dotted(place: Place) -> str:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text
