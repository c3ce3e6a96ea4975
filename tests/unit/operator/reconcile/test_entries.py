"""Ingresses and VirtualServices of graphs."""

from typing import Any

import pytest
from tests.unit.operator.reconcile.pure_cluster import NO_GROVE, PureCluster

from dynamo.operator.conversion.convert import convert
from dynamo.operator.reconcile.entries import entry_of, host_of
from dynamo.operator.reconcile.names import GraphContext, OperatorSettings
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.protocols.kubernetes.common import V1BETA1, ObjectMeta
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec, DynamoGraphDeployment

INGRESS = {
    "enabled": True,
    "host": "chat",
    "hostSuffix": "example.com",
    "ingressControllerClassName": "nginx",
    "tls": {"secretName": "cert"},
    "annotations": {"a": "b"},
}


def converted(ingress: dict[str, Any]) -> dict[str, Any]:
    """Return a v1alpha1 graph with an entry, as v1beta1."""
    service = {"componentType": "frontend", "replicas": 1, "ingress": ingress}
    value = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "chat", "namespace": "space", "generation": 1},
        "spec": {"services": {"Frontend": service}},
    }
    return convert(value, V1BETA1)


def annotations_of(ingress: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = converted(ingress)["metadata"]["annotations"]
    return found


def cluster_of(ingress: dict[str, Any], facts: ClusterFacts = NO_GROVE) -> PureCluster:
    value = converted(ingress)
    return PureCluster({"metadata": value["metadata"], "spec": value["spec"]}, facts)


def test_enabled_ingress_routes_to_the_component_service() -> None:
    cluster = cluster_of(INGRESS)
    cluster.settle()
    [made] = cluster.of_kind("Ingress")
    assert made["metadata"]["annotations"] == {"a": "b"}
    backend = {"service": {"name": "chat-frontend", "port": {"number": 8000}}}
    assert made["spec"] == {
        "rules": [
            {
                "host": "chat.example.com",
                "http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]},
            }
        ],
        "ingressClassName": "nginx",
        "tls": [{"hosts": ["chat.example.com"], "secretName": "cert"}],
    }
    assert "chat-frontend" in [one["metadata"]["name"] for one in cluster.of_kind("Service")]


def test_disabled_ingress_is_deleted() -> None:
    cluster = cluster_of(INGRESS)
    cluster.settle()
    cluster.graph["metadata"]["annotations"] |= annotations_of({**INGRESS, "enabled": False})
    cluster.settle()
    assert cluster.of_kind("Ingress") == []


def test_virtual_service_replaces_an_ingress_without_a_class() -> None:
    wanted = {"enabled": True, "host": "chat", "useVirtualService": True, "virtualServiceGateway": "istio/gateway"}
    cluster = cluster_of(wanted)
    cluster.settle()
    assert cluster.of_kind("Ingress") == []
    [made] = cluster.of_kind("VirtualService")
    assert made["spec"] == {
        "hosts": ["chat.local"],
        "gateways": ["istio/gateway"],
        "http": [
            {
                "match": [{"uri": {"prefix": "/"}}],
                "route": [{"destination": {"host": "chat-frontend", "port": {"number": 8000}}}],
            }
        ],
    }
    cluster.graph["metadata"]["annotations"] |= annotations_of({**wanted, "ingressControllerClassName": "nginx"})
    cluster.settle()
    assert len(cluster.of_kind("Ingress")) == len(cluster.of_kind("VirtualService")) == 1
    cluster.graph["metadata"]["annotations"] |= annotations_of(INGRESS)
    cluster.settle()
    assert len(cluster.of_kind("Ingress")) == 1
    assert cluster.of_kind("VirtualService") == []


@pytest.mark.parametrize(
    ("more", "facts", "message"),
    [
        ({"virtualServiceGateway": "gateway"}, ClusterFacts(), "requires Istio"),
        ({}, ClusterFacts(has_virtual_services=True), "virtualServiceGateway: is required"),
    ],
)
def test_virtual_service_that_cannot_be_created_is_an_event(
    more: dict[str, str], facts: ClusterFacts, message: str
) -> None:
    cluster = cluster_of({"enabled": True, "host": "chat", "useVirtualService": True, **more}, facts)
    [event] = [one for one in cluster.plan_graph().events if one.reason == "NotSupported"]
    assert message in event.message
    cluster.settle()
    assert cluster.of_kind("VirtualService") == []


def test_frontend_uses_the_ingress_of_the_settings_unless_annotated() -> None:
    settings = OperatorSettings(
        ingress_class="nginx", ingress_host_suffix="example.com", ingress_tls_secret="cert", virtual_service_gateway="g"
    )
    context = GraphContext(name="chat", namespace="space", settings=settings, worker_hash="")
    graph = DynamoGraphDeployment(metadata=ObjectMeta(name="chat"))
    frontend, worker = ComponentSpec(name="Frontend", type="frontend"), ComponentSpec(name="decode", type="decode")
    found = entry_of(graph, frontend, context)
    assert found == {
        "enabled": True,
        "host": "chat",
        "ingressControllerClassName": "nginx",
        "virtualServiceGateway": "g",
        "useVirtualService": True,
        "hostSuffix": "example.com",
        "tls": {"secretName": "cert"},
    }
    assert entry_of(graph, worker, context) == {}
    graph.metadata.annotations = annotations_of({"enabled": False})
    assert entry_of(graph, frontend, context) == {"enabled": False}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"host": "a"}, "a.local"),
        ({"host": "a", "hostPrefix": "p-", "hostSuffix": "x.org"}, "p-a.x.org"),
        ({"host": "a.x.org", "hostSuffix": ""}, "a.x.org"),
    ],
)
def test_host_has_prefix_and_suffix(given: dict[str, Any], expected: str) -> None:
    assert host_of(given) == expected


def test_service_names_replace_dots_of_the_graph_name() -> None:
    value = converted(INGRESS)
    value["metadata"]["name"] = "qwen3-0.6b"
    cluster = PureCluster({"metadata": value["metadata"], "spec": value["spec"]})
    cluster.settle()
    [entry] = cluster.of_kind("Ingress")
    backend = entry["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]["name"]
    assert backend in [one["metadata"]["name"] for one in cluster.of_kind("Service")] == ["qwen3-0-6b-frontend"]
    assert cluster.of_kind("Deployment")[0]["metadata"]["name"] == "qwen3-0.6b-frontend"
