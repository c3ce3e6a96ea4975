"""Result of the profiler: documents, names, and overrides in both versions."""

from typing import Any

import pytest
import yaml
from tests.unit.operator.reconcile.requests.request_cluster import CONFIG, GRAPH, RESULT, request_object

from dynamo.operator.conversion.convert import convert
from dynamo.operator.reconcile.requests.result import (
    NoGraph,
    final_objects,
    generated_objects,
    overridden,
    own_output,
    reported_error,
)
from dynamo.protocols.kubernetes.common import V1ALPHA1, V1BETA1, KubeObject, decode
from dynamo.protocols.kubernetes.v1beta1 import DynamoGraphDeploymentRequest


def override(version: str = V1BETA1, **fields: Any) -> KubeObject:
    return {"apiVersion": version, "kind": "DynamoGraphDeployment", **fields}


def final(text: str, dgd: KubeObject | None = None, **metadata: Any) -> KubeObject:
    spec = {} if dgd is None else {"overrides": {"dgd": dgd}}
    request = decode(DynamoGraphDeploymentRequest, request_object(spec, **metadata))
    return final_objects(request, request.spec, text).graph


def component(graph: KubeObject, name: str) -> KubeObject:
    found: KubeObject = next(one for one in graph["spec"]["components"] if one["name"] == name)
    return found


def worker(**pod: Any) -> KubeObject:
    """Return a graph whose decode component has a pod."""
    components = [
        one | ({"podTemplate": {"spec": pod}} if one["name"] == "decode" else {}) for one in GRAPH["spec"]["components"]
    ]
    return {**GRAPH, "spec": {"components": components}}


def test_config_maps_precede_the_graph() -> None:
    found = generated_objects(RESULT)
    assert (found.graph, found.others) == (GRAPH, (CONFIG,))


def test_graph_without_a_name_is_named_after_the_request() -> None:
    assert final(yaml.safe_dump({**GRAPH, "metadata": {}}))["metadata"]["name"] == "chat-dgd"


def test_metadata_identity_of_the_result_is_dropped() -> None:
    metadata = {"name": "g", "namespace": "elsewhere", "uid": "x", "ownerReferences": [{}], "annotations": {"a": "b"}}
    found = final(yaml.safe_dump({**GRAPH, "metadata": metadata, "status": {"state": "failed"}}))
    assert found["metadata"].keys() == {"name", "namespace", "labels", "annotations"}
    assert (found["metadata"]["namespace"], "status" in found) == ("space", False)


def test_v1alpha1_graph_in_the_result_is_converted() -> None:
    found = final(yaml.safe_dump(convert(GRAPH, V1ALPHA1)))
    assert (found["apiVersion"], component(found, "decode")["replicas"]) == (V1BETA1, 2)


def test_overrides_merge_components_and_containers_by_name() -> None:
    graph = worker(containers=[{"name": "main", "image": "a", "args": ["--x"]}])
    change = {
        "name": "decode",
        "replicas": 5,
        "podTemplate": {"spec": {"containers": [{"name": "main", "image": "b"}]}},
    }
    found = final(yaml.safe_dump(graph), override(spec={"components": [change]}))
    assert [one["name"] for one in found["spec"]["components"]] == ["Frontend", "decode"]
    decode_component = component(found, "decode")
    assert decode_component["replicas"] == 5
    assert decode_component["podTemplate"]["spec"]["containers"] == [{"name": "main", "image": "b", "args": ["--x"]}]


def test_overrides_add_tolerations_and_replace_other_lists() -> None:
    first, second = {"key": "a"}, {"key": "b"}
    graph = worker(tolerations=[first], containers=[{"name": "main", "args": ["--x"]}])
    pod = {"tolerations": [first, second], "containers": [{"name": "main", "args": ["--y"]}]}
    found = overridden(graph, override(spec={"components": [{"name": "decode", "podTemplate": {"spec": pod}}]}))
    spec = component(found, "decode")["podTemplate"]["spec"]
    assert (spec["tolerations"], spec["containers"][0]["args"]) == ([first, second], ["--y"])


def test_overrides_of_the_first_version_add_arguments_to_a_graph_of_the_second() -> None:
    graph = worker(containers=[{"name": "main", "args": ["--x"]}])
    services = {"decode": {"replicas": 3, "extraPodSpec": {"mainContainer": {"args": ["--y"]}}}}
    found = overridden(graph, override(V1ALPHA1, spec={"services": services}))
    assert (found["apiVersion"], component(found, "decode")["replicas"]) == (V1BETA1, 3)
    assert component(found, "decode")["podTemplate"]["spec"]["containers"][0]["args"] == ["--x", "--y"]


def test_null_removes_a_field() -> None:
    found = overridden(GRAPH, override(spec={"components": [{"name": "decode", "replicas": None}]}))
    assert "replicas" not in component(found, "decode")


def test_name_labels_and_annotations_are_overridden_and_no_other_metadata() -> None:
    metadata = {
        "name": "mine",
        "labels": {"team": "a", "dgdr.nvidia.com/name": "x"},
        "annotations": {"n": "v"},
        "uid": "x",
    }
    found = final(RESULT, override(metadata=metadata))["metadata"]
    assert (found["name"], found["labels"]["team"], found["annotations"]) == ("mine", "a", {"n": "v"})
    assert (found["labels"]["dgdr.nvidia.com/name"], "uid" in found) == ("chat", False)


@pytest.mark.parametrize(
    ("dgd", "text"),
    [
        (
            override(spec={"components": [{"name": "extra"}]}),
            r"components: extra: the generated graph has Frontend, decode",
        ),
        (override(V1ALPHA1, spec={"services": {"extra": {}}}), r"services: extra: the generated graph has"),
        (override("nvidia.com/v9"), r"spec.overrides.dgd: 'nvidia.com/v9 DynamoGraphDeployment'"),
        ({**override(), "kind": "Pod"}, r"spec.overrides.dgd: "),
        (
            override(spec={"components": [{"name": "decode", "replicas": "many"}]}),
            r"generated DynamoGraphDeployment: Expected",
        ),
    ],
)
def test_invalid_overrides_are_refused(dgd: KubeObject, text: str) -> None:
    with pytest.raises(NoGraph, match=text):
        final(RESULT, dgd)


def test_a_graph_of_an_unknown_version_is_refused() -> None:
    with pytest.raises(NoGraph, match="apiVersion 'x/v1' must be"):
        final(yaml.safe_dump({**GRAPH, "apiVersion": "x/v1"}))


def test_output_of_another_request_is_not_used() -> None:
    request = decode(DynamoGraphDeploymentRequest, request_object())
    output: KubeObject = {"metadata": {"ownerReferences": [{"uid": "other"}]}, "data": {"phase": "Done"}}
    assert own_output(request, output) == {}
    output["metadata"]["ownerReferences"].append({"uid": "uid-1"})
    assert own_output(request, output) == {"phase": "Done"}
    assert own_output(request, None) == own_output(request, {"metadata": {}}) == {}


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"profiler_status.yaml": "status: failed\nerror: 'no GPU'", "message": "m"}, "no GPU"),
        ({"profiler_status.yaml": "a: [", "message": "m"}, "m"),
        ({}, ""),
    ],
)
def test_profiler_error_takes_precedence_over_its_message(data: dict[str, str], error: str) -> None:
    assert reported_error(data) == error
