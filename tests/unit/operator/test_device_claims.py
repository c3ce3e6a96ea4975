"""GPUs of claims: read of templates, claims and device classes, for components without a limit of GPUs."""

import dataclasses
from typing import Any

import pytest
from tests.unit.operator.kube_store import KubeStore
from tests.unit.operator.reconcile.worlds import CONTEXT, MP, worker

from dynamo.k8s.kinds import CLAIM_TEMPLATES, CLAIMS, DEVICE_CLASSES
from dynamo.operator.device_claims import claimed_gpus
from dynamo.operator.reconcile.multinode import role_templates
from dynamo.operator.reconcile.multinode.nodes import WorkloadError, leader_worker_set_nodes
from dynamo.operator.reconcile.pods import pod_template
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

NVIDIA = {"selectors": [{"cel": {"expression": "device.driver == 'gpu.nvidia.com' && true"}}]}


def claiming(
    name: str = "resourceClaimTemplateName", request: str = "", gpus: int = 0, nodes: int = 2
) -> ComponentSpec:
    component = worker("vllm", "-tp", "16", gpus=gpus, nodes=nodes)
    assert component.pod_template is not None
    spec = component.pod_template["spec"]
    spec["resourceClaims"] = [{"name": "devices", name: "eight"}]
    resources = spec["containers"][0].setdefault("resources", {})
    resources["claims"] = [{"name": "devices", **({"request": request} if request else {})}]
    return component


def store_of(*requests: Any, **classes: Any) -> KubeStore:
    store = KubeStore()
    spec = {"devices": {"requests": list(requests)}}
    store.put(CLAIM_TEMPLATES, {"metadata": {"name": "eight", "namespace": "prod"}, "spec": {"spec": spec}})
    store.put(CLAIMS, {"metadata": {"name": "eight", "namespace": "prod"}, "spec": spec})
    for name, value in classes.items():
        store.put(DEVICE_CLASSES, {"metadata": {"name": name}, "spec": value})
    return store


def exactly(name: str = "gpus", device: str = "a", count: int | None = 8, **more: Any) -> Any:
    return {"name": name, "exactly": {"deviceClassName": device, **({"count": count} if count else {}), **more}}


@pytest.mark.parametrize(
    ("component", "requests", "expected"),
    [
        (claiming(), [exactly()], 8),
        (claiming("resourceClaimName"), [exactly()], 8),
        (claiming(), [exactly(count=None)], 1),
        (claiming(), [exactly(), exactly("nic", "b", 2)], 8),
        (claiming(request="more"), [exactly(), exactly("more", count=4)], 4),
        (claiming(), [{"name": "any", "firstAvailable": [{"deviceClassName": "a", "count": 4}] * 2}], 4),
        (claiming(), [exactly(device="gpu.example.com")], 8),
    ],
)
async def test_gpus_of_claims_are_counted(component: ComponentSpec, requests: list[Any], expected: int) -> None:
    classes = {"a": NVIDIA, "b": {"extendedResourceName": "example.com/nic"}, "gpu.example.com": {}}
    assert await claimed_gpus(store_of(*requests, **classes), "prod", [component]) == {"Decode": expected}


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([exactly(allocationMode="All")], "allocationMode All of request gpus states no number"),
        ([exactly(device="absent")], "DeviceClass absent does not exist"),
        ([exactly(device="other")], "DeviceClass other does not say whether it has GPUs"),
        (
            [{"name": "x", "firstAvailable": [{"deviceClassName": "a", "count": n} for n in (1, 2)]}],
            "of request x differ",
        ),
    ],
)
async def test_number_that_is_not_known_is_refused_where_it_is_required(requests: list[Any], message: str) -> None:
    component = claiming()
    claimed = await claimed_gpus(store_of(*requests, a=NVIDIA, other={}), "prod", [component])
    assert message in str(claimed["Decode"])
    context = dataclasses.replace(CONTEXT, settings=dataclasses.replace(CONTEXT.settings, claimed_gpus=claimed))
    template, group = pod_template(component, context, []), leader_worker_set_nodes(2)
    with pytest.raises(WorkloadError, match=r"components\[Decode\]\.podTemplate\.spec\."):
        role_templates(component, context, template, group, framework="vllm", annotations=MP)


async def test_nodes_of_a_replica_are_those_that_the_claimed_gpus_require() -> None:
    component = claiming()
    claimed = await claimed_gpus(store_of(exactly(), a=NVIDIA), "prod", [component])
    context = dataclasses.replace(CONTEXT, settings=dataclasses.replace(CONTEXT.settings, claimed_gpus=claimed))
    template, group = pod_template(component, context, []), leader_worker_set_nodes(2)
    roles = role_templates(component, context, template, group, framework="vllm", annotations=MP)
    assert "--nnodes" in roles.leader["spec"]["containers"][0]["args"]


async def test_components_without_claims_cause_no_reads() -> None:
    store = store_of()
    assert await claimed_gpus(store, "prod", [worker("vllm"), claiming(gpus=8)]) == {}
    assert store.calls == []
