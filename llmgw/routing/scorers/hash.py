"""Always the same place."""

from __future__ import annotations

from zlib import crc32

from llmgw.routing.field import Field


class Hash:
    """One second against all but the endpoint that the session's (else the client's) name hashes to.

    Rendezvous hashing: an endpoint that comes or goes moves only its own sessions.
    """

    api = 1
    name = "hash"

    def score(self, field: Field) -> list[float] | None:
        request = field.query.request
        start = crc32((request.session or request.head.client or request.id).encode())
        values = [crc32(e.id.encode(), start) for e in field.endpoints]
        best = max(values)
        return [0.0 if value == best else 1.0 for value in values]
