"""The phases of one request as text: `llmgw ctl explain-route --request-id`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text(trace: Mapping[str, Any]) -> str:
    """*trace*: as the admin API gives it (`kind: pipeline`). One line a leg: when it began, how long it took, where."""
    lines = [
        f"pipeline {trace['pipeline']}, model {trace['model']}: status {trace['status']} {trace['reason']}".rstrip()
    ]
    pair = trace.get("pair")
    if pair:
        if pair["prefill"]:
            lines.append(
                f"  pair    {pair['prefill']} -> {pair['decode']} on fabric {pair['fabric'] or '(none named)'}: {pair['why']};"
                f" {pair['bytes'] / 1e6:.1f} MB in {_ms(pair['transfer_seconds'])} (predicted)"
            )
        else:
            lines.append(f"  one     {pair['decode']}: {pair['why']}")
        lines.append(f"  cost    pair {_ms(pair['pair_cost'])}, one endpoint {_ms(pair['local_cost'])}")
        cached = pair["cached_tokens"]
        lines.append(f"  cached  {cached['prefill']} tokens at prefill, {cached['decode']} at decode (believed)")
        for source, target in pair["avoided"]:
            lines.append(f"  avoided {source} -> {target}: its link is degraded")
    for step in trace["phases"]:
        if "step" not in step:
            details = ", ".join(f"{key} {value}" for key, value in step.items() if key != "note")
            lines.append(f"  {'':>10} {step['note']}{': ' + details if details else ''}")
            continue
        failed = f"  failed: {step['failed']}" if step.get("failed") else ""
        lines.append(
            f"  {_ms(step['start']):>10} {step.get('leg', step['step']):<14} {_ms(step['seconds']):>10}"
            f"  {step.get('endpoint', '')}{failed}"
        )
    return "\n".join(lines) + "\n"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
