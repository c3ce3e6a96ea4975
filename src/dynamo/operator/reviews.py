"""Responses to the API server's reviews: validation, defaults and conversion. Pure."""

import base64
from collections.abc import Mapping
from typing import Any

from dynamo.operator.conversion.convert import ConversionFailed, convert
from dynamo.operator.defaulting import json_patch, with_defaults
from dynamo.operator.validation.admission import review
from dynamo.operator.validation.facts import AdmissionFacts, Findings, part
from dynamo.protocols.kubernetes.common import KubeObject

INVALID = 422


class MalformedReview(ValueError):
    """A request body is not a review."""


def accepting_response(message: Any) -> KubeObject:
    """Return the response that accepts an object as it is. Raise `MalformedReview`."""
    _request(message)
    return _answer(message, {"allowed": True})


def validation_response(message: Any, *, has_grove: bool | None, operator_users: frozenset[str]) -> KubeObject:
    """Return the response to an AdmissionReview of the validating webhook. Raise `MalformedReview`."""
    request = _request(message)
    if not isinstance(request.get("object"), dict):
        return _answer(message, {"allowed": True})  # A deletion has no object.
    facts = AdmissionFacts(
        has_grove=has_grove,
        user=str(part(request, "userInfo").get("username") or ""),
        operator_users=operator_users,
    )
    old = request.get("oldObject") if request.get("operation") == "UPDATE" else None
    found = review(request["object"], old, facts)
    response: KubeObject = {"allowed": not found.problems}
    if found.warnings:
        response["warnings"] = found.warnings
    if found.problems:
        response["status"] = _invalid(request["object"], found)
    return _answer(message, response)


def _invalid(value: KubeObject, found: Findings) -> KubeObject:
    name = str(part(value, "metadata").get("name") or "")
    causes = [{"reason": "FieldValueInvalid", "field": one.path, "message": one.reason} for one in found.problems]
    return {
        "code": INVALID,
        "reason": "Invalid",
        "message": f'{value.get("kind")} "{name}" is invalid: ' + "; ".join(map(str, found.problems)),
        "details": {"name": name, "kind": str(value.get("kind") or ""), "causes": causes},
    }


def defaulting_response(message: Any, *, operator_version: str) -> KubeObject:
    """Return the response to an AdmissionReview of the mutating webhook. Raise `MalformedReview`."""
    request = _request(message)
    value = request.get("object")
    response: KubeObject = {"allowed": True}
    if isinstance(value, dict):
        old = request.get("oldObject") if request.get("operation") == "UPDATE" else None
        after = with_defaults(value, old, operator_version=operator_version)
        if after != value:
            patch = base64.b64encode(json_patch(value, after)).decode()
            response |= {"patchType": "JSONPatch", "patch": patch}
    return _answer(message, response)


def conversion_response(message: Any) -> KubeObject:
    """Return the response to a ConversionReview: all objects, or the reason why one failed. Raise `MalformedReview`."""
    request = _request(message)
    desired = str(request.get("desiredAPIVersion") or "")
    try:
        converted = [convert(one, desired) for one in request.get("objects") or ()]
    except ConversionFailed as error:
        return _answer(message, {"result": {"status": "Failure", "message": str(error)}})
    return _answer(message, {"result": {"status": "Success"}, "convertedObjects": converted})


def _request(message: Any) -> Mapping[str, Any]:
    request = message.get("request") if isinstance(message, dict) else None
    if not isinstance(request, dict) or not isinstance(request.get("uid"), str):
        raise MalformedReview("expected a review with request.uid")
    return request


def _answer(message: KubeObject, response: KubeObject) -> KubeObject:
    return {
        "apiVersion": message.get("apiVersion"),
        "kind": message.get("kind"),
        "response": {"uid": message["request"]["uid"], **response},
    }
