"""The Coordinator's file and the pipeline section: accepted as they are, refused with everything that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from llmgw.errors import ConfigError
from llmgw.pipeline.config import PipelineConfig, StepConfig, Translated, build, is_coordinator, translate

FILE = """
log_level: 3
server:
  listen_addr: "127.0.0.1:8081"
  read_timeout: 31s
  shutdown_timeout: 26s
  max_request_body_size: 65
gateway:
  address: http://gateway:8081
  max_idle_conns_per_host: 200
  timeout: 61s
pipeline:
  kv_connector: kv-nixl
  ec_connector: ec-nixl
  use_openai_format: true
  steps:
    - type: replace-media-urls
      params: {download_timeout: 10s, max_concurrent_downloads: 10.0, allowed_domains: null}
    - type: render
      params: {address: "http://render:8000", timeout: 30s, max_total_tokens: 131072}
    - type: encode
      params: {max_parallel: 8}
    - type: prefill
      params: {}
    - type: decode
"""


def translated(text: str = FILE, environ: dict[str, str] | None = None, **options: Any) -> Translated:
    return translate(yaml.safe_load(text), environ or {}, **options)


def said(found: Translated) -> dict[str, str]:
    assert found.document is None
    return {".".join(map(str, place)): message for place, message in found.problems}


def test_the_shipped_form() -> None:
    found = translated()
    assert found.problems == ()
    assert found.document is not None
    assert found.document["listeners"] == [{"address": "127.0.0.1:8081"}]
    assert found.document["limits"] == {"body": 65 << 20, "body_grace": "31s"}
    assert found.document["timeouts"] == {"drain": "26s"}
    pipeline = found.document["pipelines"]["coordinator"]
    assert pipeline["gateway"] == "http://gateway:8081"
    assert pipeline["leg_timeout"] == "61s"
    assert pipeline["transfer_fields"] == "strip"
    assert pipeline["on_failure"] == {"prefill_failed": "fail", "decode_lost": "fail"}
    assert any("log_level" in note for note in found.notes)
    made = build(PipelineConfig(steps=tuple(StepConfig(**step) for step in pipeline["steps"])))
    assert [step.name for step in made.steps] == ["replace-media-urls", "render", "encode", "prefill", "decode"]


def test_defaults() -> None:
    found = translated("gateway: {address: 'http://g'}\npipeline: {steps: [{type: decode}]}")
    assert found.document is not None
    assert found.document["listeners"] == [{"address": ":8080"}]
    assert found.document["limits"]["body"] == 64 << 20
    assert found.document["timeouts"] == {"drain": "25s"}
    pipeline = found.document["pipelines"]["coordinator"]
    assert (pipeline["kv_connector"], pipeline["ec_connector"]) == ("kv-shared-storage", "ec-shared-storage")
    assert pipeline["leg_timeout"] == "60s"


def test_the_environment_wins() -> None:
    found = translated(
        environ={
            "COORDINATOR_SERVER_LISTEN_ADDR": ":9",
            "COORDINATOR_SERVER_MAX_REQUEST_BODY_SIZE": "7",
            "COORDINATOR_GATEWAY_ADDRESS": "http://other",
            "COORDINATOR_PIPELINE_USE_OPENAI_FORMAT": "false",
            "COORDINATOR_PIPELINE_KV_CONNECTOR": "kv-sglang",
            "COORDINATOR_SERVICE_HOST": "10.0.0.1",  # what Kubernetes sets for a service of this name
            "SGLANG_BOOTSTRAP_PORT": "9001",
        }
    )
    assert found.document is not None, found.problems
    assert found.document["listeners"] == [{"address": ":9"}]
    assert found.document["limits"]["body"] == 7 << 20
    pipeline = found.document["pipelines"]["coordinator"]
    assert pipeline["gateway"] == "http://other"
    assert pipeline["use_openai_format"] is False
    assert (pipeline["kv_connector"], pipeline["bootstrap_port"]) == ("kv-sglang", 9001)


@pytest.mark.parametrize("port", ["0", "65536", "text"])
def test_a_bootstrap_port_that_is_none(port: str) -> None:
    found = translated(environ={"SGLANG_BOOTSTRAP_PORT": port})
    assert found.document is not None
    assert found.document["pipelines"]["coordinator"]["bootstrap_port"] == 8998
    assert any(port in note for note in found.notes)


def test_native_needs_no_gateway() -> None:
    text = "pipeline: {steps: [{type: prefill}, {type: decode}]}"
    assert "gateway.address" in said(translated(text))
    found = translated(text, endpoints=True)
    assert found.document is not None
    assert found.document["pipelines"]["coordinator"]["gateway"] == ""
    assert found.document["pipelines"]["coordinator"]["on_failure"] == {}


def test_everything_that_is_wrong_at_once() -> None:
    problems = said(
        translated(
            """
server: {read_timeout: 30, write_timeout: "30", listen: x}
gateway: {address: gateway, timeout: soon}
pipeline:
  kv_connector: kv-x
  use_openai_format: "no"
  steps:
    - type: render
      params: {timeout: 30, max_total_tokens: -1}
    - type: nonsense
    - type: encode
      params: {max_parallel: 8192.5, colour: red}
    - {typ: decode}
surprise: 1
""",
            {"COORDINATOR_LOG_LEVEL": "loud"},
        )
    )
    for place in ("server.read_timeout", "server.write_timeout", "server.listen", "gateway.address", "gateway.timeout",
                  "pipeline.use_openai_format", "pipeline.steps.3", "surprise", "COORDINATOR_LOG_LEVEL"):  # fmt: skip
        assert place in problems, (place, problems)


def test_everything_that_is_wrong_with_the_steps() -> None:
    problems = said(
        translated(
            """
gateway: {address: "http://g"}
pipeline:
  kv_connector: kv-x
  ec_connector: ec-x
  use_openai_format: false
  steps:
    - type: prefill
    - type: nonsense
    - type: render
      params: {timeout: 30, max_total_tokens: -1}
    - type: encode
      params: {max_parallel: 8192.5, colour: red}
    - type: decode
    - type: encode
"""
        )
    )
    assert "unknown kv_connector 'kv-x'; known: kv-mooncake" in problems["pipeline.kv_connector"]
    assert "unknown ec_connector 'ec-x'" in problems["pipeline.ec_connector"]
    assert "add a render step" in problems["pipeline.steps.0"]
    assert "unknown step 'nonsense'; known: conditional-decode, decode" in problems["pipeline.steps.1.type"]
    assert "needs address" in problems["pipeline.steps.2.params.address"]
    assert "not a duration" in problems["pipeline.steps.2.params.timeout"]
    assert "-1" in problems["pipeline.steps.2.params.max_total_tokens"]
    assert "8192.5" in problems["pipeline.steps.3.params.max_parallel"]
    assert "no parameter 'colour'" in problems["pipeline.steps.3.params.colour"]
    assert "never runs" in problems["pipeline.steps.5"]


@pytest.mark.parametrize("steps", ["[]", "null", "[{type: prefill}]", "[{type: conditional-decode}]"])
def test_a_pipeline_that_never_answers(steps: str) -> None:
    found = translated(f"gateway: {{address: 'http://g'}}\npipeline: {{steps: {steps}}}")
    assert found.document is None


def test_a_steps_own_connector_wins_and_what_it_has_no_use_for_is_ignored() -> None:
    config = PipelineConfig(
        kv_connector="kv-sglang",
        bootstrap_port=9001,
        steps=(
            StepConfig(type="render", params={"address": "http://r", "use_openai_format": False}),
            StepConfig(type="prefill", params={"kv_connector": "kv-nixl", "ec_connector": "ec-nixl"}),
            StepConfig(type="decode"),
        ),
    )
    _, prefill, decode = build(config).steps
    assert prefill.kv_connector.name == "kv-nixl"  # type: ignore[attr-defined]
    assert decode.kv_connector.name == "kv-sglang"  # type: ignore[attr-defined]
    assert decode.kv_connector.bootstrap_port == 9001  # type: ignore[attr-defined]


def test_build_says_everything() -> None:
    with pytest.raises(ConfigError) as caught:
        build(PipelineConfig(steps=(StepConfig(type="render"), StepConfig(type="x")), kv_connector="y"))
    assert {problem.where for problem in caught.value.problems} == {
        "steps", "steps[1].type", "steps[0].params.address", "kv_connector",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("gateway: {}", True),
        ("pipeline: {}", True),
        ("version: 1\npipeline: x", False),
        ("endpoints: []", False),
        ("version: 1", False),
        ("3", False),
        ("", False),
    ],
)
def test_recognised_by_its_keys(text: str, is_one: bool) -> None:
    assert is_coordinator(yaml.safe_load(text)) is is_one
