"""The global planner's executor on an API server: pools of graphs, and scaling within a band of GPUs."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.cluster.kubernetes.pods import call, install_crds
from tests.cluster.kubernetes.servers import AnyKubernetes

from dynamo.core.errors import DynamoException, WorkerUnavailable
from dynamo.core.metrics import MetricsRegistry
from dynamo.global_planner.arbitration import TotalGpuBand
from dynamo.global_planner.handler import GpuArbiter, ScaleRequestHandler
from dynamo.global_planner.kubernetes_executor import KubernetesExecutor
from dynamo.planner.errors import DynamoGraphDeploymentNotReadyError
from dynamo.protocols.scaling import ScaleRequest, TargetReplica

pytestmark = pytest.mark.integration

GRAPHS = "/apis/nvidia.com/v1beta1/namespaces/default/dynamographdeployments"


def add_graph(server: AnyKubernetes, name: str, replicas: int, gpus: int | None = 2) -> None:
    """Create a graph with one worker component, settled, whose replicas have that many GPUs."""
    components = [{"name": "Worker", "type": "worker", "replicas": replicas}]
    body = {"apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeployment", "metadata": {"name": name}}
    call(server, "POST", GRAPHS, body | {"spec": {"components": components}})
    settle(server, name, gpus)


def settle(server: AnyKubernetes, name: str, gpus: int | None = 2) -> None:
    """Write the status of an operator that has made all replicas ready."""
    made = call(server, "GET", f"{GRAPHS}/{name}")
    replicas = made["spec"]["components"][0]["replicas"]
    numbers: dict[str, Any] = dict.fromkeys(
        ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), replicas
    )
    if gpus is not None:
        numbers |= {"gpusPerEngine": gpus, "gpusPerReplica": gpus}
    condition = {"type": "Ready", "status": "True", "reason": "r", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {
        "observedGeneration": made["metadata"]["generation"],
        "conditions": [condition],
        "components": {"Worker": numbers},
    }
    call(server, "PATCH", f"{GRAPHS}/{name}/status", {"status": status})


def replicas_of(server: AnyKubernetes, name: str) -> int:
    return int(call(server, "GET", f"{GRAPHS}/{name}")["spec"]["components"][0]["replicas"])


def request(name: str, replicas: int) -> ScaleRequest:
    target = TargetReplica(sub_component_type="decode", component_name="Worker", desired_replicas=replicas)
    return ScaleRequest(
        caller_namespace=f"default-{name}",
        graph_deployment_name=name,
        k8s_namespace="default",
        target_replicas=[target],
    )


async def answered(handler: ScaleRequestHandler, sent: ScaleRequest) -> dict[str, Any]:
    """Return the response of a request that planners send as JSON."""
    (response,) = [one async for one in handler.scale_request(msgspec.to_builtins(sent))]
    found: dict[str, Any] = response
    return found


@pytest.fixture
def server(kubernetes_api: AnyKubernetes, monkeypatch: pytest.MonkeyPatch) -> AnyKubernetes:
    monkeypatch.setenv("KUBECONFIG", str(kubernetes_api.kubeconfig))
    install_crds(kubernetes_api)
    add_graph(kubernetes_api, "a", 1)
    add_graph(kubernetes_api, "b", 3, gpus=4)
    return kubernetes_api


@pytest.fixture
async def executor(server: AnyKubernetes) -> AsyncIterator[KubernetesExecutor]:
    made = KubernetesExecutor([])
    yield made
    await made.close()


async def test_pools_are_those_of_all_graphs_of_the_namespace(executor: KubernetesExecutor) -> None:
    pools = await executor.observe()
    found = {key: {role: (one.replicas, one.gpus_per_replica) for role, one in of.items()} for key, of in pools.items()}
    assert found == {"default/a": {"decode": (1, 2)}, "default/b": {"decode": (3, 4)}}


async def test_managed_namespaces_select_graphs(server: AnyKubernetes) -> None:
    executor = KubernetesExecutor(["default-a", "other-b"])
    assert list(await executor.observe()) == ["default/a"]
    await executor.close()


async def test_graph_without_reported_gpus_stops_every_decision(
    server: AnyKubernetes, executor: KubernetesExecutor
) -> None:
    add_graph(server, "c", 1, gpus=None)
    with pytest.raises(WorkerUnavailable, match="default/c: the GPUs of component Worker are not reported yet"):
        await executor.observe()


async def test_request_within_the_band_is_applied_and_one_beyond_it_is_rejected(
    server: AnyKubernetes, executor: KubernetesExecutor
) -> None:
    handler = ScaleRequestHandler(GpuArbiter(TotalGpuBand(-1, 18), 360.0), executor, [], MetricsRegistry())
    assert (await answered(handler, request("a", 3)))["status"] == "success"
    assert replicas_of(server, "a") == 3
    settle(server, "a")
    assert (await answered(handler, request("b", 4)))["status"] == "rejected"
    assert replicas_of(server, "b") == 3


async def test_graph_that_is_changing_or_absent_is_not_scaled(
    server: AnyKubernetes, executor: KubernetesExecutor
) -> None:
    await executor.register(request("a", 3))
    await executor.scale("default/a", request("a", 3).target_replicas)
    with pytest.raises(DynamoGraphDeploymentNotReadyError):
        await executor.scale("default/a", request("a", 4).target_replicas)
    for name in ("absent", "../b"):
        with pytest.raises(DynamoException):
            await executor.register(request(name, 1))
