"""The generated parts of docs/coordinator.md: ``python -m tests.pipeline.page`` writes them anew.

Keys come from the code, bodies from the golden conversations; what stands between two markers is made, the rest is written.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs

from llmgw.pipeline.config import coordinator_keys
from llmgw.pipeline.step import EC_CONNECTORS, KV_CONNECTORS, STEPS
from llmgw.units import format_duration
from tests.pipeline.script import cases

PAGE = Path(__file__).parent.parent.parent / "docs" / "coordinator.md"
MARK = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

WORDS = {"integer": "whole number", "duration": "duration", "boolean": "true/false", "strings": "list of strings"}


def coordinator() -> str:
    lines = ["| key | type | default | here |", "|---|---|---|---|"]
    for key, kind, default, unused in coordinator_keys():
        shown = json.dumps(default) if not isinstance(default, str) else f"`{default}`" if default else "none"
        lines.append(f"| `{key}` | {kind} | {shown} | {'no effect: ' + unused if unused else 'in force'} |")
    return "\n".join(lines) + "\n"


def _default(field: attrs.Attribute[Any]) -> str:
    value = field.default
    if value is attrs.NOTHING:
        return "required"
    if isinstance(value, float):
        return f"`{format_duration(value)}`"
    if value == ():
        return "none"
    return f"`{json.dumps(value) if not isinstance(value, str) else value}`"


def _plugins(found: Any) -> str:
    lines = []
    for name, cls in found.all().items():
        lines += [f"**`{name}`**: {(cls.__doc__ or '').splitlines()[0]}", ""]
        fields = [f for f in attrs.fields(cls) if f.metadata.get("meaning")]
        if fields:
            lines += ["| parameter | default | meaning |", "|---|---|---|"]
            lines += [f"| `{f.name}` | {_default(f)} | {f.metadata['meaning']} |" for f in fields]
            lines.append("")
    return "\n".join(lines) + "\n"


def _shown(body: Any) -> str:
    return "```json\n" + json.dumps(body, indent=None, ensure_ascii=False) + "\n```"


def bodies() -> str:
    lines = []
    for case in (case for case in cases() if case.get("doc")):
        options = ", ".join(f"{key} {value}" for key, value in case.get("options", {}).items()) or "defaults"
        lines += [
            f"### {case['file']}: {case['name']}",
            "",
            f"`POST {case['path']}` ({options})",
            "",
            _shown(case["body"]),
            "",
        ]
        for item in case["talk"]:
            calls = [one["call"] for one in item.get("gather", ())]
            calls += [item[key] for key in ("call", "relay") if key in item]
            calls += item.get("with", [])
            for call in calls:
                body = call.get("body")
                if body is None or body == "same":
                    continue
                lines += [f"{call['leg']} → `{call.get('path', case['path'])}`", "", _shown(body), ""]
    return "\n".join(lines) + "\n"


PARTS = {
    "coordinator": coordinator,
    "steps": lambda: _plugins(STEPS),
    "kv": lambda: _plugins(KV_CONNECTORS),
    "ec": lambda: _plugins(EC_CONNECTORS),
    "bodies": bodies,
}


def made(text: str) -> str:
    """*text* with its generated parts as they are now."""
    return MARK.sub(lambda found: found[1] + "\n" + PARTS[found[2]]() + "\n" + found[3], text)


if __name__ == "__main__":
    PAGE.write_text(made(PAGE.read_text()))
