"""Built-in kinds: schemas from the lightkube models, and the rules of metadata that depend on a kind."""

import datetime as dt
import functools
import importlib
import types
import typing
from typing import Any

import msgspec
from tests.cluster.kubernetes.errors import ApiError, Object
from tests.cluster.kubernetes.metadata import METADATA
from tests.cluster.kubernetes.resources import Resource
from tests.cluster.kubernetes.schema import Schema

MODULES = {
    "v1": "core_v1", "events.k8s.io/v1": "events_v1", "rbac.authorization.k8s.io/v1": "rbac_v1",
    "apiextensions.k8s.io/v1": "apiextensions_v1", "admissionregistration.k8s.io/v1": "admissionregistration_v1",
    "networking.k8s.io/v1": "networking_v1", "storage.k8s.io/v1": "storage_v1",
    "discovery.k8s.io/v1": "discovery_v1", "coordination.k8s.io/v1": "coordination_v1",
    "scheduling.k8s.io/v1": "scheduling_v1", "resource.k8s.io/v1": "resource_v1",
}  # fmt: skip
QUANTITIES = {"limits", "requests", "capacity", "allocatable", "hard", "used", "overhead", "sizeLimit", "divisor",
              "averageValue", "value"}  # fmt: skip
MAP_KEYS = {
    "allocatedResourcesStatus": ["name"], "claims": ["name"], "conditions": ["type"], "containers": ["name"],
    "env": ["name"], "ephemeralContainers": ["name"], "hostAliases": ["ip"], "imagePullSecrets": ["name"],
    "initContainers": ["name"], "matchConditions": ["name"], "ownerReferences": ["uid"], "podIPs": ["ip"],
    "resourceClaims": ["name"], "schedulingGates": ["name"], "secrets": ["name"], "volumeMounts": ["mountPath"],
    "topologySpreadConstraints": ["topologyKey", "whenUnsatisfiable"], "volumeDevices": ["devicePath"],
    "volumes": ["name"], "webhooks": ["name"],
}  # fmt: skip
PORT_KEYS = {"Container": ["containerPort", "protocol"], "EphemeralContainer": ["containerPort", "protocol"],
             "ServiceSpec": ["port", "protocol"]}  # fmt: skip
NOT_KEYED = {("JobStatus", "conditions"), ("ServiceAccount", "imagePullSecrets")}
SETS = {("Endpoint", "addresses"), ("ObjectMeta", "finalizers"), ("NodeSpec", "podCIDRs")}
ATOMIC = {
    "CrossVersionObjectReference", "ConfigMapKeySelector", "EndpointAddress", "EndpointPort", "LabelSelector",
    "LocalObjectReference", "NodeSelector", "NodeSelectorTerm", "ObjectFieldSelector", "ObjectReference", "OwnerReference",
    "ResourceFieldSelector", "RoleRef", "ScopeSelector", "SecretKeySelector", "SecretReference", "ServiceBackendPort",
    "Subject", "TopologySelectorTerm", "TypedLocalObjectReference",
}  # fmt: skip
ATOMIC_FIELDS = {("PodSpec", "nodeSelector"), ("ServiceSpec", "selector"), ("ReplicationControllerSpec", "selector")}
SCALARS = {str: "string", int: "integer", bool: "boolean", float: "number", dt.datetime: "string"}
MAX_DEPTH = 14
"""Levels of a recursive model (JSONSchemaProps) that get a schema; deeper ones are kept as they are."""


@functools.cache
def schema_of(api_version: str, kind: str) -> Schema:
    """Return the schema of a built-in kind."""
    module = MODULES.get(api_version) or api_version.replace("/", "_")
    model = getattr(importlib.import_module(f"lightkube.models.{module}"), kind)
    raw = {**_structure(model, 0)}
    raw["required"] = [name for name in raw["required"] if name != "metadata"]
    raw["properties"] = {name: one for name, one in raw["properties"].items() if name != "metadata"}
    schema = Schema(raw)
    schema.properties["metadata"] = METADATA
    return schema


@functools.cache
def _structure(model: Any, depth: int) -> Object:
    if model.__name__ == "JSONSchemaProps" or depth > MAX_DEPTH:
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    fields = msgspec.structs.fields(model)
    raw: Object = {
        "type": "object",
        "properties": {one.encode_name: _field(model.__name__, one.encode_name, one.type, depth) for one in fields},
        "required": [one.encode_name for one in fields if one.required],
    }
    if model.__name__ in ATOMIC:
        raw["x-kubernetes-map-type"] = "atomic"
    return raw


def _field(model: str, name: str, kind: Any, depth: int) -> Object:
    if typing.get_origin(kind) in {typing.Union, types.UnionType}:
        chosen = [one for one in typing.get_args(kind) if one is not type(None)]
        if len(chosen) > 1:
            return {"x-kubernetes-int-or-string": True}
        kind = chosen[0]
    if typing.get_origin(kind) is list:
        raw: Object = {"type": "array", "items": _field(model, "", typing.get_args(kind)[0], depth), "nullable": True}
        keys = PORT_KEYS.get(model) if name == "ports" else MAP_KEYS.get(name)
        if keys and raw["items"].get("properties") and (model, name) not in NOT_KEYED:
            raw |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": keys}
            if "protocol" in keys:
                properties = {**raw["items"]["properties"], "protocol": {"type": "string", "default": "TCP"}}
                raw["items"] = {**raw["items"], "properties": properties}
        return {**raw, "x-kubernetes-list-type": "set"} if (model, name) in SETS else raw
    if kind is dict:
        values: Object = (
            {"x-kubernetes-int-or-string": True} if name in QUANTITIES else {"type": "string", "nullable": True}
        )
        atomic = {"x-kubernetes-map-type": "atomic"} if (model, name) in ATOMIC_FIELDS else {}
        return {"type": "object", "additionalProperties": values, "nullable": True, **atomic}
    if name in QUANTITIES and kind is str and model != "EnvVar" and not model.endswith("Toleration"):
        return {"x-kubernetes-int-or-string": True}
    if kind in SCALARS:
        return {"type": SCALARS[kind], "nullable": True}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {**_structure(kind, depth + 1), "nullable": True}
    return {"x-kubernetes-preserve-unknown-fields": True}


def check_types(resource: Resource, item: Object) -> None:
    """Raise 400 where a field of a built-in kind has the wrong JSON type: such an object is not decoded at all."""
    if resource.custom:
        return
    for one in resource.schema.validate(item, ""):
        if one["reason"] == "FieldValueTypeInvalid":
            head = f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}'
            raise ApiError(400, f"{head}: json: cannot unmarshal field {one['field']}: {one['message']}")


def grace_period(resource: Resource, live: Object, given: int | None) -> int:
    """Return the seconds for which a deleted object stays: those of a pod that runs on a node."""
    if resource.key != ("", "pods"):
        return 0
    spec, phase = live.get("spec") or {}, (live.get("status") or {}).get("phase")
    if not spec.get("nodeName") or phase in {"Succeeded", "Failed"}:
        return 0
    return given if given is not None else spec.get("terminationGracePeriodSeconds", 30)
