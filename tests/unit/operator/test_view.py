"""View of the cluster: children by owner, changes reported for both, own writes visible at once."""

from collections.abc import AsyncIterator

import pytest
from tests.settle import turns
from tests.unit.operator.kube_store import KubeStore

from dynamo.k8s.informer import ObjectKey
from dynamo.k8s.kinds import COMPONENTS, DEPLOYMENTS, GRAPHS
from dynamo.operator.reconcile.plan import ObjectRef
from dynamo.operator.view import ClusterView
from dynamo.protocols.kubernetes.common import KubeObject


def named(name: str, owner: KubeObject | None = None, kind: str = "DynamoGraphDeployment") -> KubeObject:
    metadata: KubeObject = {"name": name, "namespace": "space", "managedFields": [{"manager": "x"}]}
    if owner is not None:
        reference = {"kind": kind, "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
        metadata["ownerReferences"] = [{**reference, "controller": True}]
    return {"metadata": metadata, "spec": {}}


@pytest.fixture
def store() -> KubeStore:
    return KubeStore()


@pytest.fixture
async def view(store: KubeStore) -> AsyncIterator[ClusterView]:
    made = ClusterView(store)
    for kind in (GRAPHS, COMPONENTS, DEPLOYMENTS):
        made.watch(kind)
    made.start()
    await turns(20)
    yield made
    await made.close()


async def test_view_is_synced_after_every_kind_was_listed(store: KubeStore) -> None:
    made = ClusterView(store)
    made.watch(GRAPHS)
    assert not made.is_synced
    assert made.waits_for == ["dynamographdeployments"]
    made.start()
    await turns(20)
    assert (made.is_synced, made.waits_for, made.count(GRAPHS)) == (True, [], 0)
    await made.close()


async def test_children_are_selected_by_controller_and_sorted_by_name(store: KubeStore, view: ClusterView) -> None:
    graph, other = store.put(GRAPHS, named("chat")), store.put(GRAPHS, named("other"))
    for name, owner in (("b", graph), ("a", graph), ("c", other)):
        store.put(COMPONENTS, named(name, owner))
    await turns(20)
    assert [one["metadata"]["name"] for one in view.children(graph, COMPONENTS)] == ["a", "b"]
    assert view.children(graph, DEPLOYMENTS) == []
    store.remove(COMPONENTS, "space", "a")
    await turns(20)
    assert [one["metadata"]["name"] for one in view.children(graph, COMPONENTS)] == ["b"]


async def test_change_is_reported_for_the_object_and_its_owner(store: KubeStore, view: ClusterView) -> None:
    seen: list[tuple[str, ObjectKey]] = []
    view.listen(GRAPHS, lambda key: seen.append(("graph", key)))
    view.listen(COMPONENTS, lambda key: seen.append(("component", key)))
    graph = store.put(GRAPHS, named("chat"))
    await turns(20)
    store.put(COMPONENTS, named("a", graph))
    await turns(20)
    store.remove(COMPONENTS, "space", "a")
    await turns(20)
    chat, a = ("graph", ("space", "chat")), ("component", ("space", "a"))
    assert seen == [chat, a, chat, a, chat]


async def test_local_write_is_visible_at_once_and_not_overwritten_by_an_older_change(
    store: KubeStore, view: ClusterView
) -> None:
    graph = store.put(GRAPHS, named("chat"))
    first = store.put(COMPONENTS, named("a", graph))
    second = store.put(COMPONENTS, {**named("a", graph), "spec": {"replicas": 2}})
    view.store(COMPONENTS, second)
    assert view.children(graph, COMPONENTS) == [second]
    view.store(COMPONENTS, first)
    assert view.get(COMPONENTS, "space", "a") == second
    await turns(20)
    assert (view.get(COMPONENTS, "space", "a") or {})["spec"] == {"replicas": 2}


async def test_response_received_after_the_deletion_is_ignored(store: KubeStore, view: ClusterView) -> None:
    graph = store.put(GRAPHS, named("chat"))
    late = store.put(COMPONENTS, named("a", graph))
    store.remove(COMPONENTS, "space", "a")
    await turns(20)
    view.store(COMPONENTS, late)
    assert view.get(COMPONENTS, "space", "a") is None
    assert view.children(graph, COMPONENTS) == []


async def test_deletions_are_reported(store: KubeStore, view: ClusterView) -> None:
    gone: list[ObjectRef] = []
    view.on_deleted(gone.append)
    store.put(GRAPHS, named("chat"))
    await turns(20)
    store.remove(GRAPHS, "space", "chat")
    await turns(20)
    assert gone == [ObjectRef(GRAPHS.api_version, GRAPHS.kind, "space", "chat")]


async def test_managed_fields_are_dropped(store: KubeStore, view: ClusterView) -> None:
    store.put(GRAPHS, named("chat"))
    await turns(20)
    found = view.get(GRAPHS, "space", "chat")
    assert found is not None and "managedFields" not in found["metadata"]


async def test_several_selections_of_one_kind_are_viewed_together(store: KubeStore) -> None:
    made = ClusterView(store)
    made.watch(DEPLOYMENTS, "team=a")
    made.watch(DEPLOYMENTS, "app")
    made.watch(GRAPHS)
    made.start()
    await turns(20)
    graph = store.put(GRAPHS, named("chat"))
    both = named("both", graph)
    both["metadata"]["labels"] = {"team": "a", "app": "x"}
    seen: list[ObjectKey] = []
    made.listen(DEPLOYMENTS, seen.append)
    made.store(DEPLOYMENTS, store.put(DEPLOYMENTS, both))
    made.store(DEPLOYMENTS, store.put(DEPLOYMENTS, named("none", graph)))
    await turns(20)
    assert list(made.objects(DEPLOYMENTS)) == [("space", "both")]
    assert [one["metadata"]["name"] for one in made.children(graph, DEPLOYMENTS)] == ["both"]
    store.put(DEPLOYMENTS, {**both, "metadata": {**both["metadata"], "labels": {"app": "x"}}})
    await turns(20)
    assert made.get(DEPLOYMENTS, "space", "both") is not None
    store.remove(DEPLOYMENTS, "space", "both")
    await turns(20)
    assert (made.count(DEPLOYMENTS), made.children(graph, DEPLOYMENTS)) == (0, [])
    assert ("space", "both") in seen
    await made.close()
