"""Fields that only v1alpha1 has: conversion keeps its specification in an annotation of the v1beta1 object."""

from collections.abc import Iterator
from typing import Any

import msgspec

from dynamo.operator.reconcile.names import GRAPH, PREFIX, GraphContext
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec, DynamoGraphDeployment

ANNOTATION = f"{PREFIX}dgd-spec"
DEFAULT_ACCESS = "ReadWriteOnce"


def preserved_spec(graph: DynamoGraphDeployment) -> KubeObject:
    """Return the v1alpha1 specification of a graph; empty if there is none, or if it was edited into something else."""
    try:
        found = msgspec.json.decode(graph.metadata.annotations.get(ANNOTATION) or "{}")
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def preserved_service(graph: DynamoGraphDeployment, component: ComponentSpec) -> KubeObject:
    """Return the v1alpha1 service of a component; empty if there is none."""
    services = preserved_spec(graph).get("services")
    service: Any = services.get(component.name) if isinstance(services, dict) else None
    return service if isinstance(service, dict) else {}


def claims(graph: DynamoGraphDeployment, context: GraphContext) -> Iterator[KubeObject]:
    """Yield the claims that a graph creates; those without `create` exist already."""
    for claim in _dicts(preserved_spec(graph).get("pvcs")):
        if not claim.get("create") or not claim.get("name"):
            continue
        spec: KubeObject = {
            "accessModes": [claim.get("volumeAccessMode") or DEFAULT_ACCESS],
            "resources": {"requests": {"storage": str(claim.get("size") or "")}},
        }
        if claim.get("storageClass"):
            spec["storageClassName"] = claim["storageClass"]
        metadata = {"name": claim["name"], "namespace": context.namespace, "labels": {GRAPH: context.name}}
        yield {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def _dicts(value: object) -> list[KubeObject]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
