"""Profiling job: container, volumes, environment, account, and the allowed changes of `overrides.profilingJob`."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.golden import check_golden
from tests.unit.operator.reconcile.requests.request_cluster import HARDWARE, request_object

from dynamo.operator.reconcile.names import OperatorSettings
from dynamo.operator.reconcile.requests.copier import PROGRAM
from dynamo.operator.reconcile.requests.job import (
    CannotProfile,
    RequestSettings,
    alpha_profiling,
    profiled_spec,
    profiling_access,
    profiling_job,
)
from dynamo.protocols.kubernetes.common import KubeObject, decode
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeploymentRequest


def job(spec: dict[str, Any] | None = None, settings: RequestSettings | None = None, **metadata: Any) -> KubeObject:
    request = decode(DynamoGraphDeploymentRequest, request_object(spec, **metadata))
    return profiling_job(request, HARDWARE, settings or RequestSettings())


def pod_of(value: KubeObject) -> KubeObject:
    pod: KubeObject = value["spec"]["template"]["spec"]
    return pod


def override(pod: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"overrides": {"profilingJob": {**fields, "template": {"spec": pod or {}}}}}


def test_profiler_gets_the_specification_with_the_hardware() -> None:
    value = job({"hardware": {}, "sla": {"ttft": 200.0}})
    profiler = pod_of(value)["containers"][0]
    assert (profiler["image"], profiler["command"]) == ("planner:1", ["python3", "-m", "dynamo.profiler"])
    assert (profiler["args"][0], profiler["args"][2:]) == ("--config", ["--output-dir", "/data"])
    spec = msgspec.json.decode(profiler["args"][1])
    assert (spec["model"], spec["hardware"], spec["sla"]) == ("org/m", HARDWARE, {"ttft": 200.0})
    assert (value["metadata"]["name"], value["spec"]["backoffLimit"]) == ("profile-chat", 0)
    assert value["metadata"]["labels"]["app"] == "dynamo-profiler"


def test_graph_overrides_are_removed_from_the_profiler_specification() -> None:
    spec = {
        "overrides": {
            "dgd": {"apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeployment"},
            "trustRemoteCode": True,
        }
    }
    value = job(spec)
    assert msgspec.json.decode(pod_of(value)["containers"][0]["args"][1])["overrides"] == {"trustRemoteCode": True}
    found = profiled_spec(value)
    assert found is not None and found[0].overrides is not None
    assert (found[0].overrides.dgd, found[1]) == (spec["overrides"]["dgd"], 1)


@pytest.mark.parametrize("annotations", [{}, {"dgdr.nvidia.com/spec": "x", "dgdr.nvidia.com/generation": "1"}])
def test_profiled_specification_of_a_job_without_annotation_is_none(annotations: dict[str, str]) -> None:
    assert profiled_spec({"metadata": {"annotations": annotations}}) is None


def test_services_of_the_operator_are_in_the_environment() -> None:
    settings = RequestSettings(operator=OperatorSettings(nats_address="nats://n:4222"))
    env = {one["name"]: one.get("value") for one in pod_of(job(settings=settings))["containers"][0]["env"]}
    assert env["NATS_SERVER"] == "nats://n:4222" and "ETCD_ENDPOINTS" not in env
    assert (env["DGDR_NAME"], env["DGDR_NAMESPACE"], env["DGDR_UID"]) == ("chat", "space", "uid-1")


def test_model_cache_is_mounted_read_only() -> None:
    pod = pod_of(job({"modelCache": {"pvcName": "weights"}}))
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}
    assert pod["containers"][0]["volumeMounts"][1] == {
        "name": "model-cache",
        "mountPath": "/opt/model-cache",
        "readOnly": True,
    }


def test_base_deployment_of_the_first_version_is_mounted() -> None:
    kept = {"profilingConfig": {"configMapRef": {"name": "base", "key": "own.yaml"}}}
    pod = pod_of(job(annotations={"nvidia.com/dgdr-spec": msgspec.json.encode(kept).decode()}))
    items = [{"key": "own.yaml", "path": "disagg.yaml"}]
    assert pod["volumes"][1]["configMap"] == {"name": "base", "items": items}


@pytest.mark.parametrize("text", ["", "[]", "null", '{"profilingConfig": 1}'])
def test_malformed_v1alpha1_annotation_is_ignored(text: str) -> None:
    request = decode(DynamoGraphDeploymentRequest, request_object(annotations={"nvidia.com/dgdr-spec": text}))
    assert alpha_profiling(request, "profilingConfig") == {}


def test_overrides_replace_fields_of_the_job_and_of_the_pod() -> None:
    tolerations = [{"key": "gpu", "operator": "Exists"}]
    pod = {
        "tolerations": tolerations,
        "nodeSelector": {"pool": "a"},
        "securityContext": {"runAsUser": 2000},
        "hostNetwork": True,
    }
    value = job(override(pod, backoffLimit=2, activeDeadlineSeconds=60))
    assert (value["spec"]["backoffLimit"], value["spec"]["activeDeadlineSeconds"]) == (2, 60)
    found = pod_of(value)
    assert (found["tolerations"], found["nodeSelector"]) == (tolerations, {"pool": "a"})
    assert found["securityContext"] == {"runAsNonRoot": True, "runAsUser": 2000, "runAsGroup": 1000, "fsGroup": 1000}
    assert "hostNetwork" not in found


def test_overrides_merge_the_first_container_into_the_profiler() -> None:
    resources = {"limits": {"nvidia.com/gpu": 1}}
    env = [{"name": "DGDR_NAME", "value": "x"}, {"name": "OWN", "value": "y"}]
    pod = pod_of(job(override({"containers": [{"resources": resources, "env": env, "command": ["rm"]}]})))
    profiler = pod["containers"][0]
    assert (profiler["resources"], profiler["command"][0]) == (resources, "python3")
    values = {one["name"]: one.get("value") for one in profiler["env"]}
    assert (values["DGDR_NAME"], values["OWN"]) == ("x", "y")
    assert [one["name"] for one in pod["containers"]] == ["profiler", "output-copier"]


def test_overrides_do_not_change_the_selector_labels_of_the_job() -> None:
    template = {"metadata": {"labels": {"app": "x", "team": "a"}, "annotations": {"n": "v"}}}
    value = job({"overrides": {"profilingJob": {"template": template}}})
    metadata = value["spec"]["template"]["metadata"]
    assert (metadata["labels"]["app"], metadata["labels"]["team"], metadata["annotations"]) == (
        "dynamo-profiler",
        "a",
        {"n": "v"},
    )


def test_pull_secrets_and_volumes_are_added() -> None:
    pod = {
        "imagePullSecrets": [{"name": "nvcr-imagepullsecret"}, {"name": "own"}],
        "volumes": [{"name": "v", "emptyDir": {}}],
    }
    found = pod_of(job(override(pod)))
    assert [one["name"] for one in found["imagePullSecrets"]] == ["nvcr-imagepullsecret", "own"]
    assert [one["name"] for one in found["volumes"]] == ["profiling-output", "v"]


def test_request_name_too_long_for_a_job_is_refused() -> None:
    with pytest.raises(CannotProfile, match=r"metadata.name: .* at most 55 characters"):
        job(name="x" * 56)


def test_profiling_account_can_publish_output_and_deploy_candidates() -> None:
    account, role, binding = profiling_access("space")
    assert [one["kind"] for one in (account, role, binding)] == ["ServiceAccount", "Role", "RoleBinding"]
    allowed = {resource: rule["verbs"] for rule in role["rules"] for resource in rule["resources"]}
    assert {"create", "patch"} <= set(allowed["configmaps"]) and "create" in allowed["dynamographdeployments"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "dgdr-profiling-job", "namespace": "space"}]


def test_profiling_objects_equal_the_golden_file() -> None:
    spec = {"sla": {"ttft": 200.0, "itl": 20.0}, "modelCache": {"pvcName": "weights", "pvcModelPath": "m"}}
    made = job(spec)
    assert pod_of(made)["containers"][1]["args"] == [PROGRAM]
    pod_of(made)["containers"][1]["args"] = ["text of dynamo.operator.output_copier"]
    check_golden(Path(__file__).parent / "golden" / "profiling.yaml", [*profiling_access("space"), made])


def test_the_sidecar_runs_in_the_image_of_the_profiler_unless_another_is_configured() -> None:
    images = [one["image"] for one in pod_of(job(override({"containers": [{"image": "own:2"}]})))["containers"]]
    assert images == ["own:2", "own:2"]
    images = [one["image"] for one in pod_of(job(settings=RequestSettings(copier_image="py:3")))["containers"]]
    assert images == ["planner:1", "py:3"]
