"""Claims and Ingresses of v1alpha1 graphs."""

from typing import Any

import pytest
from tests.unit.operator.reconcile.pure_cluster import PureCluster

from dynamo.operator.conversion.convert import convert
from dynamo.operator.reconcile.preserved import ANNOTATION, host_of, preserved_spec
from dynamo.protocols.kubernetes.common import V1BETA1, ObjectMeta
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeployment

CLAIM = {"name": "cache", "create": True, "size": "10Gi", "storageClass": "fast", "volumeAccessMode": "ReadWriteMany"}
INGRESS = {
    "enabled": True,
    "host": "chat",
    "hostSuffix": "example.com",
    "ingressControllerClassName": "nginx",
    "tls": {"secretName": "cert"},
    "annotations": {"a": "b"},
}


def cluster_of(ingress: dict[str, Any] | None = None) -> PureCluster:
    service = {"componentType": "frontend", "replicas": 1} | ({"ingress": ingress} if ingress else {})
    value = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "chat", "namespace": "space", "generation": 1},
        "spec": {"pvcs": [CLAIM, {"name": "other"}], "services": {"Frontend": service}},
    }
    converted = convert(value, V1BETA1)
    return PureCluster({"metadata": converted["metadata"], "spec": converted["spec"]})


def test_claims_that_a_graph_creates_are_made_and_others_are_not() -> None:
    cluster = cluster_of()
    cluster.settle()
    [claim] = cluster.of_kind("PersistentVolumeClaim")
    assert claim["metadata"]["name"] == "cache"
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "10Gi"}},
        "storageClassName": "fast",
    }


def test_a_claim_is_not_changed_after_its_creation() -> None:
    cluster = cluster_of()
    cluster.settle()
    cluster.of_kind("PersistentVolumeClaim")[0]["spec"]["volumeName"] = "bound"
    cluster.settle()
    assert cluster.of_kind("PersistentVolumeClaim")[0]["spec"]["volumeName"] == "bound"


def test_an_enabled_ingress_leads_to_the_service_of_the_component() -> None:
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


def test_an_ingress_that_is_disabled_is_deleted() -> None:
    cluster = cluster_of(INGRESS)
    cluster.settle()
    cluster.graph["metadata"]["annotations"] = cluster_of({**INGRESS, "enabled": False}).graph["metadata"][
        "annotations"
    ]
    cluster.settle()
    assert cluster.of_kind("Ingress") == []


def test_a_virtual_service_is_reported_as_not_supported() -> None:
    cluster = cluster_of({**INGRESS, "useVirtualService": True})
    cluster.settle()
    assert cluster.of_kind("Ingress") == []
    assert "NotSupported" in cluster.events


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


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_an_edited_annotation_is_ignored(text: str) -> None:
    graph = DynamoGraphDeployment(metadata=ObjectMeta(name="g", annotations={ANNOTATION: text}))
    assert preserved_spec(graph) == {}
