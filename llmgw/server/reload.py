"""What a new configuration may change while requests run, and what has to wait for a restart.

Pure: old and new in, what is in force next out. All or nothing is the caller's part: it makes whatever can fail (keys,
certificates) before it changes anything.
"""

from __future__ import annotations

from typing import Any

import attrs

from llmgw.config import Server
from llmgw.errors import ConfigError, Problem

LIVE = frozenset(("endpoints", "models", "timeouts", "limits", "routing", "listeners", "engine_ca", "version"))
"""Sections that change at once; of `routing` all but `scrape`, of a listener all but its address."""


def merge(old: Server, new: Server) -> tuple[Server, tuple[str, ...]]:
    """What is in force after a reload, and the keys whose change waits for a restart.

    Raises ConfigError where a part that can change refers to one that cannot.
    """
    waits = [
        f.name for f in attrs.fields(Server) if f.name not in LIVE and getattr(old, f.name) != getattr(new, f.name)
    ]
    kept: dict[str, Any] = {name: getattr(old, name) for name in waits}
    problems = [
        Problem(f"pipeline {policy.pipeline!r} is new, and pipelines change with a restart", f"models.{name}.pipeline")
        for name, policy in new.models.items()
        if policy.pipeline and policy.pipeline not in old.pipelines
    ]
    if problems:
        raise ConfigError(problems)
    if old.routing.scrape != new.routing.scrape:
        waits.append("routing.scrape")
        kept["routing"] = attrs.evolve(new.routing, scrape=old.routing.scrape)
    if _fixed(old) != _fixed(new):
        waits.append("listeners")
        kept["listeners"] = old.listeners
    return attrs.evolve(new, **kept), tuple(waits)


def _fixed(server: Server) -> list[tuple[str, bool]]:
    return [(one.address, one.tls is None) for one in server.listeners]
