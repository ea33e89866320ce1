"""The routes of the client port, as data: which path takes which method, and what its body and answer look like.

One row a route. Everything that depends on the route (how to peek at the body, how to meter the answer, whose error
shape to use) hangs on `Route.shape` and `Route.dialect`, so a new route is a row here and, if its body is new, a row
in `llmgw.openai.peek.SHAPES`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["inference", "page"]
"""inference: relayed to an endpoint that serves the body's model. page: answered by the gateway itself."""

Dialect = Literal["openai", "anthropic"]
"""Whose error bodies the client expects."""

Shape = Literal["", "chat", "completions", "generate"]
"""What the request's body and the answer look like; "" where there is no body."""

ID = "{id}"


class Route(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row. *path* is the pattern, fit to be a metric label: it never holds what a client made up."""

    path: str
    methods: tuple[str, ...]
    kind: Kind
    dialect: Dialect = "openai"
    shape: Shape = ""


TABLE: tuple[Route, ...] = (
    Route(path="/v1/chat/completions", methods=("POST",), kind="inference", shape="chat"),
    Route(path="/v1/completions", methods=("POST",), kind="inference", shape="completions"),
    Route(path="/inference/v1/generate", methods=("POST",), kind="inference", shape="generate"),
    Route(path="/v1/models", methods=("GET",), kind="page"),
    Route(path="/v1/models/{id}", methods=("GET",), kind="page"),
    Route(path="/health", methods=("GET",), kind="page"),
    Route(path="/healthz", methods=("GET",), kind="page"),
    Route(path="/readyz", methods=("GET",), kind="page"),
)

_EXACT: dict[str, Route] = {route.path: route for route in TABLE if ID not in route.path}
_WITH_ID = tuple((route.path.partition(ID), route) for route in TABLE if ID in route.path)


def find(path: str) -> Route | None:
    """The route of *path* (no query string), or None: 404. Ids may contain slashes (``org/model``), never be empty."""
    route = _EXACT.get(path)
    if route is None:
        for (before, _, after), candidate in _WITH_ID:
            if path.startswith(before) and path.endswith(after) and len(path) > len(before) + len(after):
                return candidate
    return route


def id_of(route: Route, path: str) -> str:
    """What stands for ``{id}`` in *path*; "" if the route has none."""
    before, found, after = route.path.partition(ID)
    return path[len(before) : len(path) - len(after)] if found else ""
