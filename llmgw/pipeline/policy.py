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


@attrs.frozen
class FailurePolicy:
    """*attempts*: of one encode or prefill leg, each on another endpoint. *pairs*: how often a pair is chosen."""

    attempts: int = 2
    pairs: int = 2
    prefill_failed: Literal["decode_locally", "fail"] = "decode_locally"
    decode_lost: Literal["another_pair", "fail"] = "another_pair"
