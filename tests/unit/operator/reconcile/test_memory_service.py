"""GPU memory service of a pod: its server, its clients, and the claim in place of the GPUs of the device plugin."""

from typing import Any

import pytest
from tests.unit.operator.reconcile.pure_cluster import SETTINGS

from dynamo.operator.reconcile.memory_service import claim_template, gpu_count, is_gpu_resource
from dynamo.operator.reconcile.multinode import role_templates
from dynamo.operator.reconcile.multinode.nodes import WorkloadError, leader_worker_set_nodes
from dynamo.operator.reconcile.names import GraphContext
from dynamo.operator.reconcile.pods import pod_template
from dynamo.protocols.kubernetes.common import KubeObject, decode
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

CONTEXT = GraphContext(name="chat", namespace="space", settings=SETTINGS, worker_hash="0123abcd")
CLAIM = {"name": "intrapod-shared-gpu"}


def component(service: KubeObject | None, gpus: str = "2", **more: Any) -> ComponentSpec:
    main = {
        "name": "main",
        "image": "i",
        "command": ["python3", "-m", "dynamo.vllm"],
        "args": ["--model", "m", "--tensor-parallel-size", "4"],
        "resources": {"limits": {"nvidia.com/gpu": gpus, "memory": "8Gi"}, "requests": {"nvidia.com/gpu": gpus}},
    }
    containers = [main, {"name": "helper", "image": "h"}, {"name": "other", "image": "o"}]
    value = {"name": "Decode", "type": "decode", "podTemplate": {"spec": {"containers": containers}}, **more}
    if service is not None:
        value["experimental"] = {"gpuMemoryService": service}
    return decode(ComponentSpec, value)


def test_server_and_clients_share_the_gpus_by_a_claim() -> None:
    spec = pod_template(component({"extraClientContainers": ["helper"]}), CONTEXT, [])["spec"]
    (server,) = spec["initContainers"]
    assert (server["name"], server["image"], server["restartPolicy"]) == ("gms-server", "i", "Always")
    assert server["command"] == ["python3", "-m", "gpu_memory_service.cli.server"]
    main, helper, other = spec["containers"]
    assert main["resources"] == {"limits": {"memory": "8Gi"}, "claims": [CLAIM]}
    for one in (server, main, helper):
        assert one["resources"]["claims"] == [CLAIM]
        assert {"name": "GMS_SOCKET_DIR", "value": "/gms-intrapod-control"} in one["env"]
        assert {"name": "gms-intrapod-control", "mountPath": "/gms-intrapod-control"} in one["volumeMounts"]
    assert "resources" not in other
    assert spec["resourceClaims"] == [{**CLAIM, "resourceClaimTemplateName": "chat-decode-gpu"}]
    assert {"name": "gms-intrapod-control", "emptyDir": {}} in spec["volumes"]
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_component_without_a_service_keeps_its_gpus() -> None:
    spec = pod_template(component(None), CONTEXT, [])["spec"]
    assert "initContainers" not in spec
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert claim_template(component(None), CONTEXT, has_claims=True) is None


def test_claim_asks_for_the_gpus_of_the_main_container() -> None:
    found = claim_template(component({"deviceClassName": "gpu.example.com"}), CONTEXT, has_claims=True)
    assert found is not None
    assert found["metadata"]["name"] == "chat-decode-gpu"
    exactly = {"deviceClassName": "gpu.example.com", "allocationMode": "ExactCount", "count": 2}
    assert found["spec"] == {"spec": {"devices": {"requests": [{"name": "gpus", "exactly": exactly}]}}}


@pytest.mark.parametrize(
    ("gpus", "has_claims", "message"),
    [("2", False, "requires ResourceClaimTemplates"), ("0", True, "requires a GPU limit of at least 1")],
)
def test_claim_that_cannot_be_made_names_the_field(gpus: str, has_claims: bool, message: str) -> None:
    with pytest.raises(WorkloadError, match=rf"components\[Decode\]\.experimental\.gpuMemoryService: {message}"):
        claim_template(component({}, gpus), CONTEXT, has_claims=has_claims)


def test_nodes_of_a_worker_count_the_gpus_that_the_claim_replaces() -> None:
    one = component({}, multinode={"nodeCount": 2})
    annotations = {"nvidia.com/vllm-distributed-executor-backend": "mp"}
    template = pod_template(one, CONTEXT, [])
    nodes = leader_worker_set_nodes(2)
    roles = role_templates(one, CONTEXT, template, nodes, framework="vllm", annotations=annotations)
    assert "--nnodes" in roles.leader["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvidia.com/gpu", True),
        ("nvidia.com/mig-3g.20gb", True),
        ("gpu", True),
        ("gpu.intel.com/xe", True),
        ("cpu", False),
    ],
)
def test_gpu_resources_are_known_by_name(name: str, expected: bool) -> None:
    assert is_gpu_resource(name) is expected
    assert gpu_count({"resources": {"requests": {name: "3"}}}) == (3 if expected else 0)
