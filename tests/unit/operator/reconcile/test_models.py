"""DynamoModels: pods of the base model, readiness of adapters, conditions and events."""

from typing import Any

import pytest

from dynamo.operator.reconcile.models import RETRY_S, ServingPod, covered_pods, model_plan, serving_pods
from dynamo.operator.reconcile.names import base_model_hash
from dynamo.protocols.kubernetes.common import decode
from dynamo.protocols.kubernetes.models import DynamoModel

NOW = "2026-01-01T00:00:00Z"


def model(kind: str = "lora", **status: Any) -> DynamoModel:
    spec = {"modelName": "tuned", "baseModelName": "org/base", "modelType": kind}
    if kind == "lora":
        spec["source"] = {"uri": "s3://b/k"}  # type: ignore[assignment]
    value: dict[str, Any] = {"metadata": {"name": "m", "generation": 2}, "spec": spec}
    return decode(DynamoModel, value | ({"status": status} if status else {}))


def endpoint(name: str, address: str = "10.0.0.1", **more: Any) -> dict[str, Any]:
    return {"addresses": [address], "targetRef": {"kind": "Pod", "name": name, "uid": f"u-{name}"}, **more}


def slice_of(*endpoints: dict[str, Any], service: str = "decode") -> dict[str, Any]:
    return {"metadata": {"labels": {"kubernetes.io/service-name": service}}, "endpoints": list(endpoints)}


def conditions(status: Any) -> dict[str, tuple[str, str]]:
    return {one["type"]: (one["status"], one["reason"]) for one in status["conditions"]}


def test_each_pod_is_listed_once_even_if_it_is_not_ready() -> None:
    slices = [
        slice_of(endpoint("b", "10.0.0.2"), endpoint("a", conditions={"ready": False})),
        slice_of(endpoint("a"), service="other"),
        slice_of({"addresses": ["10.0.0.9"]}, {**endpoint("x"), "addresses": []}),
    ]
    assert serving_pods(slices) == [
        ServingPod("http://10.0.0.1:9090", "a", "u-a"),
        ServingPod("http://10.0.0.2:9090", "b", "u-b"),
    ]


def test_ipv6_addresses_are_in_brackets() -> None:
    assert serving_pods([slice_of(endpoint("a", "fd00::1"))])[0].address == "http://[fd00::1]:9090"


def test_hash_of_a_base_model_is_the_first_digits_of_sha_256() -> None:
    assert base_model_hash("Qwen/Qwen3-0.6B") == "fb68f5a6"


def test_adapter_is_ready_when_every_pod_loaded_it() -> None:
    plan = model_plan(model(), [slice_of(endpoint("a"), endpoint("b"))], {"u-a": None, "u-b": None}, NOW)
    assert plan.status is not None
    assert conditions(plan.status) == {
        "ServicesFound": ("True", "ServicesFound"),
        "EndpointsReady": ("True", "AllEndpointsReady"),
    }
    assert (plan.status["readyEndpoints"], plan.status["totalEndpoints"], plan.requeue_s) == (2, 2, None)
    assert plan.status["endpoints"][0] == {"address": "http://10.0.0.1:9090", "podName": "a", "ready": True}


def test_pod_with_a_failed_adapter_load_is_named_and_retried() -> None:
    plan = model_plan(model(), [slice_of(endpoint("a"), endpoint("b"))], {"u-a": None, "u-b": "500: no"}, NOW)
    assert plan.status is not None
    assert conditions(plan.status)["EndpointsReady"] == ("False", "NotReady")
    assert plan.requeue_s == RETRY_S
    assert ("PartialEndpointFailure", "b: 500: no") in [(event.reason, event.message) for event in plan.events]


def test_base_model_endpoints_are_discovered_but_never_ready() -> None:
    plan = model_plan(model("base"), [slice_of(endpoint("a"))], {}, NOW)
    assert plan.status is not None
    assert conditions(plan.status)["EndpointsReady"] == ("True", "EndpointsDiscovered")
    assert (plan.status["readyEndpoints"], plan.status["totalEndpoints"], plan.requeue_s) == (0, 1, None)


def test_adapter_model_without_pods_is_not_retried() -> None:
    plan = model_plan(model(), [], {}, NOW)
    assert plan.status is not None
    assert conditions(plan.status) == {
        "ServicesFound": ("False", "NoServicesFound"),
        "EndpointsReady": ("False", "NoEndpoints"),
    }
    assert plan.requeue_s is None


def test_events_report_changes_only() -> None:
    slices = [slice_of(endpoint("a"))]
    first = model_plan(model(), slices, {"u-a": None}, NOW)
    assert [event.reason for event in first.events] == ["AllEndpointsReady"]
    assert first.status is not None
    again = model_plan(model(**first.status), slices, {"u-a": None}, "later")
    assert (again.status, list(again.events)) == (first.status, [])


OLD = "500: lora management not available"


def prefill(kind: str = "prefill", module: str = "vllm", graph: str = "g", ready: str = "True") -> dict[str, Any]:
    labels = {"nvidia.com/dynamo-component-type": kind, "nvidia.com/dynamo-graph-deployment-name": graph}
    main = {"name": "main", "command": ["python3", "-m", f"dynamo.{module}"]}
    conditions = [{"type": "Ready", "status": ready}]
    return {"metadata": {"labels": labels}, "spec": {"containers": [main]}, "status": {"conditions": conditions}}


@pytest.mark.parametrize(
    ("old", "error"),
    [
        (prefill("decode"), OLD),
        (prefill(module="sglang"), OLD),
        (prefill(graph="other"), OLD),
        (prefill(ready="False"), OLD),
        (prefill(), "500: out of memory"),
        (prefill(), "404: lora management not available"),
    ],
)
def test_other_pods_are_not_covered(old: dict[str, Any], error: str) -> None:
    assert covered_pods({"old": error, "new": None}, {"old": old, "new": prefill()}) == frozenset()
    assert covered_pods({"old": OLD, "new": None}, {"old": prefill(), "new": prefill()}) == {"old"}
    assert covered_pods({"old": OLD, "new": "failed"}, {"old": prefill(), "new": prefill()}) == frozenset()


def test_model_with_covered_pods_is_complete() -> None:
    slices = [slice_of(endpoint("a"), endpoint("b"))]
    plan = model_plan(model(), slices, {"u-a": None, "u-b": OLD}, NOW, {"u-b"})
    assert plan.status is not None
    assert plan.requeue_s is None
    assert conditions(plan.status)["EndpointsReady"] == ("True", "AllEndpointsReady")
    assert (plan.status["readyEndpoints"], plan.status["loraFallbackCoveredEndpoints"]) == (1, 1)
