"""The parts of docs/node-onboarding.md that are made from the code: `python -m llmgw.agent.reference` writes them anew.

They stand between `<!-- made: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from llmgw.agent import rows
from llmgw.agent.settings import Settings
from llmgw.config import tables


def parts() -> dict[str, str]:
    return {"rows": rows.reference(), "settings": "\n".join(tables(Settings, "###")).strip() + "\n"}


def renewed(text: str) -> str:
    """*text* with every made part as the code has it now. Raises ValueError for a part that the code does not know."""
    known = parts()

    def put(found: re.Match[str]) -> str:
        if found[1] not in known:
            raise ValueError(f"{found[1]!r} is none of {', '.join(known)}")
        return f"<!-- made: {found[1]} -->\n\n{known[found[1]]}\n<!-- end -->"

    return re.sub(r"<!-- made: (\w+) -->.*?<!-- end -->", put, text, flags=re.S)


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/node-onboarding.md")
    path.write_text(renewed(path.read_text()))
