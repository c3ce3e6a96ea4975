"""Observation of traffic over HTTP: frontends that are scraped, and a Prometheus server, real where one is installed."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.processes import ProcessGroup
from tests.cluster.prometheus import PrometheusServer, requires_prometheus

from dynamo.core.clock import ManualClock
from dynamo.core.codec import json_encode
from dynamo.core.errors import DynamoException
from dynamo.planner.config.planner_config import parse
from dynamo.planner.observation.prometheus import PrometheusTraffic
from dynamo.planner.observation.scrape import FrontendScraper
from dynamo.protocols.discovery import METRICS_SOURCES, MetricsAddress
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore
from dynamo.runtime.json_service import HttpCall, JsonRoutes, TextBody

pytestmark = pytest.mark.integration

TIMEOUT_S = 30.0


class ScriptedFrontend:
    """Metrics of a frontend after `requests` requests of 10 prompt and 5 output tokens."""

    def __init__(self) -> None:
        self.requests = 0
        self.status = 200

    async def metrics(self, call: HttpCall[None]) -> tuple[int, TextBody]:
        labels = '{model="m",dynamo_namespace="n"}'
        lines = [
            f"dynamo_frontend_requests_started_total{labels} {self.requests}",
            "dynamo_component_uptime_seconds 9e9",
        ]
        for name, value in (("input_sequence_tokens", 10), ("output_sequence_tokens", 5)):
            lines.append(f"dynamo_frontend_{name}_sum{labels} {value * self.requests}")
            lines.append(f"dynamo_frontend_{name}_count{labels} {self.requests}")
        return self.status, TextBody("\n".join(lines) + "\n")

    def routes(self) -> JsonRoutes:
        routes = JsonRoutes()
        routes.add("GET", "/metrics", self.metrics)
        return routes


def loopback(url: str) -> str:
    return url.replace("0.0.0.0", "127.0.0.1")


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():  # noqa: ASYNC110 - it polls another process
            await asyncio.sleep(0.1)


async def test_registered_frontends_are_scraped_and_one_that_fails_makes_the_traffic_unknown() -> None:
    discovery, clock, frontend = MemoryDiscovery(MemoryStore()), ManualClock(100.0), ScriptedFrontend()
    scraper = FrontendScraper(discovery, "n", clock, "m")
    async with frontend.routes().serve(0) as url:
        for number, namespace in ((1, "n"), (2, ""), (3, "another")):
            target = loopback(url) if namespace != "another" else "http://127.0.0.1:1"
            address = MetricsAddress("frontend", f"{target}/metrics", number, namespace)
            await discovery.put(METRICS_SOURCES, address.key, json_encode(address))
        await scraper.sample()
        frontend.requests = 30
        clock.advance(10.0)
        await scraper.sample()
        found = (await scraper.window(10.0)).traffic
        assert found is not None
        assert (found.num_req, found.isl, found.osl) == (30.0, 10.0, 5.0)

        frontend.status = 500
        clock.advance(10.0)
        await scraper.sample()
        assert "could not be read" in (await scraper.window(10.0)).unknown
    await scraper.close()


class ScriptedPrometheus:
    """Query endpoint that records requests and returns one row for all of them."""

    def __init__(self) -> None:
        self.calls: list[HttpCall[None]] = []
        self.value = "4"

    async def query(self, call: HttpCall[None]) -> tuple[int, Any]:
        self.calls.append(call)
        row = {"metric": {"dynamo_namespace": "n", "model": "m"}, "value": [1.5, self.value]}
        return 200, {"status": "success", "data": {"resultType": "vector", "result": [row]}}


async def test_queries_carry_the_present_token_and_extra_parameters(tmp_path: Path) -> None:
    server, routes, token = ScriptedPrometheus(), JsonRoutes(), tmp_path / "token"
    routes.add("GET", "/api/v1/query", server.query)
    async with routes.serve(0) as url:
        config = parse({
            "environment": "virtual",
            "metric_pulling_prometheus_endpoint": loopback(url),
            "metric_pulling_prometheus_token_file": str(token),
            "metric_pulling_prometheus_extra_query_params": {"tenant": "t"},
        })  # fmt: skip
        traffic = PrometheusTraffic(config, "n")
        for word in ("first", "second"):
            token.write_text(word + "\n")
            found = await traffic.window(60.0)
            assert found.traffic is not None
            assert (found.traffic.num_req, found.traffic.isl, found.ttft_ms) == (4.0, 4.0, 4000.0)
            assert server.calls[-1].headers["authorization"] == f"Bearer {word}"
        assert server.calls[0].query["tenant"] == "t"
        assert server.calls[0].query["query"] == "increase(dynamo_frontend_requests_started_total[60s])"
        server.value = "NaN"
        assert (await traffic.window(60.0)).traffic is None
        token.unlink()
        with pytest.raises(DynamoException, match="metric_pulling_prometheus_token_file"):
            await traffic.window(60.0)
    with pytest.raises(DynamoException):
        await traffic.window(60.0)
    await traffic.close()


@requires_prometheus
async def test_real_prometheus_server_returns_the_traffic_of_a_frontend(tmp_path: Path) -> None:
    frontend, group = ScriptedFrontend(), ProcessGroup(tmp_path)
    async with frontend.routes().serve(0) as url:
        server = PrometheusServer(group, loopback(url).removeprefix("http://"), namespace=None)
        try:
            await asyncio.to_thread(server.start)
            config = parse({
                "environment": "virtual",
                "metric_pulling_prometheus_endpoint": server.url,
                "model_name": "M",
            })  # fmt: skip
            traffic = PrometheusTraffic(config, "n")

            async def is_observed() -> bool:
                frontend.requests += 3
                seen = (await traffic.window(20.0)).traffic
                return seen is not None and seen.num_req > 0 and (round(seen.isl), round(seen.osl)) == (10, 5)

            await until(is_observed)
            other = PrometheusTraffic(config, "another")
            assert (await other.window(20.0)).traffic is None
            await other.close()
            await traffic.close()
        finally:
            group.stop()
