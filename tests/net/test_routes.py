"""Every route of the client port takes the same guards, limits, retries and accounts: one battery over the table."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from llmgw.config import ClientLimits
from llmgw.openai.routes import TABLE, Route
from llmgw.request import Limits
from tests.net.rig import DONE, DRIVERS, SSE, DriverName, Script, Wire, answers, chunk, event, json_answer, post, rig

INFERENCE = [route for route in TABLE if route.kind == "inference"]
FIELDS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "generate": {"token_ids": [1, 2, 3]},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "count": {"messages": [{"role": "user", "content": "hi"}]},
    "input": {"input": ["a", "b"]},
    "speech": {"input": "say it", "voice": "alloy"},
    "rerank": {"query": "q", "documents": ["a", "b"]},
    "score": {"text_1": "a", "text_2": ["b", "c"]},
    "tokenize": {"prompt": "hi"},
    "detokenize": {"tokens": [1, 2]},
    "media": {"prompt": "a cat"},
}
BOUNDARY = "----x123"

every_route = pytest.mark.parametrize("route", INFERENCE, ids=lambda r: r.path)
both_drivers = pytest.mark.parametrize("driver", DRIVERS)


def path(route: Route) -> str:
    return route.path.replace("{id}", "edits")


def ask(route: Route, *, drop: str = "", **fields: Any) -> bytes:
    body = {"model": "llama", **FIELDS[route.shape], **fields}
    body.pop(drop, None)
    return post(body, path=path(route))


def form(
    *parts: tuple[str, str], file: bytes = b"\0\1\r\n--\xff", boundary: str = BOUNDARY, end: str = "--\r\n"
) -> bytes:
    data = b""
    for head, value in (*parts, ('name="file"; filename="a.wav"', "")):
        content = value.encode() or file
        data += f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + content + b"\r\n"
    return data + f"--{boundary}{end}".encode()


def post_form(body: bytes, where: str = "/v1/audio/transcriptions", boundary: str = BOUNDARY) -> bytes:
    return (
        f"POST {where} HTTP/1.1\r\nHost: g\r\nContent-Type: multipart/form-data; boundary={boundary}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def keeps(*replies: bytes, seen: list[tuple[bytes, bytes]]) -> Script:
    left = list(replies)

    async def script(wire: Wire) -> None:
        while (request := await wire.request())[0]:
            seen.append(request)
            await wire.send(left.pop(0) if len(left) > 1 else left[0])

    return script


def code_of(body: bytes) -> str:
    error = json.loads(body)["error"]
    code = error.get("code") or error["message"].rpartition(": ")[2]
    assert isinstance(code, str)
    return code.rstrip(")")


@every_route
@both_drivers
async def test_served_as_it_came(driver: DriverName, route: Route, autojump_clock: MockClock) -> None:
    seen: list[tuple[bytes, bytes]] = []
    async with rig(driver, keeps(json_answer(), seen=seen)) as r:
        request = ask(route)
        status, _, _ = await r.ask(request)
        assert status == 200
        await r.settled()
        outcome = r.brain.outcomes[0]
        assert (outcome.route, outcome.model, outcome.usage) == (route.path, "llama", "engine")
        assert outcome.prompt_tokens == 3
        head, body = seen[0]
        assert head.startswith(f"POST {path(route)} HTTP/1.1\r\n".encode())
        assert request.endswith(b"\r\n\r\n" + body)


@every_route
@both_drivers
async def test_refusals_in_the_right_shape(driver: DriverName, route: Route, autojump_clock: MockClock) -> None:
    optional = route.shape in ("tokenize", "detokenize")
    wrong = {
        "bad_json": post(b"{", path=path(route)),
        "bad_field": ask(route, model=7),
        "forbidden_field": ask(route, kv_transfer_params={}),
        "duplicate_field": post(b'{"model":"a","model":"b"}', path=path(route)),
        "model_not_found": ask(route, model="nope"),
        "unsupported_media": ask(route).replace(b"application/json", b"text/plain"),
        "too_large": ask(route, user="x" * 1100),
        "method_not_allowed": ask(route).replace(b"POST", b"GET", 1),
    }
    async with rig(driver, answers(json_answer()), limits=ClientLimits(body=1000)) as r:  # type: ignore[arg-type]
        for reason, request in wrong.items():
            status, _, body = await r.ask(request)
            assert status >= 400
            assert code_of(body) == reason
            assert (json.loads(body).get("type") == "error") == (route.dialect == "anthropic")
        assert r.engines[0].connections == 0
        status, _, body = await r.ask(ask(route, drop="model"))
        assert (status, code_of(body) if status == 400 else "") == ((200, "") if optional else (400, "bad_field"))
        await r.settled(len(wrong) + 1)
        assert [o.route for o in r.brain.outcomes] == [route.path] * (len(wrong) + 1)


@every_route
async def test_guards_retries_and_disconnects(route: Route, autojump_clock: MockClock) -> None:
    gone: list[float] = []

    async def hangs(wire: Wire) -> None:
        await wire.request()
        await wire.closed()
        gone.append(trio.current_time())

    async with rig("pump", answers(json_answer(b"{}", 503)), hangs, leg=Limits(idle=30)) as r:
        client = await r.dial()
        await client.send(ask(route))
        await trio.sleep(3)
        assert len(r.brain.open) == 1
        client.close()
        await r.settled()
        outcome = r.brain.outcomes[0]
        assert (outcome.status, outcome.attempts, outcome.aborted) == (499, 2, True)
        await trio.sleep(1)
        assert len(gone) == 1


@both_drivers
async def test_a_form_is_routed_by_its_part(driver: DriverName, autojump_clock: MockClock) -> None:
    seen: list[tuple[bytes, bytes]] = []
    body = form(('name="model"', "llama"), ('name="stream"', "true"), file=b"\0" * 200_000)
    async with rig(driver, keeps(json_answer(), seen=seen)) as r:
        assert (await r.ask(post_form(body)))[0] == 200
        await r.settled()
        outcome = r.brain.outcomes[0]
        assert (outcome.model, outcome.stream, outcome.route) == ("llama", True, "/v1/audio/{id}")
        assert seen[0][1] == body
        assert b"boundary=" + BOUNDARY.encode() in seen[0][0]


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (post_form(form()), "bad_field"),
        (post_form(form(('name="model"', "a"), ('name="model"', "b"))), "duplicate_field"),
        (post_form(form(('name="model"; filename="x"', "a"))), "bad_field"),
        (post_form(form(('name="model"', "a"), ('name="data_parallel_rank"', "1"))), "forbidden_field"),
        (post_form(form(('name="model"; name="x"', "a"))), "bad_form"),
        (post_form(form(("name*=utf-8''model", "a"))), "bad_form"),
        (post_form(form(('name="mod\\el"', "a"))), "bad_form"),
        (post_form(form(('name="model"', "a"), end="")), "bad_form"),
        (post_form(form(('name="model"', "a"), end="xx")), "bad_form"),
        (post_form(form(('name="model"', "a"), boundary="other")), "bad_form"),
        (post_form(form(('name="model"', "a"))[:-8]), "bad_form"),
        (post_form(form(('name="model"', "a\tb"))), "bad_field"),
        (post_form(form(('name="model"', "a"), ('name="n"', "0"))), "bad_field"),
        (post_form(form(("x" * 9000, "a"))), "bad_form"),
        (post_form(form(*[(f'name="p{i}"', "a") for i in range(300)])), "bad_form"),
        (post_form(b"").replace(b"boundary", b"bound"), "bad_form"),
        (post_form(b"{}", "/v1/chat/completions"), "unsupported_media"),
    ],
)
async def test_forms_that_are_refused(request_: bytes, code: str, autojump_clock: MockClock) -> None:
    async with rig("pump", answers(json_answer())) as r:
        status, _, body = await r.ask(request_)
        assert (status, code_of(body)) == (415 if code == "unsupported_media" else 400, code)
        assert r.engines[0].connections == 0


@both_drivers
async def test_answers_are_known_by_their_ids(driver: DriverName, autojump_clock: MockClock) -> None:
    created = b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_a1"}}\n\n'

    async def slow(wire: Wire) -> None:
        while (await wire.request())[0]:
            data = SSE + chunk(created + event("a")) + chunk(DONE) + b"0\r\n\r\n"
            for i in range(len(data)):
                await trio.sleep(0.01)
                await wire.send(data[i : i + 1])

    async with rig(
        driver, slow, answers(json_answer(b'{"created_at":1,"id":"resp_b2","output":[{"id":"msg_1"}]}'))
    ) as r:
        for stream in (True, False):
            assert (await r.ask(post({"model": "llama", "input": "x", "stream": stream}, path="/v1/responses")))[
                0
            ] == 200
        await r.settled(2)  # over the seam, what the brain is told comes a moment after the answer
        assert r.brain.made_answers == ["resp_a1", "resp_b2"]


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/resp_1?stream=true&starting_after=3"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("DELETE", "/v1/responses/resp_1"),
    ],
)
@both_drivers
async def test_kept_answers(driver: DriverName, method: str, target: str, autojump_clock: MockClock) -> None:
    seen: list[tuple[bytes, bytes]] = []
    async with rig(driver, keeps(json_answer(b'{"id":"resp_1"}'), seen=seen)) as r:
        status, _, body = await r.ask(f"{method} {target} HTTP/1.1\r\nHost: g\r\n\r\n".encode())
        assert (status, body) == (200, b'{"id":"resp_1"}')
        assert seen[0][0].startswith(f"{method} {target} HTTP/1.1\r\n".encode())
        assert (await r.ask(f"PUT {target} HTTP/1.1\r\nHost: g\r\n\r\n".encode()))[0] == 405


async def test_what_lies_below_an_anthropic_route_is_anthropics(autojump_clock: MockClock) -> None:
    async with rig("pump", answers(json_answer())) as r:
        status, _, body = await r.ask(b"GET /v1/messages/batches HTTP/1.1\r\nHost: g\r\n\r\n")
        assert (status, json.loads(body)["error"]["type"]) == (404, "not_found_error")
