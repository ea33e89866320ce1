"""From an endpoint's URL and key to where a mover sends bytes."""

from __future__ import annotations

from urllib.parse import urlsplit

from llmgw.endpoint import Endpoint
from llmgw.request import Target
from llmgw.units import Tcp


def target(endpoint: Endpoint, key: str = "", model: str = "") -> Target:
    """*key*: the engine's API key. *model*: the name it knows the model by, if clients ask for it by another."""
    headers = (("authorization", f"Bearer {key}"),) if key else ()
    if endpoint.url.startswith("unix:"):
        return Target(
            endpoint=endpoint.id,
            name=endpoint.name,
            address=endpoint.url,
            host="localhost",
            headers=headers,
            model=model,
        )
    return _at(endpoint.url, endpoint.id, endpoint.name, headers, model)


def service_target(address: str) -> Target:
    """A service that is no endpoint (a tokeniser, a gateway of others) at http(s)://HOST[:PORT][/prefix]."""
    return _at(address, f"service {address}", address, (), "")


def _at(url: str, identity: str, name: str, headers: tuple[tuple[str, str], ...], model: str) -> Target:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    where = Tcp(parts.hostname or "", port)
    usual = port == (443 if tls else 80)
    return Target(
        endpoint=identity,
        name=name,
        address=f"tcp:{where}",
        host=str(where).rpartition(":")[0] if usual else str(where),
        path=parts.path.rstrip("/"),
        tls=tls,
        headers=headers,
        model=model,
    )
