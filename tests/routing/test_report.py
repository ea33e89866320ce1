"""Reading engines' metrics pages: only what matters, whole names only, and never a zero that was not said."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.endpoint import Report
from llmgw.engines.base import MetricNames
from llmgw.routing.report import Reader, detect, kinds

CAPTURES = Path(__file__).parents[2].parent / "shared/captures"


def page(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def vllm() -> Reader:
    return Reader(kinds()["vllm"])


def captured(name: str) -> bytes:
    path = next(
        (base / name for base in (CAPTURES, CAPTURES.parents[2] / "shared/captures") if (base / name).exists()), None
    )
    if path is None:
        pytest.skip(f"{CAPTURES / name} is not there")
    return path.read_bytes().replace(b"\r", b"").split(b"\n\n", 2)[-1]


def test_a_real_vllm_page() -> None:
    body = captured("vllm/metrics.txt")
    found = vllm().read(body, 7.0)

    assert detect(body) == "vllm"
    assert found.report == Report(at=7.0, running=0.0, waiting=0.0, kv_usage=0.0)
    assert found.block_size == 128
    assert found.blocks
    assert found.progress


def test_a_real_llama_server_page_says_nothing_of_its_cache() -> None:
    body = captured("llama-server/metrics.txt")
    found = Reader(kinds()["llama-server"]).read(body, 7.0)

    assert detect(body) == "llama-server"
    assert found.report.running is not None
    assert found.report.kv_usage is None
    assert found.progress == 1112 + 4031 + 122


def test_only_whole_names_count() -> None:
    body = page(
        '# HELP vllm:num_requests_waiting vllm:num_requests_waiting{engine="0"} 9',
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 5.0',
        'xvllm:num_requests_waiting{engine="0"} 6.0',
    )

    assert vllm().read(body, 0.0).report.waiting is None


def test_ranks_are_added_and_the_fullest_cache_counts() -> None:
    body = page(
        *(f'vllm:num_requests_running{{engine="{i}",model_name="m"}} {i + 1}.0' for i in range(3)),
        *(f'vllm:kv_cache_usage_perc{{engine="{i}"}} 0.{i}' for i in range(3)),
        *(
            f'vllm:cache_config_info{{block_size="16",engine="{i}",num_gpu_blocks="100",x="None"}} 1.0'
            for i in range(3)
        ),
    )
    found = vllm().read(body, 1.0)

    assert found.report == Report(at=1.0, running=6.0, kv_usage=0.2)
    assert (found.block_size, found.blocks) == (16, 300)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5", 0.5),
        ("1.7", 1.0),
        ("NaN", None),
        ("+Inf", None),
        ("-1", None),
        ("junk", None),
        ("", None),
        ("2.5e-1 1700000000000", 0.25),
        ('0.25 # {trace_id="a"} 1.0', 0.25),
    ],
)
def test_values_of_this_world_only(text: str, value: float | None) -> None:
    assert vllm().read(page('vllm:kv_cache_usage_perc{engine="0"} ' + text), 0.0).report.kv_usage == value


def test_names_of_older_versions_are_found() -> None:
    assert vllm().read(page("vllm:gpu_cache_usage_perc 0.5"), 0.0).report.kv_usage == 0.5


def test_labels_with_braces_quotes_and_spaces() -> None:
    body = page(r'vllm:num_requests_running{model_name="a \"} 9 b",path="{x}"} 4.0')

    assert vllm().read(body, 0.0).report.running == 4.0


def test_a_spec_can_ask_for_a_label() -> None:
    body = page('m{kind="a",n="7"} 1', 'm{kind="b",n="8"} 2')
    reader = Reader(MetricNames(running=("m{kind=b}",), blocks=("m{kind=a}@n",), block_size=("absent", "m@n")))
    found = reader.read(body, 0.0)

    assert (found.report.running, found.blocks, found.block_size) == (2.0, 7, 8)


@pytest.mark.parametrize("spec", ["", "9m", "m{", "m{a}", "m@"])
def test_a_mapping_that_is_none_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="is "):
        Reader(MetricNames(running=(spec,)))


@pytest.mark.parametrize("body", [b"", b"<html>vllm:num_requests_running 0", b'{"detail":"Not Found"}', b"\xff" * 99])
def test_what_is_no_metrics_page_says_nothing(body: bytes) -> None:
    found = vllm().read(body, 3.0)

    assert found.empty
    assert found.report == Report(at=3.0)


@given(st.binary(max_size=200), st.binary(max_size=50))
def test_any_bytes_are_read(before: bytes, after: bytes) -> None:
    for kind in kinds().values():
        Reader(kind).read(before + b"\nvllm:num_requests_running" + after, 0.0)


def test_every_kind_has_a_page_to_look_at() -> None:
    assert {"vllm", "sglang", "llama-server", "sim", "tgi", "trtllm"} <= set(kinds())
    for names in kinds().values():
        assert names.running
        assert names.waiting


def test_a_hundred_kilobytes_cost_no_millisecond() -> None:
    filler = [
        f'vllm:request_prefill_time_seconds_bucket{{engine="0",le="{i}",model_name="a/b"}} {i}.0' for i in range(1300)
    ]
    body = page(*filler, 'vllm:num_requests_running{engine="0",model_name="m"} 3.0', *filler[:100])
    assert len(body) > 100_000
    reader, took = vllm(), []
    for _ in range(20):
        start = time.process_time()
        assert reader.read(body, 0.0).report.running == 3.0
        took.append(time.process_time() - start)

    assert min(took) < 0.001
