"""Planner faults between processes: a kill during scaling, two planners, an unexecuted request, a plugin that hangs."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ports import free_port
from tests.cluster.cluster import MODEL, Cluster
from tests.cluster.processes import stop_process
from tests.integration.planner.test_service import CONFIG, SMALL, lines

from dynamo.llm.virtual_connector import DECISION, DECODE, SCALED, PlannerState
from dynamo.runtime.discovery.file import FileDiscovery

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
CLIENTS = 12
"""Requests in progress under load: one worker of `SMALL` has sequence slots for two."""
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "one two three " * 50}], "max_tokens": 40}
SETTINGS = {
    **CONFIG,
    "optimization_target": "load",
    "decode_scale_up_kv_rate": 40,
    "decode_scale_down_kv_rate": 5,
    "prefill_scale_up_queue_tokens": 2000,
    "prefill_scale_down_queue_tokens": 100,
    "report_interval_hours": None,
    "control_api_port": 0,
    "live_dashboard_port": 0,
}
"""Thresholds that two of `CLIENTS` requests in progress and the others in the queue exceed."""


class Planned:
    """Deployment of one mocker, its planners, and the environment that executes decisions."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        cluster.mocker(*SMALL)

    def planner(self, name: str, variables: dict[str, str] | None = None, **settings: Any) -> "subprocess.Popen[bytes]":
        """Start a planner and return when it has recorded a tick."""
        folder = self.cluster.folder / name
        config = json.dumps({**SETTINGS, "log_dir": str(folder), **settings})
        command = [sys.executable, "-m", "dynamo.planner", "--config", config]
        process = self.cluster.start(f"{name}-log", command, {"DYN_NAMESPACE": "dynamo", **(variables or {})})
        self.cluster.wait_until(lambda: len(lines(folder)) > 1, f"planner {name} recorded no tick")
        return process

    def log(self, name: str) -> str:
        return (self.cluster.folder / f"{name}-log.log").read_text()

    def decisions(self, name: str) -> list[dict[str, Any]]:
        """Return the decisions of a planner."""
        return [json.loads(line)["decision"] for line in lines(self.cluster.folder / name)[1:]]

    def reasons(self, name: str) -> list[str]:
        return [one["load"]["reason"] for one in self.decisions(name)]

    def published(self) -> tuple[int, int, int]:
        """Return decode workers, id and the last id carried out."""

        async def read() -> dict[str, bytes]:
            discovery = FileDiscovery(self.cluster.folder / "kv")
            try:
                return dict(await discovery.snapshot("v1/dynamo/planner"))
            finally:
                await discovery.close()

        found = asyncio.run(read())
        decode, decision, done = (int(found.get(key, b"-1")) for key in (DECODE, DECISION, SCALED))
        return decode, decision, done

    def carry_out(self) -> None:
        """Start the workers that the last decision requires, and acknowledge it."""
        decode, decision, _ = self.published()
        while self.cluster.workers() < decode:
            self.cluster.mocker(*SMALL)

        async def acknowledge() -> None:
            discovery = FileDiscovery(self.cluster.folder / "kv")
            try:
                await PlannerState(discovery, "dynamo").write(SCALED, decision)
            finally:
                await discovery.close()

        asyncio.run(acknowledge())

    def until(self, condition: Callable[[], object], message: str) -> None:
        self.cluster.wait_until(condition, message)

    @contextmanager
    def load(self) -> Iterator[list[int]]:
        """Keep `CLIENTS` requests in progress within the block; yield the statuses so far."""
        enough, statuses = threading.Event(), []

        def requests() -> None:
            while not enough.is_set():
                statuses.append(self.cluster.post(CHAT).status_code)

        clients = [threading.Thread(target=requests) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            yield statuses
        finally:
            enough.set()
            for client in clients:
                client.join()


@pytest.fixture
def planned(tmp_path: Path) -> Iterator[Planned]:
    with Cluster(tmp_path) as cluster:
        yield Planned(cluster)


def test_planner_that_is_killed_while_it_scales_continues_from_its_decision_when_it_returns(planned: Planned) -> None:
    first = planned.planner("first")
    with planned.load() as statuses:
        planned.until(lambda: planned.published()[1] == 0, "no decision was published")
        first.send_signal(signal.SIGKILL)
        stop_process(first)
        assert planned.published() == (2, 0, -1)
        planned.planner("second")
        planned.until(lambda: "scaling_in_progress" in planned.reasons("second"), "it does not continue the decision")
        assert planned.published() == (2, 0, -1)
        assert all(
            one["scale_to"] is None for one in planned.decisions("second") if one["load"]["reason"] != "scale_up"
        )
        planned.carry_out()
        planned.until(lambda: planned.published()[:2] == (3, 1), "it does not scale after the decision was carried out")
    assert set(statuses) == {200}
    assert "Traceback" not in planned.log("second")


def test_second_planner_waits_and_takes_over_when_the_first_ends(planned: Planned) -> None:
    processes = {name: planned.planner(name) for name in ("first", "second")}
    with planned.load() as statuses:
        planned.until(lambda: planned.published()[1] == 0, "no decision was published")
        planned.until(
            lambda: any("precedence" in planned.log(name) for name in processes), "no planner names the other"
        )
        held, acting = sorted(
            processes, key=lambda name: "records decisions and does not scale" not in planned.log(name)
        )
        assert planned.log(held).count("records decisions and does not scale") == 1
        assert "records decisions and does not scale" not in planned.log(acting)
        assert "accepted: decision" not in planned.log(held)
        processes[acting].send_signal(signal.SIGKILL)
        stop_process(processes[acting])
        planned.carry_out()
        planned.until(lambda: planned.published()[:2] == (3, 1), "the other planner does not take over")
        assert "scales from now on: the preceding one has left" in planned.log(held)
    assert set(statuses) == {200}


def test_unexecuted_scaling_request_is_held_with_its_reason_and_completes_late(planned: Planned) -> None:
    planned.planner("planner", {"SCALING_MAX_WAIT_TIME": "3", "SCALING_CHECK_INTERVAL": "1"})
    with planned.load() as statuses:
        planned.until(lambda: "decision 0 is pending" in planned.log("planner"), "the pending request has no reason")
        assert "scaling_in_progress" in planned.reasons("planner")
        assert planned.published() == (2, 0, -1)
        planned.carry_out()
        planned.until(lambda: planned.published()[:2] == (3, 1), "it does not continue after the late completion")
    assert set(statuses) == {200}
    assert all(one["scale_to"]["num_decode"] <= 3 for one in planned.decisions("planner") if one["scale_to"])


@pytest.mark.kserve
def test_hanging_plugin_process_delays_no_tick_and_is_used_again_when_it_continues(planned: Planned) -> None:
    port = free_port()
    plugin = planned.cluster.start(
        "plugin", [sys.executable, "-m", "tests.integration.planner.hanging_plugin", str(port), "2"], cwd=ROOT
    )
    entry = {
        "plugin_id": "remote", "plugin_type": "propose", "priority": 1, "endpoint": f"grpc://127.0.0.1:{port}",
        "auth_token": "secret",
    }  # fmt: skip
    registration = {
        "auth": {"trusted_sources": ["static_secret"], "static_secrets": {"secret": "team"}},
        "transport": {"allow_insecure_grpc": True, "request_timeout_seconds": 0.5},
    }
    planned.planner(
        "planner",
        {"DYNAMO_PLANNER_TEST": "1"},
        scheduling={"external_plugins": [entry]},
        plugin_registration=registration,
    )
    planned.until(lambda: planned.published()[:2] == (2, 0), "the plugin's number was not published")
    planned.carry_out()
    plugin.send_signal(signal.SIGSTOP)
    planned.until(lambda: "plugin_timeout" in planned.log("planner"), "the plugin that hangs is not named")
    before = len(planned.decisions("planner"))
    planned.until(lambda: len(planned.decisions("planner")) >= before + 3, "the planner stopped deciding")
    assert planned.published()[0] in (1, 2)
    plugin.send_signal(signal.SIGCONT)

    def is_counted() -> bool:
        stages = planned.decisions("planner")[-1]["stages"]
        return any(result["plugin_id"] == "remote" for stage in stages for result in stage.get("results", []))

    planned.until(is_counted, "the plugin is not called again")
    assert "Traceback" not in planned.log("planner")
