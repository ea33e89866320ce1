"""Flags of `llmgw agent`, and which of its three jobs they ask for: look, check, or serve."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import click

if TYPE_CHECKING:
    from llmgw.net.world import Tcp

F = TypeVar("F", bound=Callable[..., Any])

CONFIG = "/etc/llmgw/agent.yaml"
TOKEN_VARIABLE = "LLMGW_JOIN_TOKEN"

_FLAGS = [
    click.option("--server", "servers", metavar="HOST:9443", multiple=True, help="Cluster port of a server; repeatable."),
    click.option("--join-token-file", metavar="FILE|-", help=f"Join token, for the first start (or ${TOKEN_VARIABLE})."),
    click.option("--config", "config_file", metavar="FILE", help=f"Settings of this node.  [default: {CONFIG}, if it is there]"),
    click.option("--node", metavar="NAME", help="Name of this node.  [default: the host's]"),
    click.option("--state", metavar="DIR", help="Folder of the agent's state.  [default: /var/lib/llmgw]"),
    click.option("--discover", is_flag=True, help="Print what this node is, and leave."),
    click.option("--preflight", is_flag=True, help="Print whether this node can serve, and leave: 1 if a row fails."),
    click.option("--engine", metavar="KIND", help="With --preflight: this engine only."),
    click.option("--weights", metavar="PATH", multiple=True, help="With --preflight: check these weights; repeatable."),
    click.option("--json", "as_json", is_flag=True, help="With --discover, --preflight: JSON."),
]  # fmt: skip


def agent_options(function: F) -> F:
    """Adds the flags to a click command; `run` takes them as they come."""
    for flag in reversed(_FLAGS):
        function = flag(function)
    return function


def run(
    *,
    servers: tuple[str, ...],
    join_token_file: str | None,
    config_file: str | None,
    node: str | None,
    state: str | None,
    discover: bool,
    preflight: bool,
    engine: str | None,
    weights: tuple[str, ...],
    as_json: bool,
) -> int:
    """The exit code. Raises ConfigError for what cannot be used."""
    import trio

    from llmgw.agent import report
    from llmgw.agent.settings import Settings, load
    from llmgw.errors import ConfigError, Problem

    if config_file is None and Path(CONFIG).exists():
        config_file = CONFIG
    settings = load(config_file) if config_file else Settings()
    settings = attrs.evolve(settings, node=node or settings.node, state=state or settings.state)
    if discover:
        return trio.run(report.discover, settings, as_json)
    if preflight:
        if engine and engine not in settings.programs():
            known = ", ".join(settings.programs())
            raise ConfigError([Problem(f"engine {engine!r} is not on this node; there are: {known}", "--engine")])
        return trio.run(report.preflight, settings, engine or "", weights, as_json)
    if not servers:
        raise ConfigError([Problem("nothing to do: give --server, --discover or --preflight")])
    from llmgw.agent.agent import serve

    trio.run(serve, settings, addresses(servers), read_token(join_token_file))
    return 0


def addresses(texts: tuple[str, ...]) -> tuple[Tcp, ...]:
    """HOST:PORT of each server. Raises ConfigError with every one that is none."""
    from llmgw.errors import ConfigError, Problem
    from llmgw.net.world import Tcp, parse_address

    found, problems = [], []
    for text in texts:
        try:
            address = parse_address(text)
        except ConfigError as error:
            problems += error.problems
            continue
        if isinstance(address, Tcp) and address.host:
            found.append(address)
        else:
            problems.append(Problem(f"{text!r} is not HOST:PORT of a server's cluster port", "--server"))
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def read_token(file: str | None) -> str:
    """The join token from *file* ("-" = standard input), or else from the environment; "" = none. Never from a flag:
    the command line of a process is everybody's to read."""
    if file == "-":
        return sys.stdin.read().strip()
    if file:
        try:
            return Path(file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            from llmgw.errors import ConfigError, Problem

            raise ConfigError([Problem(f"the join token cannot be read: {error}", "--join-token-file")]) from error
    return os.environ.get(TOKEN_VARIABLE, "").strip()
