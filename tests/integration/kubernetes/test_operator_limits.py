"""Limits of the operator: requests at rest and in failure, old resource definitions, and an API server that is away."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.cluster.kubernetes.faults import FAULTS_PATH
from tests.cluster.kubernetes.operated import (
    DEADLINE_S,
    SPACE,
    Case,
    Object,
    OperatedCluster,
    graph,
    is_successful,
    run_on,
)
from tests.cluster.kubernetes.running import KubernetesServer
from tests.settle import until

from dynamo.k8s.kinds import CHECKPOINTS, DEPLOYMENTS, EVENTS, GRAPHS, RESOURCE_DEFINITIONS, ObjectKind
from dynamo.operator import manager, view
from dynamo.operator.manager import Operator
from dynamo.protocols.kubernetes.common import V1ALPHA1

pytestmark = pytest.mark.integration

REST_S = 3.0
RETRIES_PER_S = 250
"""Requests of all watches together at the beginning of an outage, when their retries are closest."""
RETRIES_MAX = 30
"""Requests for a refused object in `REST_S`: the delay of its retries doubles."""
CHECKPOINT: Object = {
    "apiVersion": V1ALPHA1,
    "kind": CHECKPOINTS.kind,
    "metadata": {"name": "weights", "namespace": SPACE},
    "spec": {
        "identity": {"model": "m", "backendFramework": "vllm"},
        "job": {"podTemplateSpec": {"spec": {"containers": [{"name": "main", "image": "i"}]}}},
    },
}


@pytest.fixture
def run(own_kubernetes: KubernetesServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], None]:
    monkeypatch.setattr(manager, "STOP_S", 0.01)
    monkeypatch.setattr(view, "ABSENT_RETRY_S", 0.5)
    return run_on(own_kubernetes, monkeypatch)


def requests(cluster: OperatedCluster) -> dict[str, int]:
    """Return the number of requests by method and path since the start."""
    return {name: count for name, count in cluster.server.server.faults.counts.items() if FAULTS_PATH not in name}


async def until_status(
    cluster: OperatedCluster, kind: ObjectKind, name: str, is_reached: Callable[[Object], Any]
) -> Object:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        value = await cluster.client.get(kind, name, SPACE)
        status: Object = (value or {}).get("status") or {}
        if is_reached(status):
            return status
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.05)


def writes(cluster: OperatedCluster) -> int:
    return sum(count for name, count in requests(cluster).items() if not name.startswith("GET "))


async def until_idle(cluster: OperatedCluster, operator: Operator) -> None:
    """Wait until everything is reconciled, and the events that follow the statuses are written."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        before = writes(cluster)
        await asyncio.sleep(1.0)
        if operator.is_idle and not operator.events.pending and writes(cluster) == before:
            return
        assert time.monotonic() < deadline, "the operator does not come to rest"


def failure(status: Object) -> tuple[str, str] | None:
    """Return reason and message of the condition `Reconciled`."""
    found = (one for one in status.get("conditions") or () if one["type"] == "Reconciled")
    return next(((one["reason"], one["message"]) for one in found), None)


def test_idle_operator_writes_nothing_and_queries_only_optional_kinds(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator() as operator:
            await cluster.apply(graph())
            await cluster.client.create(CHECKPOINTS, CHECKPOINT, SPACE)
            await cluster.until(is_successful(1))
            await until_status(cluster, CHECKPOINTS, "weights", lambda status: status.get("phase") == "Ready")
            await until_idle(cluster, operator)
            before = requests(cluster)
            await asyncio.sleep(REST_S)
            looks = {name for name, count in requests(cluster).items() if count != before.get(name)}
            assert all(name.startswith("GET /apis/") and name.count("/") == 3 for name in looks), looks

    run(case)


def test_refused_object_is_retried_with_backoff_and_reported(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator():
            cluster.server.act(method="PATCH", path=".*/deployments/.*", status=403, count=-1)
            await cluster.apply(graph())
            name = "chat-frontend"
            kind = ObjectKind(GRAPHS.api_version, "DynamoComponentDeployment", "dynamocomponentdeployments")
            status = await until_status(cluster, kind, name, failure)
            reason, message = failure(status) or ("", "")
            assert (reason, "injected by the test" in message) == ("ReconcileFailed", True)
            path = f"PATCH /apis/apps/v1/namespaces/{SPACE}/deployments/{name}"
            await until(lambda: requests(cluster).get(path, 0) > 3)
            await asyncio.sleep(REST_S)
            assert requests(cluster)[path] < RETRIES_MAX
            events = (await cluster.client.list(EVENTS, SPACE)).items
            assert "ReconcileFailed" in {one["reason"] for one in events}
            cluster.server.act(action="clear")
            await cluster.until(is_successful(1))
            assert failure(await until_status(cluster, kind, name, lambda one: not failure(one))) is None

    run(case)


async def shorten(cluster: OperatedCluster, kind: ObjectKind, *fields: str) -> None:
    """Remove fields of the status from the resource definition of a kind, in all versions."""
    name = f"{kind.plural}.nvidia.com"
    definition = await cluster.client.get(RESOURCE_DEFINITIONS, name)
    assert definition is not None
    for version in definition["spec"]["versions"]:
        for field in fields:
            version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"].pop(field, None)
    await cluster.client.replace(RESOURCE_DEFINITIONS, definition)


def test_a_definition_without_a_field_is_a_condition_and_an_event(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        await shorten(cluster, GRAPHS, "components")
        async with cluster.operator() as operator:
            await cluster.apply(graph())
            status = await cluster.until(is_successful(1))
            assert "components" not in status
            reason, message = failure(status) or ("", "")
            assert reason == "ResourceDefinitionOutdated"
            assert "DynamoGraphDeployment does not have .status.components: install" in message
            await until_idle(cluster, operator)
            before = operator.applier.counts.total
            await asyncio.sleep(REST_S)
            assert operator.applier.counts.total == before
            events = (await cluster.client.list(EVENTS, SPACE)).items
            assert "ResourceDefinitionOutdated" in {one["reason"] for one in events}

    run(case)


def test_missing_kind_is_used_once_it_is_installed(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        name = f"{CHECKPOINTS.plural}.nvidia.com"
        definition = await cluster.client.get(RESOURCE_DEFINITIONS, name)
        assert definition is not None
        await cluster.client.delete(RESOURCE_DEFINITIONS, name)
        async with cluster.operator():
            await cluster.apply(graph())
            await cluster.until(is_successful(1))
            installed = {"apiVersion": RESOURCE_DEFINITIONS.api_version, "kind": RESOURCE_DEFINITIONS.kind}
            installed |= {"metadata": {"name": name}, "spec": definition["spec"]}
            await cluster.client.create(RESOURCE_DEFINITIONS, installed)
            await cluster.client.create(CHECKPOINTS, CHECKPOINT, SPACE)
            await until_status(cluster, CHECKPOINTS, "weights", lambda status: status.get("phase") == "Ready")

    run(case)


def test_deployments_made_during_an_outage_of_the_server_are_reconciled_after_it(run: Callable[[Case], None]) -> None:
    async def case(cluster: OperatedCluster) -> None:
        async with cluster.operator() as operator:
            await until(lambda: operator.is_ready)
            await cluster.apply(graph())
            cluster.server.act(method=".*", path="/ap.*", status=503, count=-1, user_agent=".*")
            cluster.server.act(action="drop_watches")
            await asyncio.sleep(1.0)
            before = sum(requests(cluster).values())
            await asyncio.sleep(REST_S)
            assert sum(requests(cluster).values()) - before < RETRIES_PER_S * REST_S
            assert not operator.view.waits_for
            cluster.server.act(action="clear")
            await cluster.until(is_successful(1))
            assert len(await cluster.names(DEPLOYMENTS)) == 2

    run(case)
