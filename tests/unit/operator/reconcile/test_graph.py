"""Graphs: objects, convergence, rolling updates, restarts and status, on a cluster in memory."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.operator.reconcile.pure_cluster import NAMESPACE, PureCluster

from dynamo.operator.reconcile.component_graph import DEPLOYED
from dynamo.operator.reconcile.names import CURRENT_WORKER_HASH, RESTART_AT, WORKER_HASH, worker_hash
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.operator.validation.facts import WORKLOAD_PROVIDER
from dynamo.protocols.kubernetes.common import KubeObject, decode
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeployment


def component(name: str, kind: str, replicas: int = 1, image: str = "image:1", **more: Any) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "main", "image": image}]}}
    return {"name": name, "type": kind, "replicas": replicas, "podTemplate": template, **more}


def spec_of(*, image: str = "image:1", workers: int = 4, frontend: str = "front:1", **more: Any) -> dict[str, Any]:
    components = [
        component("Frontend", "frontend", image=frontend),
        component("prefill", "prefill", 1, image),
        component("decode", "decode", workers, image),
    ]
    return {"components": components, **more}


@pytest.fixture
def cluster() -> PureCluster:
    made = PureCluster({"spec": spec_of()})
    made.settle()
    return made


def status_of(cluster: PureCluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.graph["status"]
    return found


def names(cluster: PureCluster, kind: str) -> list[str]:
    return [one["metadata"]["name"] for one in cluster.of_kind(kind)]


def pods(cluster: PureCluster, name: str) -> int:
    return sum(
        one.get("status", {}).get("availableReplicas", 0)
        for one in cluster.of_kind("Deployment")
        if f"-{name}-" in one["metadata"]["name"]
    )


def main_env(value: KubeObject) -> dict[str, Any]:
    main = value["spec"]["template"]["spec"]["containers"][0]
    return {one["name"]: one.get("value") for one in main["env"]}


def test_multinode_annotations_of_the_graph_are_copied_to_the_component() -> None:
    executor = {"nvidia.com/vllm-distributed-executor-backend": "mp"}
    several = component("decode", "decode", multinode={"nodeCount": 2})
    made = PureCluster({"spec": {"components": [component("Frontend", "frontend"), several]}})
    made.graph["metadata"]["annotations"] = {**executor, "other": "x"}
    made.step_graph()
    found = {one["spec"]["name"]: one["metadata"].get("annotations") for one in made.of_kind(DEPLOYED)}
    assert found == {"Frontend": None, "decode": executor}


def test_graph_creates_a_component_a_deployment_and_a_service_for_each_component(cluster: PureCluster) -> None:
    generation = worker_hash(decode(DynamoGraphDeployment, cluster.graph))
    wanted = sorted(["chat-frontend", f"chat-prefill-{generation}", f"chat-decode-{generation}"])
    for kind in (DEPLOYED, "Deployment", "Service"):
        assert names(cluster, kind) == wanted
    assert names(cluster, "ServiceAccount") == ["chat-k8s-service-discovery"]
    assert names(cluster, "RoleBinding") == ["chat-k8s-service-discovery-binding"]


def test_settled_graph_is_successful_and_reports_its_generation(cluster: PureCluster) -> None:
    status = status_of(cluster)
    assert (status["state"], status["observedGeneration"]) == ("successful", 1)
    assert [(one["type"], one["status"], one["reason"]) for one in status["conditions"]] == [
        ("Ready", "True", "all_resources_are_ready")
    ]
    generation = worker_hash(decode(DynamoGraphDeployment, cluster.graph))
    assert cluster.graph["metadata"]["annotations"] == {
        CURRENT_WORKER_HASH: generation,
        WORKLOAD_PROVIDER: "component",
    }
    decode_status = status["components"]["decode"]
    assert decode_status["readyReplicas"] == decode_status["updatedReplicas"] == 4
    assert decode_status["runtimeNamespace"] == f"{NAMESPACE}-chat-{generation}"
    assert "rollingUpdate" not in status


def test_settled_graph_causes_no_writes(cluster: PureCluster) -> None:
    cluster.writes = 0
    cluster.time += 100
    for _ in range(3):
        for _ in cluster.rounds():
            pass
    assert cluster.writes == 0


def test_graph_status_names_the_resources_that_are_not_ready() -> None:
    cluster = PureCluster({"spec": spec_of()})
    cluster.step_graph()
    assert status_of(cluster)["state"] == "initializing"
    cluster.step_components()
    cluster.step_graph()
    ready = status_of(cluster)["conditions"][0]
    assert status_of(cluster)["state"] == "pending"
    assert (ready["status"], ready["reason"]) == ("False", "some_resources_are_not_ready")
    assert "chat-frontend: Deployment is not ready" in ready["message"]


def test_component_environment_has_precedence_over_graph_and_operator() -> None:
    spec = spec_of(env=[{"name": "SHARED", "value": "graph"}, {"name": "DYN_SYSTEM_PORT", "value": "1"}])
    spec["components"][2]["podTemplate"]["spec"]["containers"][0]["env"] = [{"name": "SHARED", "value": "own"}]
    cluster = PureCluster({"spec": spec})
    cluster.settle()
    frontend, worker = main_env(cluster.of_kind("Deployment")[1]), main_env(cluster.of_kind("Deployment")[0])
    assert (frontend["SHARED"], frontend["DYN_HTTP_PORT"]) == ("graph", "8000")
    assert (worker["SHARED"], worker["DYN_SYSTEM_PORT"], worker["DYN_COMPONENT"]) == ("own", "1", "decode")


def test_graph_labels_and_annotations_are_copied_to_the_pods() -> None:
    cluster = PureCluster({"spec": spec_of(labels={"team": "a"}, annotations={"note": "b"})})
    cluster.settle()
    metadata = cluster.of_kind("Deployment")[0]["spec"]["template"]["metadata"]
    assert (metadata["labels"]["team"], metadata["annotations"]["note"]) == ("a", "b")


def test_frontend_change_does_not_replace_workers(cluster: PureCluster) -> None:
    before = names(cluster, DEPLOYED)
    cluster.edit(spec_of(frontend="front:2"))
    cluster.settle()
    assert names(cluster, DEPLOYED) == before
    assert status_of(cluster)["state"] == "successful"


def test_replica_change_does_not_replace_workers(cluster: PureCluster) -> None:
    before = names(cluster, DEPLOYED)
    cluster.edit(spec_of(workers=7))
    cluster.settle()
    assert names(cluster, DEPLOYED) == before
    assert pods(cluster, "decode") == 7


def test_removed_component_is_deleted(cluster: PureCluster) -> None:
    spec = spec_of()
    del spec["components"][0]
    cluster.edit(spec)
    cluster.settle()
    assert all("frontend" not in name for kind in (DEPLOYED, "Deployment", "Service") for name in names(cluster, kind))


def test_edited_and_deleted_children_are_restored(cluster: PureCluster) -> None:
    wanted = copy.deepcopy(cluster.objects)
    deployment, service = cluster.of_kind("Deployment")[0], cluster.of_kind("Service")[0]
    deployment["spec"]["replicas"] = 0
    cluster.objects = {ref: value for ref, value in cluster.objects.items() if value is not service}
    cluster.settle()
    assert cluster.of_kind("Deployment")[0]["spec"] == wanted[next(r for r in wanted if r.kind == "Deployment")]["spec"]
    assert set(cluster.objects) == set(wanted)


def test_component_with_a_scaling_adapter_keeps_its_replicas() -> None:
    spec = spec_of()
    spec["components"][2]["scalingAdapter"] = {}
    cluster = PureCluster({"spec": spec})
    cluster.settle()
    adapter = cluster.of_kind("DynamoGraphDeploymentScalingAdapter")[0]
    assert adapter["metadata"]["name"] == "chat-decode"
    assert adapter["spec"] == {"replicas": 4, "dgdRef": {"name": "chat", "componentName": "decode"}}
    adapter["spec"]["replicas"] = 9
    cluster.settle()
    assert cluster.of_kind("DynamoGraphDeploymentScalingAdapter")[0]["spec"]["replicas"] == 9
    cluster.edit(spec_of())
    cluster.settle()
    assert cluster.of_kind("DynamoGraphDeploymentScalingAdapter") == []


# Rolling update ---------------------------------------------------------------------------------------------------


def test_worker_change_replaces_all_workers_with_enough_available(cluster: PureCluster) -> None:
    before = names(cluster, DEPLOYED)
    spec = spec_of()
    spec["components"][1]["podTemplate"]["spec"]["containers"][0]["image"] = "image:2"
    cluster.edit(spec)
    phases = []
    for _ in range(40):
        for _ in cluster.rounds():
            assert pods(cluster, "decode") >= 3
            assert sum(one["spec"]["replicas"] for one in cluster.of_kind("Deployment")) <= 1 + 2 + 5
            assert pods(cluster, "prefill") >= 1
        phase = status_of(cluster).get("rollingUpdate", {}).get("phase")
        if not phases or phases[-1] != phase:
            phases.append(phase)
    assert phases == ["InProgress", "Completed"]
    assert status_of(cluster)["rollingUpdate"]["updatedComponents"] == ["decode", "prefill"]
    assert status_of(cluster)["state"] == "successful"
    after = names(cluster, DEPLOYED)
    assert len(after) == 3 and set(after) & set(before) == {"chat-frontend"}
    assert pods(cluster, "decode") == 4


def test_reverted_update_returns_to_the_first_generation(cluster: PureCluster) -> None:
    before = names(cluster, DEPLOYED)
    cluster.edit(spec_of(image="image:2"))
    for _ in range(2):
        for _ in cluster.rounds():
            pass
    assert len(names(cluster, DEPLOYED)) == 5
    cluster.edit(spec_of())
    for _ in range(40):
        for _ in cluster.rounds():
            assert pods(cluster, "decode") >= 3
    assert names(cluster, DEPLOYED) == before
    assert status_of(cluster)["rollingUpdate"]["phase"] == "Completed"


def test_recreate_strategy_ends_all_old_workers_before_new_ones_start(cluster: PureCluster) -> None:
    cluster.edit(spec_of(image="image:2", annotations={"nvidia.com/deployment-strategy": "Recreate"}))
    has_seen_none = False
    for _ in range(40):
        for _ in cluster.rounds():
            generations = {
                one["metadata"]["labels"][WORKER_HASH]
                for one in cluster.of_kind("Deployment")
                if "decode" in one["metadata"]["name"] and one.get("status", {}).get("replicas")
            }
            assert len(generations) <= 1
            has_seen_none = has_seen_none or not generations
    assert has_seen_none
    assert (status_of(cluster)["state"], pods(cluster, "decode")) == ("successful", 4)


# Restart ----------------------------------------------------------------------------------------------------------


def test_sequential_restart_follows_the_component_order(cluster: PureCluster) -> None:
    order = ["decode", "prefill", "Frontend"]
    cluster.edit(spec_of(restart={"id": "r1", "strategy": {"order": order}}))
    visited: list[str] = []
    for _ in range(40):
        for _ in cluster.rounds():
            pass
        for name in status_of(cluster)["restart"].get("inProgress") or []:
            if name not in visited:
                visited.append(name)
    assert visited == order
    assert status_of(cluster)["restart"] == {"observedID": "r1", "phase": "Completed"}
    for one in cluster.of_kind("Deployment"):
        assert one["spec"]["template"]["metadata"]["annotations"][RESTART_AT] == "r1"


def test_parallel_restart_restarts_all_components_at_once(cluster: PureCluster) -> None:
    cluster.edit(spec_of(restart={"id": "r1", "strategy": {"type": "Parallel"}}))
    cluster.step_graph()
    assert status_of(cluster)["restart"]["inProgress"] == ["Frontend", "decode", "prefill"]
    cluster.settle()
    assert status_of(cluster)["restart"]["phase"] == "Completed"
    cluster.writes = 0
    cluster.settle()
    assert cluster.writes == 0


def test_rolling_update_supersedes_a_restart(cluster: PureCluster) -> None:
    cluster.edit(spec_of(image="image:2"))
    for _ in cluster.rounds():
        pass
    cluster.edit(spec_of(image="image:2", restart={"id": "r1"}))
    cluster.settle()
    assert status_of(cluster)["restart"] == {"observedID": "r1", "phase": "Superseded"}


# Convergence ------------------------------------------------------------------------------------------------------


def _varied(image: str, workers: int, surge: str, has_adapter: bool, has_frontend: bool) -> dict[str, Any]:
    key = "nvidia.com/deployment-rolling-update-max-surge"
    spec = spec_of(image=image, workers=workers, annotations={key: surge})
    if has_adapter:
        spec["components"][2]["scalingAdapter"] = {}
    if not has_frontend:
        del spec["components"][0]
    return spec


SPECS = st.builds(
    _varied,
    st.sampled_from(["image:1", "image:2", "image:3"]),
    st.integers(0, 6),
    st.sampled_from(["0", "25%", "100%", "2"]),
    st.booleans(),
    st.booleans(),
)


@given(
    specs=st.lists(SPECS, min_size=1, max_size=4),
    actions=st.lists(st.sampled_from(["graph", "components", "deployments", "next", "lose"]), max_size=30),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_graph_reconciliation_converges_from_every_intermediate_state(
    specs: list[dict[str, Any]], actions: list[str], data: st.DataObject
) -> None:
    cluster = PureCluster({"spec": specs[0]})
    waiting = list(specs[1:])
    for action in actions:
        cluster.time += 1
        if action == "next":
            if waiting:
                cluster.edit(waiting.pop(0))
        elif action == "lose" and cluster.objects:
            del cluster.objects[data.draw(st.sampled_from(sorted(cluster.objects)))]
            cluster._collect()
        elif action in ("graph", "components", "deployments"):
            getattr(cluster, f"step_{action}")()
    for spec in waiting:
        cluster.edit(spec)
    cluster.settle(200)
    assert status_of(cluster)["state"] == "successful"
    fresh = PureCluster({"spec": (waiting or [cluster.graph["spec"]])[-1]})
    fresh.settle(200)
    assert set(cluster.objects) == set(fresh.objects)
    replicas = {ref: value["spec"]["replicas"] for ref, value in cluster.objects.items() if ref.kind == "Deployment"}
    assert replicas == {
        ref: value["spec"]["replicas"] for ref, value in fresh.objects.items() if ref.kind == "Deployment"
    }
    cluster.writes = 0
    cluster.settle()
    assert cluster.writes == 0


# Fields ------------------------------------------------------------------------------------------------------------


def test_pods_of_prefill_and_decode_workers_have_the_label_of_v1alpha1(cluster: PureCluster) -> None:
    key = "nvidia.com/dynamo-sub-component-type"
    found = [one["spec"]["template"]["metadata"]["labels"].get(key) for one in cluster.of_kind("Deployment")]
    assert found == ["decode", None, "prefill"]


def test_tensorrt_llm_nodes_share_a_key() -> None:
    spec = spec_of(backendFramework="trtllm")
    assert PureCluster({"spec": spec}).plan_graph().keys == []
    spec["components"][2] |= {"multinode": {"nodeCount": 2}}
    assert [one.name for one in PureCluster({"spec": spec}).plan_graph().keys] == ["mpi-run-ssh-secret"]


def test_graph_discovery_backend_overrides_that_of_the_operator() -> None:
    cluster = PureCluster({"spec": spec_of()})
    cluster.graph["metadata"]["annotations"] = {"nvidia.com/dynamo-discovery-backend": "etcd"}
    cluster.settle()
    assert cluster.of_kind("ServiceAccount") == []
    [frontend, *_] = [one for one in cluster.of_kind("Deployment") if "frontend" in one["metadata"]["name"]]
    assert main_env(frontend)["DYN_DISCOVERY_BACKEND"] == "etcd"
    assert "serviceAccountName" not in frontend["spec"]["template"]["spec"]
    assert "nvidia.com/dynamo-discovery-enabled" not in frontend["spec"]["template"]["metadata"]["labels"]


def test_several_nodes_without_their_controllers_fail_the_graph() -> None:
    spec = spec_of()
    spec["components"][2] |= {"multinode": {"nodeCount": 2}}
    cluster = PureCluster({"spec": spec}, ClusterFacts())
    cluster.step_graph()
    status = status_of(cluster)
    assert (status["state"], status["conditions"][0]["reason"]) == ("failed", "no_multinode_orchestrator_available")
    assert "require Grove or LeaderWorkerSet" in status["conditions"][0]["message"]
    assert cluster.objects == {}


def test_graph_keeps_its_workload_provider() -> None:
    cluster = PureCluster({"spec": spec_of()})
    cluster.step_graph()
    del cluster.graph["metadata"]["annotations"][WORKLOAD_PROVIDER]  # As if the operator ended before it wrote that.
    cluster.facts = ClusterFacts(has_grove=True)
    cluster.settle()
    assert cluster.of_kind("PodCliqueSet") == []
    assert cluster.graph["metadata"]["annotations"][WORKLOAD_PROVIDER] == "component"


def test_graph_with_a_missing_provider_fails_until_it_is_restored(cluster: PureCluster) -> None:
    cluster.graph["metadata"]["annotations"][WORKLOAD_PROVIDER] = "grove"
    before = dict(cluster.objects)
    cluster.step_graph()
    status = status_of(cluster)
    assert (status["state"], status["conditions"][0]["reason"]) == ("failed", "selected_workload_provider_unavailable")
    assert cluster.objects == before
    cluster.graph["metadata"]["annotations"][WORKLOAD_PROVIDER] = "component"
    cluster.settle()
    assert status_of(cluster)["state"] == "successful"
