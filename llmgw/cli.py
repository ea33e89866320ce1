"""The `llmgw` command: four subcommands, flags, exit codes. Composes the shells; one `trio.run` each.

Exit codes: 0 done · 1 failed (the message says what) · 2 what the operator wrote cannot be used (all problems listed).
"""

from __future__ import annotations

import click

from llmgw import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """LLM gateway and control plane for people who own their GPU servers."""
