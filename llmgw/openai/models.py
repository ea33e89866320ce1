"""The bodies of ``GET /v1/models`` and ``GET /v1/models/{id}``, merged over all endpoints.

One entry a name that a request may use: models, their aliases, their LoRAs. What replicas of one model do not agree
on is told so that every replica can do it: ``max_model_len`` is the smallest that is known.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from llmgw.endpoint import Endpoint

OWNER = "llmgw"


class _Entry(msgspec.Struct, gc=False):
    """An item of the list, as OpenAI's clients and vLLM's know it. *parent*: the base model of a LoRA."""

    id: str
    created: int
    root: str
    parent: str | None = None
    max_model_len: int | None = None
    object: str = "model"
    owned_by: str = OWNER


class Merged(msgspec.Struct, frozen=True):
    """Ready to send: the list's body, and one body by id."""

    list: bytes
    by_id: dict[str, bytes]


def merge(endpoints: Iterable[Endpoint], *, created: int) -> Merged:
    """All names that *endpoints* serve, sorted by id. *created*: Unix seconds, the same for all.

    A name that is a model somewhere is listed as a model, even if it is an alias or a LoRA elsewhere.
    """
    found: dict[str, _Entry] = {}
    for endpoint in endpoints:
        for model in endpoint.models:
            length = model.max_model_len
            _add(found, _Entry(model.name, created, model.name, max_model_len=length))
            for alias in model.aliases:
                _add(found, _Entry(alias, created, model.name, max_model_len=length))
            for lora in model.loras:
                _add(found, _Entry(lora, created, lora, model.name, length))
    entries = [found[name] for name in sorted(found)]
    return Merged(
        msgspec.json.encode({"object": "list", "data": entries}),
        {entry.id: msgspec.json.encode(entry) for entry in entries},
    )


def _add(found: dict[str, _Entry], entry: _Entry) -> None:
    old = found.get(entry.id)
    if old is not None:
        lengths = [e.max_model_len for e in (old, entry) if e.max_model_len is not None]
        entry = min(old, entry, key=_rank)
        entry.max_model_len = min(lengths, default=None)
    found[entry.id] = entry


def _rank(entry: _Entry) -> tuple[bool, bool, str, str]:
    """Models before aliases before LoRAs, then by name: the same whatever the order of the endpoints."""
    return entry.parent is not None, entry.root != entry.id, entry.root, entry.parent or ""
