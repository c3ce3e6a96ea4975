"""Defaults of new graphs and components, and the patch that carries them."""

from typing import Any

import msgspec

from dynamo.operator.defaulting import json_patch, with_defaults
from dynamo.operator.validation.facts import DISCOVERY_MODE
from dynamo.operator.validation.graph import ORIGIN_VERSION

Object = dict[str, Any]


def value(version: str, spec: Object, kind: str = "DynamoGraphDeployment") -> Object:
    return {"apiVersion": f"nvidia.com/{version}", "kind": kind, "metadata": {"name": "g"}, "spec": spec}


def test_new_graph_gets_replicas_and_origin_version() -> None:
    beta = with_defaults(
        value("v1beta1", {"components": [{"name": "a"}, {"name": "b", "replicas": 0}]}), None, operator_version="1.6.1"
    )
    assert [one["replicas"] for one in beta["spec"]["components"]] == [1, 0]
    assert beta["metadata"]["annotations"] == {ORIGIN_VERSION: "1.6.1"}
    alpha = with_defaults(value("v1alpha1", {"services": {"a": {}}}), None, operator_version="1.6.1")
    assert alpha["spec"]["services"]["a"] == {"replicas": 1}
    component = with_defaults(value("v1beta1", {}, "DynamoComponentDeployment"), None, operator_version="1.6.1")
    assert component["spec"] == {"replicas": 1}


def test_graph_with_failover_in_a_pod_discovers_containers() -> None:
    spec = {"services": {"a": {"failover": {"enabled": True}}}}
    found = with_defaults(value("v1alpha1", spec), None, operator_version="1.6.1")
    assert found["metadata"]["annotations"][DISCOVERY_MODE] == "container"


def test_update_other_kinds_and_deletion_get_no_defaults() -> None:
    graph = value("v1beta1", {"components": [{"name": "a"}]})
    assert with_defaults(graph, graph, operator_version="1.6.1") == graph
    model = value("v1alpha1", {}, "DynamoModel")
    assert with_defaults(model, None, operator_version="1.6.1") == model
    graph["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert with_defaults(graph, None, operator_version="1.6.1") == graph


def test_patch_has_the_changed_fields() -> None:
    before = value("v1beta1", {"components": [{"name": "a"}]})
    after = with_defaults(before, None, operator_version="1.6.1")
    patch = msgspec.json.decode(json_patch(before, after))
    assert [(one["op"], one["path"]) for one in patch] == [("replace", "/metadata"), ("replace", "/spec")]
    assert json_patch(after, after) == b"[]"
