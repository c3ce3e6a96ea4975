"""Resources of v1beta1, the storage version."""

from typing import Any

import pytest

from dynamo.protocols.kubernetes.common import decode, encode
from dynamo.protocols.kubernetes.crds import version_schema
from dynamo.protocols.kubernetes.schema import problems, with_defaults
from dynamo.protocols.kubernetes.v1beta1 import (
    DynamoComponentDeployment,
    DynamoGraphDeployment,
    DynamoGraphDeploymentRequest,
)


def graph(**component: Any) -> dict[str, Any]:
    return {"spec": {"components": [{"name": "worker", **component}]}}


def paths(value: dict[str, Any]) -> list[str]:
    return [one.path for one in problems(value, version_schema("DynamoGraphDeployment", "v1beta1"))]


def test_component_with_a_pod_template_is_read_and_written_unchanged() -> None:
    template = {"spec": {"containers": [{"name": "main", "image": "i"}], "tolerations": [{"key": "gpu"}]}}
    value = graph(type="worker", replicas=0, podTemplate=template, sharedMemorySize="8Gi", scalingAdapter={})
    assert paths(value) == []
    assert encode(decode(DynamoGraphDeployment, value))["spec"] == value["spec"]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (graph(type="router"), "spec.components[0].type"),
        (graph(replicas=-1), "spec.components[0].replicas"),
        (graph(multinode={"nodeCount": 1}), "spec.components[0].multinode.nodeCount"),
        (graph(podTemplate={"spec": {"containers": [{"image": "i"}]}}), "spec.components[0].podTemplate.spec.containers[0].name"),
        ({"spec": {"components": [{"name": "a"}, {"name": "a"}]}}, "spec.components[1]"),
        ({"spec": {"components": [{"name": "-a"}]}}, "spec.components[0].name"),
        ({"spec": {"components": [{"name": f"c{n}"} for n in range(26)]}}, "spec.components"),
        ({"spec": {"services": {}}}, "spec.services"),
    ],
)  # fmt: skip
def test_problem_names_its_path(value: dict[str, Any], path: str) -> None:
    assert paths(value) == [path]


def test_request_receives_the_defaults_of_its_schema() -> None:
    value = {"spec": {"model": "m", "workload": {}, "modelCache": {"pvcName": "p"}}}
    spec = decode(
        DynamoGraphDeploymentRequest, with_defaults(value, version_schema("DynamoGraphDeploymentRequest", "v1beta1"))
    ).spec
    assert (spec.backend, spec.search_strategy, spec.auto_apply) == ("auto", "rapid", True)
    assert spec.workload is not None
    assert (spec.workload.isl, spec.workload.osl) == (4000, 1000)
    assert spec.model_cache is not None
    assert spec.model_cache.pvc_mount_path == "/opt/model-cache"


def test_component_outside_a_graph_may_omit_its_name() -> None:
    component = decode(DynamoComponentDeployment, {"spec": {"type": "frontend", "backendFramework": "sglang"}})
    assert component.spec.name is None
    assert encode(component)["spec"] == {"type": "frontend", "backendFramework": "sglang"}
