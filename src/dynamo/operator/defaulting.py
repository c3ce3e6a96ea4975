"""Defaults that the mutating webhook writes into new objects. Pure.

Defaults that do not depend on the object are in the schemas; the API server writes them.
"""

import copy
from typing import Any

import msgspec

from dynamo.operator.validation.facts import DISCOVERY_MODE, part
from dynamo.operator.validation.graph import ORIGIN_VERSION
from dynamo.operator.validation.views import components_of
from dynamo.protocols.kubernetes.common import V1ALPHA1, KubeObject

CONTAINER_MODE = "container"


def with_defaults(value: KubeObject, old: KubeObject | None, *, operator_version: str) -> KubeObject:
    """Return an object with the defaults of its kind; `old` is None at creation.

    A new graph records the version of the operator that creates it, so that a later operator keeps the choices of that
    version; replicas of each component default to 1 at creation. A graph with failover within a pod discovers containers.
    """
    if value.get("kind") not in {"DynamoGraphDeployment", "DynamoComponentDeployment"} or not isinstance(
        value.get("spec"), dict
    ):
        return value
    if part(value, "metadata").get("deletionTimestamp"):
        return value
    result = copy.deepcopy(value)
    metadata = result.setdefault("metadata", {})
    annotations: dict[str, str] = dict(metadata.get("annotations") or {})
    is_graph = value["kind"] == "DynamoGraphDeployment"
    if old is None:
        annotations.setdefault(ORIGIN_VERSION, operator_version)
    if is_graph and old is None:
        is_alpha = value.get("apiVersion") == V1ALPHA1
        if any(one.failover_mode == "IntraPod" for one in components_of(result["spec"], is_alpha=is_alpha)):
            annotations.setdefault(DISCOVERY_MODE, CONTAINER_MODE)
        _set_replicas(result["spec"], is_alpha=is_alpha)
    elif old is None:
        result["spec"].setdefault("replicas", 1)
    if annotations:
        metadata["annotations"] = annotations
    return result


def _set_replicas(spec: KubeObject, *, is_alpha: bool) -> None:
    if is_alpha:
        services = part(spec, "services")
        for name in services:
            if services[name] is None:
                services[name] = {}
        items: list[Any] = list(services.values())
    else:
        items = list(spec.get("components") or ())
    for item in items:
        if isinstance(item, dict):
            item.setdefault("replicas", 1)


def json_patch(before: KubeObject, after: KubeObject) -> bytes:
    """Return the JSON patch from an object to the one with defaults: whole top-level fields that differ."""
    changed = [
        {"op": "replace" if name in before else "add", "path": f"/{name}", "value": after[name]}
        for name in after
        if before.get(name) != after[name]
    ]
    return msgspec.json.encode(changed)
