"""A decision in words and in JSON: every candidate, every term in ms, who was refused and by which filter, what came true."""

from __future__ import annotations

from typing import Any

from llmgw.request import Outcome, Refusal
from llmgw.routing.decision import Decision
from llmgw.routing.recent import Record

HEADER = 5  # candidates in a response header: it must stay below what proxies accept


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


def decision(found: Decision) -> dict[str, Any]:
    """As the admin API shows it. Times in ms; candidates cheapest first."""
    names = [found.endpoints[i].name for i in found.candidates]
    rows: list[dict[str, Any]] = []
    for at, name in enumerate(names):
        terms = {
            scorer: _ms(column[at])
            for scorer, column in zip(found.scorers, found.columns, strict=True)
            if column is not None
        }
        rows.append({"endpoint": name, "cost_ms": _ms(found.costs[at]) if found.costs else 0.0, "terms_ms": terms})
    winner = rows[found.chosen]
    rows.sort(key=lambda row: (row is not winner, row["cost_ms"]))
    second = min((r for r in rows if r is not winner), key=lambda r: r["cost_ms"], default=None)
    return {
        "kind": "decision",
        "request_id": found.request_id,
        "model": found.model,
        "profile": found.profile,
        "phases": list(found.phases),
        "revision": found.revision,
        "winner": winner["endpoint"],
        "runner_up": second["endpoint"] if second else None,
        "margin_ms": round(second["cost_ms"] - winner["cost_ms"], 2) if second else None,
        "prompt_tokens": found.prompt_tokens,
        "predicted": {"ttft_ms": _ms(found.ttft), "cached_tokens": found.cached_tokens},
        "candidates": rows,
        "refused": {r.filter: [found.endpoints[i].name for i in r.at] for r in found.refused},
    }


def refusal(found: Refusal, model: str) -> dict[str, Any]:
    """A decision that nobody can serve."""
    return {"kind": "refusal", "model": model, "reason": found.reason, "filter": found.filter, "message": found.message}


def record(found: Record) -> dict[str, Any]:
    """The last decision of a request, the attempts before it, and what came true."""
    said = decision(found.decisions[-1])
    said["attempts"] = [d.endpoint.name for d in found.decisions]
    said["came_true"] = outcome(found.outcome) if found.outcome is not None else None
    return said


def outcome(found: Outcome) -> dict[str, Any]:
    """What became of it, in the terms of the prediction."""
    ttft = None
    if found.first is not None:
        ttft = _ms(found.first - (found.admitted if found.admitted is not None else found.accepted))
    return {
        "status": found.status,
        "reason": found.reason,
        "ttft_ms": ttft,
        "cached_tokens": found.cached_tokens,
        "prompt_tokens": found.prompt_tokens,
        "completion_tokens": found.completion_tokens,
        "seconds": round(found.last - found.accepted, 3) if found.last is not None else None,
    }


def header(found: Decision) -> str:
    """One line for `x-llmgw-explain`: winner, margin, and the terms of the cheapest candidates."""
    said = decision(found)
    parts = [f"profile={said['profile']}", f"winner={said['winner']}"]
    if said["margin_ms"] is not None:
        parts.append(f"margin={said['margin_ms']:g}ms")
    for row in said["candidates"][:HEADER]:
        terms = "".join(f" {name}={value:g}" for name, value in row["terms_ms"].items())
        parts.append(f"{row['endpoint']}={row['cost_ms']:g}ms ({terms.strip()})")
    for name, gone in said["refused"].items():
        parts.append(f"{name} refused {len(gone)}")
    return "; ".join(parts)


def text(said: dict[str, Any]) -> str:
    """What `decision`, `record` or `refusal` made, for a terminal."""
    if said["kind"] == "refusal":
        return f"{said['model']}: nobody can serve it ({said['reason']}). {said['message']}\n"
    lines = [
        f"{said['model']}, profile {said['profile']}, {said['prompt_tokens']} prompt tokens: {said['winner']}"
        + (f", {said['margin_ms']:g} ms before {said['runner_up']}" if said["runner_up"] else ", the only candidate"),
        f"predicted: first token after {said['predicted']['ttft_ms']:g} ms, {said['predicted']['cached_tokens']} tokens cached",
    ]
    true = said.get("came_true")
    if true:
        first = f"first byte after {true['ttft_ms']:g} ms" if true["ttft_ms"] is not None else "no byte"
        cached = "unknown" if true["cached_tokens"] is None else true["cached_tokens"]
        end = f", ended {true['reason']}" if true["reason"] else ""
        lines.append(f"came true: {first}, {cached} tokens cached, status {true['status']}{end}")
    if len(said.get("attempts", ())) > 1:
        lines.append("attempts: " + ", ".join(said["attempts"]))
    terms = list(dict.fromkeys(name for row in said["candidates"] for name in row["terms_ms"]))
    table = [("ENDPOINT", "COST ms", *(name.upper() for name in terms))]
    for row in said["candidates"]:
        table.append(
            (row["endpoint"], f"{row['cost_ms']:.1f}", *(f"{row['terms_ms'].get(name, 0.0):.1f}" for name in terms))
        )
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    lines += [f"refused by {name}: {', '.join(gone)}" for name, gone in said["refused"].items()]
    return "\n".join(lines) + "\n"
