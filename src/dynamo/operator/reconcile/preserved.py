"""Objects of fields that only v1alpha1 has: claims and Ingresses.

Conversion keeps a v1alpha1 graph's specification in an annotation of the v1beta1 object.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from dynamo.operator.reconcile.names import GRAPH, PREFIX, GraphContext, service_name
from dynamo.operator.reconcile.plan import EventNote
from dynamo.operator.reconcile.pods import HTTP_PORT
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec, DynamoGraphDeployment

ANNOTATION = f"{PREFIX}dgd-spec"
DEFAULT_SUFFIX = "local"
DEFAULT_ACCESS = "ReadWriteOnce"


def preserved_spec(graph: DynamoGraphDeployment) -> KubeObject:
    """Return the v1alpha1 specification of a graph; empty if there is none, or if it was edited into something else."""
    try:
        found = msgspec.json.decode(graph.metadata.annotations.get(ANNOTATION) or "{}")
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


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


def ingress(graph: DynamoGraphDeployment, component: ComponentSpec, context: GraphContext) -> KubeObject | None:
    """Return the Ingress of a component, if it is enabled."""
    wanted = _ingress_spec(graph, component)
    if not wanted.get("enabled") or wanted.get("useVirtualService"):
        return None
    name = service_name(context.name, component.name)
    host = host_of(wanted)
    backend = {"service": {"name": name, "port": {"number": HTTP_PORT}}}
    paths = [{"path": "/", "pathType": "Prefix", "backend": backend}]
    spec: KubeObject = {"rules": [{"host": host, "http": {"paths": paths}}]}
    if wanted.get("ingressControllerClassName"):
        spec["ingressClassName"] = wanted["ingressControllerClassName"]
    tls = wanted.get("tls")
    if isinstance(tls, dict):
        secret = {"secretName": tls["secretName"]} if tls.get("secretName") else {}
        spec["tls"] = [{"hosts": [host], **secret}]
    metadata: KubeObject = {
        "name": name,
        "namespace": context.namespace,
        "labels": {**(wanted.get("labels") or {}), **context.labels(component)},
    }
    if wanted.get("annotations"):
        metadata["annotations"] = dict(wanted["annotations"])
    return {"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": metadata, "spec": spec}


def not_supported(graph: DynamoGraphDeployment) -> Iterator[EventNote]:
    """Yield events about preserved fields that have no effect."""
    for component in graph.spec.components or []:
        wanted = _ingress_spec(graph, component)
        if wanted.get("enabled") and wanted.get("useVirtualService"):
            text = f"spec.services.{component.name}.ingress.useVirtualService: VirtualServices are not created"
            yield EventNote("Warning", "NotSupported", text)


def host_of(wanted: KubeObject) -> str:
    """Return the host of an Ingress: prefix and host, and the suffix after a dot."""
    host = f"{wanted.get('hostPrefix') or ''}{wanted.get('host') or ''}"
    suffix = wanted.get("hostSuffix")
    suffix = DEFAULT_SUFFIX if suffix is None else suffix
    return f"{host}.{suffix}" if suffix else host


def _ingress_spec(graph: DynamoGraphDeployment, component: ComponentSpec) -> KubeObject:
    services = preserved_spec(graph).get("services")
    service: Any = services.get(component.name) if isinstance(services, dict) else None
    wanted = service.get("ingress") if isinstance(service, dict) else None
    return wanted if isinstance(wanted, dict) else {}


def _dicts(value: object) -> list[KubeObject]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
