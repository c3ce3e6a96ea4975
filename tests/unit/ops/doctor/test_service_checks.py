"""Checks of variables, ports, discovery, servers, Kubernetes and clocks."""

from dataclasses import replace

import pytest

from dynamo.ops.doctor.facts import ApiServerFacts, ClockFacts, DirectoryFacts, FrontendFacts, PortFacts, ServiceFacts
from dynamo.ops.doctor.service_checks import (
    VARIABLES_MAX,
    clock_rows,
    cluster_row,
    discovery_row,
    frontend_row,
    port_row,
    server_rows,
    variable_rows,
)
from dynamo.ops.report import CheckStatus

PASS, SKIP, WARN, FAIL = CheckStatus.PASS, CheckStatus.SKIP, CheckStatus.WARN, CheckStatus.FAIL
PORT = PortFacts(setting="DYN_HTTP_PORT", host="127.0.0.1", port=8000)
FRONTEND = FrontendFacts(url="http://127.0.0.1:8000", status="healthy", models=("m",), instances=1)
DIRECTORY = DirectoryFacts(path="/tmp/kv", exists=True, live=2)
ETCD = ServiceFacts(name="etcd", setting="ETCD_ENDPOINTS", address="http://a:2379", elapsed_ms=2)
CLUSTER = ApiServerFacts(source="KUBECONFIG", is_required=True, has_graphs=True, has_metadata=True, pods=3)


def test_known_variables_pass_and_misspelled_ones_have_the_nearest_name() -> None:
    (good,) = variable_rows({"DYN_HTTP_PORT": "1", "PATH": "x"})
    assert (good.status, good.evidence) == (PASS, "1 DYN_ variables are set: DYN_HTTP_PORT")
    wrong, unlike, unused = variable_rows({"DYN_HTP_PORT": "1", "DYN_QQQQ": "1", "DYN_STORE_KV": "1"})
    assert (wrong.status, wrong.remedy) == (WARN, "did you mean DYN_HTTP_PORT?")
    assert unlike.remedy.startswith("unset it")
    assert "no effect" in unused.evidence


def test_wrong_value_is_a_failure_and_the_number_of_rows_is_limited() -> None:
    (row,) = variable_rows({"DYN_HTTP_PORT": "x"}, "DYN_HTTP_PORT='x': expected a whole number")
    assert (row.check, row.status) == ("settings", FAIL)
    found = list(variable_rows({f"DYN_QQQ_{number}": "" for number in range(VARIABLES_MAX + 3)}))
    assert found[-1].evidence == "3 more unknown DYN_ variables"


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (PORT, PASS, "free"),
        (replace(PORT, error="in use", is_in_use=True, owner="nginx (pid 3)"), FAIL, "in use by nginx (pid 3)"),
        (replace(PORT, error="in use", is_in_use=True, is_needed=False), WARN, "in use"),
        (replace(PORT, error="in use", is_in_use=True, is_dynamo=True), PASS, "Dynamo frontend"),
        (replace(PORT, error="Cannot assign requested address"), FAIL, "Cannot assign"),
    ],
)
def test_taken_port_names_its_process(facts: PortFacts, status: CheckStatus, words: str) -> None:
    row = port_row(facts, FRONTEND)
    assert row.status is status
    assert words in row.evidence


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (None, SKIP, "none runs"),
        (FRONTEND, PASS, "models: m"),
        (replace(FRONTEND, models=()), WARN, "no worker has registered a model"),
        (replace(FRONTEND, needs_key=True), PASS, "API key"),
        (replace(FRONTEND, status="not_ready"), FAIL, "not_ready"),
    ],
)
def test_running_frontend_check_reports_each_state(
    facts: FrontendFacts | None, status: CheckStatus, words: str
) -> None:
    row = frontend_row(facts)
    assert row.status is status
    assert words in row.evidence


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (None, SKIP, "the backend is etcd"),
        (DIRECTORY, PASS, "2 live records"),
        (replace(DIRECTORY, exists=False), PASS, "does not exist"),
        (replace(DIRECTORY, problem="DYN_FILE_KV='/tmp/kv': mode 0777"), FAIL, "mode 0777"),
        (replace(DIRECTORY, is_writable=False), FAIL, "not writable"),
        (replace(DIRECTORY, stale=("v1/instances/a",)), WARN, "stale: v1/instances/a"),
        (replace(DIRECTORY, foreign=("x",)), WARN, "other users"),
        (replace(DIRECTORY, unreadable=("x",)), WARN, "no records: x"),
    ],
)
def test_discovery_directory_check_reports_each_state(
    facts: DirectoryFacts | None, status: CheckStatus, words: str
) -> None:
    row = discovery_row(facts, "etcd")
    assert row.status is status
    assert words in row.evidence


def test_servers_that_are_not_configured_are_skipped() -> None:
    assert [(row.check, row.status) for row in server_rows(())] == [("etcd", SKIP), ("NATS", SKIP)]


@pytest.mark.parametrize(
    ("services", "status", "words"),
    [
        ((ETCD,), PASS, "responded in 2 ms"),
        ((replace(ETCD, elapsed_ms=900),), WARN, "900 ms"),
        ((replace(ETCD, error="no connection"),), FAIL, "no connection"),
        ((replace(ETCD, error="no connection", is_required=False),), WARN, "no connection"),
        ((ETCD, replace(ETCD, address="http://b:2379", error="down")), WARN, "1 of 2 members respond"),
        ((replace(ETCD, error="x"), replace(ETCD, error="y")), FAIL, "no member responds"),
        ((ETCD, ETCD), PASS, "2 members respond"),
    ],
)
def test_members_of_a_server_are_checked_together(
    services: tuple[ServiceFacts, ...], status: CheckStatus, words: str
) -> None:
    row, _ = server_rows(services)
    assert row.status is status
    assert words in row.evidence


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (None, SKIP, "not configured"),
        (CLUSTER, PASS, "3 pods"),
        (replace(CLUSTER, error="refused"), FAIL, "refused"),
        (replace(CLUSTER, error="refused", is_required=False), FAIL, "refused"),
        (replace(CLUSTER, error="refused", is_required=False, source="~/.kube/config"), WARN, "refused"),
        (replace(CLUSTER, has_metadata=False, is_required=False), PASS, "3 pods"),
        (replace(CLUSTER, pods=None, pods_error="forbidden"), FAIL, "cannot list pods: forbidden"),
        (replace(CLUSTER, has_metadata=False), FAIL, "DynamoWorkerMetadata"),
        (replace(CLUSTER, has_graphs=False), WARN, "DynamoGraphDeployment"),
    ],
)
def test_kubernetes_access_check_reports_each_state(
    facts: ApiServerFacts | None, status: CheckStatus, words: str
) -> None:
    row = cluster_row(facts)
    assert row.status is status
    assert words in row.evidence


@pytest.mark.parametrize(("skew_s", "status"), [(0.3, PASS), (-5.0, WARN), (900.0, FAIL)])
def test_clock_skew_beyond_the_error_of_the_measurement_is_reported(skew_s: float, status: CheckStatus) -> None:
    (row,) = clock_rows((ClockFacts(source="etcd", skew_s=skew_s, error_s=0.5),))
    assert row.status is status
    assert [row.status for row in clock_rows(())] == [SKIP]
