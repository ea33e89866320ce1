"""The catalogue: models that shall be served, how many replicas of each, in which shapes. What `ctl apply -f` sends.

This is the placement half of a model; how it is routed (aliases, limits, profile) is added by the layer that loads the
file. Checks that need more than one key are here, so that the file, `ctl model add` and the API refuse the same things.
"""

# ruff: noqa: RUF009 -- `key` is attrs.field, which ruff does not recognise through a call

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import msgspec

from llmgw.errors import Problem
from llmgw.placement.demand import GGUF_ENGINES, SIM, Demand, Shape
from llmgw.request import Phase
from llmgw.schema import key, not_empty, not_negative
from llmgw.units import Duration, format_duration

Path = tuple["str | int", ...]

OWN_FLAGS = frozenset(
    {
        "--host", "--port", "--model", "--model-path", "-m", "--served-model-name", "--alias", "--api-key", "--api-key-file",
        "--tensor-parallel-size", "-tp", "--tp", "--tp-size", "--pipeline-parallel-size", "-pp", "--pp-size",
        "--data-parallel-size", "-dp", "--dp-size", "--nnodes", "--node-rank", "--master-addr", "--master-port",
        "--dist-init-addr", "--device-ids", "--gpu-memory-utilization", "--mem-fraction-static", "--max-model-len",
        "--context-length", "-c", "--ctx-size", "--kv-cache-dtype", "--enforce-eager", "--disable-cuda-graph",
        "--enable-expert-parallel", "--ep-size",
    }
)  # fmt: skip
"""The agent sets these from the shape and the assignment; twice is an error in some engines and a riddle in others."""

OWN_ENV = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NCCL_IB_HCA", "VLLM_PORT", "VLLM_HOST_IP")


SWITCHES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        "kv_dtype": ("--kv-cache-dtype", "{}"),
        "eager": ("--enforce-eager",),
        "expert_parallel": ("--enable-expert-parallel",),
    },
    "sglang": {
        "kv_dtype": ("--kv-cache-dtype", "{}"),
        "eager": ("--disable-cuda-graph",),
        "expert_parallel": ("--ep-size", "{}"),
    },
}
"""How engines spell the keys of a shape that the memory model reads; `{}` is the value (of `expert_parallel`: the ranks)."""


def switches(engine: str, shape: Shape) -> tuple[str, ...]:
    """The flags that make the engine do what the memory model reckoned with."""
    values = {
        "kv_dtype": shape.kv_dtype,
        "eager": shape.eager,
        "expert_parallel": shape.expert_parallel and shape.ranks,
    }
    spelt = SWITCHES.get(engine, {})
    return tuple(part.format(value) for name, value in values.items() if value for part in spelt.get(name, ()))


@attrs.frozen(kw_only=True)
class ModelSpec(Demand):
    """One model of the catalogue."""

    replicas: int = key("How many shall run.", 1, check=not_negative)
    phases: tuple[Phase, ...] = key("What its replicas do.", ("prefill", "decode"), check=not_empty)
    band: str = key("Band of requests that name none; empty = the server's default.", "")
    grace: Duration = key(
        "How long requests in flight may finish when a replica is stopped.", Duration(900.0), check=not_negative
    )
    flags: tuple[str, ...] = key("Appended to the engine's command line as they are.", ())
    env: dict[str, str] = key("Environment of the engine.", attrs.Factory(dict))

    def shape(self, label: str) -> Shape | None:
        return next((s for s in self.shapes if s.label == label), None)

    def flags_of(self, shape: Shape) -> tuple[str, ...]:
        return self.flags + shape.flags

    def env_of(self, shape: Shape) -> dict[str, str]:
        return self.env | shape.env


@attrs.frozen(kw_only=True)
class Catalogue:
    """The whole file."""

    version: Literal[1] = key("Of this schema: always 1, always there.")
    models: tuple[ModelSpec, ...] = key("What shall be served.", ())


def problems(
    models: Sequence[ModelSpec], at: Callable[[Path, str], Problem], engines: Collection[str] = ()
) -> list[Problem]:
    """Everything that single keys cannot tell. *at* makes a problem from a path and a message (it knows file and line).

    *engines*: those that this program can start; empty = not checked.
    """
    found = []
    seen: dict[str, int] = {}
    for i, model in enumerate(models):
        if seen.setdefault(model.name, i) != i:
            found.append(
                at(
                    ("models", i, "name"),
                    f"model {model.name!r} is defined twice (first as models[{seen[model.name]}])",
                )
            )
        found += [at(("models", i, *path), message) for path, message in _model(model, engines)]
    return found


def plainly(path: Path, message: str) -> Problem:
    """For `problems`, where there is no file: the dotted path alone."""
    where = ""
    for part in path:
        where += f"[{part}]" if isinstance(part, int) else (f".{part}" if where else part)
    return Problem(message, where)


def _model(model: ModelSpec, engines: Collection[str]) -> Iterator[tuple[Path, str]]:
    if model.min_available > model.replicas:
        yield (
            ("min_available",),
            f"{model.min_available} is more than replicas {model.replicas}: no drain could ever begin",
        )
    if model.spread == "hard" and model.node_cap is not None and model.node_cap > 1:
        yield ("node_cap",), "contradicts `spread: hard`, which allows one; leave one of them out"
    if len(set(model.phases)) != len(model.phases):
        yield ("phases",), "names a phase twice"
    yield from _extras(model.flags, model.env, ())
    labels: dict[str, int] = {}
    for i, shape in enumerate(model.shapes):
        here: Path = ("shapes", i)
        if labels.setdefault(shape.label, i) != i:
            yield here, f"is called {shape.label!r}, like shapes[{labels[shape.label]}]; give one of them a name"
        yield from ((here + path, message) for path, message in _shape(model, shape, engines))


def _shape(model: ModelSpec, shape: Shape, engines: Collection[str]) -> Iterator[tuple[Path, str]]:
    engine, weights = model.engine_of(shape), model.weights_of(shape)
    if engines and engine not in engines:
        yield ("engine",), f"unknown engine {engine!r}; known: {', '.join(sorted(engines))}"
    if not weights and engine != SIM:
        yield ("weights",), f"engine {engine} needs weights: a path on the nodes or a repository id"
    if model.fetch and weights.startswith(("/", ".")):
        yield (
            ("weights",),
            f"{weights!r} is a path; `fetch: true` needs a repository id such as Qwen/Qwen2.5-7B-Instruct",
        )
    degrees = shape.tp * shape.pp * shape.dp
    if shape.cpu:
        if degrees > 1 or shape.nodes > 1:
            yield ("cpu",), "a shape on the CPU has tp, pp, dp and nodes of 1"
        if shape.gpus:
            yield ("gpus",), "a shape on the CPU names no GPUs"
        if engine not in GGUF_ENGINES and engine != SIM:
            yield ("cpu",), f"engine {engine} is not run on the CPU; llama-server is"
    if degrees % shape.nodes:
        yield (
            ("nodes",),
            f"tp {shape.tp} x pp {shape.pp} x dp {shape.dp} = {degrees} GPUs are not divisible by {shape.nodes} nodes",
        )
    elif not shape.cpu and shape.share % min(shape.tp, shape.share):
        yield ("tp",), f"{shape.share} GPUs on a node do not hold whole groups of tp {shape.tp}"
    elif shape.tp > max(1, shape.share) and shape.nodes > 1:
        yield (
            ("tp",),
            f"tp {shape.tp} would span nodes of {shape.share} GPUs: use tp {shape.share} and pp for the nodes",
        )
    if shape.nodes > 1 and engine in GGUF_ENGINES:
        yield ("nodes",), f"{engine} does not run over several nodes"
    if shape.dp > 1 and engine in GGUF_ENGINES:
        yield ("dp",), f"{engine} has no data parallelism: use more replicas"
    if engine not in SWITCHES:
        for name in ("kv_dtype", "eager", "expert_parallel"):
            if getattr(shape, name):
                yield (name,), f"engine {engine} has no such switch; {' and '.join(sorted(SWITCHES))} have"
    if shape.fabric and shape.nodes == 1:
        yield ("fabric",), "only a shape over several nodes has a fabric"
    if shape.shared:
        if shape.memory_fraction is None:
            yield ("memory_fraction",), "a shared shape must say which part of the GPU it takes"
        if shape.nodes > 1:
            yield ("shared",), "a shape over several nodes has its GPUs for itself"
    yield from _extras(shape.flags, shape.env, ())


def _extras(flags: Iterable[str], env: Mapping[str, str], here: Path) -> Iterator[tuple[Path, str]]:
    for i, flag in enumerate(flags):
        if flag.partition("=")[0] in OWN_FLAGS:
            yield (
                (*here, "flags", i),
                f"{flag.partition('=')[0]} is set from the shape and the assignment; leave it out",
            )
    for name in env:
        if name in OWN_ENV or name.startswith("LLMGW_"):
            yield (*here, "env", name), "is set by the agent; leave it out"


# -- what an edit does -----------------------------------------------------------------------------------------------

BUILT = ("engine", "weights", "dtype", "quantisation", "max_model_len", "phases", "flags", "env")
"""Keys of the model that a running engine was started with; the others take effect without a restart."""

PLACED = frozenset({"name", "gpus", "island", "fabric", "min_rails", "strict_rails"})
"""Keys of a shape that only placement reads: a replica that is placed already need not move."""

_ENCODER = msgspec.json.Encoder(order="deterministic")


def fingerprint(model: ModelSpec, shape: Shape) -> str:
    """Names everything that a replica of that shape is started with. Another fingerprint = it must be replaced."""
    parts = {name: getattr(model, name) for name in BUILT}
    parts["shape"] = {a.name: getattr(shape, a.name) for a in attrs.fields(Shape) if a.name not in PLACED}
    return hashlib.sha256(_ENCODER.encode(parts)).hexdigest()[:16]


@attrs.frozen
class Change:
    """One line of `ctl diff`."""

    model: str
    kind: Literal["add", "remove", "edit"]
    fields: tuple[tuple[str, Any, Any], ...] = ()  # (path, before, after)
    restarts: bool = False  # running replicas are replaced, one at a time

    def __str__(self) -> str:
        mark = {"add": "+", "remove": "-", "edit": "~"}[self.kind]
        if self.kind != "edit":
            return f"{mark} {self.model}"
        what = ", ".join(f"{path}: {_short(old)} -> {_short(new)}" for path, old, new in self.fields)
        return f"{mark} {self.model}: {what}" + (" (replicas are replaced one at a time)" if self.restarts else "")


def diff(before: Iterable[ModelSpec], after: Iterable[ModelSpec]) -> list[Change]:
    """What applying *after* would change, by model name."""
    old, new = {m.name: m for m in before}, {m.name: m for m in after}
    found = []
    for name in sorted(old.keys() | new.keys()):
        if name not in old:
            found.append(Change(name, "add"))
        elif name not in new:
            found.append(Change(name, "remove", restarts=True))
        elif old[name] != new[name]:
            found.append(Change(name, "edit", tuple(_fields(old[name], new[name])), replaces(old[name], new[name])))
    return found


def replaces(old: ModelSpec, new: ModelSpec) -> bool:
    """Would some replica of *old* have to be replaced under *new*?"""
    for shape in old.shapes:
        other = new.shape(shape.label)
        if other is None or fingerprint(old, shape) != fingerprint(new, other):
            return True
    return False


def _fields(old: ModelSpec, new: ModelSpec) -> Iterator[tuple[str, Any, Any]]:
    for field in attrs.fields(type(new)):
        one, other = getattr(old, field.name, None), getattr(new, field.name)
        if one == other:
            continue
        if field.name != "shapes":
            yield field.name, one, other
            continue
        before, after = {s.label: s for s in one or ()}, {s.label: s for s in other}
        for label in [*before, *(name for name in after if name not in before)]:
            if before.get(label) is None or after.get(label) is None:
                yield f"shapes[{label}]", label if label in before else None, label if label in after else None
                continue
            for part in attrs.fields(Shape):
                was, now = getattr(before[label], part.name), getattr(after[label], part.name)
                if was != now:
                    yield f"shapes[{label}].{part.name}", was, now
        if list(before) != list(after) and before.keys() == after.keys():
            yield "shapes", list(before), list(after)


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    return "unset" if value is None or value in ("", [], {}) else str(value)


# -- the reference page ----------------------------------------------------------------------------------------------


def reference() -> str:
    """The tables of keys in docs/placement.md."""
    lines = []
    for title, cls in (("A model", ModelSpec), ("A shape", Shape)):
        lines += [f"### {title}", "", "| key | default | meaning |", "|---|---|---|"]
        for field in attrs.fields(cls):
            lines.append(f"| `{field.name}` | {_default(field)} | {field.metadata['meaning']} |")
        lines.append("")
    return "\n".join(lines)


def _default(field: Any) -> str:
    if field.default is attrs.NOTHING:
        return "must be given"
    value = field.default.factory() if isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type]
    if value in ("", None):
        return "empty" if value == "" else "null"
    if isinstance(value, tuple):
        return "one shape, `tp: 1`" if value == (Shape(),) else f"`[{', '.join(map(str, value))}]`"
    if field.name == "grace":
        return f"`{format_duration(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    import sys

    sys.stdout.write(reference())
