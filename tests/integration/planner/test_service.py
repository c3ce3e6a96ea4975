"""The planner process, with a real frontend and mocker, scales through the virtual connector and records its reasons."""

import json
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.ports import free_port
from tests.cluster.cluster import MODEL, Cluster
from tests.cluster.processes import wait_until

from dynamo.planner.core.record import replay

pytestmark = pytest.mark.integration

CONFIG = {
    "environment": "virtual",
    "mode": "agg",
    "optimization_target": "throughput",
    "load_adjustment_interval": 1,
    "max_gpu_budget": 3,
    "decode_engine_num_gpu": 1,
}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "one two three " * 50}], "max_tokens": 150}
SMALL = ("--num-gpu-blocks-override", "128", "--block-size", "16", "--max-num-seqs", "2", "--speedup-ratio", "1")


def started(cluster: Cluster, **settings: Any) -> Path:
    """Start a planner; return the folder of its log."""
    folder = cluster.folder / f"log{len(cluster.processes)}"
    config = json.dumps({**CONFIG, "log_dir": str(folder), **settings})
    cluster.start(
        folder.name, [sys.executable, "-m", "dynamo.planner", "--config", config], {"DYN_NAMESPACE": "dynamo"}
    )
    return folder


def lines(folder: Path) -> list[bytes]:
    """Return the lines of the log that are written completely."""
    return [line for file in sorted(folder.glob("*.jsonl")) for line in file.read_bytes().split(b"\n")[:-1]]


def decided(folder: Path, matches: Callable[[dict[str, Any]], object]) -> bool:
    return any(matches(json.loads(line)["decision"]) for line in lines(folder)[1:])


def wants_more(decision: dict[str, Any]) -> bool:
    return ((decision.get("scale_to") or {}).get("num_decode") or 0) > 1


def test_planner_scales_up_under_load_and_its_record_replays_to_the_same_decisions(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster, ThreadPoolExecutor(12) as clients:
        cluster.mocker(*SMALL)
        folder = started(cluster)
        cluster.wait_until(lambda: len(lines(folder)) > 1, "no tick was recorded")
        sent: list[Future[httpx.Response]] = []

        def has_scaled() -> bool:
            """Keep twelve requests in progress."""
            running = sum(not one.done() for one in sent)
            sent.extend(clients.submit(cluster.post, CHAT) for _ in range(12 - running))
            return decided(folder, wants_more)

        cluster.wait_until(has_scaled, "it never scaled up")
        assert [one.result().status_code for one in sent] == [200] * len(sent)
        wait_until(
            lambda: list((tmp_path / "kv" / "v1").glob("**/num%5Fdecode%5Fworkers")), "no decision was published"
        )
        recorded = lines(folder)
        replayed = list(replay(recorded))
        assert len(replayed) == len(recorded) - 1
        assert all(bytes(tick.decision) == decision for tick, decision in replayed)


def test_planner_refuses_an_invalid_setting_in_one_line(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        folder = started(cluster, max_gpu_budget="many")
        log = tmp_path / f"{folder.name}.log"
        wait_until(lambda: log.exists() and "max_gpu_budget" in log.read_text(), "nothing was said")
        assert "Traceback" not in log.read_text()


def test_two_planners_of_one_machine_run_with_the_same_ports_and_the_second_names_each_one(tmp_path: Path) -> None:
    ports = {
        name: free_port() for name in ("control_api_port", "live_dashboard_port", "metric_reporting_prometheus_port")
    }
    with Cluster(tmp_path) as cluster:
        cluster.mocker()
        first = started(cluster, **ports)
        cluster.wait_until(lambda: len(lines(first)) > 1, "the first planner recorded no tick")
        second = started(cluster, **ports)
        cluster.wait_until(lambda: len(lines(second)) > 1, "the second planner recorded no tick")
        log = (tmp_path / f"{second.name}.log").read_text()
        for name, port in ports.items():
            (line,) = [one for one in log.splitlines() if f"{name} {port}" in one]
            assert "is in use by another process" in line
            assert "the planner continues without it" in line
        assert "Traceback" not in log
        metrics = httpx.get(f"http://127.0.0.1:{ports['metric_reporting_prometheus_port']}/metrics").text
        assert "dynamo_planner_num_decode_replicas" in metrics
