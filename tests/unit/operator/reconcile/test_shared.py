"""Objects that graphs of a namespace share."""

from tests.unit.operator.reconcile.pure_cluster import PureCluster
from tests.unit.operator.reconcile.test_graph import component, spec_of

from dynamo.operator.reconcile.names import base_model_hash
from dynamo.protocols.kubernetes.common import KubeObject


def cluster_with(**fields: object) -> PureCluster:
    spec = spec_of()
    for one in spec["components"][1:]:
        one.update(fields)
    made = PureCluster({"spec": spec})
    made.settle()
    return made


def test_pods_of_a_base_model_have_one_headless_service() -> None:
    cluster = cluster_with(modelRef={"name": "Qwen/Qwen3-0.6B"})
    found = base_model_hash("Qwen/Qwen3-0.6B")
    services: dict[str, KubeObject] = {one["metadata"]["name"]: one for one in cluster.of_kind("Service")}
    made = services[f"dynamo-model-{found}"]
    assert made["spec"]["clusterIP"] == "None"
    assert made["metadata"]["annotations"] == {"nvidia.com/dynamo-base-model": "Qwen/Qwen3-0.6B"}
    for one in cluster.of_kind("Deployment"):
        is_worker = "frontend" not in one["metadata"]["name"]
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert (made["spec"]["selector"].items() <= labels.items()) == is_worker
    key = "nvidia.com/dynamo-base-model-hash"
    assert [name for name, one in services.items() if key in one["metadata"]["labels"]] == [f"dynamo-model-{found}"]


def test_graphs_without_a_model_have_no_shared_service() -> None:
    assert {one["metadata"]["name"] for one in cluster_with().of_kind("ServiceAccount")} == {
        "chat-k8s-service-discovery"
    }


def test_planner_has_permission_to_scale_its_graph() -> None:
    spec = spec_of()
    spec["components"].append(component("Planner", "planner"))
    cluster = PureCluster({"spec": spec})
    cluster.settle()
    accounts = [one["metadata"]["name"] for one in cluster.of_kind("ServiceAccount")]
    assert "planner-serviceaccount" in accounts
    [role] = [one for one in cluster.of_kind("Role") if one["metadata"]["name"] == "planner-serviceaccount-role"]
    rights = {(resource, verb) for one in role["rules"] for resource in one["resources"] for verb in one["verbs"]}
    assert ("dynamographdeployments", "patch") in rights
    assert ("dynamographdeploymentscalingadapters/scale", "patch") in rights
    pod = next(one for one in cluster.of_kind("Deployment") if "planner" in one["metadata"]["name"])
    assert pod["spec"]["template"]["spec"]["serviceAccountName"] == "planner-serviceaccount"
