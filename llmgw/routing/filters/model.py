"""Serves the model."""

from __future__ import annotations

from collections.abc import Sequence

from llmgw.endpoint import Endpoint, Snapshot
from llmgw.request import Phase
from llmgw.routing.field import Query

KINDS = 4096  # answers that are remembered for one set of endpoints: names × phases that are in use


class Model:
    """Serves the model (by name, alias or adapter) and does the phases that are asked for."""

    api = 1
    name = "model"

    def __init__(self) -> None:
        self._endpoints: tuple[Endpoint, ...] = ()
        self._known: dict[tuple[str, str, tuple[Phase, ...]], list[int]] = {}

    def keep(self, query: Query, snapshot: Snapshot, at: Sequence[int], now: float) -> Sequence[int]:
        endpoints = snapshot.endpoints
        if endpoints is not self._endpoints or len(self._known) > KINDS:
            self._endpoints, self._known = endpoints, {}
        kind = (query.model, query.request.lora, query.phases)
        found = self._known.get(kind)
        if found is None:
            found = self._known[kind] = [i for i, e in enumerate(endpoints) if serves(e, *kind)]
        if len(at) == len(endpoints):
            return found
        mine = set(found)
        return [i for i in at if i in mine]


def serves(endpoint: Endpoint, model: str, lora: str, phases: tuple[Phase, ...]) -> bool:
    return endpoint.phases.issuperset(phases) and any(
        (model == m.name or model in m.aliases or model in m.loras) and (not lora or lora in m.loras)
        for m in endpoint.models
    )
