"""The routes of the client port, as data: which path takes which method, and what its body and answer look like.

One row a route. Everything that depends on the route (how to peek at the body, how to meter the answer, whose error
shape to use) hangs on `Route.shape` and `Route.dialect`, so a new route is a row here and, if its body is new, a row
in `llmgw.openai.peek.SHAPES`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["inference", "kept", "page"]
"""inference: relayed to an endpoint that serves the body's model. kept: relayed to the endpoint that made the answer
whose id stands in the path. page: answered by the gateway itself."""

Dialect = Literal["openai", "anthropic"]
"""Whose error bodies the client expects."""

Shape = Literal[
    "", "chat", "completions", "generate", "responses", "messages", "count", "input", "speech", "rerank", "score",
    "tokenize", "detokenize", "media",
]  # fmt: skip
"""What the request's body and the answer look like; "" where there is no body that we read."""

GENERATING: frozenset[Shape] = frozenset(("chat", "completions", "generate", "responses", "messages"))
"""Shapes whose answers are made token by token."""

ID = "{id}"


class Route(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row. *path* is the pattern, fit to be a metric label: it never holds what a client made up."""

    path: str
    methods: tuple[str, ...]
    kind: Kind
    dialect: Dialect = "openai"
    shape: Shape = ""

    @property
    def pipelined(self) -> bool:
        """Whether a pipeline can serve it: its phases know these bodies."""
        return self.shape in ("chat", "completions", "generate")

    @property
    def generates(self) -> bool:
        """Whether its answer is made token by token; all else is a prompt's pass and ends with it."""
        return self.shape in GENERATING


TABLE: tuple[Route, ...] = (
    Route(path="/v1/chat/completions", methods=("POST",), kind="inference", shape="chat"),
    Route(path="/v1/completions", methods=("POST",), kind="inference", shape="completions"),
    Route(path="/inference/v1/generate", methods=("POST",), kind="inference", shape="generate"),
    Route(path="/v1/responses", methods=("POST",), kind="inference", shape="responses"),
    Route(path="/v1/responses/{id}/cancel", methods=("POST",), kind="kept"),
    Route(path="/v1/responses/{id}/input_items", methods=("GET",), kind="kept"),
    Route(path="/v1/responses/{id}", methods=("GET", "DELETE"), kind="kept", shape="responses"),
    Route(path="/v1/messages", methods=("POST",), kind="inference", dialect="anthropic", shape="messages"),
    Route(path="/v1/messages/count_tokens", methods=("POST",), kind="inference", dialect="anthropic", shape="count"),
    Route(path="/v1/embeddings", methods=("POST",), kind="inference", shape="input"),
    Route(path="/v1/rerank", methods=("POST",), kind="inference", shape="rerank"),
    Route(path="/rerank", methods=("POST",), kind="inference", shape="rerank"),
    Route(path="/v1/score", methods=("POST",), kind="inference", shape="score"),
    Route(path="/score", methods=("POST",), kind="inference", shape="score"),
    Route(path="/pooling", methods=("POST",), kind="inference", shape="input"),
    Route(path="/classify", methods=("POST",), kind="inference", shape="input"),
    Route(path="/tokenize", methods=("POST",), kind="inference", shape="tokenize"),
    Route(path="/detokenize", methods=("POST",), kind="inference", shape="detokenize"),
    Route(path="/v1/audio/speech", methods=("POST",), kind="inference", shape="speech"),
    Route(path="/v1/audio/{id}", methods=("POST",), kind="inference", shape="media"),
    Route(path="/v1/images/{id}", methods=("POST",), kind="inference", shape="media"),
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
