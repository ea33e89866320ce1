"""Recorded load: Azure's LLM inference traces (CSV) and Mooncake's (JSON lines)."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import attrs
import msgspec

from llmgw.errors import ConfigError, Problem

MOONCAKE_BLOCK = 512
"""Tokens that one of its `hash_ids` stands for."""


@attrs.frozen
class Row:
    """One request of a trace."""

    at: float  # seconds since the first
    prompt: int  # tokens
    output: int  # tokens
    blocks: tuple[int, ...] = ()  # ids of the prompt's blocks: equal ids, equal content
    block_size: int = 0


class _Mooncake(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read(path: str, kind: str, limit: int = 0) -> list[Row]:
    """The rows of the trace at *path*, first at time 0. Raises ConfigError with the line of what cannot be read."""
    parse = _azure if kind == "azure" else _mooncake
    rows: list[Row] = []
    try:
        with Path(path).open(encoding="utf-8", newline="") as lines:
            for number, row in parse(iter(lines)):
                if isinstance(row, str):
                    raise ConfigError([Problem(row, file=path, line=number)])
                rows.append(row)
                if limit and len(rows) >= limit:
                    break
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError([Problem(f"trace {path!r} cannot be read: {reason}")]) from None
    if not rows:
        raise ConfigError([Problem("the trace is empty", file=path)])
    start = rows[0].at
    for number, (before, after) in enumerate(pairwise(rows), 1):
        if after.at < before.at:
            raise ConfigError([Problem(f"row {number + 1} is earlier than the one before it", file=path)])
    return [attrs.evolve(row, at=row.at - start) for row in rows]


def _azure(lines: Iterator[str]) -> Iterator[tuple[int, Row | str]]:
    head = next(lines, "").strip()
    if head != "TIMESTAMP,ContextTokens,GeneratedTokens":
        yield 1, "expected the head TIMESTAMP,ContextTokens,GeneratedTokens"
        return
    for number, fields in enumerate(csv.reader(lines), 2):
        try:
            stamp, prompt, output = fields
            whole, _, fraction = stamp.partition(".")
            at = datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")
            row = Row(at, int(prompt), int(output))
        except ValueError:
            yield number, f"expected time,tokens,tokens, found {','.join(fields)[:80]!r}"
            return
        yield number, _sound(row)


def _mooncake(lines: Iterator[str]) -> Iterator[tuple[int, Row | str]]:
    decoder = msgspec.json.Decoder(_Mooncake)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = decoder.decode(line)
        except msgspec.DecodeError as error:
            yield number, f"not a request of a Mooncake trace: {error}"
            return
        row = Row(
            found.timestamp / 1000, found.input_length, found.output_length, tuple(found.hash_ids), MOONCAKE_BLOCK
        )
        yield number, _sound(row)


def _sound(row: Row) -> Row | str:
    if row.prompt < 1 or row.output < 0:
        return f"a prompt of {row.prompt} and an answer of {row.output} tokens cannot be"
    return attrs.evolve(row, output=max(1, row.output))
