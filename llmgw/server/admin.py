"""The admin port: metrics, health, debugging, and the API that `llmgw ctl` is a client of.

    GET  /metrics  /health  /readyz  /debug/tasks  /debug/profile?seconds=5
    GET  /api/v1/endpoints[/NAME]    POST /api/v1/endpoints/NAME/drain|undrain    GET /api/v1/models[/NAME]
    GET  /api/v1/decisions[/REQUEST-ID]  POST /api/v1/explain-route

Objects have a `kind`, lists have `kind`, `revision` and `items`, errors are those of the reasons table. Whoever reaches
this port may use it, so it answers only to names that a browser cannot be tricked into (loopback, a configured host), and
to nothing that a web page sends (`Origin`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from llmgw import reasons
from llmgw.endpoint import EndpointView
from llmgw.metrics import Metrics, page
from llmgw.request import PHASES, Refusal
from llmgw.routing import explain
from llmgw.routing.health import slow
from llmgw.server.brain import Brain
from llmgw.server.fleet import Place
from llmgw.server.inspect import LONGEST, Profiler, task_tree

LATEST = 100  # decisions in a list; one by its request id is found as long as the ring keeps it
EXPLAINED = 8 << 20  # bytes of a request that is only explained

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


class Problem(Exception):
    """Ends a request of the admin API with a reason."""

    def __init__(self, reason: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.param = param


def problem(reason: str, message: str, param: str | None = None) -> Response:
    """The answer for *reason*."""
    row = reasons.get(reason)
    error = {"message": message, "type": row.type, "param": param, "code": row.code}
    return JSONResponse({"error": error}, row.status)


class Asked(msgspec.Struct):
    """What `explain-route` is asked."""

    model: str
    session: str = ""
    profile: str = ""
    request: msgspec.Raw = msgspec.Raw(b"{}")  # a client's body


class Guard:
    """Refuses what a web page in somebody's browser could send."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self._app = app
        self._hosts = LOOPBACK | {h.lower() for h in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        peer = scope.get("state", {}).get("peer")
        local = peer is not None and peer.kind == "unix"  # a browser cannot get there
        if b"origin" in headers:
            answer = problem("admin_forbidden", "The admin port answers no web pages (Origin).")
        elif not local and name not in self._hosts:
            answer = problem(
                "admin_forbidden", f"The admin port does not answer to host {name[:100]!r}; see admin.hosts."
            )
        else:
            await self._app(scope, receive, send)
            return
        await answer(scope, receive, send)


def describe(place: Place, view: EndpointView, now: float) -> dict[str, Any]:
    """An endpoint as the API shows it. Its key is not shown, only where it is kept."""
    found: dict[str, Any] = {"kind": "endpoint"}
    found |= msgspec.to_builtins(place.endpoint)
    found["phases"] = [phase for phase in PHASES if phase in place.endpoint.phases]
    found["fabrics"] = sorted(place.endpoint.fabrics)
    health = place.health
    found["health"] = {"state": health.state, "seconds": round(now - health.since, 3), "why": health.why}
    found |= load(view, now)
    found["requests"] = place.slot.requests
    found["failures"] = place.slot.failures
    return found


def load(view: EndpointView, now: float) -> dict[str, Any]:
    """What an endpoint has to do, and how fast it has been seen to do it. None = unknown."""
    report = view.report
    return {
        "inflight": view.inflight,
        "queued": view.queued,
        "prefill_tokens": view.prefill_tokens,
        "decode_tokens": view.decode_tokens,
        "foreign": round(view.foreign, 1),
        "ahead_ms": _rounded(view.ahead, 1000.0),
        "prefill_rate": _rounded(view.prefill_rate),
        "decode_rate": _rounded(view.decode_rate),
        "overhead_ms": _rounded(view.overhead, 1000.0),
        "report": None
        if report is None
        else {
            "seconds": round(now - report.at, 3),
            "running": report.running,
            "waiting": report.waiting,
            "kv_usage": report.kv_usage,
        },
    }


def _rounded(value: float | None, factor: float = 1.0) -> float | None:
    return None if value is None else round(value * factor, 2)


def models(places: Iterable[Place]) -> list[dict[str, Any]]:
    """All models, with who serves them."""
    found: dict[str, dict[str, Any]] = {}
    for place in places:
        for model in place.endpoint.models:
            entry = found.setdefault(
                model.name,
                {
                    "kind": "model",
                    "name": model.name,
                    "aliases": [],
                    "loras": [],
                    "max_model_len": None,
                    "endpoints": [],
                    "serving": 0,
                },
            )
            entry["aliases"] = sorted({*entry["aliases"], *model.aliases})
            entry["loras"] = sorted({*entry["loras"], *model.loras})
            lengths = [n for n in (entry["max_model_len"], model.max_model_len) if n is not None]
            entry["max_model_len"] = min(lengths, default=None)
            entry["endpoints"].append(place.endpoint.name)
            entry["serving"] += place.health.serving
    return [found[name] for name in sorted(found)]


class Admin:
    """The app's handlers."""

    def __init__(self, brain: Brain, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._brain = brain
        self._fleet = brain.fleet
        self._metrics = metrics
        self._clock = clock
        self._profiler = Profiler()

    def app(self, hosts: Iterable[str] = (), routes: Iterable[Route] = ()) -> ASGIApp:
        """*hosts*: names that it answers to besides loopback. *routes*: the control plane's; they come first."""
        api = "/api/v1"
        routes = [
            *routes,
            Route("/metrics", self.metrics),
            Route("/health", self.health),
            Route("/readyz", self.readyz),
            Route("/debug/tasks", self.tasks),
            Route("/debug/profile", self.profile),
            Route(api + "/endpoints", self.endpoints),
            Route(api + "/endpoints/{name}", self.endpoint),
            Route(api + "/endpoints/{name}/{action:str}", self.drain, methods=["POST"]),
            Route(api + "/queue", self.queue),
            Route(api + "/admissions/{id}", self.admission),
            Route(api + "/decisions", self.decisions),
            Route(api + "/decisions/{id}", self.decision),
            Route(api + "/explain-route", self.explain_route, methods=["POST"]),
            Route(api + "/models", self.models),
            Route(api + "/models/{name:path}", self.model),
        ]
        made = Starlette(
            routes=routes,
            exception_handlers={
                Problem: _show_problem,
                HTTPException: _show_http,
                Exception: _show_bug,
            },
        )
        return Guard(made, hosts)

    async def metrics(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        body, kind = page(self._metrics)
        return Response(body, media_type=kind)

    async def health(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        return Response()

    async def readyz(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        return Response(status_code=200 if self._brain.ready else 503)

    async def tasks(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        return PlainTextResponse(task_tree())

    async def profile(self, request: Request) -> Response:
        text = request.query_params.get("seconds", "5")
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= LONGEST:
            raise Problem("bad_field", f"seconds={text[:20]!r}: write a number up to {LONGEST:g}.", "seconds")
        if self._profiler.busy:
            raise Problem("concurrency", "A profile is being made; wait until it is done.")
        return PlainTextResponse(await self._profiler.run(seconds))

    def _place(self, name: str) -> Place:
        for place in self._fleet.places.values():
            if place.endpoint.name == name:
                return place
        raise Problem("unknown_path", f"There is no endpoint {name[:100]!r}.")

    def _describe(self, place: Place, now: float) -> dict[str, Any]:
        return describe(place, self._fleet.router.ledger.view(place.endpoint.id, now) or EndpointView(), now)

    def _list(self, kind: str, items: list[dict[str, Any]], **more: object) -> Response:
        return JSONResponse({"kind": kind, "revision": self._fleet.revision, "items": items, **more})

    async def endpoints(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        now = self._clock()
        found = [self._describe(p, now) for p in self._fleet.places.values()]
        for one in found:
            mine = {m["name"] for m in one["models"]}
            pool = [o["prefill_rate"] for o in found if mine & {m["name"] for m in o["models"]}]
            share = slow(one["prefill_rate"], pool)
            one["slow"] = None if share is None else round(share, 2)
        return self._list("endpoints", found)

    async def endpoint(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        return JSONResponse(self._describe(self._place(request.path_params["name"]), self._clock()))

    async def drain(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        place, action = self._place(request.path_params["name"]), request.path_params["action"]
        if action == "drain":
            self._fleet.happened(place, "drain")
        elif action == "undrain":
            self._fleet.happened(place, "undrain")
        else:
            raise Problem("unknown_path", f"An endpoint has no action {action[:100]!r}; there are: drain, undrain.")
        return JSONResponse(self._describe(place, self._clock()))

    async def queue(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        admission = self._brain.admission
        return self._list("queue", admission.queue(), engines=admission.gate.engines())

    async def admission(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        name = request.path_params["id"]
        found = self._brain.admission.explain(name)
        if found is None:
            raise Problem("unknown_path", f"No admission of request {name[:100]!r} is kept: unknown, or too long ago.")
        return JSONResponse(found)

    async def decisions(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        found = self._fleet.router.recent.latest(LATEST)
        return self._list("decisions", [explain.record(one) for one in found])

    async def decision(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        name = request.path_params["id"]
        found = self._fleet.router.recent.get(name)
        pipelines = self._brain.pipelines
        phases = pipelines.trace(name) if pipelines is not None else None
        if phases is not None:
            decided = explain.record(found) if found is not None else {"kind": "decision", "request_id": name}
            return JSONResponse({**decided, "pipeline": phases})
        if found is None:
            raise Problem(
                "unknown_path", f"No decision for request {name[:100]!r} is kept: unknown, or older than the ring."
            )
        return JSONResponse(explain.record(found))

    async def explain_route(self, request: Request) -> Response:
        """Decides as for a client, and sends nothing. Body: ``{"model", "session", "profile", "request": {…}}``."""
        body = await request.body()
        if len(body) > EXPLAINED:
            raise Problem("too_large", f"A request to explain may have {EXPLAINED >> 20} MiB.")
        try:
            asked = msgspec.json.decode(body, type=Asked)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise Problem("bad_field", f"The body cannot be used: {error}.") from error
        found = self._brain.explain(asked.model, bytes(asked.request), asked.session, asked.profile)
        if isinstance(found, Refusal):
            return JSONResponse(explain.refusal(found, asked.model))
        return JSONResponse(explain.decision(found))

    async def models(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        return self._list("models", models(self._fleet.places.values()))

    async def model(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        name = request.path_params["name"]
        for model in models(self._fleet.places.values()):
            if name == model["name"] or name in model["aliases"] or name in model["loras"]:
                return JSONResponse(model)
        raise Problem("model_not_found", f"There is no model {name[:100]!r}.")


async def _show_problem(request: Request, error: Exception) -> Response:
    await trio.lowlevel.checkpoint()
    assert isinstance(error, Problem)
    return problem(error.reason, str(error), error.param)


async def _show_http(request: Request, error: Exception) -> Response:
    await trio.lowlevel.checkpoint()
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        answer = problem("method_not_allowed", f"{request.method} is not allowed here.")
        answer.headers.update(error.headers or {})
        return answer
    return problem("unknown_path", f"The admin port has no {request.url.path[:100]!r}.")


async def _show_bug(request: Request, error: Exception) -> Response:
    await trio.lowlevel.checkpoint()
    return problem("internal", "A fault of the gateway; its log says more.")
