"""Flags of `llmgw server`, and the configuration that they and the file make together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from llmgw.config import Driver, Server

F = TypeVar("F", bound=Callable[..., Any])

_FLAGS = (
    click.option("--config", "file", metavar="FILE", help="YAML; examples/server.yaml shows every key."),
    click.option(
        "--endpoint",
        "endpoints",
        multiple=True,
        metavar="NAME=URL=MODEL",
        help="An engine; repeatable, and again with the same NAME and URL for a further MODEL. May be followed by"
        " ,phases=prefill ,fabric=a ,engine=vllm. Without =MODEL the engine is asked what it serves.",
    ),
    click.option(
        "--listen", multiple=True, metavar="ADDRESS", help="Client port: :8080 (all interfaces), HOST:PORT, unix:/path."
    ),
    click.option(
        "--admin", multiple=True, metavar="ADDRESS", help="Admin port: 127.0.0.1:9090 unless configured, unix:/path."
    ),
    click.option("--log-file", metavar="FILE", help="Append the log here instead of writing to standard output."),
    click.option("--driver", type=click.Choice(["pump", "tasks"]), help="How bytes are moved; pump is faster."),
)


def server_options(command: F) -> F:
    """The flags of `llmgw server`, as a decorator."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command


def configuration(
    *,
    file: str | None,
    endpoints: tuple[str, ...],
    listen: tuple[str, ...],
    admin: tuple[str, ...],
    log_file: str | None,
    driver: Driver | None,
) -> Server:
    """What is in force. Raises ConfigError with all problems of file and flags."""
    from llmgw import config

    base = config.load(file) if file else config.Server(version=1)
    return config.with_flags(base, endpoints=endpoints, listen=listen, admin=admin, log_file=log_file, driver=driver)
