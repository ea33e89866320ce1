"""Which of the client's headers travel on the legs of a pipeline.

native: the data plane's own allow-list applies, as to every request. gateway: the address may be a gateway that authenticates,
sets priorities or traces by headers, so all travel but those below.
"""

from __future__ import annotations

from collections.abc import Iterable

HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"}
)  # fmt: skip
OURS = frozenset(
    {"content-length", "host", "content-type", "epp-profile", "x-request-id", "prefer", "accept-encoding", "expect"}
)
"""Stamped by us, or meant for us. `prefer: if-available` on a prefill leg would be answered 412, and a compressed
answer of render or prefill could not be read."""

AIMING_PREFIXES = ("x-override-", "x-llmgw-", "x-smg-", "x-gateway-destination-")
AIMING = frozenset({"x-data-parallel-rank", "x-prefiller-host-port", "x-encoder-hosts-ports", "x-conversation-id"})
"""They would choose the worker, its rank or its peer."""


def forwarded(headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """The client's headers as they go to a gateway: lower-cased, the first of each name."""
    kept: dict[str, str] = {}
    nominated: set[str] = set()
    for name, value in headers:
        lower = name.lower()
        if lower == "connection":
            nominated |= {token.strip().lower() for token in value.split(",")}
        kept.setdefault(lower, value)
    return tuple(
        (name, value)
        for name, value in kept.items()
        if name not in HOP_BY_HOP
        and name not in OURS
        and name not in AIMING
        and name not in nominated
        and not name.startswith(AIMING_PREFIXES)
    )
