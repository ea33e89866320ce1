"""Asks every endpoint how it is, one task each, and learns what it serves.

`GET /health`, then `GET /v1/models`. Engines differ in what "not ready" looks like: vLLM refuses connections while it
loads, llama-server answers 503 `Loading model`, SGLang's `/health` generates a token and takes a second and more.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import trio

from llmgw.config import Probe
from llmgw.endpoint import Model
from llmgw.errors import Unavailable
from llmgw.net.client import Answer, Client, Unreachable
from llmgw.routing.health import Event, overlooks, pause
from llmgw.server.fleet import Fleet, Place
from llmgw.server.targets import target
from llmgw.server.watching import each_place

ANSWER = 1 << 20  # bytes: a list of models is a few KiB
NAMES = 256  # models of one engine that are believed; more is no engine

OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama-server"}
"""What engines call themselves in `owned_by`."""


class _Entry(msgspec.Struct):
    id: str
    parent: str | None = None
    owned_by: str = ""
    max_model_len: int | None = None


class _Listing(msgspec.Struct):
    data: list[_Entry]


class Prober:
    """Keeps one task for every place of the fleet."""

    def __init__(self, fleet: Fleet, client: Client, options: Probe, rng: random.Random) -> None:
        self._fleet = fleet
        self._client = client
        self._options = options
        self._rng = rng

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Probe until cancelled."""
        task_status.started()
        await each_place(self._fleet, self._watch)

    async def _watch(self, place: Place) -> None:
        """Until *place* is gone."""
        options = self._options
        while place.index >= 0:
            wake = trio.Event()
            place.changed = wake.set
            event, why = await self._probe(place)
            if event is not None:
                if event == "probe_ok":
                    place.slot.probes_ok += 1
                else:
                    place.slot.probes_failed += 1
                self._fleet.happened(place, event, why)
                wake = trio.Event()  # what this probe itself brought about needs no other one at once
                place.changed = wake.set
            with trio.move_on_after(pause(place.health, options.interval, options.quarantine, self._rng.random())):
                await wake.wait()
        place.changed = None

    async def _probe(self, place: Place) -> tuple[Event | None, str]:
        """What one probe says, and why it is nothing good."""
        limit = self._options.timeout
        with trio.move_on_after(limit):
            try:
                return await self._ask(place)
            except Unreachable as error:
                return "connect_failed", str(error)
            except Unavailable as error:
                return "probe_failed", str(error)
        if overlooks(place.alive, trio.current_time(), limit):
            return None, ""
        return "probe_failed", f"no answer to its health check within {limit:g} s"

    async def _ask(self, place: Place) -> tuple[Event, str]:
        where = target(place.endpoint, place.key)
        health = await self._client.request(where, "GET", "/health", limit=ANSWER)
        without = health.status in (404, 405)  # not every OpenAI-compatible server has /health
        if health.status != 200 and not without:
            return "probe_failed", f"/health says {_said(health)}"
        models = await self._client.request(where, "GET", "/v1/models", limit=ANSWER)
        if models.status != 200:
            if without:
                return "probe_failed", f"/health says {_said(health)}, /v1/models {_said(models)}"
            if not place.endpoint.models:
                return "probe_failed", f"its models are not configured, and /v1/models says {_said(models)}"
            return "probe_ok", ""
        self._learn(place, models.body)
        return "probe_ok", ""

    def _learn(self, place: Place, body: bytes) -> None:
        try:
            entries = msgspec.json.decode(body, type=_Listing).data[:NAMES]
        except (msgspec.MsgspecError, RecursionError):
            return
        names = {e.id for e in entries}
        loras: dict[str, list[str]] = {}
        for entry in entries:
            if entry.parent in names and entry.parent != entry.id:
                loras.setdefault(str(entry.parent), []).append(entry.id)
        adapters = {name for found in loras.values() for name in found}
        models = tuple(
            Model(name=e.id, loras=tuple(loras.get(e.id, ())), max_model_len=e.max_model_len)
            for e in entries
            if e.id not in adapters
        )
        engine = next((OWNERS[e.owned_by] for e in entries if e.owned_by in OWNERS), "")
        self._fleet.learn(place, models, engine)


def _said(answer: Answer) -> str:
    """Status, and the error's message if there is one: it tells "Loading model" from "dead"."""
    try:
        error: Any = msgspec.json.decode(answer.body)["error"]
        text = error if isinstance(error, str) else str(error["message"])
    except (msgspec.MsgspecError, KeyError, TypeError, RecursionError):
        return str(answer.status)
    return f"{answer.status} {text[:100]}"
