"""Conversion of every kind: counterparts, round trips without loss, and edits made in the other version."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.operator.conversion.convert import ConversionFailed, annotation_key, convert
from dynamo.operator.validation.admission import review
from dynamo.protocols.kubernetes.common import V1ALPHA1, V1BETA1

Object = dict[str, Any]
ROUNDS = settings(max_examples=60, deadline=None)


def resource(kind: str, version: str, spec: Object, **rest: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": "x", "labels": {"a": "b"}}, "spec": spec, **rest}


def graph(version: str, spec: Object, **rest: Any) -> Object:
    return resource("DynamoGraphDeployment", version, spec, **rest)


SERVICE: Object = {
    "componentType": "worker",
    "subComponentType": "prefill",
    "replicas": 2,
    "serviceName": "w",
    "annotations": {"k": "v"},
    "envs": [{"name": "A", "value": "1"}],
    "envFromSecret": "hf-token-secret",
    "resources": {"limits": {"cpu": "4", "gpu": "2", "custom": {"rdma/ib": "1"}}},
    "volumeMounts": [{"name": "cache", "mountPoint": "/cache"}, {"name": "jit", "useAsCompilationCache": True}],
    "ingress": {"enabled": True, "host": "h"},
    "sharedMemory": {"size": "16Gi"},
    "extraPodMetadata": {"labels": {"l": "1"}},
    "extraPodSpec": {"mainContainer": {"image": "i", "env": [{"name": "B", "value": "2"}]}, "nodeSelector": {"n": "1"}},
    "readinessProbe": {"httpGet": {"path": "/health", "port": 9090}},
    "scalingAdapter": {"enabled": True},
    "gpuMemoryService": {"enabled": True, "mode": "intraPod"},
}


def test_service_becomes_component_with_pod_template() -> None:
    value = graph(V1ALPHA1, {"services": {"W": SERVICE}, "envs": [{"name": "E", "value": "e"}]})
    beta = convert(value, V1BETA1)
    assert review({**beta, "spec": {**beta["spec"]}}).problems == []
    (component,) = beta["spec"]["components"]
    assert beta["spec"]["env"] == [{"name": "E", "value": "e"}]
    assert (component["name"], component["type"], component["replicas"]) == ("W", "prefill", 2)
    assert component["sharedMemorySize"] == "16Gi"
    assert component["compilationCache"] == {"pvcName": "jit"}
    assert component["experimental"] == {"gpuMemoryService": {"mode": "IntraPod"}}
    assert component["scalingAdapter"] == {}
    template = component["podTemplate"]
    assert template["metadata"] == {"annotations": {"k": "v"}, "labels": {"l": "1"}}
    (main,) = template["spec"]["containers"]
    assert main["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    assert main["resources"] == {"limits": {"cpu": "4", "nvidia.com/gpu": "2", "rdma/ib": "1"}}
    assert main["volumeMounts"] == [{"name": "cache", "mountPath": "/cache"}]
    assert main["envFrom"] == [{"secretRef": {"name": "hf-token-secret"}}]
    assert template["spec"]["volumes"] == [{"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}]


def test_component_type_absent_from_v1beta1_is_preserved() -> None:
    value = graph(V1ALPHA1, {"services": {"R": {"componentType": "default"}}})
    beta = convert(value, V1BETA1)
    assert beta["spec"]["components"] == [{"name": "R"}]
    beta["spec"]["components"][0]["replicas"] = 2
    assert review(beta).problems == []
    service = convert(beta, V1ALPHA1)["spec"]["services"]["R"]
    assert service == {"componentType": "default", "replicas": 2}


def test_component_becomes_service() -> None:
    component = {
        "name": "d", "type": "decode", "sharedMemorySize": "0", "scalingAdapter": {},
        "podTemplate": {"spec": {"containers": [{"name": "main", "image": "i"}, {"name": "side"}]}},
    }  # fmt: skip
    alpha = convert(graph(V1BETA1, {"components": [component]}), V1ALPHA1)
    service = alpha["spec"]["services"]["d"]
    assert (service["componentType"], service["subComponentType"]) == ("worker", "decode")
    assert service["sharedMemory"] == {"disabled": True}
    assert service["scalingAdapter"] == {"enabled": True}
    assert service["extraPodSpec"] == {"mainContainer": {"image": "i"}, "containers": [{"name": "side"}]}
    assert "annotations" not in alpha["metadata"]


def test_profiling_request_of_the_first_release_becomes_typed_targets() -> None:
    config: Object = {"sla": {"isl": 3000, "osl": 150, "ttft": 200, "itl": 20}, "sweep": {"x": 1}}
    spec = {"model": "m", "backend": "vllm", "autoApply": True, "profilingConfig": {"config": config}}
    value = resource("DynamoGraphDeploymentRequest", V1ALPHA1, spec, status={"state": "Ready", "backend": "vllm"})
    beta = convert(value, V1BETA1)
    assert beta["spec"] == {
        "model": "m",
        "backend": "vllm",
        "autoApply": True,
        "sla": {"ttft": 200, "itl": 20},
        "workload": {"isl": 3000, "osl": 150},
    }
    assert beta["status"] == {"phase": "Ready"}
    assert convert(beta, V1ALPHA1) == value
    edited = copy.deepcopy(beta)
    edited["spec"]["sla"]["ttft"] = 300
    edited["status"]["phase"] = "Deploying"
    alpha = convert(edited, V1ALPHA1)
    assert alpha["spec"]["profilingConfig"]["config"] == {**config, "sla": {**config["sla"], "ttft": 300}}
    assert alpha["status"] == {"state": "Deploying", "backend": "vllm"}


def test_request_without_auto_apply_keeps_the_default_of_its_version() -> None:
    kind = "DynamoGraphDeploymentRequest"
    assert convert(resource(kind, V1ALPHA1, {"model": "m"}), V1BETA1)["spec"]["autoApply"] is False
    assert convert(resource(kind, V1BETA1, {"model": "m"}), V1ALPHA1)["spec"]["autoApply"] is True


def test_request_keeps_the_version_of_its_runtime() -> None:
    given = {"model": "m", "runtimeVersionOverride": "1.6.1"}
    for version, other in ((V1ALPHA1, V1BETA1), (V1BETA1, V1ALPHA1)):
        value = resource("DynamoGraphDeploymentRequest", version, given)
        assert convert(value, other)["spec"]["runtimeVersionOverride"] == "1.6.1"


def test_adapter_and_status_are_renamed() -> None:
    spec = {"replicas": 1, "dgdRef": {"name": "g", "serviceName": "w"}}
    beta = convert(resource("DynamoGraphDeploymentScalingAdapter", V1ALPHA1, spec), V1BETA1)
    assert beta["spec"]["dgdRef"] == {"name": "g", "componentName": "w"}
    status = {"services": {"W": {"replicas": 1}}, "rollingUpdate": {"phase": "InProgress", "updatedServices": ["W"]}}
    value = graph(V1ALPHA1, {"services": {}}, status=status)
    assert convert(value, V1BETA1)["status"]["components"] == {"W": {"replicas": 1}}
    assert convert(value, V1BETA1)["status"]["rollingUpdate"]["updatedComponents"] == ["W"]


def test_status_fields_of_one_version_are_kept() -> None:
    status = {"components": {"W": {"replicas": 1, "newerField": 2}}}
    value = graph(V1BETA1, {"components": [{"name": "W"}]}, status=status)
    alpha = convert(value, V1ALPHA1)
    assert alpha["status"] == {"services": {"W": {"replicas": 1}}}
    assert convert(alpha, V1BETA1) == value


def test_replica_change_preserves_other_fields() -> None:
    value = graph(V1ALPHA1, {"services": {"W": SERVICE}, "pvcs": [{"name": "cache"}]})
    beta = convert(value, V1BETA1)
    beta["spec"]["components"][0]["replicas"] = 5
    expected = copy.deepcopy(value)
    expected["spec"]["services"]["W"]["replicas"] = 5
    assert convert(beta, V1ALPHA1) == expected


def test_removed_variable_is_not_restored_by_conversion() -> None:
    value = graph(V1ALPHA1, {"services": {"W": SERVICE}, "pvcs": [{"name": "cache"}]})
    beta = convert(value, V1BETA1)
    main = beta["spec"]["components"][0]["podTemplate"]["spec"]["containers"][0]
    main["env"] = [{"name": "B", "value": "2"}]
    alpha = convert(beta, V1ALPHA1)
    again = convert(alpha, V1BETA1)["spec"]["components"][0]["podTemplate"]["spec"]["containers"][0]
    assert again["env"] == [{"name": "B", "value": "2"}]
    assert alpha["spec"]["services"]["W"]["ingress"] == SERVICE["ingress"]
    assert alpha["spec"]["pvcs"] == [{"name": "cache"}]


def test_damaged_annotation_is_ignored() -> None:
    value = graph(V1BETA1, {"components": [{"name": "a"}]})
    value["metadata"]["annotations"] = {annotation_key("dgd", "spec"): "{", "user": "1"}
    alpha = convert(value, V1ALPHA1)
    assert (alpha["spec"], alpha["metadata"]["annotations"]) == ({"services": {"a": {}}}, {"user": "1"})


@pytest.mark.parametrize(("kind", "version"), [("DynamoModel", V1BETA1), ("DynamoGraphDeployment", "nvidia.com/v2")])
def test_unknown_version_is_refused(kind: str, version: str) -> None:
    with pytest.raises(ConversionFailed, match="cannot be converted"):
        convert(resource(kind, V1ALPHA1, {}), version)


names = st.text("ab", min_size=1, max_size=2)
maps = st.dictionaries(names, names, max_size=2)
envs = st.lists(st.fixed_dictionaries({"name": names, "value": names}), max_size=2, unique_by=lambda one: one["name"])
containers = st.fixed_dictionaries({}, optional={"image": names, "env": envs, "args": st.lists(names, max_size=2)})
services = st.fixed_dictionaries(
    {},
    optional={
        "componentType": st.sampled_from(["frontend", "worker", "planner", "default"]),
        "subComponentType": st.sampled_from(["prefill", "decode"]),
        "replicas": st.integers(0, 3),
        "annotations": maps,
        "envs": envs,
        "envFromSecret": names,
        "serviceName": names,
        "sharedMemory": st.sampled_from([{}, {"disabled": True}, {"size": "1Gi"}, {"disabled": False, "size": "2Gi"}]),
        "resources": st.fixed_dictionaries({}, optional={"limits": st.fixed_dictionaries({"gpu": st.just("1")})}),
        "volumeMounts": st.lists(
            st.fixed_dictionaries({"name": names, "mountPoint": names}, optional={"useAsCompilationCache": st.booleans()}),
            max_size=2,
        ),
        "extraPodSpec": st.fixed_dictionaries({}, optional={"mainContainer": containers, "nodeSelector": maps}),
        "extraPodMetadata": st.fixed_dictionaries({}, optional={"labels": maps}),
        "scalingAdapter": st.fixed_dictionaries({"enabled": st.booleans()}),
        "failover": st.fixed_dictionaries({"enabled": st.booleans()}, optional={"numShadows": st.integers(1, 2)}),
        "checkpoint": st.fixed_dictionaries({"enabled": st.booleans()}, optional={"mode": st.just("Auto")}),
        "frontendSidecar": st.fixed_dictionaries({"image": names}, optional={"envs": envs, "envFromSecret": names}),
    },
)  # fmt: skip
alpha_specs = st.fixed_dictionaries(
    {"services": st.dictionaries(names, services, max_size=2)},
    optional={"envs": envs, "pvcs": st.just([{"name": "a"}]), "topologyConstraint": st.just({"topologyProfile": "t"})},
)
pods = st.fixed_dictionaries(
    {},
    optional={
        "containers": st.lists(
            st.builds(lambda name, one: {"name": name, **one}, st.sampled_from(["main", "a", "sidecar-frontend"]), containers),
            max_size=3,
            unique_by=lambda one: one["name"],  # type: ignore[index]
        ),
        "nodeSelector": maps,
    },
)  # fmt: skip
components = st.fixed_dictionaries(
    {"name": names},
    optional={
        "type": st.sampled_from(["frontend", "worker", "prefill", "epp"]),
        "replicas": st.integers(0, 3),
        "sharedMemorySize": st.sampled_from(["0", "1Gi"]),
        "scalingAdapter": st.just({}),
        "frontendSidecar": st.sampled_from(["a", "sidecar-frontend"]),
        "runtimeVersionOverride": st.just("1.6.1"),
        "compilationCache": st.fixed_dictionaries({"pvcName": names}, optional={"mountPath": names}),
        "experimental": st.just({"checkpoint": {"enabled": True, "startupPolicy": "Immediate"}, "failover": {}}),
        "podTemplate": st.fixed_dictionaries({}, optional={"spec": pods, "metadata": st.fixed_dictionaries({"labels": maps})}),
    },
)  # fmt: skip
beta_specs = st.fixed_dictionaries(
    {"components": st.lists(components, max_size=2, unique_by=lambda one: one["name"])}, optional={"env": envs}
)


@ROUNDS
@given(spec=alpha_specs)
def test_alpha_graph_survives_the_round_trip(spec: Object) -> None:
    value = graph(V1ALPHA1, spec)
    assert convert(convert(value, V1BETA1), V1ALPHA1) == value


@ROUNDS
@given(spec=beta_specs)
def test_beta_graph_survives_the_round_trip(spec: Object) -> None:
    value = graph(V1BETA1, spec)
    assert convert(convert(value, V1ALPHA1), V1BETA1) == value


@ROUNDS
@given(spec=alpha_specs, replicas=st.integers(4, 5), image=names)
def test_edit_in_beta_is_kept_through_alpha(spec: Object, replicas: int, image: str) -> None:
    beta = convert(graph(V1ALPHA1, spec), V1BETA1)
    for component in beta["spec"]["components"]:
        component["replicas"] = replicas
        component.setdefault("podTemplate", {})["spec"] = {"containers": [{"name": "main", "image": image}]}
    assert convert(convert(beta, V1ALPHA1), V1BETA1)["spec"] == beta["spec"]


@ROUNDS
@given(spec=beta_specs, replicas=st.integers(4, 5))
def test_edit_in_alpha_is_kept_through_beta(spec: Object, replicas: int) -> None:
    alpha = convert(graph(V1BETA1, spec), V1ALPHA1)
    for service in alpha["spec"]["services"].values():
        service["replicas"] = replicas
        service["ingress"] = {"enabled": False}
    assert convert(convert(alpha, V1BETA1), V1ALPHA1)["spec"] == alpha["spec"]
