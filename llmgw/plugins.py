"""Registry of plug-ins: one file, one plug-in.

A plug-in is a class with `api = 1`, a `name`, and a docstring whose first line goes into the reference page. Its
parameters are the keyword arguments of its constructor (an attrs class does): unknown configuration keys are refused
from them. Ours are found by importing the package that holds them; third parties' by entry points in the group
``llmgw.<kind>``. Two plug-ins of one kind and name are refused.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from llmgw.errors import ConfigError, Problem

API = 1

T = TypeVar("T")


class Registry(Generic[T]):
    """All plug-ins of one *kind* (``scorer``, ``step``, …)."""

    def __init__(self, kind: str, package: ModuleType | None = None) -> None:
        self.kind = kind
        self._package = package
        self._loaded: dict[str, type[T]] | None = None

    def add(self, cls: type[T]) -> type[T]:
        """Register *cls*. Raises ConfigError for a wrong api number, a missing or a taken name."""
        found = {} if self._loaded is None else self._loaded
        self._loaded = found
        name = getattr(cls, "name", None)
        place = f"{cls.__module__}.{cls.__qualname__}"
        if getattr(cls, "api", None) != API:
            raise ConfigError(
                [Problem(f"{self.kind} {place} declares api {getattr(cls, 'api', None)!r}; this llmgw speaks {API}")]
            )
        if not isinstance(name, str) or not name:
            raise ConfigError([Problem(f"{self.kind} {place} declares no name")])
        if name in found and found[name] is not cls:
            other = f"{found[name].__module__}.{found[name].__qualname__}"
            raise ConfigError(
                [Problem(f"{self.kind} {name!r} is declared twice: by {other} and by {place}; remove one")]
            )
        found[name] = cls
        return cls

    def all(self) -> Mapping[str, type[T]]:
        """Name → class, sorted by name."""
        if self._loaded is None:
            self._loaded = {}
            if self._package is not None:
                for info in sorted(pkgutil.iter_modules(self._package.__path__), key=lambda m: m.name):
                    module = importlib.import_module(f"{self._package.__name__}.{info.name}")
                    for value in vars(module).values():
                        if inspect.isclass(value) and value.__module__ == module.__name__ and "api" in vars(value):
                            self.add(cast("type[T]", value))
            for point in entry_points(group=f"llmgw.{self.kind}"):
                self.add(point.load())
        return dict(sorted(self._loaded.items()))

    def make(self, name: str, parameters: Mapping[str, Any], where: str = "") -> T:
        """An instance of the plug-in *name*. Raises ConfigError naming the known ones, or every unknown key."""
        known = self.all()
        if name not in known:
            raise ConfigError([Problem(f"unknown {self.kind} {name!r}; known: {', '.join(known) or 'none'}", where)])
        cls = known[name]
        accepted = list(inspect.signature(cls).parameters)
        problems = [
            Problem(f"unknown key {key!r} for {self.kind} {name!r}; known: {', '.join(accepted) or 'none'}", where)
            for key in parameters
            if key not in accepted
        ]
        if problems:
            raise ConfigError(problems)
        try:
            return cls(**parameters)
        except (TypeError, ValueError) as error:
            raise ConfigError([Problem(f"{self.kind} {name!r}: {error}", where)]) from error
