"""Dashboards and rules on a real Prometheus server that scrapes running processes: no panel is empty, and lost workers alert."""

import json
import math
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from benchmarks.ports import free_port
from tests.cluster.cluster import MODEL, Cluster
from tests.cluster.processes import wait_until
from tests.cluster.prometheus import PrometheusServer, requires_prometheus
from tools.dashboard_table import DISAGGREGATION, ENGINES, KV_ROUTER, OVERVIEW, PLANNER, Dashboard
from tools.upstream_dashboards import DASHBOARDS as UPSTREAM_DASHBOARDS
from tools.upstream_dashboards import REASONS

from dynamo.operator.reconcile.names import COMPONENT_TYPE, METRICS_ENABLED, WORKER_TYPES

ROOT = Path(__file__).parents[3]
OBSERVABILITY = ROOT / "deploy" / "observability"
RULES = OBSERVABILITY / "prometheus" / "rules.yml"
pytestmark = pytest.mark.integration
requires_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no `promtool`; on Debian: apt-get install prometheus"
)
PLANNER_CONFIG = {
    "environment": "virtual", "mode": "disagg", "optimization_target": "sla", "load_adjustment_interval": 1, "max_gpu_budget": 8,
    "decode_engine_num_gpu": 1, "prefill_engine_num_gpu": 1, "load_predictor": "constant", "throughput_adjustment_interval": 10,
}  # fmt: skip
MOCKER = ("--model-name", MODEL, "--num-gpu-blocks-override", "300", "--block-size", "16")
ALERTS_OF_THE_MACHINE = {"DynamoEventLoopStalls", "DynamoPlannerLate"}
"""Alerts that mean too little CPU, which tests that run side by side may cause."""
AFTER_FIRST_USE = {"dynamo_component_errors_total"}
"""Metrics whose series appear when something fails, as upstream's."""
LIVE = (OVERVIEW, DISAGGREGATION, KV_ROUTER, PLANNER, ENGINES)
"""Dashboards whose components are part of the running graph."""


@requires_promtool
def test_rules_alert_as_their_tests_expect() -> None:
    command = ["promtool", "test", "rules", "rules_test.yml"]
    done = subprocess.run(command, cwd=RULES.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@requires_promtool
def test_every_alert_has_a_test() -> None:
    alerts = set(re.findall(r"- alert: (\w+)", RULES.read_text()))
    assert set(re.findall(r"- alertname: (\w+)", (RULES.parent / "rules_test.yml").read_text())) == alerts


@requires_promtool
def test_configuration_of_the_stack_is_valid_and_names_existing_files() -> None:
    checked = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"], cwd=RULES.parent, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    stack = yaml.safe_load((ROOT / "deploy" / "docker-observability.yml").read_text())
    mounted = [one.split(":")[0] for service in stack["services"].values() for one in service.get("volumes", ())]
    assert [path for path in mounted if path.startswith(".") and not (ROOT / "deploy" / path).exists()] == []
    for path in OBSERVABILITY.rglob("*.yml"):
        assert yaml.safe_load(path.read_text()), path


def test_pod_monitors_select_labels_and_ports_that_the_operator_sets() -> None:
    monitors = list(yaml.safe_load_all((OBSERVABILITY / "k8s" / "podmonitors.yaml").read_text()))
    ports = {"dynamo-frontend": "http", "dynamo-worker": "system", "dynamo-planner": "metrics"}
    assert {one["metadata"]["name"]: one["spec"]["podMetricsEndpoints"][0]["port"] for one in monitors} == ports
    for one in monitors:
        selector = one["spec"]["selector"]
        assert selector["matchLabels"].pop(METRICS_ENABLED) == "true"
        (chosen,) = [*selector["matchLabels"], *(rule["key"] for rule in selector.get("matchExpressions", ()))]
        assert chosen == COMPONENT_TYPE
        values = selector.get("matchExpressions", [{}])[0].get("values")
        assert values is None or set(values) == WORKER_TYPES


class Graph:
    """A frontend and its workers under load, and a Prometheus server that scrapes them and evaluates the rules at once."""

    def __init__(self, cluster: Cluster, roles: Sequence[str], *, has_planner: bool = False) -> None:
        """`roles`: `--disaggregation-mode` of each worker, empty without it."""
        self.cluster = cluster
        self._ending = threading.Event()
        ports = [free_port() for _ in (*roles, "planner")]
        self.workers = [self._worker(role, port) for role, port in zip(roles, ports, strict=False)]
        cluster.wait_until(lambda: cluster.workers() >= len(roles), "the workers did not appear")
        jobs = {
            "dynamo-frontend": [f"127.0.0.1:{cluster.port}"],
            "dynamo-worker": [f"127.0.0.1:{port}" for port in ports[: len(roles)]],
        }
        if has_planner:
            config = json.dumps({**PLANNER_CONFIG, "metric_reporting_prometheus_port": ports[-1]})
            planner = [sys.executable, "-m", "dynamo.planner", "--config", config]
            cluster.start("planner", planner, {"DYN_NAMESPACE": "dynamo"})
            jobs["dynamo-planner"] = [f"127.0.0.1:{ports[-1]}"]
        rules = re.sub(r"for: \d+m|for: 30s", "for: 1s", RULES.read_text()).replace("interval: 30s", "interval: 1s")
        self.prometheus = PrometheusServer(cluster, jobs=jobs, rules=rules)
        self.prometheus.start()
        self._loads = [threading.Thread(target=self._load, args=(number,)) for number in range(3)]
        for one in self._loads:
            one.start()

    def _worker(self, role: str, port: int) -> "subprocess.Popen[bytes]":
        mode = ("--disaggregation-mode", role) if role else ()
        return self.cluster.run("mocker", *MOCKER, *mode, DYN_SYSTEM_PORT=str(port), DYN_SYSTEM_HOST="127.0.0.1")

    def _load(self, number: int) -> None:
        turn = 0
        while not self._ending.is_set():
            turn += 1
            words = f"{number} " + "word " * (60 + 40 * (turn % 4))
            self.cluster.post(
                {
                    "model": MODEL,
                    "messages": [{"role": "user", "content": words}],
                    "max_tokens": 20,
                    "ignore_eos": True,
                    "stream": True,
                }
            )
            self._ending.wait(0.2)

    def values(self, expr: str) -> list[float]:
        """Return the numbers of an instant query, with the variables of a dashboard replaced."""
        query = expr.replace("$__rate_interval", "30s").replace("$model", ".*")
        rows = self.prometheus.query(query)
        return [value for row in rows if not math.isnan(value := float(row["value"][1]))]

    def stop(self) -> None:
        self._ending.set()
        for one in self._loads:
            one.join()


@contextmanager
def running(folder: Path, router_mode: str, roles: Sequence[str], *, has_planner: bool = False) -> Iterator[Graph]:
    with Cluster(folder, "--router-mode", router_mode, "--migration-limit", "3") as cluster:
        cluster.wait_until(cluster.is_live, "the frontend did not start")
        found = Graph(cluster, roles, has_planner=has_planner)
        try:
            yield found
        finally:
            found.stop()


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    """A disaggregated graph with a KV router and a planner."""
    roles = ("prefill", "decode", "decode")
    with running(tmp_path_factory.mktemp("graph"), "kv", roles, has_planner=True) as found:
        yield found


def empty_panels(graph: Graph, dashboard: Dashboard) -> list[str]:
    """Return the panels without a value; optional ones are left out."""
    return [
        f"{panel.title}: {panel.queries[0].expr}"
        for row in dashboard.rows
        for panel in row.panels
        if not panel.optional and not any(graph.values(query.expr) for query in panel.queries)
    ]


def wait_filled(graph: Graph, dashboard: Dashboard) -> None:
    """Return when every panel has a value."""
    try:
        graph.cluster.wait_until(lambda: not empty_panels(graph, dashboard), "")
    except AssertionError as error:
        raise AssertionError(f"empty panels of {dashboard.name}: {empty_panels(graph, dashboard)}") from error


def wait_quiet(graph: Graph) -> None:
    """Return when no alert fires: a scrape that takes longer than a second on a busy machine has one fire for a moment."""
    try:
        wait_until(lambda: not graph.prometheus.firing() - ALERTS_OF_THE_MACHINE, "")
    except AssertionError as error:
        raise AssertionError(f"alerts: {graph.prometheus.firing()}") from error


@requires_prometheus
@pytest.mark.parametrize("dashboard", LIVE, ids=lambda one: one.name)
def test_no_panel_of_a_disaggregated_graph_with_a_planner_is_empty(graph: Graph, dashboard: Dashboard) -> None:
    wait_filled(graph, dashboard)


@requires_prometheus
@pytest.mark.parametrize("router_mode", ["round-robin", "kv"])
def test_no_panel_of_an_aggregated_graph_is_empty_and_no_alert_fires(tmp_path: Path, router_mode: str) -> None:
    with running(tmp_path, router_mode, ("", "")) as graph:
        for dashboard in (OVERVIEW, ENGINES, *([KV_ROUTER] if router_mode == "kv" else ())):
            wait_filled(graph, dashboard)
        wait_until(lambda: graph.values("dynamo:ttft_slow:ratio_rate5m"), "the rules have no values")
        wait_quiet(graph)


@requires_prometheus
@pytest.mark.parametrize("name", ["dynamo", "disagg", "planner"])
def test_upstream_dashboards_have_data(graph: Graph, name: str) -> None:
    for metric in UPSTREAM_DASHBOARDS[name].keys() - REASONS.keys() - AFTER_FIRST_USE:
        wait_until(
            lambda metric=metric: graph.values(f"count({metric}) or count({metric}_count)"), f"{metric} has no series"
        )


@requires_prometheus
def test_optional_panels_have_valid_queries(graph: Graph) -> None:
    for dashboard in LIVE:
        for panel in (panel for row in dashboard.rows for panel in row.panels):
            for query in panel.queries:
                graph.values(query.expr)


@requires_prometheus
def test_recording_rules_have_values(graph: Graph) -> None:
    for record in re.findall(r"- record: (\S+)", RULES.read_text()):
        wait_until(lambda record=record: graph.values(record), f"{record} has no value")


@requires_prometheus
def test_a_killed_worker_alerts(graph: Graph) -> None:
    wait_quiet(graph)
    for worker in graph.workers[1:]:
        worker.kill()
        worker.wait()
    wait_until(lambda: len(graph.prometheus.alerts("DynamoTargetDown")) == 2, "no alert of the lost targets")
    wait_until(lambda: graph.prometheus.alerts("DynamoModelWithoutWorker"), "no alert of the model without workers")
