"""A scenario: engines, load, faults, what is expected of the service; read from YAML, all problems told at once."""

# ruff: noqa: RUF009 -- `key` is attrs.field, which ruff does not recognise through a call

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import attrs

from llmgw.config import Document
from llmgw.errors import ConfigError, Problem
from llmgw.request import Phase
from llmgw.schema import a_name, key, not_negative, positive
from llmgw.simengine.options import FAILURES, Options
from llmgw.units import Duration

from .load import Load, maybe_seconds, meaning, seconds

Kind = Literal["kill", "restart", "stall", "slow", "mute", "link", "skew"]

MAX_ENGINES = 1000


def a_failure(value: str) -> str | None:
    return None if value in FAILURES else f"must be one of {', '.join(FAILURES)}"


def a_share(value: float) -> str | None:
    return None if 0 <= value <= 1 else "is a share from 0 to 1"


@attrs.frozen(kw_only=True)
class EngineGroup:
    """Engines that are alike. One alone keeps the group's name, several are NAME-0, NAME-1, …"""

    name: str = key("Name of the engine, or prefix of their names.", check=a_name)
    count: int = key("How many.", 1, check=positive)
    model: str = key("Model that they serve.", "sim")
    hardware: str = key("GPU-MODEL[-tpN], such as h100-8b; instead of the rates below.", "")
    phases: tuple[Phase, ...] = key("What they do.", ("prefill", "decode"))
    fabrics: tuple[str, ...] = key("Fabrics that they are on.", ())
    prefill_tps: float = key("Prompt tokens a second.", 8000.0, check=positive)
    decode_tps: float = key("Tokens a second of one sequence alone.", 100.0, check=positive)
    batch_contention: float = key("Share by which each further sequence lengthens a step.", 0.01, check=not_negative)
    max_num_seqs: int = key("Sequences in one batch.", 256, check=positive)
    max_num_batched_tokens: int = key("Token budget of one step.", 8192, check=positive)
    max_model_len: int = key("Longest prompt and answer.", 32768, check=positive)
    num_gpu_blocks: int | None = key("KV blocks.", None)
    block_size: int = key("Tokens a block.", 16, check=positive)
    prefix_cache_blocks: int | None = key("Unreferenced blocks kept; 0: no prefix caching.", None)
    stream_interval: int = key("Tokens an event; more is faster to simulate and coarser.", 1, check=positive)
    startup_delay: Duration = attrs.field(
        default=Duration(0.0),
        converter=seconds,
        metadata=meaning("Time before it listens, at the start and after a restart."),
    )
    fail_rate: float = key("Share of requests that fail.", 0.0, check=a_share)
    failure_mode: str = key("How they fail.", "refuse", check=a_failure)

    def names(self) -> list[str]:
        return [self.name] if self.count == 1 else [f"{self.name}-{i}" for i in range(self.count)]

    def options(self, seed: int) -> Options:
        own = ("name", "count", "fabrics")
        values = {f.name: getattr(self, f.name) for f in attrs.fields(EngineGroup) if f.name not in own}
        return Options(seed=seed, prompt_tokens_details=True, **values)


@attrs.frozen(kw_only=True)
class Fault:
    """Something that goes wrong at a time, for a time."""

    at: Duration = attrs.field(converter=seconds, metadata=meaning("When.", check=not_negative))
    kind: Kind = key("kill, restart (comes back), stall, slow, mute (no metrics), link, skew (wall clock).")
    target: str = key("Engine that it happens to; link: the engine at its end, or * for all.", "*")
    lasts: Duration | None = attrs.field(
        default=None, converter=maybe_seconds, metadata=meaning("For how long; nothing: for ever.")
    )
    factor: float = key("slow: step time is multiplied by this.", 4.0, check=positive)
    latency: Duration = attrs.field(
        default=Duration(0.0), converter=seconds, metadata=meaning("link: added one way.", check=not_negative)
    )
    mode: Literal["latency", "clog", "cut"] = key("link: slower, nothing passes, or connections break.", "latency")
    seconds: float = key("skew: what is added to the wall clock.", 0.0)


@attrs.frozen(kw_only=True)
class Slo:
    """What a good answer is."""

    ttft: Duration = attrs.field(
        default=Duration(2.0), converter=seconds, metadata=meaning("First token within.", check=positive)
    )
    itl: Duration = attrs.field(
        default=Duration(0.1), converter=seconds, metadata=meaning("Mean time between tokens at most.", check=positive)
    )


@attrs.frozen(kw_only=True)
class Scenario:
    """All of a rehearsal."""

    version: Literal[1] = key("Version of this format.", 1)
    name: str = key("Its name.", "scenario", check=a_name)
    about: str = key("What it shows.", "")
    seed: int = key("Seed of all that is drawn.", 0)
    engines: tuple[EngineGroup, ...] = key("The engines.", ())
    load: tuple[Load, ...] = key("The load.", ())
    faults: tuple[Fault, ...] = key("What goes wrong.", ())
    slo: Slo = key("What a good answer is.", Slo())
    latency: Duration = attrs.field(
        default=Duration(0.0), converter=seconds, metadata=meaning("Of every link, one way.", check=not_negative)
    )
    grace: Duration = attrs.field(
        default=Duration(600.0),
        converter=seconds,
        metadata=meaning("After the last session, how long what is open may take.", check=positive),
    )
    sample: Duration = attrs.field(
        default=Duration(1.0),
        converter=seconds,
        metadata=meaning("How often the engines' state is noted.", check=positive),
    )
    server: dict[str, Any] = key(
        "Parts of the server's configuration file; endpoints are made from the engines.", attrs.Factory(dict)
    )
    expect: tuple[str, ...] = key(
        "States that must have been reached: queued, engine_queue, retried, hung_up, aborted, hit, preempted, remote_kv, engine_error, and each kind of fault.",
        (),
    )

    def engine_names(self) -> list[str]:
        return [name for group in self.engines for name in group.names()]

    def groups(self) -> Iterator[tuple[str, EngineGroup]]:
        for group in self.engines:
            for name in group.names():
                yield name, group


def check(scenario: Scenario) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Path and text of what does not fit together."""
    if not scenario.engines:
        yield ("engines",), "at least one engine is needed"
    if not scenario.load:
        yield ("load",), "at least one load is needed"
    names = scenario.engine_names()
    if len(names) > MAX_ENGINES:
        yield ("engines",), f"{len(names)} engines; at most {MAX_ENGINES}"
    for name in {name for name in names if names.count(name) > 1}:
        yield ("engines",), f"engine {name!r} is defined twice"
    for i, group in enumerate(scenario.engines):
        for problem in group.options(0).problems():
            yield ("engines", i, problem.where.removeprefix("--").replace("-", "_")), problem.message
    loads = [load.name for load in scenario.load]
    for i, load in enumerate(scenario.load):
        if loads.index(load.name) != i:
            yield ("load", i, "name"), f"load {load.name!r} is defined twice; give each a name"
        for problem in load.problems():
            yield ("load", i, problem.where), problem.message
    for i, fault in enumerate(scenario.faults):
        if fault.target not in names and not (fault.target == "*" and fault.kind in ("link", "skew")):
            yield ("faults", i, "target"), f"no engine is called {fault.target!r}; there are {', '.join(names[:20])}"
        if fault.kind == "restart" and fault.lasts is None:
            yield ("faults", i, "lasts"), "a restart needs how long it lasts"


def parse(text: str, file: str = "") -> Scenario:
    """The scenario in *text*. Raises ConfigError with every problem."""
    document = Document(text, file)
    scenario, problems = document.structure(Scenario)
    if scenario is not None and not problems:
        problems = [document.problem(path, message) for path, message in check(scenario)]
    if scenario is None or problems:
        raise ConfigError(sorted(problems, key=lambda problem: problem.line))
    return scenario


def built_in() -> list[str]:
    """Names of the scenarios that come with it."""
    return sorted(entry.name.removesuffix(".yaml") for entry in files(__package__).joinpath("scenarios").iterdir())


def where(path: str) -> Path:
    """The file that *path* means: itself, or the built-in scenario of that name."""
    found = Path(path)
    if path in built_in() and not found.exists():
        return Path(str(files(__package__).joinpath("scenarios", f"{path}.yaml")))
    return found


def pinned(path: str, seed: int) -> str:
    """The text of a scenario with *seed* for its own, so that it plays the same story for ever."""
    text = where(path).read_text(encoding="utf-8")
    line = f"seed: {seed}  # found a fault"
    changed, count = re.subn(r"^seed:.*$", line, text, flags=re.MULTILINE)
    return changed if count else f"{text.rstrip()}\n{line}\n"


def load(path: str) -> Scenario:
    """The scenario in the file at *path*, or the built-in one of that name. Paths of traces are relative to it."""
    found = where(path)
    try:
        text = found.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        known = ", ".join(built_in())
        raise ConfigError([Problem(f"scenario {path!r} cannot be read: {reason}; built in: {known}")]) from None
    scenario = parse(text, str(found))
    loads = [
        attrs.evolve(one, file=str(found.parent / one.file)) if one.file and not Path(one.file).is_absolute() else one
        for one in scenario.load
    ]
    return attrs.evolve(scenario, load=tuple(loads))
