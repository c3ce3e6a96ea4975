"""Graphs with Grove: objects, scaling, updates in place, restarts, topology and status, on a cluster in memory."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.operator.reconcile.pure_cluster import NAMESPACE
from tests.unit.operator.reconcile.pure_grove import PureGrove
from tests.unit.operator.reconcile.test_graph import component, spec_of

from dynamo.operator.reconcile.grove_graph import is_processed, with_observed
from dynamo.operator.reconcile.names import CURRENT_WORKER_HASH, RESTART_AT, WORKER_HASH, worker_hash
from dynamo.operator.validation.facts import WORKLOAD_PROVIDER
from dynamo.protocols.kubernetes.common import KubeObject, decode
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeployment

CHILDREN = ("PodClique", "PodCliqueScalingGroup")
SEVERAL = ["python3", "-m", "dynamo.vllm", "--model", "m", "--tensor-parallel-size", "8"]


def spec(*, image: str = "image:1", workers: int = 4, **more: Any) -> dict[str, Any]:
    """Return a graph whose prefill worker has two nodes."""
    found = spec_of(image=image, workers=workers, **more)
    prefill = found["components"][1]
    prefill["multinode"] = {"nodeCount": 2}
    main = prefill["podTemplate"]["spec"]["containers"][0]
    main |= {"command": SEVERAL, "resources": {"limits": {"nvidia.com/gpu": "4"}}}
    return found


@pytest.fixture
def cluster() -> PureGrove:
    made = PureGrove({"spec": spec()})
    made.settle()
    return made


def status_of(cluster: PureGrove) -> dict[str, Any]:
    found: dict[str, Any] = cluster.graph["status"]
    return found


def condition(cluster: PureGrove, kind: str) -> tuple[str, str, str]:
    found = next(one for one in status_of(cluster)["conditions"] if one["type"] == kind)
    return found["status"], found["reason"], found["message"]


def cliques(cluster: PureGrove) -> dict[str, KubeObject]:
    [found] = cluster.of_kind("PodCliqueSet")
    return {one["name"]: one for one in found["spec"]["template"]["cliques"]}


def test_graph_creates_one_set_with_a_service_for_each_component(cluster: PureGrove) -> None:
    kinds = {ref.kind for ref in cluster.objects}
    assert not kinds & {"DynamoComponentDeployment", "Deployment"}
    services = {one["metadata"]["name"]: one["spec"]["selector"] for one in cluster.of_kind("Service")}
    assert sorted(services) == ["chat-decode", "chat-frontend", "chat-prefill"]
    assert set(cliques(cluster)) == {"frontend", "prefill-ldr", "prefill-wkr", "decode"}
    labels = cliques(cluster)["decode"]["labels"]
    assert services["chat-decode"].items() <= labels.items()
    assert cluster.of_kind("ConfigMap")[0]["metadata"]["name"] == "chat-wait-leader-script"
    assert cluster.of_kind("ServiceAccount")[0]["metadata"]["name"] == "chat-k8s-service-discovery"


def test_a_settled_graph_reports_its_cliques_and_groups(cluster: PureGrove) -> None:
    generation = worker_hash(decode(DynamoGraphDeployment, cluster.graph))
    status = status_of(cluster)
    assert (status["state"], condition(cluster, "Ready")[:2]) == ("successful", ("True", "all_resources_are_ready"))
    assert cluster.graph["metadata"]["annotations"] == {WORKLOAD_PROVIDER: "grove", CURRENT_WORKER_HASH: generation}
    found = status["components"]["decode"]
    assert (found["componentKind"], found["componentName"]) == ("PodClique", "chat-0-decode")
    assert found["readyReplicas"] == found["scheduledReplicas"] == found["updatedReplicas"] == 4
    assert found["runtimeNamespace"] == f"{NAMESPACE}-chat-{generation}"
    group = status["components"]["prefill"]
    assert (group["componentKind"], group["availableReplicas"]) == ("PodCliqueScalingGroup", 1)
    assert group["gpusPerReplica"] == 8
    assert status["components"]["Frontend"]["runtimeNamespace"] == f"{NAMESPACE}-chat"


def test_a_settled_graph_causes_no_writes(cluster: PureGrove) -> None:
    cluster.writes, cluster.events = 0, []
    cluster.time += 100
    for _ in range(3):
        for _ in cluster.rounds():
            pass
    assert (cluster.writes, cluster.events) == (0, [])


def test_graph_status_names_unready_cliques_and_the_reason() -> None:
    cluster = PureGrove({"spec": spec()})
    cluster.step_graph()
    assert status_of(cluster)["state"] == "initializing"
    cluster.step_grove()
    cluster.step_graph()
    assert status_of(cluster)["state"] == "pending"
    status, reason, message = condition(cluster, "Ready")
    assert (status, reason) == ("False", "InsufficientCapacity")
    assert "chat: podclique/chat-0-decode: 1 of 4 replicas are scheduled" in message


def test_replicas_are_scaled_without_a_change_of_the_set(cluster: PureGrove) -> None:
    before = cluster.of_kind("PodCliqueSet")[0]["metadata"]["generation"]
    changed = spec(workers=7)
    changed["components"][1]["replicas"] = 3
    cluster.edit(changed)
    cluster.settle()
    assert cluster.of_kind("PodCliqueSet")[0]["metadata"]["generation"] == before
    assert status_of(cluster)["components"]["decode"]["readyReplicas"] == 7
    assert status_of(cluster)["components"]["prefill"]["availableReplicas"] == 3
    assert "RollingUpdateNotSupported" not in cluster.events


def test_worker_change_is_applied_in_place_and_reported_once(cluster: PureGrove) -> None:
    before = set(cluster.objects)
    cluster.edit(spec(image="image:2"))
    cluster.settle()
    assert set(cluster.objects) == before
    assert cluster.events.count("RollingUpdateNotSupported") == 1
    assert "rollingUpdate" not in status_of(cluster)
    generation = worker_hash(decode(DynamoGraphDeployment, cluster.graph))
    assert cluster.graph["metadata"]["annotations"][CURRENT_WORKER_HASH] == generation
    labels = {name: one["labels"].get(WORKER_HASH) for name, one in cliques(cluster).items()}
    assert labels == {"frontend": None, "prefill-ldr": generation, "prefill-wkr": generation, "decode": generation}
    suffix = {
        one["name"]: one.get("value") for one in cliques(cluster)["decode"]["spec"]["podSpec"]["containers"][0]["env"]
    }
    assert suffix["DYN_NAMESPACE_WORKER_SUFFIX"] == generation


def test_ready_condition_reports_an_update_in_progress(cluster: PureGrove) -> None:
    cluster.edit(spec(image="image:2"))
    cluster.step_graph()
    cluster.step_grove()
    cluster.step_graph()
    assert condition(cluster, "Ready")[1] == "Updating"


def test_clique_order_is_preserved_when_components_are_reordered(cluster: PureGrove) -> None:
    before = list(cliques(cluster))
    changed = spec()
    changed["components"].reverse()
    cluster.writes = 0
    cluster.edit(changed)
    cluster.settle()
    assert list(cliques(cluster)) == before


def test_sequential_restart_of_cliques_follows_the_component_order(cluster: PureGrove) -> None:
    order = ["decode", "prefill", "Frontend"]
    cluster.edit(spec(restart={"id": "r1", "strategy": {"order": order}}))
    visited: list[str] = []
    for _ in range(30):
        for _ in cluster.rounds():
            pass
        for name in status_of(cluster)["restart"].get("inProgress") or []:
            if name not in visited:
                visited.append(name)
        if "prefill" not in visited:
            assert RESTART_AT not in cliques(cluster)["prefill-ldr"].get("annotations", {})
    assert visited == order
    assert status_of(cluster)["restart"] == {"observedID": "r1", "phase": "Completed"}
    assert {one["annotations"][RESTART_AT] for one in cliques(cluster).values()} == {"r1"}
    cluster.edit(spec())
    cluster.settle()
    assert {one["annotations"][RESTART_AT] for one in cliques(cluster).values()} == {"r1"}  # No second restart.


def test_scaling_adapter_exists_while_the_component_enables_it() -> None:
    wanted = spec()
    wanted["components"][2]["scalingAdapter"] = {}
    cluster = PureGrove({"spec": wanted})
    cluster.settle()
    [adapter] = cluster.of_kind("DynamoGraphDeploymentScalingAdapter")
    assert adapter["metadata"]["name"] == "chat-decode"
    assert not {WORKER_HASH, "nvidia.com/selector"} & set(adapter["metadata"]["labels"])
    cluster.edit(spec())
    cluster.settle()
    assert cluster.of_kind("DynamoGraphDeploymentScalingAdapter") == []


@pytest.mark.parametrize(
    ("reported", "wanted"),
    [
        (None, ("Unknown", "TopologyConditionPending")),
        ({"status": "False", "reason": "AllTopologyLevelsAvailable"}, ("True", "AllTopologyLevelsAvailable")),
        ({"status": "True", "reason": "ClusterTopologyLevelsUnavailable"}, ("False", "TopologyLevelsUnavailable")),
        ({"status": "True", "reason": "ClusterTopologyNotFound"}, ("False", "TopologyDefinitionNotFound")),
    ],
)
def test_topology_of_grove_is_a_condition_of_the_graph(reported: KubeObject | None, wanted: tuple[str, str]) -> None:
    constrained = spec(topologyConstraint={"clusterTopologyName": "gpus", "packDomain": "rack"})
    cluster = PureGrove({"spec": constrained})
    cluster.settle()
    assert cluster.of_kind("PodCliqueSet")[0]["spec"]["template"]["topologyConstraint"] == {
        "topologyName": "gpus",
        "pack": {"required": "rack"},
    }
    if reported is not None:
        status = cluster.of_kind("PodCliqueSet")[0]["status"]
        status["conditions"] = [{"type": "TopologyLevelsUnavailable", "message": "level rack", **reported}]
    cluster.events = []
    cluster.settle()
    assert condition(cluster, "TopologyLevelsAvailable")[:2] == wanted
    assert cluster.events.count(wanted[1]) == (wanted[0] == "False")
    assert condition(cluster, "Ready")[0] == "True"


def test_a_graph_without_constraints_has_no_topology_condition(cluster: PureGrove) -> None:
    assert [one["type"] for one in status_of(cluster)["conditions"]] == ["Ready"]


def test_component_that_cannot_run_fails_the_graph() -> None:
    wanted = spec(backendFramework="sglang")
    cluster = PureGrove({"spec": wanted})
    cluster.step_graph()
    assert status_of(cluster)["state"] == "failed"
    assert condition(cluster, "Ready")[1] == "failed_to_reconcile_the_resources"
    assert not cluster.objects
    cluster.step_graph()
    assert cluster.events == ["CannotRender"]
    cluster.edit(spec())
    cluster.settle()
    assert status_of(cluster)["state"] == "successful"


@pytest.mark.parametrize(
    ("status", "wanted"),
    [
        ({}, False),
        ({"observedGeneration": 1}, False),
        ({"observedGeneration": 2}, True),
        ({"observedGeneration": 2, "updateProgress": {"updateStartedAt": "t"}}, False),
        ({"observedGeneration": 2, "updateProgress": {"updateStartedAt": "t", "updateEndedAt": "u"}}, True),
    ],
)
def test_set_is_processed_after_grove_observed_it_without_pending_updates(status: KubeObject, wanted: bool) -> None:
    assert is_processed({"metadata": {"generation": 2}, "status": status}) is wanted


def test_new_cliques_follow_the_existing_ones() -> None:
    def clique(name: str, replicas: int) -> KubeObject:
        return {"name": name, "spec": {"replicas": replicas}}

    wanted = {"spec": {"replicas": 1, "template": {"cliques": [clique("new", 5), clique("b", 5), clique("a", 5)]}}}
    observed = {"spec": {"template": {"cliques": [clique("a", 1), clique("b", 2)]}}}
    found = with_observed(wanted, observed)["spec"]["template"]["cliques"]
    assert found == [clique("a", 1), clique("b", 2), clique("new", 5)]


def _varied(image: str, workers: int, nodes: int, has_adapter: bool, is_reversed: bool) -> dict[str, Any]:
    found = spec(image=image, workers=workers)
    found["components"][1]["replicas"] = nodes
    if has_adapter:
        found["components"][2]["scalingAdapter"] = {}
    if is_reversed:
        found["components"].reverse()
    return found


SPECS = st.builds(
    _varied,
    st.sampled_from(["image:1", "image:2"]),
    st.integers(0, 4),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)


@given(
    specs=st.lists(SPECS, min_size=1, max_size=4),
    actions=st.lists(st.sampled_from(["graph", "grove", "next", "lose"]), max_size=20),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_grove_reconciliation_converges_from_every_intermediate_state(
    specs: list[dict[str, Any]], actions: list[str], data: st.DataObject
) -> None:
    cluster = PureGrove({"spec": specs[0]})
    waiting = list(specs[1:])
    for action in actions:
        cluster.time += 1
        if action == "next" and waiting:
            cluster.edit(waiting.pop(0))
        elif action == "lose" and cluster.objects:
            del cluster.objects[data.draw(st.sampled_from(sorted(cluster.objects)))]
        elif action in ("graph", "grove"):
            getattr(cluster, f"step_{action}")()
    for one in waiting:
        cluster.edit(one)
    cluster.settle(100)
    assert status_of(cluster)["state"] == "successful"
    fresh = PureGrove({"spec": cluster.graph["spec"]})
    fresh.settle(100)
    assert set(cluster.objects) == set(fresh.objects)
    for kind in CHILDREN:
        replicas = [[one["spec"]["replicas"] for one in each.of_kind(kind)] for each in (cluster, fresh)]
        assert replicas[0] == replicas[1]
    cluster.writes = 0
    cluster.settle()
    assert cluster.writes == 0


def test_component_without_a_type_has_a_service() -> None:
    cluster = PureGrove({"spec": {"components": [component("extra", "")]}})
    cluster.graph["spec"]["components"][0].pop("type")
    cluster.settle()
    [found] = cluster.of_kind("Service")
    assert found["spec"]["ports"] == [{"name": "system", "port": 9090, "targetPort": 9090, "protocol": "TCP"}]


def test_component_with_zero_replicas_is_created_with_one_and_scaled_down() -> None:
    cluster = PureGrove({"spec": spec(workers=0)})
    cluster.settle()
    assert cliques(cluster)["decode"]["spec"]["replicas"] == 1
    [decode] = [one for one in cluster.of_kind("PodClique") if one["metadata"]["name"] == "chat-0-decode"]
    assert decode["spec"]["replicas"] == 0
    assert status_of(cluster)["state"] == "successful"
