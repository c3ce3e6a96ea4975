"""Selection of a graph's objects, and their form without secrets."""

import json
from typing import Any

from dynamo.ops.troubleshoot.cluster import absence, log_requests, objects_file, of_graph

LABEL = "nvidia.com/dynamo-graph-deployment-name"


def named(name: str, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels}}


def test_objects_of_a_graph_are_selected_by_label_and_by_name() -> None:
    pods = [named("g-frontend-1"), named("x", **{LABEL: "g"}), named("other"), named("dl-1", **{"job-name": "dl"})]
    assert [one["metadata"]["name"] for one in of_graph("pods.json", pods, "g")] == ["g-frontend-1", "x", "dl-1"]
    events = [{"metadata": {"name": "e1"}, "involvedObject": {"name": name}} for name in ("g", "g-frontend-1", "gx")]
    assert len(of_graph("events.json", events, "g")) == 2
    assert of_graph("events.json", events, None) == events
    assert of_graph("claims.json", [named("c")], "g") == [named("c")]


def test_secrets_and_managed_fields_are_removed() -> None:
    value = {
        "metadata": {
            "name": "p",
            "managedFields": [1],
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "x", "a": "b"},
        },
        "spec": {"containers": [{"env": [{"name": "HF_TOKEN", "value": "s3cret"}, {"name": "A", "value": "b"}]}]},
    }
    (one,) = json.loads(objects_file([value], "Pod"))
    assert one["kind"] == "Pod"
    assert one["metadata"] == {"name": "p", "annotations": {"a": "b"}}
    assert one["spec"]["containers"][0]["env"] == [
        {"name": "HF_TOKEN", "value": "[redacted]"},
        {"name": "A", "value": "b"},
    ]


def test_logs_of_pods_that_are_not_ready_come_first_with_those_of_previous_runs() -> None:
    ready = {
        "metadata": {"name": "a"},
        "spec": {"initContainers": [{"name": "i"}], "containers": [{"name": "main"}]},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    crashed = {
        "metadata": {"name": "b"},
        "spec": {"containers": [{"name": "main"}]},
        "status": {"containerStatuses": [{"name": "main", "restartCount": 2}]},
    }
    assert [one.file for one in log_requests([ready, crashed])] == [
        "pods/b/main.log",
        "pods/b/main-previous.log",
        "pods/a/i.log",
        "pods/a/main.log",
    ]


def test_graph_that_does_not_exist_is_named() -> None:
    assert absence({"graphs.json": json.dumps([named("other")])}, "g", "ns") == (
        "g: no DynamoGraphDeployment of this name in namespace ns"
    )
    assert absence({"graphs.json": json.dumps([named("g")])}, "g", "ns") == ""
    assert absence({}, None, "ns") == ""
