"""Render: the prompt as token ids, images with their hashes and placeholders, from a tokeniser service."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

import attrs

from llmgw.pipeline import params
from llmgw.pipeline.commands import Body, Call, Command, Failed, Reply
from llmgw.pipeline.context import CHAT, COMPLETIONS, GENERATE, Context, Entry
from llmgw.pipeline.step import LegFailed, Work, attempt
from llmgw.pipeline.wire import refuse, token_list


@attrs.frozen
class Render:
    """Token ids from a service at *address*; tokens-in requests are checked instead."""

    api: ClassVar[int] = 1
    name: ClassVar[str] = "render"
    address: str = params.key(params.http_address, "The tokeniser service, http://HOST:PORT. Required.")
    timeout: float = params.key(params.duration, "For the whole call.", 30.0)
    max_idle_conns_per_host: int = params.key(params.integer(0), "Idle connections kept to the service.", 100)
    idle_conn_timeout: float = params.key(params.duration, "How long an idle connection is kept.", 90.0)
    max_total_tokens: int = params.key(params.integer(0), "Longest prompt, tokens; 0 = no limit.", 0)
    max_total_placeholder_tokens: int = params.key(
        params.integer(0), "Most tokens that images may take; 0 = no limit.", 0
    )

    def run(self, ctx: Context) -> Work:
        if ctx.path == CHAT:
            yield from self._chat(ctx)
        elif ctx.path == COMPLETIONS:
            yield from self._completions(ctx)
        elif ctx.path == GENERATE:
            self._generate(ctx)
        return None

    def _call(self, ctx: Context) -> Generator[Command, Reply, Any]:
        answer = yield from attempt(
            ctx,
            lambda: Call(
                leg=ctx.leg("render"),
                step="render",
                path=f"{ctx.path}/render",
                body=ctx.body,
                address=self.address,
                timeout=self.timeout,
            ),
        )
        return answer.body

    def _chat(self, ctx: Context) -> Generator[Command, Reply, None]:
        page = yield from self._call(ctx)
        if not isinstance(page, dict):
            raise _unusable("the answer is not a JSON object")
        ids = self._tokens(page.get("token_ids"))
        told = page.get("features") or {}
        if ctx.entries or _images(told, "mm_hashes"):
            lists = [_images(told, key) for key in ("mm_hashes", "mm_placeholders", "kwargs_data")]
            if any(found is None or len(found) != len(ctx.entries) for found in lists):
                counts = ", ".join("none" if found is None else str(len(found)) for found in lists)
                raise _unusable(f"{len(ctx.entries)} images went in; hashes, placeholders, tensors came out: {counts}")
            hashes, places, tensors = (found or [] for found in lists)
            for entry, hash_, place, tensor in zip(ctx.entries, hashes, places, tensors, strict=True):
                if not isinstance(hash_, str) or not isinstance(place, dict):
                    raise _unusable("a hash or placeholder has the wrong type")
                entry.hash, entry.kwargs = hash_, tensor or None
                entry.offset, entry.length = _span(place, len(ids))
        self._check(ids, ctx.entries)
        ctx.token_ids = ids

    def _completions(self, ctx: Context) -> Generator[Command, Reply, None]:
        prompt = ctx.body.get("prompt")
        if isinstance(prompt, list) and (not prompt or type(prompt[0]) in (int, float)):
            ctx.token_ids = token_list(prompt, "prompt", self.max_total_tokens)
            return
        if not isinstance(prompt, str):
            raise refuse(
                "bad_field", "prompt must be a string or an array of token ids; one prompt a request", "prompt"
            )
        page = yield from self._call(ctx)
        if not isinstance(page, list) or len(page) != 1 or not isinstance(page[0], dict):
            raise _unusable("the answer is not an array of one object")
        ids = self._tokens(page[0].get("token_ids"))
        self._check(ids, [])
        ctx.token_ids = ids
        ctx.body["prompt"] = ids

    def _generate(self, ctx: Context) -> None:
        """No call: the client has tokenised. Everything that bounds an allocation later is checked here."""
        body = ctx.body
        ids = token_list(body.get("token_ids"), "token_ids", self.max_total_tokens)
        if not ids:
            raise refuse("bad_field", "token_ids is empty", "token_ids")
        sampling = _object(body, "sampling_params", "sampling_params")
        _object(sampling, "extra_args", "sampling_params.extra_args")
        ctx.entries = _entries(_object(body, "features", "features"), len(ids))
        self._check(ids, ctx.entries)
        ctx.token_ids = ids

    def _tokens(self, value: Any) -> list[int]:
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise _unusable("token_ids is not an array of integers")
        return value

    def _check(self, ids: list[int], entries: list[Entry]) -> None:
        if self.max_total_tokens and len(ids) > self.max_total_tokens:
            raise refuse("bad_field", f"the prompt has {len(ids)} tokens; at most {self.max_total_tokens} are allowed")
        if most := self.max_total_placeholder_tokens:
            total = sum(entry.length for entry in entries)
            if total > most:
                raise refuse("bad_field", f"the images take {total} tokens; at most {most} are allowed")


def _unusable(detail: str) -> LegFailed:
    return LegFailed("render", Failed(reason="phase_failed", detail=detail))


def _images(told: object, key: str) -> list[Any] | None:
    """The ``image`` list under *key*; None where there is none."""
    found = told.get(key) if isinstance(told, dict) else None
    images = found.get("image") if isinstance(found, dict) else None
    return images if isinstance(images, list) else None


def _span(place: dict[str, Any], tokens: int) -> tuple[int, int]:
    """Offset and length of a placeholder inside a prompt of *tokens*. Raises LegFailed where it lies outside."""
    offset, length = place.get("offset"), place.get("length")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0 or offset + length > tokens:
        raise _unusable(f"placeholder {place} does not lie in a prompt of {tokens} tokens")
    return offset, length


def _object(place: Body, key: str, param: str) -> Body:
    """``place[key]`` as an object; {} where it is absent or null. Raises Refused for another type."""
    found = place.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise refuse("bad_field", f"{param} is not an object", param)
    return found


def _image_list(told: Body, key: str) -> list[Any] | None:
    images = _object(told, key, f"features.{key}").get("image")
    if images is not None and not isinstance(images, list):
        raise refuse("bad_field", f"features.{key}.image is not an array", f"features.{key}.image")
    return images


def _entries(told: Body, tokens: int) -> list[Entry]:
    """The images of a tokens-in request. Raises Refused for anything malformed or outside the prompt."""
    hashes = _image_list(told, "mm_hashes")
    if not hashes:
        return []
    places = _image_list(told, "mm_placeholders")
    tensors = _image_list(told, "kwargs_data")
    if places is None or len(places) != len(hashes):
        raise refuse(
            "bad_field", "features.mm_placeholders.image needs one item per hash", "features.mm_placeholders.image"
        )
    if told.get("kwargs_data") is not None and (tensors is None or len(tensors) != len(hashes)):
        raise refuse("bad_field", "features.kwargs_data.image needs one item per hash", "features.kwargs_data.image")
    found = []
    for index, (hash_, place) in enumerate(zip(hashes, places, strict=True)):
        where = f"features.mm_placeholders.image[{index}]"
        if not isinstance(hash_, str):
            raise refuse("bad_field", f"features.mm_hashes.image[{index}] is not a string", "features.mm_hashes.image")
        offset = place.get("offset") if isinstance(place, dict) else None
        length = place.get("length") if isinstance(place, dict) else None
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise refuse("bad_field", f"{where} needs a non-negative integer offset and length", where)
        if offset >= tokens or offset + length > tokens:
            raise refuse("bad_field", f"{where} ends beyond the prompt of {tokens} tokens", where)
        tensor = tensors[index] if tensors is not None else None
        if tensor is not None and not isinstance(tensor, str):
            raise refuse("bad_field", f"features.kwargs_data.image[{index}] is neither a string nor null", where)
        found.append(Entry(-1, hash=hash_, kwargs=tensor or None, offset=offset, length=length))
    return found
