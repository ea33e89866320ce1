"""The file is read strictly, every problem is reported at once and in its place, and what is printed reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

from llmgw import config
from llmgw.config import EndpointConfig, ModelConfig, ModelPolicy, Server
from llmgw.errors import ConfigError
from llmgw.units import Duration

ROOT = Path(__file__).parent.parent.parent


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config.parse(text, "f.yaml")
    return list(map(str, caught.value.problems))


def test_the_smallest_file() -> None:
    server = config.parse("version: 1")
    assert server == Server(version=1)
    assert server.limits.body == 64 << 20
    assert server.limits_of("any").idle == 120.0


def test_every_problem_at_once_with_file_line_and_path() -> None:
    assert problems(
        """version: 2
lisen: 3
limits: {body: 5x, body: 3, header_count: "3", zz: 1}
timeouts: [1]
listeners: []
endpoints:
  - name: a
    url: ftp://x
  - name: a
    url: http://me:secret@x
    models: x
    phases: [foo]
    weight: 0
    labels: {a: 1}
  - 3
  - {url: 'http://ok'}
models: {m: {aliases: [a]}, n: {aliases: [a, m], usage: x, timeouts: {idle: 0s}}}
admin: {addresses: ['8080'], hosts: ["a b"]}
driver: fast
"""
    ) == [
        "f.yaml:1: version: expected 1, found 2",
        "f.yaml:2: lisen: unknown key 'lisen'; did you mean 'listeners'?",
        "f.yaml:3: limits.body: key 'body' occurs twice (first in line 3)",
        "f.yaml:3: limits.body: '5x' is not a size; write 64MiB, 64KiB, 4096",
        "f.yaml:3: limits.header_count: expected a whole number, found '3'",
        "f.yaml:3: limits.zz: unknown key 'zz'; known: body, headers, header_count, head_timeout, body_min_rate, "
        "body_grace, keep_alive, connections",
        "f.yaml:4: timeouts: expected a mapping with the keys of Timeouts, found a list",
        "f.yaml:5: listeners: must not be empty",
        "f.yaml:8: endpoints[0].url: must be http://HOST[:PORT], https://HOST[:PORT] or unix:/path",
        "f.yaml:9: endpoints[1].name: endpoint 'a' is defined twice (first in line 7)",
        "f.yaml:10: endpoints[1].url: must not contain a user or password; use api_key_file",
        "f.yaml:11: endpoints[1].models: expected a list, found 'x'",
        "f.yaml:12: endpoints[1].phases[0]: expected encode or prefill or decode, found 'foo'",
        "f.yaml:13: endpoints[1].weight: must be more than 0",
        "f.yaml:14: endpoints[1].labels.a: expected a string, found 1",
        "f.yaml:15: endpoints[2]: expected a mapping with the keys of EndpointConfig, found 3",
        "f.yaml:16: endpoints[3].name: is missing",
        "f.yaml:17: models.n.usage: expected count or ask, found 'x'",
        "f.yaml:17: models.n.timeouts.idle: must be more than 0",
        "f.yaml:17: models.n.aliases[0]: alias 'a' is taken by model 'm'",
        "f.yaml:17: models.n.aliases[1]: alias 'm' is taken by model 'm'",
        "f.yaml:18: admin.addresses: address '8080' is none of :PORT, HOST:PORT, [IPV6]:PORT, unix:/path",
        "f.yaml:18: admin.hosts: 'a b' is not a host name",
        "f.yaml:19: driver: expected pump or tasks, found 'fast'",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "f.yaml: version: is missing"),
        ("a: [", "f.yaml:1: not YAML: "),
        ("version: 1\n\tx: 1", "f.yaml:2: not YAML: "),
        ("- 1", "f.yaml:1: expected a mapping"),
        ("version: !!python/object:os.system 1", "f.yaml:1: version: tag "),
        ("version: 1\n1: 2", "f.yaml:2: key '1' is not a string; quote it"),
        ("version: 1\nlog: {file: ''}", "f.yaml:2: log.file: must not be empty"),
        ("version: 1\nlog: null", "f.yaml:2: log: expected a mapping"),
        ("version: 1\ntimeouts: {idle: 30}", "f.yaml:2: timeouts.idle: expected a duration such as 30s, found 30"),
        ("version: 1\nlisteners: [{forward_headers: [X-LLMGW-Band]}]", "f.yaml:2: listeners[0].forward_headers: 'X-L"),
        ("version: 1\nlisteners: [{forward_headers: ['a b']}]", "f.yaml:2: listeners[0].forward_headers: 'a b' is not"),
        ("version: 1\nendpoints: [{name: a, url: 'http://x:99999'}]", "f.yaml:2: endpoints[0].url: must name a host"),
        ("version: 1\nendpoints: [{name: a, url: 'http://x?k=v'}]", "f.yaml:2: endpoints[0].url: must not have a q"),
        ("version: 1\nendpoints: [{name: a, url: 'http://x', phases: []}]", "f.yaml:2: endpoints[0].phases: must not"),
        ("a: &a [*a]", "f.yaml"),
        ("[" * 2000, "f.yaml"),
    ],
)
def test_each_problem_says_where_and_what(text: str, expected: str) -> None:
    assert problems(text)[0].startswith(expected)


def test_a_bomb_of_aliases_is_refused() -> None:
    text = "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
    for left, right in zip("abcdefg", "bcdefgh", strict=True):
        text += f"{right}: &{right} [{','.join([f'*{left}'] * 10)}]\n"
    assert "more than" in problems(text)[0]


def test_aliases_are_allowed() -> None:
    server = config.parse(
        "version: 1\nmodels:\n  a: {timeouts: &slow {idle: 5m}}\n  b: {timeouts: *slow, usage: ask}\n"
    )
    assert server.limits_of("b").idle == 300.0
    assert server.models["b"] == attrs.evolve(server.models["a"], usage="ask")


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file"):
        config.load(str(tmp_path / "absent.yaml"))
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is not UTF-8"):
        config.load(str(tmp_path / "x"))


# -- flags ---------------------------------------------------------------------------------------------------------


def test_endpoint_flags() -> None:
    assert config.parse_endpoints(
        [
            "a=http://h:8000=llama",
            "b=http://i:8000/v=m/x:y,phases=prefill,fabric=f,fabric=g,engine=vllm",
            "a=http://h:8000=qwen",
            "c=unix:/run/e.sock,phases=encode+prefill",
        ]
    ) == (
        EndpointConfig(name="a", url="http://h:8000", models=(ModelConfig(name="llama"), ModelConfig(name="qwen"))),
        EndpointConfig(
            name="b",
            url="http://i:8000/v",
            models=(ModelConfig(name="m/x:y"),),
            phases=("prefill",),
            fabrics=("f", "g"),
            engine="vllm",
        ),
        EndpointConfig(name="c", url="unix:/run/e.sock", phases=("encode", "prefill")),
    )


def test_every_bad_endpoint_flag_is_reported_and_no_password() -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse_endpoints(
            [
                "a",
                "b=http://h=m,color=red",
                "c=http://h=m",
                "c=http://i=m",
                "c=http://h=n,engine=sglang",
                "d=http://u:hunter2@h=m",
                "e=http://h=m,phases=think",
            ]
        )
    text = str(caught.value)
    assert "hunter2" not in text
    assert text.split("\n") == [
        "--endpoint a: expected NAME=URL=MODEL[,phases=prefill][,fabric=a][,engine=vllm]",
        "--endpoint b=http://h=m,color=red: unknown option 'color=red'; known: phases=, fabric=, engine=",
        "--endpoint c=http://i=m: c already has another URL; a second engine needs a name of its own",
        "--endpoint c=http://h=n,engine=sglang: engine of c contradicts an earlier --endpoint c=…",
        "--endpoint d: url: must not contain a user or password; use api_key_file",
        "--endpoint e: phases[0]: expected encode or prefill or decode, found 'think'",
    ]


def test_flags_add_endpoints_and_replace_the_rest() -> None:
    server = config.parse("version: 1\nlisteners: [{address: ':1', half_close: allow}]\n")
    changed = config.with_flags(
        server, endpoints=["a=http://h=m"], listen=[":2", "unix:/x"], admin=["unix:/y"], log_file="l", driver="tasks"
    )
    assert [(one.address, one.half_close) for one in changed.listeners] == [(":2", "allow"), ("unix:/x", "allow")]
    assert (changed.admin.addresses, changed.log.file, changed.driver) == (("unix:/y",), "l", "tasks")
    assert [e.name for e in changed.endpoints] == ["a"]
    with pytest.raises(ConfigError, match="in the configuration file too"):
        config.with_flags(changed, endpoints=["a=http://i=m"])
    with pytest.raises(ConfigError, match="--listen: address 'x'"):
        config.with_flags(server, listen=["x"])


def test_an_endpoint_keeps_its_identity_until_its_engine_restarts() -> None:
    (one,) = config.parse_endpoints(["a=http://gpu-1:8000=m"])
    made = one.endpoint()
    assert (made.host, sorted(made.phases), made.models[0].name) == ("gpu-1", ["decode", "prefill"], "m")
    assert made.id == one.endpoint().id != one.endpoint(start="2").id


# -- printing and documents ----------------------------------------------------------------------------------------


def example() -> str:
    return (ROOT / "examples" / "server.yaml").read_text()


def test_what_is_printed_reads_back() -> None:
    server = config.load(str(ROOT / "examples" / "server.yaml"))
    assert config.parse(config.dump(server)) == server
    assert "head_timeout: 10s" in config.dump(server)


def test_the_reference_page_is_current() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == config.reference(), "run: python -m llmgw.config > docs/configuration.md"


def test_the_example_shows_every_key() -> None:
    """Every key of every section stands in the file at least once."""
    used: dict[type, set[str]] = {cls: set() for cls in config.sections()}

    def walk(plain: Any, value: Any) -> None:
        if attrs.has(type(value)):
            used[type(value)] |= set(plain) if isinstance(plain, dict) else set()
            for name in plain if isinstance(plain, dict) else ():
                walk(plain[name], getattr(value, name))
        elif isinstance(value, tuple):
            for left, right in zip(plain, value, strict=True):
                walk(left, right)
        elif isinstance(value, dict):
            for name in value:
                walk(plain[name], value[name])

    walk(yaml.safe_load(example()), config.parse(example()))
    missing = {
        f"{cls.__name__}.{f.name}" for cls, seen in used.items() for f in attrs.fields(cls) if f.name not in seen
    }
    assert not missing, "examples/server.yaml lacks these keys"


def test_a_policy_overrides_single_limits() -> None:
    server = attrs.evolve(
        Server(version=1),
        models={"m": ModelPolicy(timeouts=config.ModelTimeouts(generation=Duration(60.0)))},
    )
    assert (server.limits_of("m").generation, server.limits_of("m").idle) == (60.0, 120.0)
    assert server.limits_of("n").generation is None


def test_pipelines_are_checked_with_the_file() -> None:
    text = """version: 1
pipeline: nowhere
pipelines:
  pd:
    kv_connector: kv-x
    steps:
      - type: render
      - type: decode
        params:
          colour: red
models:
  m:
    pipeline: pe
"""
    with pytest.raises(ConfigError) as caught:
        config.parse(text, "s.yaml")
    found = {(p.where, p.line) for p in caught.value.problems}
    assert found == {
        ("pipeline", 2), ("pipelines.pd.kv_connector", 5), ("pipelines.pd.steps[0].params.address", 7),
        ("pipelines.pd.steps[1].params.colour", 10), ("models.m.pipeline", 13),
    }  # fmt: skip


def test_the_coordinators_file_becomes_ours() -> None:
    text = "gateway: {address: 'http://g:1'}\npipeline:\n  kv_connector: kv-nixl\n  steps: [{type: prefill}, {type: decode}]\n"
    server = config.parse(text, environ={"COORDINATOR_SERVER_LISTEN_ADDR": "127.0.0.1:0"})
    assert server.listeners[0].address == "127.0.0.1:0"
    assert server.pipelines["coordinator"].kv_connector == "kv-nixl"
    assert server.pipeline == "coordinator"
    assert config.parse(config.dump(server)) == server
    with pytest.raises(ConfigError, match=r"c\.yaml:2: pipeline\.surprise: unknown key"):
        config.parse("gateway: {address: 'http://g:1'}\npipeline: {surprise: 1, steps: [{type: decode}]}", "c.yaml")
