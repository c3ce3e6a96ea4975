"""The planner's connector on an API server: counts, scaling and what prevents it."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.cluster.kubernetes.pods import call, install_crds
from tests.cluster.kubernetes.servers import AnyKubernetes

from dynamo.core.errors import ConfigError
from dynamo.planner.config.planner_config import parse
from dynamo.planner.connectors.base import ScaleStatus
from dynamo.planner.connectors.kubernetes import KubernetesConnector
from dynamo.protocols.planner import ScalingDecision
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryStore

pytestmark = pytest.mark.integration

GROUP = "/apis/nvidia.com/v1beta1/namespaces/default"
GRAPH = f"{GROUP}/dynamographdeployments/agg"
ADAPTERS = f"{GROUP}/dynamographdeploymentscalingadapters"
CONFIG = parse({"mode": "agg", "optimization_target": "sla", "namespace": "default-agg"})
SERVING = {"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1, "availableReplicas": 1, "gpusPerEngine": 2, "gpusPerReplica": 2}  # fmt: skip


class ScaledGraph:
    """A graph with a frontend and a worker, whose status the test writes in place of an operator."""

    def __init__(self, server: AnyKubernetes) -> None:
        self.server = server
        components = [
            {"name": "Frontend", "type": "frontend", "replicas": 1},
            {"name": "VllmWorker", "type": "worker", "replicas": 1},
        ]
        body = {"apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeployment"}
        call(server, "POST", GRAPH.rpartition("/")[0], body | {"metadata": {"name": "agg"}, "spec": {"components": components}})  # fmt: skip
        self.observe()

    def observe(self, ready: str = "True", worker: dict[str, Any] | None = None, **status: Any) -> None:
        """Write the status of the present generation."""
        generation = call(self.server, "GET", GRAPH)["metadata"]["generation"]
        condition = {"type": "Ready", "status": ready, "reason": "r", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        written = {
            "observedGeneration": generation,
            "conditions": [condition],
            "components": {"Frontend": SERVING, "VllmWorker": worker or SERVING},
            **status,
        }
        call(self.server, "PATCH", f"{GRAPH}/status", {"status": written})

    @property
    def replicas(self) -> int:
        """Desired replicas of the worker."""
        components = call(self.server, "GET", GRAPH)["spec"]["components"]
        return next(int(one["replicas"]) for one in components if one["name"] == "VllmWorker")

    def add_adapter(self) -> None:
        body = {"apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeploymentScalingAdapter"}
        spec = {"replicas": 1, "dgdRef": {"name": "agg", "componentName": "VllmWorker"}}
        call(self.server, "POST", ADAPTERS, body | {"metadata": {"name": "agg-vllmworker"}, "spec": spec})

    def adapter_replicas(self) -> int:
        return int(call(self.server, "GET", f"{ADAPTERS}/agg-vllmworker")["spec"]["replicas"])


@pytest.fixture
def graph(kubernetes_api: AnyKubernetes, monkeypatch: pytest.MonkeyPatch) -> ScaledGraph:
    monkeypatch.setenv("KUBECONFIG", str(kubernetes_api.kubeconfig))
    monkeypatch.setenv("DYN_PARENT_DGD_K8S_NAME", "agg")
    install_crds(kubernetes_api)
    return ScaledGraph(kubernetes_api)


@pytest.fixture
async def connector(graph: ScaledGraph) -> AsyncIterator[KubernetesConnector]:
    made = KubernetesConnector(CONFIG, MemoryDiscovery(MemoryStore()))
    await made.start()
    yield made
    await made.close()


def workers(number: int) -> ScalingDecision:
    return ScalingDecision(num_decode=number)


async def test_counts_are_those_of_the_status(graph: ScaledGraph, connector: KubernetesConnector) -> None:
    counts = await connector.counts()
    assert (counts.ready_num_decode, counts.expected_num_decode, counts.decode_scaling_in_progress) == (1, 1, False)
    assert (counts.ready_num_prefill, counts.expected_num_prefill) == (None, None)
    graph.observe(worker={**SERVING, "availableReplicas": 0}, rollingUpdate={"phase": "InProgress"})
    counts = await connector.counts()
    assert (counts.ready_num_decode, counts.decode_scaling_in_progress, counts.rollout) == (0, True, "InProgress")


async def test_capabilities_have_the_gpus_that_the_operator_reports(connector: KubernetesConnector) -> None:
    decode = (await connector.capabilities()).decode
    assert decode is not None
    assert (decode.num_gpu, decode.gpus_per_replica) == (2, 2)


async def test_replicas_are_set_in_the_graph_without_an_adapter(
    graph: ScaledGraph, connector: KubernetesConnector
) -> None:
    outcome = await connector.scale(workers(3))
    assert (outcome.status, outcome.message) == (ScaleStatus.ACCEPTED, "VllmWorker: 3")
    assert graph.replicas == 3


async def test_replicas_are_set_at_the_adapter_that_owns_them(
    graph: ScaledGraph, connector: KubernetesConnector
) -> None:
    graph.add_adapter()
    assert (await connector.scale(workers(3))).status is ScaleStatus.ACCEPTED
    assert (graph.adapter_replicas(), graph.replicas) == (3, 1)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ({"ready": "False"}, "is not ready"),
        ({"rollingUpdate": {"phase": "InProgress"}}, "rolling update: InProgress"),
        ({"worker": {**SERVING, "availableReplicas": 0}}, "replicas are starting or ending"),
        ({"observedGeneration": 0}, "replicas are starting or ending"),
    ],
)
async def test_nothing_is_set_while_the_graph_changes(
    graph: ScaledGraph, connector: KubernetesConnector, status: dict[str, Any], message: str
) -> None:
    graph.observe(**status)
    outcome = await connector.scale(workers(3))
    assert outcome.status is ScaleStatus.HELD
    assert message in outcome.message
    assert graph.replicas == 1


async def test_replicas_that_are_still_starting_can_be_given_up(
    graph: ScaledGraph, connector: KubernetesConnector
) -> None:
    await connector.scale(workers(3))
    body = {"metadata": {"name": "starting", "labels": {"nvidia.com/dynamo-graph-deployment-name": "agg"}}}
    call(graph.server, "POST", "/api/v1/namespaces/default/pods", body | {"spec": {"containers": [{"name": "main", "image": "i"}]}})  # fmt: skip
    graph.observe(ready="False", worker={**SERVING, "replicas": 3, "updatedReplicas": 3})
    counts = await connector.counts()
    assert (counts.ready_num_decode, counts.expected_num_decode, counts.pending_num_decode) == (1, 3, 2)
    assert (await connector.scale(workers(2))).status is ScaleStatus.HELD
    assert (await connector.scale(workers(1))).status is ScaleStatus.ACCEPTED
    assert graph.replicas == 1


async def test_graph_that_is_edited_at_the_same_time_is_not_overwritten(
    graph: ScaledGraph, connector: KubernetesConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dynamo.planner.connectors.graph_api.replicas_patch",
        lambda *_: [{"op": "test", "path": "/spec/components/0/name", "value": "another"}],
    )
    outcome = await connector.scale(workers(3))
    assert outcome.status is ScaleStatus.FAILED
    assert "VllmWorker: 3" in outcome.message
    assert graph.replicas == 1


async def test_missing_graph_or_variable_is_one_line_at_the_start(
    graph: ScaledGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    discovery = MemoryDiscovery(MemoryStore())
    other = KubernetesConnector(CONFIG, discovery, name="other")
    with pytest.raises(
        ConfigError, match="environment: kubernetes: DynamoGraphDeployment default/other does not exist"
    ):
        await other.start()
    await other.close()
    disaggregated = parse({"mode": "disagg", "optimization_target": "sla", "namespace": "default-agg"})
    split = KubernetesConnector(disaggregated, discovery)
    with pytest.raises(ConfigError, match="prefill"):
        await split.start()
    await split.close()
    monkeypatch.delenv("DYN_PARENT_DGD_K8S_NAME")
    with pytest.raises(ConfigError, match="DYN_PARENT_DGD_K8S_NAME: missing"):
        KubernetesConnector(CONFIG, discovery)
