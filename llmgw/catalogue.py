"""The catalogue's file, `cluster.yaml`: models, where they may run and how their requests are routed.

The placement half is `llmgw.control.catalog`, the routing half `llmgw.config.ModelPolicy`, under `routing`. Server and
tests read it here; every problem is reported, each with file, line and path.
"""

# ruff: noqa: RUF009 -- `key` is attrs.field, which ruff does not recognise through a call

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import msgspec

from llmgw.config import Document, ModelPolicy, Server, converter, plain, tables
from llmgw.control.catalog import Catalogue, Change, ModelSpec, diff, problems
from llmgw.endpoint import Model
from llmgw.engines import ENGINES
from llmgw.errors import ConfigError, Problem
from llmgw.routing.profiles import profiles
from llmgw.schema import key


@attrs.frozen(kw_only=True)
class CatalogueModel(ModelSpec):
    """One model: placement and routing."""

    routing: ModelPolicy = key("How its requests are routed.", attrs.Factory(ModelPolicy))

    def model(self) -> Model:
        """What endpoints of it serve; aliases come from the policy."""
        return Model(name=self.name, max_model_len=self.max_model_len)


@attrs.frozen(kw_only=True)
class CatalogueFile(Catalogue):
    """The whole file."""

    models: tuple[CatalogueModel, ...] = key("What shall be served.", ())


def parse(text: str, server: Server, file: str = "") -> tuple[CatalogueModel, ...]:
    """The models in *text*, which must fit what *server* defines. Raises ConfigError with every problem."""
    document = Document(text, file)
    found, wrong = document.structure(CatalogueFile)
    if found is not None:
        wrong = [*wrong, *problems(found.models, document.problem, tuple(ENGINES.all()))]
        wrong += _routing(found.models, document, server)
    if found is None or wrong:
        raise ConfigError(sorted(wrong, key=lambda p: p.line))
    return found.models


def _routing(models: Sequence[CatalogueModel], document: Document, server: Server) -> Iterator[Problem]:
    """Names that mean nothing, or two things."""
    try:
        known = set(profiles(server.routing.profiles))
    except ConfigError:
        known = set()  # the server's own file says so already
    static = {m.name: e.name for e in server.endpoints for m in e.models}
    owner = {name: f"model {name!r} of the server's file" for name in (*server.models, *static)}
    owner |= {a: f"model {n!r} of the server's file" for n, p in server.models.items() for a in p.aliases}
    for i, model in enumerate(models):
        if model.name in owner:
            yield document.problem(("models", i, "name"), f"{model.name!r} is taken by {owner[model.name]}")
    owner |= {m.name: f"model {m.name!r}" for m in models}
    names = {*owner, *(m.name for m in models)}
    for i, model in enumerate(models):
        here, routing = ("models", i, "routing"), model.routing
        for j, alias in enumerate(routing.aliases):
            if alias in owner:
                yield document.problem((*here, "aliases", j), f"alias {alias!r} is taken by {owner[alias]}")
            owner.setdefault(alias, f"an alias of model {model.name!r}")
        if routing.profile and known and routing.profile not in known:
            text = f"unknown profile {routing.profile!r}; known: {', '.join(sorted(known))}"
            yield document.problem((*here, "profile"), text)
        if routing.pipeline and routing.pipeline not in server.pipelines:
            text = f"there is no pipeline {routing.pipeline!r}; defined: {', '.join(server.pipelines) or 'none'}"
            yield document.problem((*here, "pipeline"), text)
        if model.name in routing.fallback or model.name in routing.canary:
            yield document.problem(here, "names itself as its fallback or canary")
        for name in (*routing.fallback, *routing.canary):
            if name not in names:
                yield document.problem(here, f"names model {name!r}, which nobody defines")


# -- to and from the store and the API ---------------------------------------------------------------------------------


def to_plain(model: CatalogueModel) -> dict[str, Any]:
    """As the file writes it, without what is as it would be anyway."""
    return _without_defaults(model)


def encode(model: CatalogueModel) -> bytes:
    return msgspec.json.encode(to_plain(model))


def decode(value: bytes) -> CatalogueModel:
    """Raises cattrs.BaseValidationError for what another version wrote and this one cannot read."""
    return converter().structure(msgspec.json.decode(value), CatalogueModel)


def _without_defaults(value: Any) -> dict[str, Any]:
    whole: dict[str, Any] = plain(value, type(value))
    found = {}
    for field in attrs.fields(type(value)):
        default: Any = field.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type] # a class, for all that its stub says
            default = default.factory()
        mine = getattr(value, field.name)
        if default is attrs.NOTHING or mine != default:
            found[field.name] = [_without_defaults(s) for s in mine] if field.name == "shapes" else whole[field.name]
            if attrs.has(type(mine)):
                found[field.name] = _without_defaults(mine)
    return found


def changes(before: Iterable[CatalogueModel], after: Iterable[CatalogueModel]) -> list[Change]:
    """What applying *after* would change; of `routing` every key by itself."""
    return [attrs.evolve(c, fields=tuple(_fields(c))) for c in diff(before, after)]


def _fields(change: Change) -> Iterator[tuple[str, Any, Any]]:
    for path, old, new in change.fields:
        if not isinstance(new, ModelPolicy) or not isinstance(old, ModelPolicy):
            yield path, old, new
            continue
        for field in attrs.fields(ModelPolicy):
            one, other = getattr(old, field.name), getattr(new, field.name)
            if one != other:
                yield f"{path}.{field.name}", plain(one, type(one)), plain(other, type(other))


# -- the page ----------------------------------------------------------------------------------------------------------


def reference() -> str:
    """The text of docs/catalogue.md."""
    lines = [
        "# The catalogue's file",
        "",
        "`llmgw ctl apply -f FILE` makes a YAML file the catalogue; `examples/cluster.yaml` shows it at work, [ctl.md](ctl.md) the",
        "commands. Unknown keys, keys that occur twice and values of another type are refused, all problems at once, and so are names",
        "that the server's own file uses. Made by `python -m llmgw.catalogue`.",
    ]
    return "\n".join([*lines, *tables(CatalogueFile, "##")]) + "\n"


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201
