"""What the admin and the cluster port say of the control plane, and what they let it be told.

    GET  /api/v1/catalogue                     PUT  the same: {"text", "file", "revision", "remove", "dry": diff|plan}
    GET  /api/v1/models[/M]                    POST /api/v1/models/M/scale {"replicas"} | retry
    GET  /api/v1/nodes[/N]                     POST /api/v1/nodes/N/cordon|uncordon|drain|abort|forget|revoke
    GET  /api/v1/replicas[/R][?model=M]        GET  /api/v1/replicas/R/log
    GET  /api/v1/placements/M[?now=1]          GET  /api/v1/drains[/N]     GET /api/v1/events[?after=N]
    POST /api/v1/tokens {"node","pool","ttl"}  GET  /api/v1/backup         POST /api/v1/brake/release
    POST /agent/v1/sync                        (cluster port)

Lists take `?watch=1`: a line of JSON whenever something has changed.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from random import Random
from typing import Any, Protocol, TypeVar

import attrs
import msgspec
import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from llmgw.catalogue import CatalogueModel, changes, parse, to_plain
from llmgw.config import Server
from llmgw.control import drain as drains
from llmgw.control.catalog import Change
from llmgw.control.observed import Sync
from llmgw.control.reconcile import Clock, forget, release, retry, step
from llmgw.control.state import Cluster, Drain, Event
from llmgw.errors import ConfigError, LlmgwError
from llmgw.net.doors import Peer
from llmgw.pki.issue import Denied
from llmgw.placement import explain
from llmgw.placement.demand import Pending, natural
from llmgw.placement.fabrics import resolve
from llmgw.placement.solver import plan
from llmgw.placement.verdict import Record
from llmgw.server.admin import Problem
from llmgw.server.admin import models as served_models
from llmgw.server.control import Control, ControlError, Told
from llmgw.server.control_rows import State
from llmgw.server.control_shows import node, replica, wanted
from llmgw.server.fleet import Place

T = TypeVar("T")

MAX_TEXT = 4 << 20  # bytes of a catalogue: 200 models need 100 KB
MAX_SYNC = 8 << 20  # bytes: a node with everything wrong needs 300 KB
IDLE = 15.0  # seconds after which a watch that has nothing to say shows that it lives
PLANNED = 10_000  # replicas of a plan: all, where a real round places a few


Write = Callable[[bytes], Awaitable[None]]


class Flow(Response):
    """An answer that is written piece by piece, until its reader has gone. Its length is not known before its end."""

    def __init__(self, pieces: Callable[[Write], Awaitable[None]], media_type: str) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(piece: bytes) -> None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_gone, receive, nursery.cancel_scope)
            await self._pieces(write)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            nursery.cancel_scope.cancel("all is written")


async def _gone(receive: Receive, answer: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.cancel("the reader has gone")


class Authority(Protocol):
    """What joins and revokes nodes."""

    async def token(self, node: str, pool: str, life: float) -> dict[str, Any]: ...

    async def revoke(self, node: str) -> None: ...


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """A catalogue to be applied, or looked at."""

    text: str
    file: str = ""
    revision: int | None = None  # of the catalogue that the text was made from; another one now = conflict
    remove: bool = False  # models that the text does not name go
    dry: str = ""  # "diff" or "plan": nothing is written


class Scale(msgspec.Struct, forbid_unknown_fields=True):
    replicas: int


class NodeOrder(msgspec.Struct, forbid_unknown_fields=True):
    by: str = ""
    why: str = ""
    surge: bool = True
    parallel: int = 1


class TokenOrder(msgspec.Struct, forbid_unknown_fields=True):
    node: str = ""
    pool: str = ""
    ttl: float = 900.0


class ControlApi:
    """Handlers. *places*: endpoints, for what models are served by. *off*: why there is no control plane; "" = there is."""

    def __init__(
        self,
        control: Control,
        server: Server,
        wall: Callable[[], float],
        places: Callable[[], list[Place]] = list,
        authority: Authority | None = None,
    ) -> None:
        self._control, self._server, self._wall, self._places = control, server, wall, places
        self.authority = authority
        self.copy: Callable[[Write], Awaitable[None]] | None = None
        self.off = ""

    def routes(self) -> list[Route]:
        """Of the admin port."""
        api = "/api/v1"
        return [
            Route(api + "/catalogue", self.catalogue, methods=["GET"]),
            Route(api + "/catalogue", self.apply, methods=["PUT"]),
            Route(api + "/models", self.models, methods=["GET"]),
            Route(api + "/models/{name}/{action:str}", self.on_model, methods=["POST"]),
            Route(api + "/models/{name:path}", self.model, methods=["GET"]),
            Route(api + "/nodes", self.nodes, methods=["GET"]),
            Route(api + "/nodes/{name}", self.node, methods=["GET"]),
            Route(api + "/nodes/{name}/{action:str}", self.on_node, methods=["POST"]),
            Route(api + "/replicas", self.replicas, methods=["GET"]),
            Route(api + "/replicas/{name}", self.replica, methods=["GET"]),
            Route(api + "/replicas/{name}/log", self.log, methods=["GET"]),
            Route(api + "/placements/{name}", self.placement, methods=["GET"]),
            Route(api + "/drains", self.drains, methods=["GET"]),
            Route(api + "/drains/{name}", self.drain, methods=["GET"]),
            Route(api + "/events", self.events, methods=["GET"]),
            Route(api + "/brake/release", self.release, methods=["POST"]),
            Route(api + "/tokens", self.token, methods=["POST"]),
            Route(api + "/backup", self.backup, methods=["GET"]),
        ]

    def agent_routes(self) -> list[Route]:
        """Of the cluster port."""
        return [Route("/agent/v1/sync", self.sync, methods=["POST"])]

    # -- agents ------------------------------------------------------------------------------------------------------

    async def sync(self, request: Request) -> Response:
        peer: Peer = request.state.peer
        try:
            sync = msgspec.json.decode(await _body(request, MAX_SYNC), type=Sync)
        except ValueError as error:  # msgspec's errors are ValueErrors
            raise Denied("bad_request", f"the report is not what is expected here: {error}") from error
        if sync.node != peer.node:
            raise Denied("bad_request", f"the certificate is node {peer.node}'s, and the report node {sync.node}'s")
        try:
            answer = self._control.sync(sync, peer.address)
        except ControlError as error:
            status = 409 if error.reason == "conflict" else 503
            return JSONResponse(
                {"error": {"message": str(error), "type": "cluster_error", "code": error.reason}}, status
            )
        return Response(msgspec.json.encode(answer), media_type="application/json")

    # -- the catalogue -----------------------------------------------------------------------------------------------

    async def catalogue(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        self._on()
        models = [to_plain(m) for m in self._control.state.models.values()]
        return JSONResponse({"kind": "catalogue", "revision": _stamp(self._control.state), "models": models})

    async def apply(self, request: Request) -> Response:
        asked = await _decode(request, Asked)
        self._on()
        try:
            made = parse(asked.text, self._server, asked.file)
        except ConfigError as error:
            raise Problem("bad_field", str(error), "text") from error
        models = {m.name: m for m in made}
        if asked.dry == "plan":
            return JSONResponse(self._plan(models))
        if asked.dry == "diff":
            found = changes(self._control.state.models.values(), made)
            return JSONResponse(_changes("diff", found, _stamp(self._control.state)))
        if asked.dry:
            raise Problem("bad_field", f"dry={asked.dry!r}: diff and plan are known.", "dry")
        done: list[Change] = []

        def edit(state: State) -> State:
            if asked.revision is not None and asked.revision != _stamp(state):
                raise ControlError(
                    "conflict", "the catalogue was changed meanwhile; look at `llmgw ctl diff -f FILE` again"
                )
            done[:] = changes(state.models.values(), made)
            gone = [c.model for c in done if c.kind == "remove"]
            if gone and not asked.remove:
                text = f"{', '.join(gone)}: in the catalogue and not in the file; add it there, or give --remove to stop it"
                raise ControlError("conflict", text)
            return State(state.cluster, models)

        await self._change(edit, lambda: [self._event("catalogue", c.model, str(c)) for c in done])
        return JSONResponse(_changes("applied", done, _stamp(self._control.state)))

    def _plan(self, models: dict[str, CatalogueModel]) -> dict[str, Any]:
        """One round on what would be, with nothing written: what it would do, and every placement that it decides."""
        control = self._control
        clock = control.clock()
        ready = Clock(now=clock.now, wall=clock.wall, started=min(clock.started, clock.now - control.settings.settle))
        settings = msgspec.structs.replace(control.settings, placements=PLANNED)
        before = control.state.cluster
        result = step(
            before,
            models,
            control.seen,
            ready,
            Random(0),  # only back-off draws, and its times are not shown
            settings,
            inflight=control.inflight(),
            template=control.template(),
        )
        placed = [
            r
            for r in sorted(result.cluster.replicas.values(), key=lambda r: natural(r.id))
            if r.record is not None and (r.id not in before.replicas or before.replicas[r.id].state == "pending")
        ]
        return {
            "kind": "plan",
            "changes": [_change(c) for c in changes(control.state.models.values(), models.values())],
            "events": [_event(Told(i, e)) for i, e in enumerate(result.events)],
            "placements": [explain.json(r.record) for r in placed if r.record is not None],
            "text": [explain.summary(r.record) for r in placed if r.record is not None],
        }

    # -- models ------------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return await self._list(request, "models", self._models)

    def _models(self) -> list[dict[str, Any]]:
        found = {m["name"]: m for m in served_models(self._places())}
        for spec in self._control.state.models.values():
            entry = found.setdefault(spec.name, _unserved(spec))
            entry |= wanted(spec, self._control.replicas_of(spec.name))
        return [found[name] for name in sorted(found)]

    async def model(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        name = request.path_params["name"]
        for model in self._models():
            if name == model["name"] or name in model["aliases"] or name in model["loras"]:
                return JSONResponse(model)
        raise Problem("model_not_found", f"There is no model {name[:100]!r}.")

    async def on_model(self, request: Request) -> Response:
        name, action = request.path_params["name"], request.path_params["action"]
        self._on()
        self._spec(name)
        if action == "scale":
            number = (await _decode(request, Scale)).replicas
            await self._change(
                lambda s: _scaled(s, name, number), lambda: [self._event("model", name, f"scaled to {number}")]
            )
        elif action == "retry":
            await self._edit(lambda c: retry(c, name), "model", name, "tried again by an operator")
        else:
            raise Problem("unknown_path", f"A model has no action {action[:100]!r}; there are: scale, retry.")
        found = next(m for m in self._models() if m["name"] == name)
        return JSONResponse(found)

    def _spec(self, name: str) -> CatalogueModel:
        spec = self._control.state.models.get(name)
        if spec is None:
            known = ", ".join(self._control.state.models) or "none"
            raise Problem("model_not_found", f"There is no model {name[:100]!r} in the catalogue; there are: {known}.")
        return spec

    # -- nodes -------------------------------------------------------------------------------------------------------

    async def nodes(self, request: Request) -> Response:
        return await self._list(request, "nodes", lambda: self._nodes(list(self._control.state.cluster.nodes)))

    def _nodes(self, names: list[str]) -> list[dict[str, Any]]:
        control = self._control
        lost, now = control.lost(), trio.current_time()
        fabrics = resolve(s.observed.inventory for s in control.seen.values() if s.observed)
        users = {
            gpu: r.id
            for r in control.state.cluster.replicas.values()
            if r.assignment is not None
            for gpus in r.assignment.gpus
            for gpu in gpus
        }
        cluster = control.state.cluster
        return [
            node(
                cluster.nodes[name],
                control.seen.get(name),
                lost.get(name),
                now,
                fabrics,
                users,
                [r for r in cluster.replicas.values() if r.assignment and name in r.assignment.nodes],
            )
            for name in sorted(names, key=natural)
        ]

    async def node(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        return JSONResponse(self._nodes([self._node(request)])[0])

    def _node(self, request: Request) -> str:
        self._on()
        name: str = request.path_params["name"]
        if name not in self._control.state.cluster.nodes:
            known = ", ".join(sorted(self._control.state.cluster.nodes, key=natural)[:20]) or "none has joined"
            raise Problem("unknown_path", f"There is no node {name[:100]!r}; known: {known}.")
        return name

    async def on_node(self, request: Request) -> Response:
        name, action = self._node(request), request.path_params["action"]
        order = await _decode(request, NodeOrder)
        peer: Peer | None = getattr(request.state, "peer", None)
        by = order.by or (peer.name if peer else "") or "somebody"
        said = f"by {by}" + (f": {order.why}" if order.why else "")
        now = self._wall()
        if action == "cordon":
            await self._edit(lambda c: drains.cordon(c, name, by, now, order.why), "node", name, f"cordoned {said}")
        elif action == "uncordon":
            if self._control.state.cluster.nodes[name].draining:
                raise Problem("conflict", f"{name} is being drained; end that first: llmgw ctl drain {name} --abort")
            await self._edit(lambda c: drains.uncordon(c, name), "node", name, f"uncordoned {said}")
        elif action == "drain":

            def begin(cluster: Cluster) -> Cluster:
                return drains.begin(cluster, name, by, now, why=order.why, surge=order.surge, parallel=order.parallel)

            if order.parallel < 1:
                raise Problem("bad_field", f"parallel={order.parallel}: at least 1.", "parallel")
            await self._edit(begin, "drain", name, f"drain ordered {said}")
            return JSONResponse(self._drain(self._control.state.cluster.drains[name]))
        elif action == "abort":
            if name not in self._control.state.cluster.drains:
                raise Problem("unknown_path", f"{name} is not being drained.")
            await self._edit(lambda c: drains.abort(c, name), "drain", name, f"drain aborted {said}")
        elif action == "forget":
            if name not in self._control.lost():
                raise Problem(
                    "conflict",
                    f"{name} still reports; stop its agent and wait {self._control.settings.lost_after:.0f} s, or drain it",
                )
            await self._edit(lambda c: forget(c, name), "node", name, f"forgotten {said}")
            self._control.seen.pop(name, None)
            return JSONResponse({"kind": "node", "name": name, "state": "gone"})
        elif action == "revoke":
            await self._asked(self._authority().revoke(name))
            self._control.note([self._event("node", name, f"revoked {said}")])
        else:
            known = "cordon, uncordon, drain, abort, forget, revoke"
            raise Problem("unknown_path", f"A node has no action {action[:100]!r}; there are: {known}.")
        return JSONResponse(self._nodes([name])[0])

    # -- replicas and where they are -----------------------------------------------------------------------------------

    async def replicas(self, request: Request) -> Response:
        model = request.query_params.get("model", "")
        if model:
            self._spec(model)

        def items() -> list[dict[str, Any]]:
            replicas = self._control.state.cluster.replicas.values()
            return [
                self._replica(r.id) for r in sorted(replicas, key=lambda r: natural(r.id)) if model in ("", r.model)
            ]

        return await self._list(request, "replicas", items)

    async def replica(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        return JSONResponse(self._replica(self._named(request)))

    def _replica(self, name: str) -> dict[str, Any]:
        control = self._control
        return replica(control.state.cluster.replicas[name], control.seen, control.inflight().get(name, 0))

    def _named(self, request: Request) -> str:
        self._on()
        name: str = request.path_params["name"]
        if name not in self._control.state.cluster.replicas:
            raise Problem("unknown_path", f"There is no replica {name[:100]!r}; see: llmgw ctl replicas.")
        return name

    async def log(self, request: Request) -> Response:
        """The last lines of the engine's last failure, as its agent has sent them, and where the whole log lies."""
        await trio.lowlevel.checkpoint()
        name = self._named(request)
        found = self._control.state.cluster.replicas[name]
        nodes = found.assignment.nodes if found.assignment else ()
        failures = [
            {"node": n, "cause": run.failure.cause, "message": run.failure.message, "at": run.failure.at, "log": list(run.failure.log)}
            for n in nodes
            if (known := self._control.seen.get(n)) is not None and known.observed is not None
            for run in known.observed.runs
            if run.replica == name and run.failure is not None
        ]  # fmt: skip
        return JSONResponse(
            {"kind": "log", "replica": name, "state": found.state, "nodes": list(nodes), "failures": failures}
        )

    async def placement(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        self._on()
        name = request.path_params["name"]
        spec = self._spec(name)
        replicas = self._control.replicas_of(name)
        running = sum(1 for r in replicas if r.state == "ready")
        waiting = sum(1 for r in replicas if r.state == "pending")
        record = None if request.query_params.get("now") == "1" else _recorded(self._control, name)
        recorded = record is not None
        if record is None:
            (record,) = plan(self._control.snapshot(), [Pending(replica="", demand=spec)])
        if request.query_params.get("format") == "text":
            text = explain.text(record, desired=spec.replicas, running=running, pending=waiting)
            return JSONResponse(
                {"kind": "placement_text", "recorded": recorded, "exit": explain.exit_code(record), "text": text}
            )
        return JSONResponse(explain.json(record, desired=spec.replicas, running=running) | {"recorded": recorded})

    # -- drains, events ----------------------------------------------------------------------------------------------

    async def drains(self, request: Request) -> Response:
        return await self._list(
            request, "drains", lambda: [self._drain(d) for d in self._control.state.cluster.drains.values()]
        )

    async def drain(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        name = self._node(request)
        order = self._control.state.cluster.drains.get(name)
        if order is None:
            raise Problem("unknown_path", f"{name} is not being drained.")
        return JSONResponse(self._drain(order))

    def _drain(self, order: Drain) -> dict[str, Any]:
        replicas = self._control.state.cluster.replicas.values()
        here = [r for r in replicas if r.assignment and order.node in r.assignment.nodes]
        load = self._control.inflight()
        moving = [
            {"replica": r.id, "state": r.state, "inflight": load.get(r.id, 0), "copy": copy.id if copy else None,
             "copy_state": copy.state if copy else None}
            for r in here
            if r.id in order.current
            for copy in [next((c for c in replicas if c.replaces == r.id), None)]
        ]  # fmt: skip
        found: dict[str, Any] = {"kind": "drain"} | msgspec.to_builtins(order) | {
            "remaining": sorted((r.id for r in here), key=natural),
            "moving": moving,
            "progress": drains.progress(order, here),
        }  # fmt: skip
        return found

    async def events(self, request: Request) -> Response:
        """Kept ones after number `after`; with `watch`, a line each as they happen."""
        self._on()
        try:
            after = int(request.query_params.get("after", "0"))
        except ValueError:
            raise Problem("bad_field", "after: a whole number.", "after") from None
        if request.query_params.get("watch") != "1":
            await trio.lowlevel.checkpoint()
            items = [_event(t) for t in self._control.events if t.number > after]
            return JSONResponse({"kind": "events", "revision": self._control.revision, "items": items})

        async def lines(write: Write) -> None:
            last = after
            while True:
                changed = self._control.changed
                for told in [t for t in self._control.events if t.number > last]:
                    last = told.number
                    await write(msgspec.json.encode(_event(told)) + b"\n")
                await changed.wait()

        return Flow(lines, "application/jsonl")

    async def release(self, request: Request) -> Response:
        self._on()
        await self._edit(release, "brake", "cluster", "released by an operator")
        return JSONResponse({"kind": "brake", "frozen": self._control.state.cluster.frozen})

    # -- identity and copies -----------------------------------------------------------------------------------------

    async def token(self, request: Request) -> Response:
        order = await _decode(request, TokenOrder)
        made = await self._asked(self._authority().token(order.node, order.pool, order.ttl))
        return JSONResponse({"kind": "token"} | made)

    async def backup(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        self._on()
        if self.copy is None:
            raise Problem("control_unavailable", "This store makes its own copies: `etcdctl snapshot save FILE`.")
        return Flow(self.copy, "application/octet-stream")

    def _authority(self) -> Authority:
        self._on()
        if self.authority is None:
            raise Problem("control_unavailable", "There is no certificate authority yet; make one: llmgw ctl ca init")
        return self.authority

    async def _asked(self, work: Any) -> Any:
        try:
            return await work
        except Denied as error:
            raise Problem("conflict", str(error)) from error
        except ConfigError as error:
            raise Problem("bad_field", str(error)) from error
        except LlmgwError as error:
            raise Problem("control_unavailable", str(error)) from error

    # -- all together ------------------------------------------------------------------------------------------------

    def _on(self) -> None:
        if self.off:
            raise Problem("control_unavailable", self.off)
        if not self._control.term:
            who = f": {self._control.leader} does" if self._control.leader else ""
            raise Problem("control_unavailable", f"This server does not lead the control plane{who}.")

    def _event(self, kind: str, subject: str, text: str) -> Event:
        return Event(kind=kind, subject=subject, text=text, at=self._wall())

    async def _edit(self, edit: Callable[[Cluster], Cluster], kind: str, subject: str, text: str) -> None:
        before = self._control.state.cluster

        def events() -> list[Event]:
            return [self._event(kind, subject, text)] if self._control.state.cluster != before else []

        await self._change(lambda s: State(edit(s.cluster), s.models), events)

    async def _change(self, edit: Callable[[State], State], events: Callable[[], list[Event]]) -> None:
        try:
            await self._control.change(edit)
        except ControlError as error:
            raise Problem(error.reason, str(error)) from error
        self._control.note(events())

    async def _list(self, request: Request, kind: str, items: Callable[[], list[dict[str, Any]]]) -> Response:
        if kind != "models":
            self._on()

        def made() -> dict[str, Any]:
            return {"kind": kind, "revision": self._control.revision, "items": items()}

        if request.query_params.get("watch") != "1":
            await trio.lowlevel.checkpoint()
            return JSONResponse(made())

        async def lines(write: Write) -> None:
            while True:
                changed = self._control.changed
                await write(msgspec.json.encode(made()) + b"\n")
                with trio.move_on_after(IDLE):
                    await changed.wait()

        return Flow(lines, "application/jsonl")


def _scaled(state: State, name: str, number: int) -> State:
    spec = state.models.get(name)
    if spec is None:
        raise ControlError("conflict", f"{name} was taken out of the catalogue meanwhile")
    if number < spec.min_available or number < 0:
        text = f"{name} cannot have {number} replicas: min_available is {spec.min_available}; change that first"
        raise ControlError("conflict", text)
    return State(state.cluster, {**state.models, name: attrs.evolve(spec, replicas=number)})


def _recorded(control: Control, model: str) -> Record | None:
    """The decision that people ask about: of a replica that has no place, else the latest one."""
    found = [r for r in control.replicas_of(model) if r.record is not None]
    found.sort(key=lambda r: (r.state != "pending", -(r.record.at if r.record else 0.0), natural(r.id)))
    return found[0].record if found else None


def _stamp(state: State) -> int:
    """Names the catalogue's text: rises or falls with it, never equal for two that follow each other."""
    return zlib.crc32(msgspec.json.encode([to_plain(m) for m in state.models.values()]))


def _unserved(spec: CatalogueModel) -> dict[str, Any]:
    return {
        "kind": "model",
        "name": spec.name,
        "aliases": sorted(spec.routing.aliases),
        "loras": [],
        "max_model_len": spec.max_model_len,
        "endpoints": [],
        "serving": 0,
    }


def _changes(kind: str, found: list[Change], revision: int) -> dict[str, Any]:
    return {"kind": kind, "revision": revision, "changes": [_change(c) for c in found]}


def _change(change: Change) -> dict[str, Any]:
    return {
        "model": change.model,
        "change": change.kind,
        "restarts": change.restarts,
        "fields": [{"path": path, "before": msgspec.to_builtins(_bare(old)), "after": msgspec.to_builtins(_bare(new))} for path, old, new in change.fields],
        "text": str(change),
    }  # fmt: skip


def _bare(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _event(told: Told) -> dict[str, Any]:
    event = told.event
    return {"number": told.number, "at": event.at, "about": event.kind, "subject": event.subject, "text": event.text}


async def _body(request: Request, limit: int) -> bytes:
    """Raises ValueError for one that is too long."""
    body = bytearray()
    async with aclosing(request.stream()) as parts:
        async for part in parts:
            body += part
            if len(body) > limit:
                raise ValueError(f"more than {limit >> 20} MiB")
    return bytes(body)


async def _decode(request: Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await _body(request, MAX_TEXT) or b"{}", type=kind)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise Problem("bad_field", f"The body cannot be used: {error}.") from error
