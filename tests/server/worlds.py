"""A brain with its fleet, metrics and log, without any socket, on a clock that tests set."""

from __future__ import annotations

import json
import random
from typing import Any

import attrs

from llmgw import config
from llmgw.hooks import Hooks
from llmgw.logs import Log
from llmgw.metrics import Metrics
from llmgw.request import Head, InferenceRequest, Lease, Outcome
from llmgw.routing.router import Router
from llmgw.server.brain import Brain
from llmgw.server.fleet import Fleet, Place


class Lines:
    """A log's target that keeps everything."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> int | None:
        self.data += data
        return len(data)

    async def wait(self) -> None:
        raise AssertionError("never full")

    def close(self) -> None:
        return None


@attrs.define(eq=False)
class Bench:
    """*now* is the clock."""

    brain: Brain
    fleet: Fleet
    metrics: Metrics
    log: Log
    lines: Lines
    clock: list[float]

    def place(self, name: str) -> Place:
        return next(p for p in self.fleet.places.values() if p.endpoint.name == name)

    def counts(self, name: str) -> tuple[int, int, int]:
        """Requests, prompt tokens and answer tokens that the ledger has for *name*."""
        return self.fleet.router.ledger.counts(self.place(name).endpoint.id)

    def ready(self, *names: str) -> None:
        for place in self.fleet.places.values():
            if not names or place.endpoint.name in names:
                self.fleet.happened(place, "probe_ok")

    def logged(self, event: str = "") -> list[dict[str, Any]]:
        self.log._write(b"")
        found = [json.loads(line) for line in self.lines.data.splitlines()]
        return [line for line in found if (line.get("event", "") if event else line["kind"]) == (event or "request")]

    def forget(self) -> None:
        """What has been logged is gone."""
        self.log._write(b"")
        self.lines.data = b""

    def admit(self, model: str = "m", route: str = "/v1/chat/completions", **known: Any) -> Any:
        request = InferenceRequest(id="r", head=Head(route, "1.2.3.4"), model=model, accepted=self.clock[0], **known)
        return self.brain.admit(request)

    def lease(self, model: str = "m", **known: Any) -> Lease:
        found = self.admit(model, **known)
        assert isinstance(found, Lease), found
        return found

    def settle(self, lease: Lease | None, status: int = 200, reason: str = "", **known: Any) -> Outcome:
        outcome = Outcome(
            request_id="r", route="/v1/chat/completions", status=status, reason=reason, model="m", **known
        )
        self.brain.settle(lease.id if lease else None, outcome)
        return outcome


def bench(*endpoints: str, text: str = "", hooks: Hooks | None = None, now: float = 100.0, **known: Any) -> Bench:
    """*endpoints*: as after ``--endpoint``. *text*: more of the configuration file. *now*: its clock at first."""
    if "routing:" not in text:
        text += "\nrouting: {profile: round-robin}\n"
    server = config.with_flags(config.parse("version: 1\n" + text), endpoints=endpoints)
    clock = [now]
    metrics, lines = Metrics(), Lines()
    log = Log(lines, lambda: 1e9)
    router = Router(random.Random(0).random, 0.0, server.routing.profiles)
    fleet = Fleet(metrics, log, lambda: clock[0], policies=server.models, router=router, **known)
    brain = Brain(server, fleet, metrics, log, lambda: clock[0], created=1e9, hooks=hooks)
    fleet.replace("static", tuple(e.endpoint() for e in server.endpoints))
    return Bench(brain, fleet, metrics, log, lines, clock)
