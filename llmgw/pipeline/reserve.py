"""Which host the prefill leg will go to, for connectors that must write it into both bodies beforehand.

Natively the pair is chosen already. Behind a gateway it is asked to reserve an endpoint: a prefill leg without a body
of its own and with ``Prefer: reserve-endpoint``, answered with the endpoint's address in a header, which then pins the
real leg. (llmgw's own internal listener answers so; of other gateways, those that support reservations.)
"""

from __future__ import annotations

from collections.abc import Generator
from urllib.parse import urlsplit

from llmgw.pipeline.commands import Answer, Call, Command, Failed, Reply
from llmgw.pipeline.context import Context
from llmgw.pipeline.step import LegFailed

DESTINATION = "x-gateway-destination-endpoint"


def prefill_host(ctx: Context, bootstrap_port: int) -> Generator[Command, Reply, tuple[str, int]]:
    """Host without brackets, and the port of the bootstrap server. Raises LegFailed where nobody says."""
    assert ctx.chosen is not None
    endpoint = ctx.chosen.prefill
    if endpoint is None:
        reply = yield Call(
            leg=ctx.leg("reserve"), step="prefill", phase="prefill", path=ctx.path, body={"model": ctx.model},
            headers=(("prefer", "reserve-endpoint"),),
        )  # fmt: skip
        if not isinstance(reply, Answer):
            assert isinstance(reply, Failed)
            raise LegFailed("prefill", reply)
        named = dict(reply.headers).get(DESTINATION.encode(), b"").decode("latin-1")
        host = urlsplit(f"//{named}").hostname
        if not host:
            raise nobody(ctx, f"the gateway did not answer with {DESTINATION}")
        ctx.pin_prefill = ((DESTINATION, named),)
        return host, bootstrap_port
    told = urlsplit(f"//{endpoint.bootstrap}") if endpoint.bootstrap else urlsplit(endpoint.url)
    if not told.hostname:
        raise nobody(ctx, f"endpoint {endpoint.name} has no bootstrap address")
    return told.hostname, (told.port or bootstrap_port) if endpoint.bootstrap else bootstrap_port


def nobody(ctx: Context, detail: str) -> LegFailed:
    """The prefill leg cannot be written for this endpoint; it has not been sent, so another one may do."""
    prefill = ctx.chosen.prefill if ctx.chosen is not None else None
    name = prefill.id if prefill is not None else ""
    return LegFailed("prefill", Failed(reason="phase_failed", endpoint=name, started=False, detail=detail))
