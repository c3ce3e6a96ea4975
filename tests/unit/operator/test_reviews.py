"""Responses to reviews: refusals with field causes, patches, and conversions."""

import base64
from typing import Any

import msgspec
import pytest

from dynamo.operator.reviews import MalformedReview, conversion_response, defaulting_response, validation_response

Object = dict[str, Any]


def graph(replicas: int | None = None, version: str = "v1beta1") -> Object:
    component = {"name": "a", "scalingAdapter": {}, **({} if replicas is None else {"replicas": replicas})}
    spec = {"components": [component]}
    return {
        "apiVersion": f"nvidia.com/{version}",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "g"},
        "spec": spec,
    }


def admission(value: Object | None, old: Object | None = None, user: str = "") -> Object:
    operation = "UPDATE" if old else "CREATE" if value else "DELETE"
    request = {"uid": "1", "operation": operation, "object": value, "oldObject": old, "userInfo": {"username": user}}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def validated(message: Object) -> Object:
    response: Object = validation_response(message, has_grove=None, operator_users=frozenset({"operator"}))["response"]
    return response


def test_refusal_has_field_causes() -> None:
    response = validated(admission(graph(-1)))
    assert (response["uid"], response["allowed"], response["status"]["code"]) == ("1", False, 422)
    assert response["status"]["details"]["causes"][0]["field"] == "spec.components[0].replicas"
    assert "spec.components[0].replicas: -1 must be at least 0" in response["status"]["message"]


def test_user_identity_determines_permission_to_scale() -> None:
    assert not validated(admission(graph(2), graph(1), "someone"))["allowed"]
    assert validated(admission(graph(2), graph(1), "operator"))["allowed"]


def test_deletion_is_allowed() -> None:
    assert validated(admission(None, None)) == {"uid": "1", "allowed": True}


def test_patch_carries_the_defaults() -> None:
    response = defaulting_response(admission(graph()), operator_version="1.6.1")["response"]
    patch = msgspec.json.decode(base64.b64decode(response["patch"]))
    assert [one["path"] for one in patch] == ["/metadata", "/spec"]
    assert "patch" not in defaulting_response(admission(graph(1), graph(1)), operator_version="1.6.1")["response"]


def test_conversion_is_complete_or_failed() -> None:
    def converted(*objects: Object) -> Object:
        request = {"uid": "1", "desiredAPIVersion": "nvidia.com/v1alpha1", "objects": list(objects)}
        response: Object = conversion_response({"kind": "ConversionReview", "request": request})["response"]
        return response

    response = converted(graph(1), graph(2))
    assert [one["spec"]["services"]["a"]["replicas"] for one in response["convertedObjects"]] == [1, 2]
    failed = converted(graph(1), graph(1, "v9"))
    assert failed["result"]["status"] == "Failure"
    assert "v9" in failed["result"]["message"]


@pytest.mark.parametrize("message", [None, [], {}, {"request": {}}, {"request": {"uid": 1}}])
def test_malformed_review_is_refused(message: Any) -> None:
    with pytest.raises(MalformedReview):
        conversion_response(message)
