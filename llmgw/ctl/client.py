"""The client of the admin API: the only way in which `llmgw ctl` learns or changes anything of a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx2

from llmgw.errors import LlmgwError, Unavailable

DEFAULT = "http://127.0.0.1:9090"
SECONDS = 10.0  # the admin API answers from memory; more means that something is wrong
WRITE_SECONDS = 30.0  # a change waits for the store, and that for its disk or its quorum


class Failed(LlmgwError):
    """The server said no. *code* is a reason of docs/reasons.md."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class AdminClient:
    """*server*: ``http://HOST:PORT`` or ``unix:/path``."""

    def __init__(self, server: str = DEFAULT) -> None:
        self._server = server
        if server.startswith("unix:"):
            path = server[5:]
            transport = httpx2.HTTPTransport(uds="\0" + path[1:] if path.startswith("@") else path)
            self._http = httpx2.Client(base_url="http://localhost", transport=transport, timeout=SECONDS)
        else:
            url = server if "://" in server else f"http://{server}"
            self._http = httpx2.Client(base_url=url, timeout=SECONDS, trust_env=False)

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, *path: str, **query: str) -> dict[str, Any]:
        """The object at /api/v1/PATH. Raises Unavailable or Failed."""
        return self._ask("GET", path, query=query)

    def post(self, *path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Do something, and what came of it. Raises Unavailable or Failed."""
        return self._ask("POST", path, body or {})

    def put(self, *path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Replace something, and what came of it. Raises Unavailable or Failed."""
        return self._ask("PUT", path, body)

    def follow(self, *path: str, **query: str) -> Iterator[dict[str, Any]]:
        """A line of JSON at a time, for as long as the server lives. Raises Unavailable or Failed."""
        for line in self._stream(path, query | {"watch": "1"}, lines=True):
            yield json.loads(line)

    def download(self, *path: str) -> Iterator[bytes]:
        """Bytes. Raises Unavailable or Failed."""
        return self._stream(path, {}, lines=False)

    def _stream(self, path: tuple[str, ...], query: Mapping[str, str], *, lines: bool) -> Iterator[Any]:
        try:
            with self._http.stream(
                "GET", _url(path), params=query, timeout=httpx2.Timeout(SECONDS, read=None)
            ) as answer:
                if answer.status_code >= 400:
                    answer.read()
                    self._told(answer)
                yield from answer.iter_lines() if lines else answer.iter_bytes()
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._unreachable(error) from error

    def _ask(
        self,
        method: str,
        path: tuple[str, ...],
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        seconds = SECONDS if method == "GET" else WRITE_SECONDS
        try:
            answer = self._http.request(method, _url(path), json=body, params=query or None, timeout=seconds)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._unreachable(error) from error
        return self._told(answer)

    def _told(self, answer: httpx2.Response) -> dict[str, Any]:
        try:
            body = answer.json()
        except ValueError as error:
            raise Unavailable(f"{self._server} is no llmgw admin port: it does not answer in JSON") from error
        if not isinstance(body, dict):
            raise Unavailable(f"{self._server} is no llmgw admin port: it does not answer with an object")
        if answer.status_code >= 400:
            told = body.get("error")
            known = told if isinstance(told, dict) else {}
            raise Failed(str(known.get("code", "")), str(known.get("message", f"status {answer.status_code}")))
        return body

    def _unreachable(self, error: Exception) -> Unavailable:
        return Unavailable(
            f"no answer from the admin port at {self._server}: {error}; does `llmgw server` run there? (--server, LLMGW_SERVER)"
        )


def _url(path: tuple[str, ...]) -> str:
    return "/api/v1/" + "/".join(quote(part, safe="/") for part in path)
