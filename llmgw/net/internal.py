"""What the head of a leg says on an internal listener: which phase, and on which conditions.

llmgw is then the gateway that a pipeline (its own, or llm-d's Coordinator) sends its legs to. `EPP-Profile` names the phase,
`decode` where it is missing; `Prefer: if-available` and `reserve-endpoint` are RFC 7240 lists.
"""

from __future__ import annotations

import msgspec

from llmgw.net.http1 import RequestHead
from llmgw.request import PHASES, InferenceRequest, Phase, Prefer, Refusal

DEFAULT: Phase = "decode"


def read(request: InferenceRequest, head: RequestHead) -> InferenceRequest | Refusal:
    """*request* as the leg that *head* makes it; refused for a phase that is none."""
    asked = head.text(b"epp-profile").strip()
    phase = next((phase for phase in PHASES if phase == asked), DEFAULT if not asked else None)
    if phase is None:
        return Refusal(
            reason="bad_field",
            param="epp-profile",
            message=f"EPP-Profile {asked[:40]!r} is none of {', '.join(PHASES)}",
        )
    prefer: Prefer = ""
    for part in head.text(b"prefer").split(","):
        token = part.split(";")[0].split("=")[0].strip().lower()
        if token in ("if-available", "reserve-endpoint"):
            prefer = "if-available" if token == "if-available" else "reserve-endpoint"
    return msgspec.structs.replace(
        request, phases=(phase,), internal=True, prefer=prefer, pin=head.text(b"x-gateway-destination-endpoint").strip()
    )
