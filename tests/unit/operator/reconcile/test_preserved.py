"""Claims of v1alpha1 graphs."""

import pytest
from tests.unit.operator.reconcile.pure_cluster import PureCluster

from dynamo.operator.conversion.convert import convert
from dynamo.operator.reconcile.preserved import ANNOTATION, preserved_spec
from dynamo.protocols.kubernetes.common import V1BETA1, ObjectMeta
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeployment

CLAIM = {"name": "cache", "create": True, "size": "10Gi", "storageClass": "fast", "volumeAccessMode": "ReadWriteMany"}


def cluster_of() -> PureCluster:
    value = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "chat", "namespace": "space", "generation": 1},
        "spec": {
            "pvcs": [CLAIM, {"name": "other"}],
            "services": {"Frontend": {"componentType": "frontend", "replicas": 1}},
        },
    }
    converted = convert(value, V1BETA1)
    return PureCluster({"metadata": converted["metadata"], "spec": converted["spec"]})


def test_claims_marked_for_creation_are_created() -> None:
    cluster = cluster_of()
    cluster.settle()
    [claim] = cluster.of_kind("PersistentVolumeClaim")
    assert claim["metadata"]["name"] == "cache"
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "10Gi"}},
        "storageClassName": "fast",
    }


def test_existing_claim_is_not_changed() -> None:
    cluster = cluster_of()
    cluster.settle()
    cluster.of_kind("PersistentVolumeClaim")[0]["spec"]["volumeName"] = "bound"
    cluster.settle()
    assert cluster.of_kind("PersistentVolumeClaim")[0]["spec"]["volumeName"] == "bound"


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_malformed_preserved_annotation_is_ignored(text: str) -> None:
    graph = DynamoGraphDeployment(metadata=ObjectMeta(name="g", annotations={ANNOTATION: text}))
    assert preserved_spec(graph) == {}
