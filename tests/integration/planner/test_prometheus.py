"""Observation through a real Prometheus server: equal to direct scraping under load, and held decisions while it is away."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cluster import MODEL, Cluster
from tests.cluster.processes import wait_until
from tests.cluster.prometheus import PrometheusServer, requires_prometheus
from tests.integration.planner.test_service import lines
from tests.unit.planner.test_profile_data import write_json

from dynamo.core.clock import SystemClock
from dynamo.core.errors import DynamoException
from dynamo.planner.config.planner_config import parse
from dynamo.planner.observation.prometheus import PrometheusTraffic
from dynamo.planner.observation.scrape import FrontendScraper
from dynamo.planner.observation.traffic import ObservedTraffic
from dynamo.runtime.discovery.file import FileDiscovery

pytestmark = [pytest.mark.integration, requires_prometheus]

WINDOW_S = 8
CLIENTS = 4
TOLERANCE = 0.2
"""`increase()` extrapolates from the first and last scrape inside its window to the window's ends."""
STARTED = "dynamo_frontend_requests_started_total"
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "one two three " * 20}],
    "max_tokens": 20,
    "stream": True,
}


@contextmanager
def load(cluster: Cluster) -> Iterator[list[int]]:
    """Keep `CLIENTS` requests in progress within the block; yield the statuses so far."""
    enough, statuses = threading.Event(), []

    def requests() -> None:
        while not enough.is_set():
            statuses.append(cluster.post(CHAT).status_code)

    clients = [threading.Thread(target=requests) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield statuses
    finally:
        enough.set()
        for client in clients:
            client.join()


def started(cluster: Cluster) -> PrometheusServer:
    """Return a server that has scraped the frontend after its first request: a counter's first value is no increase."""
    assert cluster.post(CHAT).status_code == 200
    server = PrometheusServer(cluster, f"127.0.0.1:{cluster.port}")
    server.start()
    server.wait_value(STARTED, 1)
    return server


async def queried_traffic(server: PrometheusServer) -> ObservedTraffic:
    """Return the traffic of the last window from Prometheus."""
    config = parse({"environment": "virtual", "metric_pulling_prometheus_endpoint": server.url, "model_name": MODEL})
    prometheus = PrometheusTraffic(config, config.namespace)
    try:
        return await prometheus.window(WINDOW_S)
    finally:
        await prometheus.close()


async def observed(cluster: Cluster, server: PrometheusServer) -> tuple[ObservedTraffic, ObservedTraffic]:
    """Return the traffic of the same window, scraped and from Prometheus."""
    discovery = FileDiscovery(cluster.folder / "kv")
    scraper = FrontendScraper(discovery, "dynamo", SystemClock(), MODEL)
    try:
        await scraper.sample()
        await asyncio.sleep(WINDOW_S)
        await scraper.sample()
        return await scraper.window(WINDOW_S), await queried_traffic(server)
    finally:
        await scraper.close()
        await discovery.close()


def test_prometheus_and_direct_scraping_observe_the_same_traffic_under_load(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        # The mocker determines the rate of the requests, not the processor, which other tests use too.
        cluster.mocker("--speedup-ratio", "0.5")
        server = started(cluster)
        with load(cluster) as statuses:
            wait_until(lambda: len(statuses) >= CLIENTS, "no request was served")
            scraped, queried = asyncio.run(observed(cluster, server))
        assert set(statuses) == {200}
        assert scraped.traffic is not None
        assert queried.traffic is not None
        assert scraped.traffic.num_req > 10
        assert queried.traffic.num_req == pytest.approx(scraped.traffic.num_req, rel=TOLERANCE)
        assert (queried.traffic.isl, queried.traffic.osl) == pytest.approx((scraped.traffic.isl, scraped.traffic.osl))
        assert queried.ttft_ms == pytest.approx(scraped.ttft_ms, rel=TOLERANCE)
        assert queried.itl_ms == pytest.approx(scraped.itl_ms, rel=TOLERANCE)
        assert queried.request_duration_s == pytest.approx(scraped.request_duration_s, rel=TOLERANCE)
        server.stop()
        with pytest.raises(DynamoException):
            asyncio.run(queried_traffic(server))


def planned(folder: Path, since: int = 0) -> list[dict[str, Any]]:
    """Return the decisions of the ticks of throughput scaling."""
    decisions = [json.loads(line)["decision"] for line in lines(folder)[1:]]
    return [one for one in decisions if one["throughput"]["reason"] != "unset"][since:]


def test_decisions_are_held_with_a_reason_while_prometheus_is_away_and_continue_after_it(tmp_path: Path) -> None:
    write_json(tmp_path)
    with Cluster(tmp_path) as cluster:
        cluster.mocker("--speedup-ratio", "5")
        server, folder = started(cluster), tmp_path / "log"
        config = {
            "environment": "virtual", "mode": "agg", "namespace": "dynamo", "model_name": MODEL, "load_predictor": "constant",
            "optimization_target": "sla", "enable_throughput_scaling": True, "enable_load_scaling": False,
            "throughput_adjustment_interval_seconds": 3, "pre_deployment_sweeping_mode": "none",
            "profile_results_dir": str(tmp_path), "metric_pulling_prometheus_endpoint": server.url,
            "max_gpu_budget": 1, "decode_engine_num_gpu": 1, "log_dir": str(folder), "report_interval_hours": None,
            "control_api_port": 0, "live_dashboard_port": 0,
        }  # fmt: skip
        cluster.start("planner", [sys.executable, "-m", "dynamo.planner", "--config", json.dumps(config)])

        def reasons(since: int) -> list[str]:
            return [one["throughput"]["reason"] for one in planned(folder, since)]

        with load(cluster) as statuses:
            cluster.wait_until(lambda: "no_change" in reasons(0), "no decision was made from Prometheus")
            server.stop()
            before = len(planned(folder))
            cluster.wait_until(lambda: len(reasons(before)) >= 2, "no tick without Prometheus")
            held = planned(folder, before + 1)  # The first may have been observed before the stop.
            assert {one["throughput"]["reason"] for one in held} == {"no_traffic_data"}
            assert all(one.get("scale_to") is None for one in held)
            text = (tmp_path / "planner.log").read_text()
            assert "failed to observe traffic: " in text
            assert "unknown: traffic: " in text
            assert "Traceback" not in text
            server.start()
            cluster.wait_until(lambda: reasons(before)[-1] == "no_change", "it did not continue after Prometheus")
        assert set(statuses) == {200}
