"""What happens when a phase fails: data, so that it can be configured, printed and tested.

Everything below holds only while nothing has reached the client. Afterwards an answer is never retried.

    what failed                          prefill_failed / decode_lost        then
    encode or prefill, attempt < attempts               –                    the same leg on another endpoint
    prefill, attempts used up            decode_locally                      decode without transfer parameters
                                         fail                                phase_failed
    decode, no byte of it                another_pair                        another decode endpoint of the same fabric
                                                                             if the lost one provably never began (the
                                                                             blocks still wait at prefill); else
                                                                             another pair from the start
                                         fail                                what the relay says
    any leg answered 4xx                 –                                   the client's fault: no second attempt
"""

from __future__ import annotations

from typing import Literal

import attrs

from llmgw.pipeline.params import option


def _at_least_1(value: int) -> str | None:
    return None if value >= 1 else "must be at least 1"


@attrs.frozen
class FailurePolicy:
    """What happens when a phase fails, while nothing has reached the client."""

    attempts: int = option(
        "Attempts of one encode or prefill leg, each on another endpoint; of a decode leg that never began.",
        2,
        check=_at_least_1,
    )
    pairs: int = option("How often a prefill/decode pair is chosen for one request.", 2, check=_at_least_1)
    prefill_failed: Literal["decode_locally", "fail"] = option(
        "When prefill's attempts are used up: the decode endpoint computes the prompt itself, or the request fails.",
        "decode_locally",
    )
    decode_lost: Literal["another_pair", "fail"] = option(
        "When the decode endpoint is lost before it answered: another one, or the request fails.", "another_pair"
    )
