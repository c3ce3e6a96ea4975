"""Controllers: they plan from the view; malformed and deleted objects are left alone."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.settle import turns
from tests.unit.operator.kube_store import KubeStore

from dynamo.k8s.client import KubeRefused
from dynamo.k8s.kinds import COMPONENTS, DEPLOYMENTS, GRAPHS, SCALING_ADAPTERS
from dynamo.operator.applier import Applier, NotControlled
from dynamo.operator.controllers import SETTLE_S, ComponentController, GraphController, Reconciler
from dynamo.operator.reconcile.names import OperatorSettings
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.operator.view import ClusterView

KEY = ("space", "chat")


class Subject:
    """Controllers over a cluster in memory."""

    def __init__(self) -> None:
        self.store = KubeStore()
        self.view = ClusterView(self.store)
        for kind in (GRAPHS, COMPONENTS, SCALING_ADAPTERS, DEPLOYMENTS):
            self.view.watch(kind)
        self.applier = Applier(self.store, self.view, self.store)
        graphs = GraphController(self.view, OperatorSettings(), ClusterFacts, self.store)
        components = ComponentController(self.view, OperatorSettings(), ClusterFacts, self.store)
        self.graphs = Reconciler(graphs, self.view, self.applier, self.store)
        self.components = Reconciler(components, self.view, self.applier, self.store)

    async def put(self, components: Any, **metadata: Any) -> None:
        """Write the graph."""
        named = {"name": "chat", "namespace": "space", **metadata}
        self.store.put(GRAPHS, {"metadata": named, "spec": {"components": components}})
        await turns(20)

    def kinds(self) -> list[str]:
        """Return the kinds and names of all objects."""
        return sorted(f"{plural}/{name}" for plural, _, name in self.store.objects)


@pytest.fixture
async def subject() -> AsyncIterator[Subject]:
    made = Subject()
    made.view.start()
    await turns(20)
    yield made
    await made.view.close()


async def test_graph_controller_creates_components_and_component_controller_their_deployments(subject: Subject) -> None:
    await subject.put([{"name": "Frontend", "type": "frontend"}])
    assert await subject.graphs.reconcile(KEY) == SETTLE_S
    assert "status" not in subject.store.objects["dynamographdeployments", "space", "chat"]
    await subject.graphs.reconcile(KEY)
    await turns(20)
    await subject.components.reconcile(("space", "chat-frontend"))
    assert subject.kinds() == [
        "deployments/chat-frontend",
        "dynamocomponentdeployments/chat-frontend",
        "dynamographdeployments/chat",
        "rolebindings/chat-k8s-service-discovery-binding",
        "roles/chat-k8s-service-discovery-role",
        "serviceaccounts/chat-k8s-service-discovery",
        "services/chat-frontend",
    ]
    graph = subject.store.objects["dynamographdeployments", "space", "chat"]
    assert graph["status"]["state"] == "pending"


async def test_status_is_written_during_repeated_changes_of_children(
    subject: Subject,
) -> None:
    await subject.put([{"name": "Frontend", "type": "frontend"}])
    await subject.graphs.reconcile(KEY)
    subject.store.remove(COMPONENTS, "space", "chat-frontend")
    await turns(20)
    assert await subject.graphs.reconcile(KEY) is None
    assert subject.store.objects["dynamographdeployments", "space", "chat"]["status"]["state"] == "pending"


async def test_malformed_object_is_an_event_and_not_retried(subject: Subject) -> None:
    await subject.put([{"name": "Frontend", "replicas": "many"}])
    assert await subject.graphs.reconcile(KEY) is None
    assert [reason for reason, _ in subject.store.events] == ["InvalidObject"]
    assert "replicas" in subject.store.events[0][1]


async def test_foreign_object_is_an_event_and_a_failure(subject: Subject) -> None:
    foreign = {"metadata": {"name": "chat-frontend", "namespace": "space"}, "spec": {}}
    subject.store.put(COMPONENTS, foreign)
    await subject.put([{"name": "Frontend", "type": "frontend"}])
    with pytest.raises(NotControlled):
        await subject.graphs.reconcile(KEY)
    assert [reason for reason, _ in subject.store.events] == ["NotControlled"]


async def test_server_refusal_is_an_event_and_a_failure(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any, **__: Any) -> Any:
        raise KubeRefused(403, "Forbidden", "no")

    monkeypatch.setattr(subject.store, "apply", refuse)
    await subject.put([{"name": "Frontend", "type": "frontend"}])
    with pytest.raises(KubeRefused):
        await subject.graphs.reconcile(KEY)
    assert subject.store.events == [("ReconcileFailed", "403 Forbidden: no")]


async def test_deleted_or_terminating_object_is_not_reconciled(subject: Subject) -> None:
    await subject.put([{"name": "Frontend"}], deletionTimestamp="2026-01-01T00:00:00Z")
    subject.store.calls.clear()
    assert await subject.graphs.reconcile(KEY) is None
    assert await subject.graphs.reconcile(("space", "none")) is None
    assert subject.store.calls == []


async def test_status_written_after_a_change_describes_the_current_state(subject: Subject) -> None:
    await subject.put([{"name": "Frontend", "type": "frontend", "replicas": 1}])
    await subject.graphs.reconcile(KEY)
    ready = {"conditions": [{"type": "Available", "status": "True", "reason": "r"}], "observedGeneration": 1}
    component = subject.store.objects["dynamocomponentdeployments", "space", "chat-frontend"]
    subject.store.put(COMPONENTS, {**component, "status": ready})
    await turns(20)
    await subject.graphs.reconcile(KEY)
    graph = subject.store.objects["dynamographdeployments", "space", "chat"]
    assert graph["status"]["state"] == "successful"
    await subject.put([{"name": "Frontend", "type": "frontend", "replicas": 2}])
    await subject.graphs.reconcile(KEY)
    await subject.graphs.reconcile(KEY)
    graph = subject.store.objects["dynamographdeployments", "space", "chat"]
    assert graph["status"]["state"] == "pending"
    assert graph["status"]["observedGeneration"] == 2
