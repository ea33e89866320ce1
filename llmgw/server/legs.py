"""What this server answers to legs of other pipelines in place of relaying them: it is their gateway then.

`Prefer: if-available` is answered 412 unless the endpoint has nearly all of the prompt; `Prefer: reserve-endpoint` with the
endpoint's address, by which the real leg is pinned afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from llmgw.endpoint import Endpoint
from llmgw.pipeline.reserve import DESTINATION
from llmgw.request import InferenceRequest, Page, Refusal
from llmgw.routing.decision import Decision

UNCACHED = 256
"""Most prompt tokens that an endpoint may lack to answer a conditional leg: a block or two of any engine. With a single
matching block among thousands it would silently compute the rest."""

NOT_SERVED = Refusal(reason="no_endpoint", message="answered without an engine")
"""Why what was reserved for such a leg is given back."""

_UNAVAILABLE = (
    b'{"error":{"message":"PreconditionFailed - no decode worker has the requested KV cache",'
    b'"type":"invalid_request_error","param":null,"code":"not_cached"}}'
)


def has_prompt(decision: Decision) -> bool:
    """Whether the chosen endpoint is believed to have (nearly) all of the prompt cached."""
    return decision.cached_tokens > 0 and decision.uncached <= UNCACHED


def instead(request: InferenceRequest, decision: Decision) -> Page | None:
    """The answer in place of the leg; None: it is to be served."""
    if request.prefer == "reserve-endpoint":
        return Page(body=b"{}", headers=((DESTINATION, host_port(decision.endpoint.url)),))
    if request.prefer == "if-available" and not has_prompt(decision):
        return Page(status=412, body=_UNAVAILABLE)
    return None


def others(endpoints: Iterable[Endpoint], pin: str) -> tuple[str, ...]:
    """Ids of all endpoints but the one at *pin* (``HOST:PORT``)."""
    return tuple(endpoint.id for endpoint in endpoints if host_port(endpoint.url) != pin)


def host_port(url: str) -> str:
    """``HOST:PORT`` of an endpoint's URL; the URL itself for a Unix socket."""
    parts = urlsplit(url)
    if not parts.hostname:
        return url
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
