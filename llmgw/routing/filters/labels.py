"""Has labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmgw.endpoint import Snapshot
from llmgw.routing.field import Query


class Labels:
    """Has all of the labels that the profile names: pins a tenant or a kind of work to a part of the fleet."""

    api = 1
    name = "labels"

    def __init__(self, labels: Mapping[str, str]) -> None:
        if not labels:
            raise ValueError("labels must map names to values, e.g. {pool: batch}")
        self._wanted = frozenset((str(k), str(v)) for k, v in labels.items())

    def keep(self, query: Query, snapshot: Snapshot, at: Sequence[int], now: float) -> Sequence[int]:
        return [i for i in at if self._wanted <= snapshot.endpoints[i].labels.items()]
