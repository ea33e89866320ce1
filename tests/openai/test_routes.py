from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.openai.routes import TABLE, Route, find, id_of


@pytest.mark.parametrize("route", TABLE, ids=lambda r: r.path)
def test_every_row_is_found_by_its_own_path(route: Route) -> None:
    assert find(route.path.replace("{id}", "x")) is route


@pytest.mark.parametrize("name", ["llama", "org/model", "a/b/c", "models", "/"])
def test_ids_may_hold_slashes(name: str) -> None:
    route = find(f"/v1/models/{name}")
    assert route is not None
    assert (route.path, id_of(route, f"/v1/models/{name}")) == ("/v1/models/{id}", name)


@pytest.mark.parametrize("path", ["", "/", "/v1/models/", "/v1", "/v1/chat/completions/", "/healthzz", "//health"])
def test_everything_else_is_unknown(path: str) -> None:
    assert find(path) is None


def test_an_exact_route_has_no_id() -> None:
    route = find("/health")
    assert route is not None
    assert id_of(route, "/health") == ""


def test_the_readme_names_every_route() -> None:
    page = (Path(__file__).parents[2] / "README.md").read_text()
    assert [route.path for route in TABLE if f"{route.path}`" not in page] == []
