"""What the pure work on one request costs, in microseconds a call: ``python -m tests.bench.openai_cost``.

Processor time, median of `ROUNDS` rounds with the spread; neighbours on the machine still cost caches.
"""

from __future__ import annotations

import json
import statistics
import time
import timeit
from collections.abc import Callable, Iterator

from llmgw.openai.errors import error_body
from llmgw.openai.peek import Peek, peek, peek_steps
from llmgw.openai.rewrite import rewrite
from llmgw.openai.routes import find
from llmgw.openai.sse import JsonMeter, Meter
from llmgw.openai.usage import UsageFilter
from llmgw.request import Refusal

ROUNDS = 7

CHUNK = (
    b'data: {"id":"chatcmpl-8761e946d75fbc3c","object":"chat.completion.chunk","created":1796060754,"model":"llama",'
    b'"choices":[{"index":0,"delta":{"content":" %s"},"logprobs":null,"finish_reason":null,"token_ids":null}],"x":"abcdef"}'
    b"\n\n"
)


def request(content: object, **more: object) -> bytes:
    body = {"model": "llama", "messages": [{"role": "user", "content": content}], "max_tokens": 64, "stream": True}
    return json.dumps(body | more).encode()


def rounds(call: Callable[[], object], number: int) -> list[float]:
    call()
    return sorted(t / number * 1e6 for t in timeit.repeat(call, timer=time.process_time, number=number, repeat=ROUNDS))


def show(name: str, call: Callable[[], object], number: int = 20_000, per: int = 1) -> None:
    times = [t / per for t in rounds(call, number)]
    print(f"{name:58s} {statistics.median(times):12.2f} µs   ({times[0]:.2f} … {times[-1]:.2f})")


def longest_step(steps: Iterator[None]) -> tuple[float, float]:
    """Seconds of the longest step and of all."""
    worst = total = 0.0
    while True:
        start = time.process_time()
        try:
            next(steps)
        except StopIteration:
            return worst, total
        finally:
            took = time.process_time() - start
            worst, total = max(worst, took), total + took


def main() -> None:
    chat = find("/v1/chat/completions")
    assert chat is not None
    short = request("Say hello to everybody in the room, please, and be nice about it all too.")
    usage = request("Say hello to everybody in the room, please.", stream_options={"include_usage": True})
    prose = request(('the quick brown fox jumps over the "lazy" dog\n' * 1000)[:32_000])
    odd = request("x", user="\u00e9")
    chats = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 60}] * 320}).encode()
    assert isinstance(peek(chat, short), Peek)
    print(
        f"bodies: {len(short)}, {len(usage)}, {len(prose)}, {len(chats)} bytes; an event: {len(CHUNK % b'the')} bytes"
    )
    show("find", lambda: find("/v1/chat/completions"), 100_000)
    show("peek, 200 bytes", lambda: peek(chat, short))
    show("peek, with stream_options", lambda: peek(chat, usage))
    show("peek, with a \\u outside the prompt (exact scan)", lambda: peek(chat, odd), 5_000)
    show("peek, 32 KiB, one message", lambda: peek(chat, prose), 500)
    show("peek, 32 KiB, 320 messages", lambda: peek(chat, chats), 500)
    show("rewrite, model and usage, 200 bytes", lambda: rewrite(short, model="other", ask_usage=True), 5_000)
    show("rewrite, model, 32 KiB", lambda: rewrite(prose, model="other"), 500)
    show("error_body", lambda: error_body(Refusal(reason="queue_full", message="The queue is full.")), 5_000)

    events = [CHUNK % word for word in (b"the", b"quick", b"brown", b"fox", b"jumps")] * 52
    meter = Meter("chat")

    def paced() -> None:
        for event in events:
            meter.feed(event)

    show("Meter, one event a slice", paced, 40, len(events))
    burst = b"".join(events)
    show("Meter, 260 events a slice, an event", lambda: meter.feed(burst), 40, len(events))
    escaped = CHUNK % b'say \\"hi\\"\\n'
    show("Meter, an event that is looked at exactly", lambda: meter.feed(escaped), 5_000)
    cut = [burst[i : i + 1448] for i in range(0, len(burst), 1448)]

    def segments() -> None:
        one = Meter("chat")
        for piece in cut:
            one.feed(piece)

    show("Meter, slices of 1448 bytes, an event", segments, 40, len(events))
    hide = UsageFilter()
    show("UsageFilter, one event a slice", lambda: hide.feed(events[0]))
    answer = (
        b'{"choices":[{"message":{"content":"'
        + b"word " * 100
        + b'"}}],"usage":{"prompt_tokens":1,"completion_tokens":2}}'
    )
    show("JsonMeter, 600 bytes", lambda: JsonMeter().feed(answer))

    mib = 1 << 20
    for name, body in (
        ("one image", request([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (64 * mib)}}])),
        ("prose with escapes", request("the quick \"brown\" fox\n" * (64 * mib // 26))),
        ("short messages", json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}] * (mib * 64 // 38)}).encode()),
        ("token ids", json.dumps({"model": "m", "messages": list(range(100_000, 108_192)) * 1024}).encode()),
        ("brackets", b'{"model":"m","messages":[' + b"[]," * (21 * mib) + b"0]}"),
    ):  # fmt: skip
        worst, total = longest_step(peek_steps(chat, body))
        print(
            f"peek_steps, {len(body) / mib:.0f} MiB of {name:38s} worst step {worst * 1e3:7.2f} ms, in all {total * 1e3:8.1f} ms"
        )


if __name__ == "__main__":
    main()
