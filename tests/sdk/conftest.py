"""One engine with a server before it for all tests of a kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sdk.place import Place, place

KINDS = ["sim", *(pytest.param(kind, marks=pytest.mark.engines) for kind in ("vllm", "llama-server"))]


@pytest.fixture(name="there", scope="session", params=KINDS)
def _there(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(request.param, tmp_path_factory.mktemp(request.param)) as made:
        yield made
