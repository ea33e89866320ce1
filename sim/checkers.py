"""What must hold in every rehearsal, whatever the scenario: the books of client, gateway and engine agree.

- No token lost, doubled or reordered after the first byte: what the client read is a prefix of what the engine says it
  produced, and all of it if the answer was complete.
- Every request is in the gateway's log exactly once, with the reason that its client saw.
- Refused means: a reason of the closed set.
- Nothing is left: sequences, blocks, permits, load, tasks, descriptors.
- Nothing goes on past its deadline and the scenario's grace.
- Every state that the scenario promises was reached.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs

from llmgw import reasons

from .clients import ENGINE_ERROR
from .records import Record, Result
from .scenario import Scenario

SHOWN = 20
"""Problems of one kind that are told; more are counted."""


@attrs.define
class Evidence:
    """What the parts of a cluster say."""

    journals: dict[str, list[dict[str, Any]]]  # engine name: its journal
    killed: set[str] = attrs.Factory(set)  # engines that died at least once
    left: list[str] = attrs.Factory(list)
    log: list[dict[str, Any]] = attrs.Factory(list)  # the gateway's request lines
    bugs: list[dict[str, Any]] = attrs.Factory(list)


def check(scenario: Scenario, result: Result, evidence: Evidence) -> None:
    """Adds to `result.problems`, and to `result.seen`; fills in each record's endpoint."""
    problems: dict[str, list[str]] = {}

    def bad(kind: str, text: str) -> None:
        problems.setdefault(kind, []).append(text)

    for text in evidence.left:
        bad("left", text)
    for line in evidence.bugs:
        bad("bug", f"the gateway reports a bug: {line.get('message')}")
    by_request: dict[str, list[dict[str, Any]]] = {}
    for line in evidence.log:
        by_request.setdefault(line["request_id"], []).append(line)
    said = {
        entry["id"].removeprefix("chatcmpl-"): (name, entry)
        for name, journal in evidence.journals.items()
        for entry in journal
    }
    for record in result.records:
        lines = by_request.pop(record.id, [])
        if len(lines) != 1:
            if not (record.reason in ("connect_failed", "client_gone") and not lines):
                bad("log", f"{record.id}: {len(lines)} lines in the gateway's log")
            continue
        _one(record, lines[0], said, evidence, result, bad)
    for name in by_request:
        bad("log", f"{name}: in the gateway's log, but no client asked")
    _engine_states(result, said)
    for what in scenario.expect:
        if not result.seen[what]:
            bad("expect", f"the scenario promises {what!r}, but it never came to that; reached: {dict(result.seen)}")
    for kind, texts in problems.items():
        result.problems += texts[:SHOWN]
        if len(texts) > SHOWN:
            result.problems.append(f"… and {len(texts) - SHOWN} more of kind {kind!r}")


def _one(
    record: Record,
    line: dict[str, Any],
    said: dict[str, tuple[str, dict[str, Any]]],
    evidence: Evidence,
    result: Result,
    bad: Any,
) -> None:
    """One request in the three books."""
    name = record.id
    record.endpoint = line.get("endpoint", "")
    seen = result.seen
    seen["retried"] += line.get("attempts", 0) > 1
    if line.get("queue"):
        seen["queued"] += line["queue"] > 0
    if record.reason == "client_gone":
        if line.get("reason") not in ("client_gone", "", None):
            seen["gone_while_failing"] += 1
    elif record.reason == ENGINE_ERROR:
        seen["engine_error"] += 1
    elif record.reason and record.reason not in reasons.BY_CODE:
        bad("reason", f"{name}: {record.reason!r} (status {record.status}) is no reason of the closed set")
    elif record.reason != line.get("reason", ""):
        bad("reason", f"{name}: its client saw {record.reason!r}, the log says {line.get('reason', '')!r}")
    if record.end < 0:
        bad("open", f"{name}: no end")
    where = said.get(line.get("upstream_request_id", ""))
    if where is None:
        if record.tokens:
            engine = record.endpoint
            if engine not in evidence.killed:
                bad("journal", f"{name}: its client read {record.tokens} tokens, but no engine knows it")
            else:
                seen["lost_with_its_engine"] += 1
        return
    engine, entry = where
    if engine != record.endpoint and record.endpoint:
        bad("journal", f"{name}: the log says {record.endpoint}, but {engine} served it")
    if record.tokens > entry["tokens"]:
        bad("tokens", f"{name}: its client read {record.tokens} tokens, {engine} produced {entry['tokens']}")
    if record.served:
        if record.tokens != entry["tokens"]:
            bad("tokens", f"{name}: its client read {record.tokens} tokens, {engine} produced {entry['tokens']}")
        elif record.digest != entry["digest"]:
            bad("tokens", f"{name}: its client read other words than {engine} produced")
        if line.get("completion_tokens") not in (None, record.tokens):
            bad("tokens", f"{name}: the log says {line['completion_tokens']} tokens, its client read {record.tokens}")
        if entry["finish"] not in ("length", "stop"):
            bad("journal", f"{name}: served, but {engine} says it ended by {entry['finish']!r}")
    if record.reason == ENGINE_ERROR and entry["finish"] != "error":
        bad("reason", f"{name}: an error of the engine, but {engine} says it ended by {entry['finish']!r}")
    if record.reason == "client_gone" and entry["finish"] in ("abort", "length", "stop"):
        seen["aborted"] += entry["finish"] == "abort"


def _engine_states(result: Result, said: dict[str, tuple[str, dict[str, Any]]]) -> None:
    """Interesting states of the engines."""
    entries = Counter(
        what
        for _, entry in said.values()
        for what, reached in (
            ("hit", entry["cached_tokens"]),
            ("preempted", entry["preemptions"]),
            ("remote_kv", entry["external_tokens"]),
        )
        if reached
    )
    result.seen.update(entries)
