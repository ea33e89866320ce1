"""The `llmgw` command: four subcommands, flags, exit codes. Composes the shells; one `trio.run` each.

Exit codes: 0 done · 1 failed (the message says what) · 2 what the operator wrote cannot be used (all problems listed).
"""

from __future__ import annotations

from typing import Any

import click

from llmgw import __version__
from llmgw.agent.options import agent_options


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """LLM gateway and control plane for people who own their GPU servers."""


@main.command()
@agent_options
def agent(**flags: Any) -> None:
    """On every GPU node: discovers hardware, proves that it can serve, starts and watches engines."""
    from llmgw.agent.options import run
    from llmgw.errors import ConfigError

    try:
        code = run(**flags)
    except ConfigError as error:
        click.echo(str(error), err=True)
        raise SystemExit(2) from None
    raise SystemExit(code)
