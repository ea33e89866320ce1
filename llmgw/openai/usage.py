"""Token counts as engines report them, and the filter that hides a report that the client did not ask for."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from llmgw.openai.cut import CAP, EVENT, PART, REST, Cutter, data_of

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Usage(msgspec.Struct, frozen=True, gc=False):
    """As the engine said. None = it did not say. *prompt* includes *cached*."""

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None
    computed: int | None = None  # prompt tokens whose cache this engine made itself (vLLM's created_cache_tokens)


class _Details(msgspec.Struct, gc=False):
    cached_tokens: Count | None = None
    created_cache_tokens: Count | None = None


class Reported(msgspec.Struct, gc=False):
    """A usage object in any of the three dialects. Anthropic's input_tokens leaves out what the cache had."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None

    def merged(self, before: Usage | None) -> Usage | None:
        """This report over an earlier one: the last word wins, number by number (Anthropic's comes in two halves)."""
        prompt = self.prompt_tokens
        cached: int | None = None
        computed: int | None = None
        details = self.prompt_tokens_details or self.input_tokens_details
        if details is not None:
            cached, computed = details.cached_tokens, details.created_cache_tokens
        if prompt is None and self.input_tokens is not None:
            prompt = self.input_tokens + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        if cached is None:
            cached = self.cache_read_input_tokens
        completion = self.completion_tokens if self.completion_tokens is not None else self.output_tokens
        if prompt is None and completion is None:
            return before
        if before is None:
            return Usage(prompt, cached, completion, computed)
        return Usage(
            before.prompt if prompt is None else prompt,
            before.cached if cached is None else cached,
            before.completion if completion is None else completion,
            before.computed if computed is None else computed,
        )


class _UsageOnly(msgspec.Struct, gc=False):
    choices: list[Raw]
    usage: Reported


_usage_only = msgspec.json.Decoder(_UsageOnly).decode


class UsageFilter:
    """Takes out the extra event with nothing but usage, where the gateway asked for it and the client did not.

    Everything else passes byte for byte; at most one event is held until it is complete, and one above *cap* is no
    usage event and passes as it comes.
    """

    __slots__ = ("_cutter", "_dropped", "_passing")

    def __init__(self, cap: int = CAP) -> None:
        self._cutter = Cutter(cap)
        self._dropped = False  # the event before, so that what is left of its line end goes too
        self._passing = False  # part of a long event went through

    @property
    def at_boundary(self) -> bool:
        """Do the bytes that were let through end where an event may begin? What is held has not been let through."""
        return not self._passing

    def feed(self, data: bytes) -> bytes:
        if self._cutter.idle and data.endswith(b"\n\n") and b'"usage"' not in data:
            self._dropped = False
            return data
        out = []
        for piece, text in self._cutter.feed(data):
            if piece != REST:
                self._dropped = piece == EVENT and b'"usage"' in text and _is_usage_only(text)
            if not self._dropped:
                out.append(text)
            self._passing = piece == PART
        return b"".join(out)

    def finish(self) -> bytes:
        """What is left when the upstream has ended."""
        left = self._cutter.finish()
        if not self._passing and b'"usage"' in left and _is_usage_only(left):
            return b""
        return left


def _is_usage_only(event: bytes) -> bool:
    data = data_of(event)
    if data is None:
        return False
    try:
        return not _usage_only(data).choices
    except (ValueError, RecursionError):
        return False
