"""Environment of main containers and of frontends in pods of workers."""

from typing import Any

import pytest

from dynamo.operator.reconcile.environment import environment, sidecar_environment
from dynamo.operator.reconcile.names import GraphContext, OperatorSettings
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

CONTEXT = GraphContext(name="chat", namespace="space", settings=OperatorSettings(), worker_hash="0123abcd")


def component(kind: Any, image: str = "r:1.6.1", **annotations: str) -> ComponentSpec:
    named = {f"nvidia.com/{name.replace('_', '-')}": value for name, value in annotations.items()}
    template = {"metadata": {"annotations": named}, "spec": {"containers": [{"name": "main", "image": image}]}}
    return ComponentSpec(name="One", type=kind, pod_template=template)


def values(one: ComponentSpec, **layers: Any) -> dict[str, Any]:
    found = environment(one, CONTEXT, layers.get("graph", ()), layers.get("own", ()), "main")
    assert len({item["name"] for item in found}) == len(found)
    return {item["name"]: item.get("value") for item in found}


def test_component_environment_overrides_graph_and_operator_environment() -> None:
    graph = [{"name": "DYN_SYSTEM_PORT", "value": "1"}, {"name": "DYN_COMPONENT", "value": "graph"}]
    own = [{"name": "DYN_SYSTEM_PORT", "value": "2"}]
    found = values(component("worker"), graph=graph, own=own)
    assert (found["DYN_SYSTEM_PORT"], found["DYN_COMPONENT"]) == ("2", "graph")


@pytest.mark.parametrize(("image", "enabled"), [("r:1.4.0", "false"), ("r:1.5.0", "true"), ("r:dev", "false")])
def test_engine_health_of_later_runtimes_is_checked_by_canary_requests(image: str, enabled: str) -> None:
    assert values(component("worker", image))["DYN_HEALTH_CHECK_ENABLED"] == enabled


def test_endpoint_picker_environment_names_the_graph_and_hides_gpus() -> None:
    found = values(component("epp"))
    assert (found["DYN_NAMESPACE_PREFIX"], found["NVIDIA_VISIBLE_DEVICES"]) == ("space-chat", "void")
    assert (found["USE_STREAMING"], found["DYN_ENFORCE_DISAGG"]) == ("true", "false")


def test_container_discovery_sets_the_container_name() -> None:
    found = values(component("worker", dynamo_kube_discovery_mode="container"))
    assert (found["CONTAINER_NAME"], found["DYN_KUBE_DISCOVERY_MODE"]) == ("main", "container")
    assert "CONTAINER_NAME" not in values(component("worker"))


def test_discovery_backend_is_read_from_an_annotation() -> None:
    assert values(component("worker", dynamo_discovery_backend="etcd"))["DYN_DISCOVERY_BACKEND"] == "etcd"


def test_frontend_sidecar_has_frontend_variables() -> None:
    own = [{"name": "DYN_ROUTER_MODE", "value": "direct"}]
    found = {one["name"]: one.get("value") for one in sidecar_environment(component("worker"), CONTEXT, own, "side")}
    assert (found["DYN_COMPONENT"], found["DYN_HTTP_PORT"], found["DYN_ROUTER_MODE"]) == ("frontend", "8000", "direct")
    assert found["DYN_NAMESPACE_PREFIX"] == "space-chat"
    assert "DYN_SYSTEM_PORT" not in found
