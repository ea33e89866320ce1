"""What the agent asks a running engine: is it healthy, does it list its model, can it serve, what does it count."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from llmgw.control.observed import EndpointFacts
from llmgw.endpoint import Report
from llmgw.engines.base import BOOTSTRAP, KV_EVENTS, SIDE_CHANNEL, Ask, Engine, Launch
from llmgw.errors import Unavailable
from llmgw.net.client import Answer, Client, Unreachable
from llmgw.request import PHASES, Target
from llmgw.routing.report import Reader, Reading

PAGE = 4 << 20  # bytes of a metrics page
SMALL = 1 << 20  # bytes of any other answer


class _Entry(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Listing(msgspec.Struct):
    data: list[_Entry]


@attrs.define
class Asking:
    """The questions to one replica's engine. The caller sets deadlines."""

    client: Client
    engine: Engine
    launch: Launch
    reader: Reader
    max_model_len: int | None = None  # as it lists its model

    @classmethod
    def of(cls, client: Client, engine: Engine, launch: Launch) -> Asking:
        return cls(client, engine, launch, Reader(engine.metrics))

    @property
    def address(self) -> str:
        host = f"[{self.launch.host}]" if ":" in self.launch.host else self.launch.host
        return f"{host}:{self.launch.first_port}"

    async def _ask(self, ask: Ask, limit: int = SMALL) -> Answer:
        key = self.launch.key
        headers = (("authorization", f"Bearer {key}"),) if key else ()
        target = Target(
            endpoint=self.launch.names[0], name=self.launch.names[0], address=f"tcp:{self.address}", host=self.address, headers=headers
        )  # fmt: skip
        more = (("content-type", "application/json"),) if ask.body else ()
        return await self.client.request(target, ask.method, ask.path, headers=more, body=ask.body, limit=limit)

    async def healthy(self) -> bool:
        """It is healthy and lists its model. Never raises for an engine that is not up yet."""
        try:
            if (await self._ask(self.engine.health)).status != 200:
                return False
            answer = await self._ask(self.engine.models)
            entries = msgspec.json.decode(answer.body, type=_Listing).data if answer.status == 200 else []
        except (Unavailable, msgspec.MsgspecError):
            return False
        found = next((e for e in entries if e.id == self.launch.names[0]), None)
        if found is None:
            return False
        self.max_model_len = found.max_model_len or self.launch.max_model_len
        return True

    async def canary(self) -> str:
        """ "" = it served the smallest request; else what it said instead."""
        try:
            answer = await self._ask(self.engine.canary(self.launch))
        except Unavailable as error:
            return str(error)
        if answer.status != 200:
            return f"{answer.status} {_message(answer.body)}".strip()
        try:
            said: dict[str, Any] = msgspec.json.decode(answer.body, type=dict[str, Any])
        except msgspec.MsgspecError:
            return "200, but not JSON"
        return (
            "" if said.get("choices") or said.get("data") else f"200, but nothing was served: {_message(answer.body)}"
        )

    async def figures(self, now: float) -> Reading | None:
        """What its metrics page says; None = nothing. Raises Unreachable if its port refuses."""
        try:
            answer = await self._ask(Ask(path=self.engine.metrics.path), PAGE)
        except Unreachable:
            raise
        except Unavailable:
            return None
        return self.reader.read(answer.body, now) if answer.status == 200 else None

    def facts(self, reading: Reading | None, version: str, fabrics: tuple[str, ...]) -> EndpointFacts:
        """The endpoint that a ready replica is."""
        launch = self.launch
        split = launch.phases != {"prefill", "decode"}
        host = self.address.rpartition(":")[0]
        kind = self.engine.name
        return EndpointFacts(
            url=f"http://{self.address}",
            version=version,
            phases=tuple(p for p in PHASES if p in launch.phases),
            fabrics=fabrics,
            max_model_len=self.max_model_len,
            block_size=reading.block_size if reading else None,
            blocks=reading.blocks if reading else None,
            kv_events=f"connect tcp://{host}:{launch.port(KV_EVENTS)}" if launch.kv_events else "",
            side_channel=f"{host}:{launch.port(SIDE_CHANNEL)}" if split and kind == "vllm" else "",
            bootstrap=f"{host}:{launch.port(BOOTSTRAP)}"
            if split and kind == "sglang" and "prefill" in launch.phases
            else "",
            api_key=launch.key,
        )


def busy(report: Report) -> bool:
    """Whether it says that requests are with it."""
    return bool((report.running or 0) + (report.waiting or 0))


def _message(body: bytes) -> str:
    """The error's message, in any of the shapes that engines use; at most 200 characters."""
    try:
        said: Any = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return body[:200].decode(errors="replace")
    if isinstance(said, dict):
        said = said.get("error", said.get("message", said))
    if isinstance(said, dict):
        said = said.get("message", said)
    return str(said)[:200]
