"""Tables, and their place in `docs/performance.md`: between two comments that name the part."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

PAGE = Path("docs/performance.md")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, aligned so that it reads well as text."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return "| " + " | ".join(cells) + " |"

    rule = "|" + "|".join(("-" * (width + 2) if i == 0 else "-" * (width + 1) + ":") for i, width in enumerate(widths))
    return "\n".join([line(head), rule + "|", *map(line, rows)])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, and the range in brackets."""
    middle = statistics.median(values)
    if len(values) < 2:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def put(part: str, text: str, page: Path = PAGE) -> None:
    """Replace what stands between `<!-- part -->` and `<!-- /part -->`. Raises ValueError without such a place."""
    old = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {part} -->\n", f"<!-- /{part} -->"
    before, found, rest = old.partition(begin)
    _, also, after = rest.partition(end)
    if not found or not also:
        raise ValueError(f"{page} has no place for the part {part!r}: {begin.strip()} … {end}")
    page.write_text(f"{before}{begin}{text.strip()}\n{end}{after}", encoding="utf-8")
