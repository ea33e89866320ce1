"""Which headers of a client a gateway gets to see."""

from __future__ import annotations

import pytest

from llmgw.pipeline.headers import forwarded


def test_first_of_each_name_lower_cased() -> None:
    assert forwarded([("Authorization", "a"), ("AUTHORIZATION", "b"), ("traceparent", "t")]) == (
        ("authorization", "a"),
        ("traceparent", "t"),
    )


@pytest.mark.parametrize(
    "name",
    [
        "connection", "content-length", "Host", "content-type", "EPP-Profile", "x-request-id", "Prefer", "accept-encoding",
        "x-data-parallel-rank", "x-override-bootstrap-host", "x-gateway-destination-endpoint", "transfer-encoding", "te",
        "x-prefiller-host-port", "x-llmgw-band",
    ],
)  # fmt: skip
def test_never(name: str) -> None:
    assert forwarded([(name, "v")]) == ()


def test_what_connection_nominates_stays_here() -> None:
    assert forwarded([("Connection", "close, X-Hop"), ("x-hop", "v"), ("x-keep", "v")]) == (("x-keep", "v"),)
