"""Topology labels: the label of a pod's node is copied to the pod."""

from collections.abc import AsyncIterator

import pytest
from tests.settle import turns
from tests.unit.operator.kube_store import KubeStore

from dynamo.k8s.kinds import NODES, PODS
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.operator.reconcile.topology import LABEL_KEY, TOPOLOGY_NAME
from dynamo.operator.topology_labels import RETRY_S, TopologyLabelReconciler
from dynamo.operator.view import ClusterView

KEY = "topology.kubernetes.io/rack"
POD = {
    "metadata": {"name": "worker-0", "namespace": "space", "annotations": {LABEL_KEY: KEY}},
    "spec": {"nodeName": "node-0"},
}
TOPOLOGIES = {"gpus": {"zone": "zone", "rack": KEY}}
AT = ("space", "worker-0")


@pytest.fixture
async def store() -> KubeStore:
    return KubeStore()


@pytest.fixture
async def subject(store: KubeStore) -> AsyncIterator[TopologyLabelReconciler]:
    view = ClusterView(store)
    view.watch(PODS)
    view.start()
    yield TopologyLabelReconciler(view, store, store, lambda: ClusterFacts(topologies=TOPOLOGIES))
    await view.close()


async def test_node_label_is_copied_to_the_pod_once(store: KubeStore, subject: TopologyLabelReconciler) -> None:
    store.put(NODES, {"metadata": {"name": "node-0", "labels": {KEY: "r7"}}})
    store.put(PODS, POD)
    await turns(20)
    assert await subject.reconcile(AT) is None
    assert store.objects["pods", "space", "worker-0"]["metadata"]["labels"] == {KEY: "r7"}
    await turns(20)
    store.calls.clear()
    assert await subject.reconcile(AT) is None
    assert store.calls == []


@pytest.mark.parametrize("labels", [None, {"other": "x"}])
async def test_node_without_the_label_is_an_event_and_retried(
    labels: dict[str, str] | None, store: KubeStore, subject: TopologyLabelReconciler
) -> None:
    if labels:
        store.put(NODES, {"metadata": {"name": "node-0", "labels": labels}})
    store.put(PODS, POD)
    await turns(20)
    assert await subject.reconcile(AT) == RETRY_S
    assert store.events[0][0] == "TopologyLabelMissing"


async def test_deleted_pods_are_ignored(store: KubeStore, subject: TopologyLabelReconciler) -> None:
    assert await subject.reconcile(AT) is None
    assert store.calls == []


async def test_topology_domains_present_on_the_node_are_copied(
    store: KubeStore, subject: TopologyLabelReconciler
) -> None:
    store.put(NODES, {"metadata": {"name": "node-0", "labels": {KEY: "r7"}}})
    store.put(PODS, {**POD, "metadata": {**POD["metadata"], "annotations": {TOPOLOGY_NAME: "gpus"}}})  # type: ignore[dict-item]
    await turns(20)
    assert await subject.reconcile(AT) == RETRY_S
    labels = store.objects["pods", "space", "worker-0"]["metadata"]["labels"]
    assert labels == {"nvidia.com/dynamo-topology.rack": "r7"}
    assert "has no label zone" in store.events[0][1]
