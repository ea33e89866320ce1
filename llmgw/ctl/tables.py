"""Lists for people: a table on a terminal, plain columns in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

COLOURS = {
    "ready": "green",
    "degraded": "yellow",
    "quarantined": "red",
    "joining": "cyan",
    "draining": "magenta",
    "failed": "red",
    "lost": "red",
    "unknown": "yellow",
    "not-ready": "red",
}


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """Print it. *empty*: what is said where there are no rows."""
    if sys.stdout.isatty():
        console = Console()
        if not rows:
            console.print(empty)
            return
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(f"[{COLOURS[cell]}]{cell}[/]" if cell in COLOURS else cell for cell in row))
        console.print(table)
        return
    if not rows:
        sys.stderr.write(empty + "\n")
        return
    lines = [tuple(columns), *(tuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write(text.rstrip() + "\n")
