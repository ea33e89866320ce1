"""What `llmgw sim-engine` can be told, checked as a whole before anything starts.

`flags` decorates a click command with all of it, `from_flags` makes the `Options` that `server.serve` takes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any, TypeVar

import attrs
import click

from llmgw.errors import ConfigError, Problem
from llmgw.request import PHASES
from llmgw.simengine.core import Shape
from llmgw.simengine.latency import Knobs, Physics, StepModel, hardware

FAILURES = ("refuse", "error", "reset", "stall", "garbage")
"""What a failing request meets: 500 before the headers · an error event inside the stream · a TCP reset · silence ·
bytes that are no HTTP."""

ROLES = {
    "both": "prefill,decode",
    "prefill": "prefill",
    "decode": "decode",
    "encode": "encode",
    "prefill-decode": "prefill,decode",
    "encode-prefill": "encode,prefill",
    "encode-prefill-decode": "encode,prefill,decode",
}
"""llm-d's role names, as phases."""

API_SECONDS = 0.014
"""Tokenising, validation and HTTP of a real engine before its scheduler sees a request; used with `hardware`."""


@attrs.frozen(kw_only=True)
class Options:
    """One simulated engine. Durations are seconds, sizes tokens, unless said otherwise."""

    listen: tuple[str, ...] = (":8000",)
    model: str = "sim"
    served_model_name: tuple[str, ...] = ()  # further names; the first given one is shown
    loras: tuple[str, ...] = ()
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_num_queued_reqs: int = 0  # 0 = no limit; more get 503
    max_model_len: int = 32768
    num_gpu_blocks: int | None = None  # None: what the hardware holds, or 16384
    block_size: int = 16
    prefill_tps: float = 8000.0
    decode_tps: float = 100.0  # of one sequence alone
    batch_contention: float = 0.01
    prefix_cache_blocks: int | None = None  # unreferenced blocks kept; None = all, 0 = no prefix caching
    priority: bool = False  # schedule by the request's `priority` (lower first)
    hardware: str = ""  # constants instead of the four rates above: "h100-8b"
    phases: tuple[str, ...] = ("prefill", "decode")
    seed: int = 0
    fail_rate: float = 0.0  # 0..1
    failure_mode: str = "refuse"
    fail_after: int = 4  # tokens before a failure inside an answer
    speed: float = 1.0  # how much faster than real time the clock runs
    startup_delay: float = 0.0  # connections are refused for so long, as by an engine that loads weights
    stream_interval: int = 1  # tokens an event
    prompt_tokens_details: bool = False  # usage tells cached tokens
    request_id_headers: bool = False
    auto_tool_choice: bool = False
    scale_out: bool = True  # /render and /inference/v1/generate
    api_key: str = attrs.field(default="", repr=False)
    keep_alive: float = 5.0  # an idle connection is closed after so long
    journal: str = ""  # file to append one JSON line a finished sequence to
    kv_events: str = ""  # ZMQ address to publish KV events on
    kv_events_maps: bool = True  # the newer of the two message shapes
    transfer_gbps: float = 40.0  # GB/s of the link that KV moves over
    transfer_setup: float = 0.001
    encode_seconds: float = 0.03  # of one medium
    side_channel_host: str = ""  # where others fetch KV from; "" = the first address listened on
    pin_seconds: float = 480.0  # how long a prefill keeps blocks that no decode fetches

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that the model is served under; the first is what the engine shows."""
        return tuple(dict.fromkeys((*self.served_model_name, self.model)))

    def physics(self) -> Physics | None:
        return hardware(self.hardware) if self.hardware else None

    def step_model(self) -> StepModel:
        return self.physics() or Knobs(self.prefill_tps, self.decode_tps, self.batch_contention)

    def kv_bytes(self) -> int:
        """KV bytes a token: of the hardware's model, or of an 8B one."""
        physics = self.physics()
        return physics.model.kv_bytes if physics else 131072

    def shape(self) -> Shape:
        physics = self.physics()
        blocks = self.num_gpu_blocks
        if blocks is None:
            blocks = physics.blocks(self.block_size) if physics else 16384
        return Shape(
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_num_batched_tokens,
            num_blocks=blocks,
            block_size=self.block_size,
            keep_blocks=self.prefix_cache_blocks,
            max_model_len=self.max_model_len,
            by_priority=self.priority,
            overhead=API_SECONDS if physics else 0.0,
        )

    def problems(self) -> list[Problem]:
        """Everything that is wrong with it; empty if nothing is."""
        found: list[Problem] = []

        def want(good: bool, flag: str, message: str) -> None:
            if not good:
                found.append(Problem(message, where=flag))

        want(bool(self.listen), "--listen", "give at least one address")
        want(bool(self.model), "--model", "give the model a name")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "stream_interval"):
            value = getattr(self, name)
            want(value >= 1, "--" + name.replace("_", "-"), f"must be at least 1, is {value}")
        for name in ("prefill_tps", "decode_tps", "speed", "transfer_gbps"):
            value = getattr(self, name)
            want(value > 0, "--" + name.replace("_", "-"), f"must be above 0, is {value:g}")
        for name in (
            "batch_contention",
            "startup_delay",
            "max_num_queued_reqs",
            "fail_after",
            "transfer_setup",
            "encode_seconds",
        ):
            value = getattr(self, name)
            want(value >= 0, "--" + name.replace("_", "-"), f"must not be negative, is {value:g}")
        want(0 <= self.fail_rate <= 1, "--fail-rate", f"is a share from 0 to 1, not {self.fail_rate:g}")
        want(
            self.failure_mode in FAILURES,
            "--failure-mode",
            f"{self.failure_mode!r} is none of {', '.join(FAILURES)}",
        )
        unknown = [phase for phase in self.phases if phase not in PHASES]
        want(not unknown and bool(self.phases), "--phases", f"{unknown} are none of {', '.join(PHASES)}")
        if self.prefix_cache_blocks is not None:
            want(self.prefix_cache_blocks >= 0, "--prefix-cache-blocks", "must not be negative")
        if self.hardware:
            try:
                hardware(self.hardware)
            except ConfigError as error:
                return found + [attrs.evolve(problem, where="--hardware") for problem in error.problems]
        if not found:
            shape = self.shape()
            want(
                shape.num_blocks >= 2,
                "--num-gpu-blocks",
                f"must be at least 2 (one is reserved), is {shape.num_blocks}",
            )
            need = ceil(self.max_model_len / self.block_size)
            want(
                need <= shape.num_blocks - 1,
                "--max-model-len",
                f"one request of {self.max_model_len} tokens needs {need} KV blocks, but only "
                f"{shape.num_blocks - 1} can be used: lower --max-model-len or raise --num-gpu-blocks",
            )
        return found

    def check(self) -> None:
        """Raises ConfigError with every problem."""
        if found := self.problems():
            raise ConfigError(found)


Command = TypeVar("Command", bound=Callable[..., Any])


def _list(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


_FLAGS = (
    click.option("--listen", multiple=True, default=(":8000",), show_default=True, help="Address; repeatable (two at most make sense: :8000, unix:/path)."),
    click.option("--model", "models", multiple=True, default=("sim",), show_default=True, help="Model name; more than one are aliases."),
    click.option("--served-model-name", multiple=True, help="Further name of the model; repeatable, the first is shown."),
    click.option("--lora", "loras", multiple=True, help="LoRA adapter served beside the model; repeatable."),
    click.option("--max-num-seqs", default=256, show_default=True, help="Sequences in one batch."),
    click.option("--max-num-batched-tokens", default=8192, show_default=True, help="Token budget of one step."),
    click.option("--max-num-queued-reqs", default=0, help="Refuse with 503 beyond so many waiting requests; 0 = queue all."),
    click.option("--max-model-len", default=32768, show_default=True, help="Longest prompt + answer, tokens."),
    click.option("--num-gpu-blocks", type=int, help="KV blocks, one of them reserved. [default: what the hardware holds, else 16384]"),
    click.option("--block-size", default=16, show_default=True, help="Tokens a KV block."),
    click.option("--prefill-tps", default=8000.0, show_default=True, help="Prompt tokens a second."),
    click.option("--decode-tps", default=100.0, show_default=True, help="Tokens a second of one sequence alone."),
    click.option("--batch-contention", default=0.01, show_default=True, help="Share by which each further sequence lengthens a step."),
    click.option("--prefix-cache-blocks", type=int, help="Unreferenced blocks kept for reuse; 0 = no prefix caching. [default: all]"),
    click.option("--priority", is_flag=True, help="Schedule by the request's `priority`, lower first."),
    click.option("--hardware", default="", help="GPU-MODEL[-tpN] (h100-8b, h200-70b-tp4): time, blocks and overhead of that machine."),
    click.option("--phases", default="prefill,decode", show_default=True, callback=_list, help="Any of encode,prefill,decode."),
    click.option("--role", type=click.Choice(sorted(ROLES)), help="Phases by llm-d's names."),
    click.option("--seed", default=0, show_default=True, help="Seed of all that is drawn."),
    click.option("--fail-rate", default=0.0, help="Share of requests that fail, 0 to 1."),
    click.option("--failure-mode", default="refuse", show_default=True, type=click.Choice(FAILURES), help="How they fail."),
    click.option("--fail-after", default=4, show_default=True, help="Tokens before a failure inside an answer."),
    click.option("--speed", default=1.0, show_default=True, help="Run the clock so many times faster than real time."),
    click.option("--startup-delay", default=0.0, help="Seconds of refused connections before it is up."),
    click.option("--stream-interval", default=1, show_default=True, help="Tokens an event."),
    click.option("--enable-prompt-tokens-details", "prompt_tokens_details", is_flag=True, help="Tell cached tokens in usage."),
    click.option("--enable-request-id-headers", "request_id_headers", is_flag=True, help="Answer X-Request-Id."),
    click.option("--enable-auto-tool-choice", "auto_tool_choice", is_flag=True, help='Accept tool_choice "auto".'),
    click.option("--api-key-file", type=click.File("r"), help="Demand the key in this file under /v1 and /inference."),
    click.option("--journal", default="", type=click.Path(dir_okay=False), help="Append one JSON line a finished sequence."),
    click.option("--kv-events", default="", help="Publish KV events on this ZMQ address (tcp://*:5557 binds, else connects)."),
    click.option("--kv-events-maps/--kv-events-arrays", default=True, help="Newer or older message shape. [default: maps]"),
    click.option("--encode-seconds", default=0.03, show_default=True, help="Seconds to encode one image, video or sound."),
    click.option("--side-channel-host", default="", help="Host that decode engines fetch KV from. [default: the address listened on]"),
    click.option("--transfer-gbps", default=40.0, show_default=True, help="GB/s of the link that KV moves over (P/D)."),
)  # fmt: skip


def flags(command: Command) -> Command:
    """Adds every flag of a simulated engine to a click command, whose function takes ``**given``."""
    for option in reversed(_FLAGS):
        command = option(command)
    return command


def from_flags(given: dict[str, Any]) -> Options:
    """What `flags` collected, checked. Raises ConfigError with every problem."""
    values = dict(given)
    role = values.pop("role", None)
    models = values.pop("models")
    key_file = values.pop("api_key_file", None)
    values["model"] = models[0]
    values["served_model_name"] = (*values["served_model_name"], *models)
    if key_file is not None:
        values["api_key"] = key_file.read().strip()
    if role:
        values["phases"] = tuple(ROLES[role].split(","))
    options = Options(**values)
    options.check()
    return options
