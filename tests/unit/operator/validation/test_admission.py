"""Admission rules of every kind in both versions: creation and update, with field paths."""

import copy
from typing import Any

import pytest

from dynamo.operator.validation.admission import review
from dynamo.operator.validation.facts import DISCOVERY_MODE, POWER_LIMIT, WORKLOAD_PROVIDER, AdmissionFacts

Object = dict[str, Any]
GROVE = AdmissionFacts(has_grove=True)
NO_GROVE = AdmissionFacts(has_grove=False)
PLANNER = AdmissionFacts(user="system:serviceaccount:default:planner-serviceaccount")


def main_container(**fields: Any) -> Object:
    return {"name": "main", "image": "image:1", **fields}


def worker(name: str = "decode", **fields: Any) -> Object:
    gpus = {"limits": {"nvidia.com/gpu": "1"}}
    pod = {"spec": {"containers": [main_container(resources=gpus)]}}
    return {"name": name, "type": "decode", "podTemplate": pod, **fields}


def picker(image: str, **fields: Any) -> Object:
    pod = {"spec": {"containers": [{"name": "main", "image": image}]}}
    return {"name": "e", "type": "epp", "podTemplate": pod, **fields}


def graph(*components: Object, name: str = "g", annotations: Object | None = None, **spec: Any) -> Object:
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name, "annotations": annotations or {}},
        "spec": {"components": list(components) or [{"name": "Frontend", "type": "frontend"}, worker()], **spec},
    }


def alpha(services: Object | None = None, **spec: Any) -> Object:
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "g"},
        "spec": {"services": {"Frontend": {"componentType": "frontend"}} if services is None else services, **spec},
    }


def resource(kind: str, version: str, **spec: Any) -> Object:
    return {"apiVersion": f"nvidia.com/{version}", "kind": kind, "metadata": {"name": "x"}, "spec": spec}


def paths(value: Object, old: Object | None = None, facts: AdmissionFacts | None = None) -> list[str]:
    return [one.path for one in review(value, old, facts).problems]


SHARED: Object = {"experimental": {"gpuMemoryService": {}, "failover": {}}}
INTER_POD: Object = {"experimental": {"gpuMemoryService": {"mode": "InterPod"}}}
BASE = "spec.components[0]"
CREATED: list[tuple[Object, str]] = [
    ({**graph(), "spec": {"components": []}}, "spec.components"),
    ({**graph(), "metadata": {}}, "metadata.name"),
    (graph(worker(replicas=-1)), f"{BASE}.replicas"),
    (graph(worker(multinode={"nodeCount": 1})), f"{BASE}.multinode.nodeCount"),
    (graph(worker("a"), worker("A")), "spec.components[1].name"),
    (graph(worker(), worker()), "spec.components[1]"),
    (graph(worker(eppConfig={"config": {}})), f"{BASE}.eppConfig"),
    (graph({"name": "e", "type": "epp", "eppConfig": {}}), f"{BASE}.eppConfig"),
    (graph({"name": "e", "type": "epp", "eppConfig": {"configMapRef": {"key": "k"}}}), f"{BASE}.eppConfig.configMapRef.name"),
    (graph({"name": "e", "type": "epp", "replicas": 2}), f"{BASE}.replicas"),
    (graph(picker("epp:1.5.0", eppConfig={"config": {}})), f"{BASE}.eppConfig"),
    (graph(picker("epp:1.4.2")), f"{BASE}.eppConfig"),
    (graph(picker("epp:custom", runtimeVersionOverride="1.4.0")), f"{BASE}.eppConfig"),
    (graph({"name": "e", "type": "epp"}, {"name": "f", "type": "epp"}), "spec.components[1].type"),
    (graph(worker(type="wroker")), f"{BASE}.type"),
    (graph(worker(sharedMemorySize="8GB")), f"{BASE}.sharedMemorySize"),
    (graph(worker(sharedMemorySize="-1Gi")), f"{BASE}.sharedMemorySize"),
    (graph(worker(frontendSidecar="sidecar")), f"{BASE}.frontendSidecar"),
    (graph(worker(**SHARED)), f"metadata.annotations[{DISCOVERY_MODE}]"),
    (graph(worker(experimental={"failover": {}})), f"{BASE}.experimental.failover"),
    (graph({"name": "f", "type": "frontend", "experimental": {"gpuMemoryService": {}}}), f"{BASE}.experimental.gpuMemoryService"),
    (graph(worker(experimental={**INTER_POD["experimental"], "checkpoint": {"enabled": True}})), f"{BASE}.experimental.checkpoint"),
    (alpha({"W": {"failover": {"enabled": True}, "checkpoint": {"enabled": True}}}), "spec.services.W.checkpoint"),
    (alpha({"W": {"failover": {"enabled": True, "numShadows": 2}}}), "spec.services.W.failover.numShadows"),
    (graph(worker(**INTER_POD), backendFramework="sglang"), f"{BASE}.experimental.gpuMemoryService.mode"),
    (graph(annotations={WORKLOAD_PROVIDER: "swarm"}), f"metadata.annotations[{WORKLOAD_PROVIDER}]"),
    (graph(annotations={"nvidia.com/dynamo-operator-origin-version": "new"}), "metadata.annotations[nvidia.com/dynamo-operator-origin-version]"),
    (graph(restart={"id": "1"}), "spec.restart.id"),
    (graph(topologyConstraint={"clusterTopologyName": "t"}), "spec.topologyConstraint.packDomain"),
    (graph(worker(topologyConstraint={"packDomain": "rack"})), f"{BASE}.topologyConstraint"),
    (graph(experimental={"kvTransferPolicy": {"domain": "rack"}}), "spec.experimental.kvTransferPolicy"),
    (graph(sevices=1), "spec.sevices"),
    (alpha({}), "spec.services"),
    (alpha({"W": {"sharedMemory": {}}}), "spec.services.W.sharedMemory.size"),
    (alpha({"W": {"ingress": {"enabled": True}}}), "spec.services.W.ingress.host"),
    (alpha({"W": {"volumeMounts": [{"name": "c"}]}}), "spec.services.W.volumeMounts[0].mountPoint"),
    (alpha({"W": {"multinode": {"nodeCount": 1}}}), "spec.services.W.multinode.nodeCount"),
    (alpha(pvcs=[{"name": "c", "create": True, "size": "1Gi"}]), "spec.pvcs[0].storageClass"),
    (alpha(pvcs=[{"name": ""}]), "spec.pvcs[0].name"),
    (resource("DynamoModel", "v1alpha1", modelName="a", baseModelName="b", modelType="lora"), "spec.source.uri"),
    (resource("DynamoModel", "v1alpha1", modelName="a", baseModelName="b", modelType="lora", source={"uri": "file:///a"}), "spec.source.uri"),
    (resource("DynamoGraphDeploymentScalingAdapter", "v1alpha1", replicas=1, dgdRef={"name": "g"}), "spec.dgdRef.serviceName"),
    (resource("DynamoGraphDeploymentScalingAdapter", "v1beta1", replicas=-1, dgdRef={"name": "g", "componentName": "d"}), "spec.replicas"),
    (resource("DynamoGraphDeploymentRequest", "v1beta1", model="m", sla={"e2eLatency": 1, "ttft": 1}), "spec.sla"),
    (resource("DynamoGraphDeploymentRequest", "v1beta1", model="m", sla={"itl": 0}), "spec.sla.itl"),
    (resource("DynamoGraphDeploymentRequest", "v1beta1", model=""), "spec.model"),
    (resource("DynamoGraphDeploymentRequest", "v1beta1", model="m", overrides={"dgd": {"apiVersion": "apps/v1", "kind": "Deployment"}}), "spec.overrides.dgd"),
    ({**resource("DynamoGraphDeploymentRequest", "v1beta1", model="m"), "metadata": {"name": "n" * 56}}, "metadata.name"),
    (resource("DynamoGraphDeploymentRequest", "v1alpha1", model="m", profilingConfig={"config": {"sla": {"ttft": -1}}}), "spec.profilingConfig.config.sla.ttft"),
    (resource("DynamoComponentDeployment", "v1beta1", type="worker", multinode={"nodeCount": 1}), "spec.multinode.nodeCount"),
    (resource("DynamoGraph", "v1beta1"), "kind"),
    (resource("DynamoGraphDeployment", "v2"), "apiVersion"),
    ({**graph(), "metadata": {"name": 5}}, "metadata.name"),
    ({**graph(), "metadata": {"name": "x", "labels": ["a"]}}, "metadata.labels"),
    ({**graph(), "metadata": {"name": "x", "annotations": {WORKLOAD_PROVIDER: False}}}, f"metadata.annotations[{WORKLOAD_PROVIDER}]"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "path"), CREATED)
def test_rule_refuses_with_field_path(value: Object, path: str) -> None:
    found = review(value)
    assert path in [one.path for one in found.problems]
    assert all(one.reason for one in found.problems)


@pytest.mark.parametrize(
    "value",
    [
        graph(),
        alpha(),
        graph(worker(**SHARED), annotations={DISCOVERY_MODE: "container"}),
        graph(worker(**INTER_POD), backendFramework="vllm"),
        graph(worker(multinode={})),
        graph(picker("epp:1.6.1")),
        graph(picker("epp:1.4.2", eppConfig={"config": {}})),
        graph(picker("epp:custom", eppConfig={"config": {}})),
        graph(topologyConstraint={"clusterTopologyName": "t", "packDomain": "rack"}),
        resource("DynamoGraphDeploymentRequest", "v1beta1", model="m", autoApply=False),
        resource("DynamoModel", "v1alpha1", modelName="a", baseModelName="b"),
        resource("DynamoComponentDeployment", "v1alpha1", componentType="frontend"),
    ],
)
def test_valid_object_is_accepted(value: Object) -> None:
    assert review(value, facts=GROVE).problems == []


def test_fields_of_a_request_without_effect_are_warnings() -> None:
    job = {"backoffLimit": 1, "foo": 1, "template": {"spec": {"tolerations": [], "hostNetwork": True}}}
    value = resource(
        "DynamoGraphDeploymentRequest", "v1beta1", model="m", searchStrategy="thorough", overrides={"profilingJob": job}
    )
    found = review(value)
    assert found.problems == []
    assert [one.partition(":")[0] for one in found.warnings] == [
        "spec.backend",
        "spec.overrides.profilingJob.foo",
        "spec.overrides.profilingJob.template.spec.hostNetwork",
    ]


def test_profiling_request_of_the_first_release_is_accepted() -> None:
    value = resource(
        "DynamoGraphDeploymentRequest",
        "v1alpha1",
        model="Qwen/Qwen3-0.6B",
        backend="vllm",
        profilingConfig={"config": {"sla": {"isl": 3000, "osl": 150, "ttft": 200, "itl": 20}}},
        autoApply=True,
    )
    assert review(value).problems == []


def test_grove_rules_apply_only_on_a_cluster_with_grove() -> None:
    long = graph(worker("a" * 40), name="g" * 10)
    priority = graph(priorityClassName="high")
    assert [paths(long, facts=facts) for facts in (GROVE, NO_GROVE, None)] == [[f"{BASE}.name"], [], []]
    assert [paths(priority, facts=facts) for facts in (GROVE, NO_GROVE, None)] == [[], ["spec.priorityClassName"], []]
    priority["metadata"]["annotations"] = {"nvidia.com/enable-grove": "false"}
    assert paths(priority, facts=GROVE) == ["spec.priorityClassName"]


@pytest.mark.parametrize(("name", "is_accepted"), [("decode", True), ("vllmdecodeworker", True), ("d" * 18, False)])
def test_long_name_of_a_graph_is_accepted_with_grove_which_gets_a_short_one(name: str, is_accepted: bool) -> None:
    value = graph(worker(name, multinode={"nodeCount": 2}), name="llama-405b-disaggregated-nightly")
    assert paths(value, facts=GROVE) == ([] if is_accepted else [f"{BASE}.name"])


def changed(value: Object, **spec: Any) -> Object:
    return {**copy.deepcopy(value), "spec": {**copy.deepcopy(value["spec"]), **spec}}


def test_graph_update_refuses_immutable_fields() -> None:
    old = graph(backendFramework="vllm")
    front, back = old["spec"]["components"]
    assert paths(changed(old, components=[front]), old) == ["spec.components"]
    assert paths(changed(old, components=[front, back, worker("new")]), old) == ["spec.components[2].name"]
    assert paths(changed(old, backendFramework="sglang"), old) == ["spec.backendFramework"]
    topology = {"clusterTopologyName": "t", "packDomain": "rack"}
    assert paths(changed(old, topologyConstraint=topology), old) == ["spec.topologyConstraint"]
    assert paths(changed(old, components=[front, {**back, "multinode": {}}]), old) == ["spec.components[1].multinode"]
    other = {**changed(old), "metadata": {"name": "g", "annotations": {WORKLOAD_PROVIDER: "component"}}}
    assert paths(other, old) == [f"metadata.annotations[{WORKLOAD_PROVIDER}]"]
    assert paths(changed(old), old) == []


def test_replicas_of_scaling_adapter_change_only_by_planner() -> None:
    old = graph(worker(replicas=1, scalingAdapter={}))
    new = graph(worker(replicas=2, scalingAdapter={}))
    assert paths(new, old) == [f"{BASE}.replicas"]
    assert paths(new, old, PLANNER) == []
    alpha_old = alpha({"W": {"replicas": 1, "scalingAdapter": {"enabled": True}}})
    alpha_new = alpha({"W": {"replicas": 2, "scalingAdapter": {"enabled": True}}})
    assert paths(alpha_new, alpha_old) == ["spec.services.W.replicas"]


def test_standby_engines_between_pods_are_immutable() -> None:
    def between_pods(count: int) -> Object:
        shared = {"gpuMemoryService": {"enabled": True, "mode": "interPod"}}
        failover = {"enabled": True, "mode": "interPod", "numShadows": count}
        service = {"componentType": "worker", "resources": {"limits": {"gpu": "1"}}, **shared, "failover": failover}
        return alpha({"W": service}, backendFramework="vllm")

    assert paths(between_pods(2), between_pods(1)) == ["spec.services.W.failover.numShadows"]
    assert paths(between_pods(1), between_pods(1)) == []


def test_power_limit_is_immutable() -> None:
    old, new = graph(worker()), graph(worker())
    new["spec"]["components"][0]["podTemplate"]["metadata"] = {"annotations": {POWER_LIMIT: "300"}}
    assert paths(new, old) == [f"{BASE}.podTemplate.metadata.annotations[{POWER_LIMIT}]"]


def test_restart_order_is_unique_and_complete() -> None:
    old = graph()
    path = "spec.restart.strategy.order"

    def ordered(order: list[str], kind: str = "Sequential") -> list[str]:
        return paths(changed(old, restart={"id": "1", "strategy": {"type": kind, "order": order}}), old)

    assert ordered(["Frontend", "decode"]) == []
    assert ordered(["Frontend"]) == [path]
    assert ordered(["Frontend", "Frontend", "decode"]) == [f"{path}[1]"]
    assert ordered(["Frontend", "decode", "other"]) == [f"{path}[2]"]
    assert ordered(["Frontend", "decode"], "Parallel") == [path]
    rolling = {**old, "status": {"rollingUpdate": {"phase": "InProgress"}}}
    assert paths(changed(old, restart={"id": "1"}), rolling) == ["spec.restart"]


@pytest.mark.parametrize(("version", "field"), [("v1alpha1", "state"), ("v1beta1", "phase")])
def test_request_is_immutable_once_profiling_started(version: str, field: str) -> None:
    old = resource("DynamoGraphDeploymentRequest", version, model="m")
    new = changed(old, model="other")
    assert paths(new, {**old, "status": {field: "Pending"}}) == []
    assert paths(new, {**old, "status": {field: "Profiling"}}) == ["spec.model"]


def test_references_of_other_kinds_are_immutable() -> None:
    model = resource("DynamoModel", "v1alpha1", modelName="a", baseModelName="b")
    assert paths(changed(model, baseModelName="c"), model) == ["spec.baseModelName"]
    adapter = resource(
        "DynamoGraphDeploymentScalingAdapter", "v1beta1", replicas=1, dgdRef={"name": "g", "componentName": "d"}
    )
    assert paths(changed(adapter, dgdRef={"name": "g", "componentName": "e"}), adapter) == ["spec.dgdRef"]


def test_checkpoint_names_a_container_and_keeps_its_identity() -> None:
    job = {"podTemplateSpec": {"spec": {"containers": [main_container()]}}}
    value = resource("DynamoCheckpoint", "v1alpha1", identity={"model": "m", "backendFramework": "vllm"}, job=job)
    assert paths(value) == []
    assert paths(changed(value, job={**job, "targetContainerName": "x"})) == ["spec.job.targetContainerName"]
    other = changed(value, identity={"model": "n", "backendFramework": "vllm"})
    assert paths(other, value) == ["spec.identity"]


def test_object_under_deletion_is_not_validated() -> None:
    value = alpha({})
    value["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert paths(value, alpha()) == []


def test_problem_of_the_stored_object_does_not_prevent_other_changes() -> None:
    old = graph(worker(sharedMemorySize="-1Gi", replicas=1))
    assert paths(graph(worker(sharedMemorySize="-1Gi", replicas=2)), old) == []
    assert paths(graph(worker(sharedMemorySize="-2Gi", replicas=1)), old) == [f"{BASE}.sharedMemorySize"]
