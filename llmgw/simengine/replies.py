"""How a simulated engine answers: the same keys in the same order, event by event, as vLLM.

A `Reply` renders one request: whole bodies for plain answers, server-sent events for streams. The content events of a
choice differ in their text only, so `frame` gives what stands before and after it; the rest is made when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import attrs
import msgspec

from llmgw.simengine.text import Tokenizer
from llmgw.simengine.wire import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, Ask, Body

VERSION = "0.32.0"
"""The version of vLLM whose bytes these are."""

DONE = b"data: [DONE]\n\n"
MARK = "\0"

encode = msgspec.json.encode


def event(payload: Body) -> bytes:
    return b"data: " + encode(payload) + b"\n\n"


def named(payload: Body) -> bytes:
    return b"event: %b\n" % str(payload["type"]).encode() + event(payload)


def error_event(message: str, kind: str, code: int) -> bytes:
    """The error inside a stream, spaced as Python's json module spaces."""
    return (
        b'data: {"error": {"message": '
        + encode(message)
        + b', "type": '
        + encode(kind)
        + b', "param": null, "code": %d}}\n\n' % code
    )


ENGINE_DIED = (
    "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "InternalServerError",
    500,
)


@attrs.define(eq=False)
class Choice:
    """One choice of an answer, as far as it has got."""

    index: int
    output: Sequence[int]
    prompt: Sequence[int]
    tokens: int = 0
    reason: str | None = None
    stop_reason: str | int | None = None
    cached: int = 0


class Reply:
    """Chat completions, and what all dialects share."""

    prefix = "chatcmpl-"
    chunk = "chat.completion.chunk"

    def __init__(
        self, ask: Ask, request_id: str, created: int, tokenizer: Tokenizer, fingerprint: str, details: bool
    ) -> None:
        self.ask = ask
        self.id = self.prefix + request_id
        self.created = created
        self.tokenizer = tokenizer
        self.fingerprint = f"vllm-{VERSION}-{fingerprint}"
        self.details = details
        self.kv: Body | None = None
        self.ec: Body | None = None
        self.choices: list[Choice] = []

    # Usage

    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.ask.prompts)

    def completion_tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)

    def cached(self) -> int:
        return max((choice.cached for choice in self.choices), default=0)

    def usage(self, *, stream: bool = False) -> Body:
        prompt, completion = self.prompt_tokens(), self.completion_tokens()
        usage: Body = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        details: Body | None = None
        if self.details:
            details = {"cached_tokens": self.cached(), "created_cache_tokens": 0}
            if not stream:
                details["multimodal_tokens"] = None
        if details is not None or not stream:
            usage["prompt_tokens_details"] = details
        if not stream:
            usage["completion_tokens_details"] = None
        return usage

    def running_usage(self) -> Body:
        prompt, completion = self.prompt_tokens(), self.completion_tokens()
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "completion_tokens_details": None,
        }

    # Log probabilities: plausible, and the same for the same token

    def _logprob(self, token: int, rank: int) -> float:
        return -(1 + crc32(b"%d.%d" % (token, rank)) % 4000) / 1000 - rank

    def logprobs(self, tokens: Sequence[int]) -> Body | None:
        count = self.ask.logprobs
        if count is None:
            return None
        content = []
        for token in tokens:
            first = self._entry(token, 0)
            others = [self._entry(token + rank, rank) for rank in range(1, count)]
            content.append({**first, "top_logprobs": [first, *others] if count else []})
        return {"content": content}

    def _entry(self, token: int, rank: int) -> Body:
        piece = self.tokenizer.piece(token)
        return {"token": piece, "logprob": self._logprob(token, rank), "bytes": list(piece.encode())}

    # Whole

    def whole(self) -> bytes:
        return encode(
            {
                "id": self.id,
                "object": "chat.completion",
                "created": self.created,
                "model": self.ask.model,
                "choices": [self._choice(choice) for choice in self.choices],
                "service_tier": None,
                "system_fingerprint": self.fingerprint,
                "usage": self.usage(),
                "prompt_logprobs": None,
                "prompt_token_ids": self.ask.prompts[0] if self.ask.token_ids else None,
                "prompt_text": None,
                "kv_transfer_params": self.kv,
                "ec_transfer_params": self.ec,
                "metrics": None,
            }
        )

    def embeddings(self, vectors: list[Any]) -> bytes:
        data = [{"index": i, "object": "embedding", "embedding": vector} for i, vector in enumerate(vectors)]
        tokens = self.prompt_tokens()
        usage = {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        }
        name = "embd-" + self.id.removeprefix(self.prefix)
        answer = {"id": name, "object": "list", "created": self.created, "model": self.ask.model}
        return encode({**answer, "data": data, "usage": usage})

    def _choice(self, choice: Choice) -> Body:
        said = choice.output[: choice.tokens]
        text = self.tokenizer.decode(said)
        message: Body = {
            "role": "assistant",
            "content": "" if self.ask.tool else text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if self.ask.tool:
            call = {
                "id": self._call_id(choice),
                "type": "function",
                "function": {"name": self.ask.tool.get("name"), "arguments": text},
            }
            message["tool_calls"] = [call]
        message["reasoning"] = None
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self.logprobs(said),
            "finish_reason": choice.reason,
            "stop_reason": choice.stop_reason,
            "token_ids": list(said) if self.ask.token_ids else None,
            "routed_experts": None,
        }

    def _call_id(self, choice: Choice) -> str:
        return f"chatcmpl-tool-{crc32(self.id.encode()):08x}{choice.index:08x}"

    # Stream

    def _chunk(self, choices: list[Body], **more: Any) -> bytes:
        payload: Body = {
            "id": self.id,
            "object": self.chunk,
            "created": self.created,
            "model": self.ask.model,
            "choices": choices,
        }
        if self.ask.continuous and choices:
            payload["usage"] = self.running_usage()
        return event({**payload, **more})

    def opening(self, choice: Choice) -> bytes:
        """Before the first token of *choice*."""
        delta: Body = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        out = self._chunk([delta], prompt_token_ids=None, prompt_text=None)
        if self.ask.tool:
            call = {
                "id": self._call_id(choice),
                "type": "function",
                "index": 0,
                "function": {"name": self.ask.tool.get("name")},
            }
            out += self._delta(choice, {"content": None, "tool_calls": [call]})
        return out

    def _delta(self, choice: Choice, delta: Body, tokens: Sequence[int] = (), **finish: Any) -> bytes:
        return self._chunk(
            [
                {
                    "index": choice.index,
                    "delta": delta,
                    "logprobs": self.logprobs(tokens) if tokens else None,
                    "finish_reason": choice.reason,
                    **finish,
                    "token_ids": list(tokens) if self.ask.token_ids else None,
                }
            ],
            **self._fingerprint(choice),
        )

    def _fingerprint(self, choice: Choice) -> Body:
        return {"system_fingerprint": self.fingerprint} if choice.reason and not self.ask.usage else {}

    def frame(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """What stands before and after the text of a content event; None if events differ in more than that."""
        if self.ask.logprobs is not None or self.ask.continuous or self.ask.token_ids:
            return None
        return _split(self.content(choice, MARK, ()))

    def content(self, choice: Choice, text: str, tokens: Sequence[int]) -> bytes:
        """An event with more of the answer; with `choice.reason` set, the last one."""
        finish = {"stop_reason": choice.stop_reason} if choice.reason else {}
        if not self.ask.tool:
            return self._delta(choice, {"content": text}, tokens, **finish)
        reason, choice.reason = choice.reason, None
        call = {"index": 0, "function": {"arguments": text}}
        out = self._delta(choice, {"content": None, "tool_calls": [call]}, tokens)
        choice.reason = reason
        return out + self._delta(choice, {}, (), **finish) if reason else out

    def closing(self) -> bytes:
        """After the last event of all choices."""
        if not self.ask.usage:
            return DONE
        return self._chunk([], usage=self.usage(stream=True), system_fingerprint=self.fingerprint) + DONE


class Completions(Reply):
    prefix = "cmpl-"
    chunk = "text_completion"

    def logprobs(self, tokens: Sequence[int]) -> Body | None:
        count = self.ask.logprobs
        if count is None:
            return None
        pieces = [self.tokenizer.piece(token) for token in tokens]
        offsets, at = [], 0
        for piece in pieces:
            offsets.append(at)
            at += len(piece)
        return {
            "text_offset": offsets,
            "token_logprobs": [self._logprob(token, 0) for token in tokens],
            "tokens": pieces,
            "top_logprobs": [
                {self.tokenizer.piece(token + rank): self._logprob(token, rank) for rank in range(max(1, count))}
                for token in tokens
            ],
        }

    def whole(self) -> bytes:
        return encode(
            {
                "id": self.id,
                "object": "text_completion",
                "created": self.created,
                "model": self.ask.model,
                "choices": [self._choice(choice) for choice in self.choices],
                "service_tier": None,
                "system_fingerprint": self.fingerprint,
                "usage": self.usage(),
                "kv_transfer_params": self.kv,
                "ec_transfer_params": self.ec,
                "metrics": None,
            }
        )

    def _choice(self, choice: Choice) -> Body:
        said = choice.output[: choice.tokens]
        shown = [*choice.prompt, *said] if self.ask.echo else said
        logprobs = self.logprobs(shown)
        if logprobs and self.ask.echo:
            logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
        return {
            "index": choice.index,
            "text": self.tokenizer.decode(shown),
            "logprobs": logprobs,
            "finish_reason": choice.reason,
            "stop_reason": choice.stop_reason,
            "token_ids": list(said) if self.ask.token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": list(choice.prompt) if self.ask.token_ids else None,
            "routed_experts": None,
        }

    def opening(self, choice: Choice) -> bytes:
        if not self.ask.echo:
            return b""
        return self.content(choice, self.tokenizer.decode(choice.prompt), ())

    def content(self, choice: Choice, text: str, tokens: Sequence[int]) -> bytes:
        return self._chunk(
            [
                {
                    "index": choice.index,
                    "text": text,
                    "logprobs": self.logprobs(tokens) if tokens else None,
                    "finish_reason": choice.reason,
                    "stop_reason": choice.stop_reason,
                    "prompt_token_ids": None,
                    "token_ids": list(tokens) if self.ask.token_ids else None,
                }
            ],
            **self._fingerprint(choice),
        )


class Generate(Reply):
    prefix = "generate-tokens-"

    def _choice(self, choice: Choice) -> Body:
        return {
            "index": choice.index,
            "finish_reason": choice.reason,
            "stop_reason": choice.stop_reason,
            "token_ids": list(choice.output[: choice.tokens]),
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [{"version": "default", "start": 0, "end": choice.tokens}],
            "logprobs": None,
        }

    def whole(self) -> bytes:
        usage = self.usage()
        usage["prompt_tokens_details"] = {
            "cached_tokens": self.cached(),
            "created_cache_tokens": None,
            "multimodal_tokens": None,
        }
        return encode(
            {
                "request_id": self.id,
                "model": self.ask.model,
                "created": self.created,
                "usage": usage,
                "prompt_logprobs": None,
                "prompt_token_id_logprobs": None,
                "prompt_token_ids": None,
                "mm_placeholders": None,
                "metrics": None,
                "kv_transfer_params": self.kv,
                "ec_transfer_params": self.ec,
                "output_mode": "tokens",
                "choices": [self._choice(choice) for choice in self.choices],
            }
        )

    def opening(self, choice: Choice) -> bytes:
        return b""

    def frame(self, choice: Choice) -> tuple[bytes, bytes] | None:
        return None

    def _event(self, choices: list[Body], usage: Body | None) -> bytes:
        return event({"request_id": self.id, "usage": usage, "output_mode": "tokens", "choices": choices})

    def content(self, choice: Choice, text: str, tokens: Sequence[int]) -> bytes:
        body = self._choice(choice)
        body["token_ids"] = list(tokens)
        if not choice.reason:
            body["weight_versions"] = None
        return self._event([body], self.running_usage() if self.ask.continuous else None)

    def closing(self) -> bytes:
        return self._event([], self.usage(stream=True)) + DONE if self.ask.usage else DONE


class Messages(Reply):
    """Anthropic's. One text block; no `[DONE]`."""

    def _usage(self) -> Body:
        return {"input_tokens": self.prompt_tokens(), "output_tokens": self.completion_tokens()}

    def _stop(self, choice: Choice) -> str:
        if choice.reason == "length":
            return "max_tokens"
        return "stop_sequence" if choice.stop_reason else "end_turn"

    def whole(self) -> bytes:
        choice = self.choices[0]
        text = self.tokenizer.decode(choice.output[: choice.tokens])
        return encode(
            {
                "id": self.id,
                "type": "message",
                "role": "assistant",
                "content": [{"type": "text", "text": text}],
                "model": self.ask.model,
                "stop_reason": self._stop(choice),
                "usage": self._usage(),
            }
        )

    def opening(self, choice: Choice) -> bytes:
        message: Body = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self.ask.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self.prompt_tokens(), "output_tokens": 0},
        }
        start = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}
        return named({"type": "message_start", "message": message}) + named(start)

    def frame(self, choice: Choice) -> tuple[bytes, bytes] | None:
        return _split(self._text(MARK))

    def _text(self, text: str) -> bytes:
        return named({"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}, "index": 0})

    def content(self, choice: Choice, text: str, tokens: Sequence[int]) -> bytes:
        out = self._text(text)
        if not choice.reason:
            return out
        stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        delta = {"stop_reason": self._stop(choice), "stop_sequence": stop}
        return (
            out
            + named({"type": "content_block_stop", "index": 0})
            + named({"type": "message_delta", "delta": delta, "usage": self._usage()})
            + named({"type": "message_stop"})
        )

    def closing(self) -> bytes:
        return b""


class Responses(Reply):
    """OpenAI's Responses API. Events are numbered; no `[DONE]`."""

    prefix = "resp_"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._item_id = f"msg_{crc32(self.id.encode()):08x}{crc32(self.id.encode(), 1):08x}"
        self._number = 0

    def _response(self, status: str) -> Body:
        body = self.ask.body
        done = status != "in_progress"
        choice = self.choices[0] if self.choices else None
        return {
            "id": self.id,
            "created_at": self.created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": self.ask.model,
            "object": "response",
            "output": [self._item("completed", self._said(choice))] if done and choice else [],
            "parallel_tool_calls": True,
            "temperature": float(body.get("temperature", 1.0)),
            "tool_choice": "none",
            "tools": [],
            "top_p": float(body.get("top_p", 1.0)),
            "background": False,
            "max_output_tokens": body.get("max_output_tokens") or self.ask.room,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": self._usage() if done else None,
            "user": body.get("user"),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": self.kv,
            "ec_transfer_params": self.ec,
            "input_messages": None,
            "output_messages": None,
        }

    def _usage(self) -> Body:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": self.cached(),
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": usage["total_tokens"],
        }

    def _said(self, choice: Choice) -> list[Body]:
        return [self._part(self.tokenizer.decode(choice.output[: choice.tokens]))]

    def _part(self, text: str) -> Body:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}

    def _item(self, status: str, content: list[Body]) -> Body:
        return {
            "id": self._item_id,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _status(self, choice: Choice) -> str:
        return "incomplete" if choice.reason == "length" else "completed"

    def whole(self) -> bytes:
        return encode(self._response(self._status(self.choices[0])))

    def _numbered(self, kind: str, payload: Body, **after: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named({**payload, "sequence_number": number, **after, "type": kind})

    def opening(self, choice: Choice) -> bytes:
        numbered = self._numbered
        part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        return (
            numbered("response.created", {"response": self._response("in_progress")})
            + numbered("response.in_progress", {"response": self._response("in_progress")})
            + numbered("response.output_item.added", {"item": self._item("in_progress", []), "output_index": 0})
            + numbered(
                "response.content_part.added",
                {"content_index": 0, "item_id": self._item_id, "output_index": 0, "part": part},
            )
        )

    def frame(self, choice: Choice) -> tuple[bytes, bytes] | None:
        return None

    def content(self, choice: Choice, text: str, tokens: Sequence[int]) -> bytes:
        numbered, item = self._numbered, self._item_id
        place: Body = {"item_id": item, "output_index": 0}
        out = numbered(
            "response.output_text.delta",
            {"content_index": 0, "delta": text, "item_id": item, "logprobs": [], "output_index": 0},
        )
        if not choice.reason:
            return out
        said = self._said(choice)
        done = {"content_index": 0, "item_id": item, "logprobs": [], "output_index": 0}
        return (
            out
            + numbered("response.output_text.done", done, text=said[0]["text"])
            + numbered("response.content_part.done", {"content_index": 0, **place, "part": said[0]})
            + numbered("response.output_item.done", {"item": self._item("completed", said), "output_index": 0})
            + numbered("response.completed", {"response": self._response(self._status(choice))})
        )

    def closing(self) -> bytes:
        return b""


def _split(whole: bytes) -> tuple[bytes, bytes]:
    head, tail = whole.split(encode(MARK)[1:-1])
    return head, tail


REPLIES: dict[str, type[Reply]] = {
    CHAT: Reply,
    COMPLETIONS: Completions,
    GENERATE: Generate,
    MESSAGES: Messages,
    RESPONSES: Responses,
}
