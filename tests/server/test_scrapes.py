"""Metrics pages of engines, on virtual time and real sockets."""

from __future__ import annotations

import random

import trio

from llmgw.config import Scrape
from llmgw.endpoint import EndpointView
from llmgw.net.client import Client
from llmgw.net.world import RealWorld
from llmgw.server.scrapes import Scraper
from llmgw.units import Duration
from tests.server.raw import engine, response
from tests.server.worlds import Bench, bench

PAGE = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
vllm:generation_tokens_total{engine="0"} %d
"""


def view(one: Bench) -> EndpointView:
    found = one.fleet.router.ledger.view(one.place("a").endpoint.id, trio.current_time())
    assert found is not None
    return found


async def scrape(one: Bench, nursery: trio.Nursery) -> None:
    one.fleet._clock = trio.current_time
    client = Client(RealWorld())
    nursery.start_soon(close_at_the_end, client)
    await nursery.start(Scraper(one.fleet, client, Scrape(interval=Duration(1.0)), random.Random(1)).run)


async def close_at_the_end(client: Client) -> None:
    try:
        await trio.sleep_forever()
    finally:
        client.close()


async def test_a_page_corrects_the_ledger_until_it_is_old(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    async with engine({"/metrics": response(PAGE % 1)}) as fake:
        one = bench(f"a={fake.url}=m", now=0.0)
        one.ready()
        await scrape(one, nursery)
        await trio.sleep(8)
        found = view(one)
        assert found.report is not None
        assert (found.report.running, found.report.waiting, found.report.kv_usage) == (7.0, 2.0, 0.25)
        assert trio.current_time() - found.report.at < 2.0
        assert 8.5 < found.foreign < 9.1
        fake.pages = {}  # 404 from now on
        await trio.sleep(20)
        found = view(one)
        assert found.report is not None
        assert trio.current_time() - found.report.at > 15
        assert found.foreign == 0.0
        assert one.place("a").slot.scrapes_failed >= 3


async def test_counters_that_rise_are_a_sign_of_life(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    async with engine({"/metrics": response(PAGE % 1)}) as fake:
        one = bench(f"a={fake.url}=m,engine=vllm")
        one.ready()
        one.place("a").alive = None
        await scrape(one, nursery)
        await trio.sleep(5)
        assert one.place("a").alive is None
        fake.pages = {"/metrics": response(PAGE % 5)}
        await trio.sleep(3)
        assert one.place("a").alive is not None


async def test_what_is_no_metrics_page_changes_nothing_and_is_asked_for_seldom(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    async with engine({"/metrics": response(b"<html>no</html>")}) as fake:
        one = bench(f"a={fake.url}=m")
        one.ready()
        await scrape(one, nursery)
        await trio.sleep(300)
        assert view(one).report is None
        assert len(fake.requests) < 16
