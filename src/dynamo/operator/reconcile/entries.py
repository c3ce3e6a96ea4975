"""Entries of a graph from outside the cluster: Ingresses and Istio's VirtualServices of its components."""

from collections.abc import Iterator

from dynamo.operator.reconcile.names import HTTP_PORT, GraphContext, dns_label, service_name
from dynamo.operator.reconcile.plan import EventNote
from dynamo.operator.reconcile.preserved import preserved_service
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec, DynamoGraphDeployment

INGRESS, VIRTUAL_SERVICE = "networking.k8s.io/v1", "networking.istio.io/v1beta1"
DEFAULT_SUFFIX = "local"


def entries(
    graph: DynamoGraphDeployment, component: ComponentSpec, context: GraphContext, facts: ClusterFacts
) -> Iterator[KubeObject | EventNote]:
    """Yield the Ingress and the VirtualService of a component, or events where the cluster cannot have them.

    A frontend without an entry of its own has that of the operator's settings, if there is one.
    """
    wanted = entry_of(graph, component, context)
    if not wanted.get("enabled"):
        return
    name, host = dns_label(service_name(context.name, component.name)), host_of(wanted)
    metadata: KubeObject = {
        "name": name,
        "namespace": context.namespace,
        "labels": {**(wanted.get("labels") or {}), **context.labels(component)},
    }
    if wanted.get("annotations"):
        metadata["annotations"] = dict(wanted["annotations"])
    is_virtual = bool(wanted.get("useVirtualService"))
    if not is_virtual or wanted.get("ingressControllerClassName"):
        yield {"apiVersion": INGRESS, "kind": "Ingress", "metadata": metadata, "spec": _ingress(wanted, name, host)}
    if not is_virtual:
        return
    path = f"spec.services.{component.name}.ingress"
    if not wanted.get("virtualServiceGateway"):
        text = f"{path}.virtualServiceGateway: is required with useVirtualService"
        yield EventNote("Warning", "NotSupported", text)
    elif not facts.has_virtual_services:
        text = f"{path}.useVirtualService: requires Istio, whose VirtualServices are not installed"
        yield EventNote("Warning", "NotSupported", text)
    else:
        spec = _virtual_service(str(wanted["virtualServiceGateway"]), name, host)
        yield {"apiVersion": VIRTUAL_SERVICE, "kind": "VirtualService", "metadata": metadata, "spec": spec}


def entry_of(graph: DynamoGraphDeployment, component: ComponentSpec, context: GraphContext) -> KubeObject:
    """Return the `ingress` of a component, in the form of v1alpha1; empty if it has none."""
    own = preserved_service(graph, component).get("ingress")
    if isinstance(own, dict):
        return own
    settings = context.settings
    if component.type != "frontend" or not (settings.ingress_class or settings.virtual_service_gateway):
        return {}
    found: KubeObject = {"enabled": True, "host": context.name}
    for name, value in (
        ("ingressControllerClassName", settings.ingress_class),
        ("virtualServiceGateway", settings.virtual_service_gateway),
        ("useVirtualService", bool(settings.virtual_service_gateway)),
        ("hostSuffix", settings.ingress_host_suffix),
        ("tls", settings.ingress_tls_secret and {"secretName": settings.ingress_tls_secret}),
    ):
        if value:
            found[name] = value
    return found


def host_of(wanted: KubeObject) -> str:
    """Return the host of an entry: prefix and host, and the suffix after a dot."""
    host = f"{wanted.get('hostPrefix') or ''}{wanted.get('host') or ''}"
    suffix = wanted.get("hostSuffix")
    suffix = DEFAULT_SUFFIX if suffix is None else suffix
    return f"{host}.{suffix}" if suffix else host


def _ingress(wanted: KubeObject, name: str, host: str) -> KubeObject:
    backend = {"service": {"name": name, "port": {"number": HTTP_PORT}}}
    paths = [{"path": "/", "pathType": "Prefix", "backend": backend}]
    spec: KubeObject = {"rules": [{"host": host, "http": {"paths": paths}}]}
    if wanted.get("ingressControllerClassName"):
        spec["ingressClassName"] = wanted["ingressControllerClassName"]
    tls = wanted.get("tls")
    if isinstance(tls, dict):
        secret = {"secretName": tls["secretName"]} if tls.get("secretName") else {}
        spec["tls"] = [{"hosts": [host], **secret}]
    return spec


def _virtual_service(gateway: str, name: str, host: str) -> KubeObject:
    destination = {"host": name, "port": {"number": HTTP_PORT}}
    route = {"match": [{"uri": {"prefix": "/"}}], "route": [{"destination": destination}]}
    return {"hosts": [host], "gateways": [gateway], "http": [route]}
