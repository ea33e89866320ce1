"""Plays a conversation between a pipeline and the world, written down in YAML (tests/pipeline/golden/*.yaml).

A case is a request, the pipeline's options, and `talk`: what the pipeline must ask for, in order, and what it is told.
`body: same` in an expected call stands for the client's body as it is at that moment. Only the keys written down are
compared, and bodies always whole. Notes are compared where `notes` lists them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import yaml

from llmgw.endpoint import Endpoint
from llmgw.pipeline.commands import (
    Answer,
    Call,
    Choose,
    Chosen,
    Command,
    Declined,
    Failed,
    Fetch,
    Gather,
    Media,
    Note,
    Relay,
    Relayed,
    Reply,
)
from llmgw.pipeline.context import Context
from llmgw.pipeline.policy import FailurePolicy
from llmgw.pipeline.run import Ending, releases, run
from llmgw.pipeline.step import STEPS, Step
from llmgw.pipeline.wire import encode

GOLDEN = Path(__file__).parent / "golden"
FULL = ("replace-media-urls", "render", "encode", "prefill", "decode")

OPTIONS = {
    "replace-media-urls": ("max_multimodal_entries", "allowed_domains"),
    "render": ("max_total_tokens", "max_total_placeholder_tokens"),
    "encode": ("use_openai_format", "ec_connector", "max_parallel"),
    "prefill": ("use_openai_format", "kv_connector", "ec_connector"),
    "decode": ("use_openai_format", "kv_connector"),
    "conditional-decode": ("use_openai_format",),
}


def cases() -> list[dict[str, Any]]:
    return [
        {**case, "file": path.stem}
        for path in sorted(GOLDEN.glob("*.yaml"))
        for case in yaml.safe_load(path.read_text())
    ]


def make_steps(options: dict[str, Any], names: tuple[str, ...] | list[str]) -> list[Step]:
    """Steps of a case; each takes of *options* what it knows."""
    made = []
    for name in names:
        chosen = {key: options[key] for key in OPTIONS[name] if key in options}
        if name == "render":
            chosen["address"] = "http://render:8000"
        made.append(STEPS.make(name, chosen))
    return made


def plain(body: Any) -> Any:
    """As the engine reads it: encoded and decoded again, so that raw pieces count as what they say."""
    return msgspec.json.decode(encode(body))


def endpoint(told: dict[str, Any] | None) -> Endpoint | None:
    return None if told is None else Endpoint(**{"name": told["id"], "url": f"http://{told['id']}:8000", **told})


def reply_of(told: dict[str, Any]) -> Any:
    """The reply that a script writes down."""
    if "answer" in told:
        headers = tuple((k.encode(), v.encode()) for k, v in told.get("headers", {}).items())
        return Answer(body=told["answer"], endpoint=told.get("endpoint", ""), headers=headers)
    if "failed" in told:
        return Failed(**told["failed"])
    if "chosen" in told:
        chosen = told["chosen"]
        ends = {key: endpoint(chosen.get(key)) for key in ("prefill", "decode")}
        return Chosen(**{**chosen, **ends})
    if "media" in told:
        return Media(*told["media"])
    if "relayed" in told:
        return Relayed(status=told["relayed"], beside=tuple(reply_of(item) for item in told.get("beside", ())))
    assert told.get("declined"), f"what is {told}?"
    return Declined()


def check_call(expected: dict[str, Any], call: Call, ctx: Context, where: str) -> None:
    for key, value in expected.items():
        if key == "body":
            assert plain(call.body) == (plain(ctx.body) if value == "same" else value), where
        elif key == "headers":
            assert dict(call.headers) == value, where
        elif key == "avoid":
            assert call.avoid == frozenset(value), where
        else:
            assert getattr(call, key) == value, f"{where}: {key}"


def check(item: dict[str, Any], command: Command, ctx: Context, where: str) -> Any:
    """Compare *command* with what the script expects here; the reply."""
    if isinstance(command, Gather):
        assert "gather" in item, f"{where}: expected {item}, got {command}"
        assert len(command.calls) == len(item["gather"]), where
        for expected, call in zip(item["gather"], command.calls, strict=True):
            check_call(expected["call"], call, ctx, where)
        return tuple(reply_of(expected) for expected in item["gather"])
    if isinstance(command, Fetch):
        assert list(command.urls) == [told["url"] for told in item["fetch"]], where
        return tuple(reply_of(told) for told in item["fetch"])
    if isinstance(command, Choose):
        for key, value in item["choose"].items():
            found = getattr(command, key)
            assert (sorted(found) if isinstance(found, frozenset) else found) == value, f"{where}: {key}"
        return reply_of(item)
    if isinstance(command, Relay):
        assert "relay" in item, f"{where}: expected {item}, got {command}"
        check_call(item["relay"], command.call, ctx, where)
        for flag in ("conditional", "hold_5xx"):
            assert getattr(command, flag) == item.get(flag, getattr(command, flag)), f"{where}: {flag}"
        assert len(command.beside) == len(item.get("with", ())), where
        for expected, call in zip(item.get("with", ()), command.beside, strict=True):
            check_call(expected, call, ctx, where)
        return reply_of(item)
    assert isinstance(command, Call), where
    assert "call" in item, f"{where}: expected {item}, got {command}"
    check_call(item["call"], command, ctx, where)
    return reply_of(item)


def play(case: dict[str, Any]) -> tuple[Context, Ending, list[Note]]:
    """Run the case's pipeline against its script. Raises AssertionError at the first difference."""
    ctx = Context(
        request_id="r1",
        path=case["path"],
        body=plain(case["body"]),
        policy=FailurePolicy(**case.get("policy", {})),
        rng=random.Random(7),
    )
    script = list(case["talk"])
    notes: list[Note] = []
    legs: list[str] = []
    work = run(make_steps(case.get("options", {}), case.get("steps", FULL)), ctx)
    reply: Reply = None
    while True:
        try:
            command = work.send(reply)
        except StopIteration as stop:
            ending = stop.value
            break
        reply = None
        if isinstance(command, Note):
            notes.append(command)
            continue
        calls = command.calls if isinstance(command, Gather) else ()
        calls += (command.call, *command.beside) if isinstance(command, Relay) else ()
        calls += (command,) if isinstance(command, Call) else ()
        legs += [call.leg for call in calls]
        where = f"{case['file']}: {case['name']}: step {len(case['talk']) - len(script) + 1}"
        if isinstance(command, Choose) and not (script and "choose" in script[0]):
            reply = Chosen(disaggregate=command.disaggregate)  # as in gateway mode: nobody is named
            continue
        assert script, f"{where}: nothing more was expected, got {command}"
        reply = check(script.pop(0), command, ctx, where)
    assert not script, f"{case['name']}: never asked for {script}"
    assert len(legs) == len(set(legs)), f"{case['name']}: two legs share a name: {legs}"
    _check_ending(case, ctx, ending)
    for name in case.get("notes", ()):
        assert name in [note.event for note in notes], f"{case['name']}: no note {name}"
    return ctx, ending, notes


def _check_ending(case: dict[str, Any], ctx: Context, ending: object) -> None:
    expected = case.get("ends", {"status": 200})
    assert isinstance(ending, Ending)
    assert ending.status == expected.get("status"), f"{case['name']}: {ending}"
    said = (ending.refusal.reason, ending.refusal.message) if ending.refusal is not None else ("", "")
    assert said[0] == expected.get("reason", ""), ending
    assert expected.get("message", "") in said[1], ending
    assert [call.leg for call in releases(ctx)] == case.get("releases", [])
