"""Flags of `llmgw server`, and the configuration that they and the file make together."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llmgw.errors import ConfigError, Problem

if TYPE_CHECKING:
    from llmgw.config import Driver, Server

DEFAULT_PATH = "config/coordinator/coordinator.yaml"
"""What `--config` without a value means: where the Coordinator looks."""

F = TypeVar("F", bound=Callable[..., Any])

_FLAGS = (
    click.option(
        "--config",
        "files",
        metavar="FILE",
        multiple=True,
        is_flag=False,
        flag_value=DEFAULT_PATH,
        help="YAML; examples/server.yaml shows every key. Also the Coordinator's file (alone: config/coordinator/"
        "coordinator.yaml), and beside it a second one that names the engines.",
    ),
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
    click.option("--tls-cert", metavar="FILE", help="Speak TLS on the client port: certificate, then intermediates."),
    click.option("--tls-key", metavar="FILE", help="Its private key."),
    click.option("--log-file", metavar="FILE", help="Append the log here instead of writing to standard output."),
    click.option("--state", metavar="DIR", help="Be a control plane too, with identity and store in this folder."),
    click.option("--driver", type=click.Choice(["pump", "tasks"]), help="How bytes are moved; pump is faster."),
)


def server_options(command: F) -> F:
    """The flags of `llmgw server`, as a decorator."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command


def configuration(
    *,
    files: tuple[str, ...],
    endpoints: tuple[str, ...],
    listen: tuple[str, ...],
    admin: tuple[str, ...],
    log_file: str | None,
    driver: Driver | None,
    state: str | None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
) -> Server:
    """What is in force. Raises ConfigError with all problems of file and flags."""
    from llmgw import config

    base = config.Server(version=1)
    loaded = []
    problems: list[Problem] = []
    for file in files:
        try:
            elsewhere = bool(endpoints) or len(files) > 1
            loaded.append(config.load(file, environ=os.environ, endpoints=elsewhere, tell=_tell))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    if len(loaded) == 1:
        base = loaded[0]
    elif loaded:
        base = _both(loaded, files)
    return config.with_flags(
        base,
        endpoints=endpoints,
        listen=listen,
        admin=admin,
        log_file=log_file,
        driver=driver,
        tls_cert=tls_cert,
        tls_key=tls_key,
        state=state,
    )


def _tell(note: str) -> None:
    click.echo(note, err=True)


def _both(loaded: list[Server], files: tuple[str, ...]) -> Server:
    """A Coordinator's file, and a server's that names the engines."""
    import attrs

    from llmgw.pipeline.config import TRANSLATED

    pipelines = [one for one in loaded if one.pipeline == TRANSLATED]
    engines = [one for one in loaded if one.pipeline != TRANSLATED]
    if len(pipelines) != 1 or len(engines) != 1:
        raise ConfigError(
            [Problem("two files are a Coordinator's and one with endpoints; these are not", ", ".join(files))]
        )
    coordinator, server = pipelines[0], engines[0]
    return attrs.evolve(
        server,
        listeners=coordinator.listeners,
        limits=coordinator.limits,
        timeouts=attrs.evolve(server.timeouts, drain=coordinator.timeouts.drain),
        pipelines={**server.pipelines, **coordinator.pipelines},
        pipeline=coordinator.pipeline,
    )
