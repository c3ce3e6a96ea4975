"""Groups of engines: when one ends, all of its group are deleted, and no others."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.settle import turns
from tests.unit.operator.kube_store import KubeStore

from dynamo.k8s.kinds import PODS
from dynamo.operator.failover_groups import FailoverGroupReconciler
from dynamo.operator.view import ClusterView


def pod(name: str, index: str = "0", phase: str = "Running", replica: str = "0", **labels: str) -> dict[str, Any]:
    known = {
        "nvidia.com/dynamo-failover-engine-group-member": "true",
        "grove.io/podcliquescalinggroup": "g-0-decode",
        "grove.io/podcliquescalinggroup-replica-index": replica,
        "grove.io/podclique-pod-index": index,
    }
    metadata = {"name": name, "namespace": "space", "labels": {**known, **labels}}
    return {"metadata": metadata, "spec": {}, "status": {"phase": phase}}


@pytest.fixture
async def store() -> KubeStore:
    return KubeStore()


@pytest.fixture
async def subject(store: KubeStore) -> AsyncIterator[FailoverGroupReconciler]:
    view = ClusterView(store)
    view.watch(PODS)
    view.start()
    yield FailoverGroupReconciler(view, store, store)
    await view.close()


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
async def test_group_of_an_ended_engine_is_deleted(
    phase: str, store: KubeStore, subject: FailoverGroupReconciler
) -> None:
    for one in (
        pod("leader-0", phase=phase),
        pod("worker-0"),
        pod("leader-1", "1"),
        pod("other-replica", replica="1"),
        pod("service", **{"nvidia.com/dynamo-failover-engine-group-member": "false"}),
    ):
        store.put(PODS, one)
    await turns(20)
    await subject.reconcile(("space", "leader-0"))
    assert store.calls == ["delete Pod leader-0 at once", "delete Pod worker-0 at once"]
    assert [reason for reason, _ in store.events] == ["FailoverCascade"]
    await turns(20)
    await subject.reconcile(("space", "leader-0"))
    assert len(store.calls) == 2


async def test_running_deleted_and_foreign_pods_are_left_alone(
    store: KubeStore, subject: FailoverGroupReconciler
) -> None:
    going = pod("going", phase="Failed")
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    for one in (pod("running"), going, pod("unknown", index="", phase="Failed")):
        store.put(PODS, one)
    await turns(20)
    for name in ("running", "going", "unknown", "absent"):
        await subject.reconcile(("space", name))
    assert store.calls == []
