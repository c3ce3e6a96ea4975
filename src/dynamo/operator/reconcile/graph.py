"""Objects of a graph: its components with their workloads and services, scaling adapters, and the account of its pods.

Only Deployments are made: a component with several nodes requires a LeaderWorkerSet or Grove.
"""

from collections.abc import Iterator

from dynamo.operator.reconcile.names import (
    SELECTOR,
    GraphContext,
    OperatorSettings,
    is_worker,
    merged,
    service_name,
    worker_hash,
)
from dynamo.operator.reconcile.pods import pod_template, ports
from dynamo.protocols.kubernetes.common import V1BETA1, KubeObject, encode
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec, DynamoGraphDeployment

ROLLING_UPDATE = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}}
DISCOVERY_RULES = [
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
    {
        "apiGroups": ["nvidia.com"],
        "resources": ["dynamoworkermetadatas"],
        "verbs": ["get", "list", "watch", "create", "patch"],
    },
]
RBAC = "rbac.authorization.k8s.io"


class CannotRender(ValueError):
    """A graph requires objects that are not supported; the message names the field."""


def graph_objects(graph: DynamoGraphDeployment, settings: OperatorSettings, namespace: str) -> list[KubeObject]:
    """Return the objects of a graph in a namespace. Raise `CannotRender` for a component with several nodes."""
    context = GraphContext(
        name=graph.metadata.name, namespace=namespace, settings=settings, worker_hash=worker_hash(graph)
    )
    found = list(discovery_access(context))
    for index, component in enumerate(graph.spec.components or []):
        if component.multinode is not None:
            raise CannotRender(f"spec.components[{index}].multinode: workloads of several nodes are not supported yet")
        found += component_objects(graph, component, context)
    return found


def discovery_access(context: GraphContext) -> Iterator[KubeObject]:
    """Yield the account of the graph's pods and its role, which discovery in Kubernetes requires."""
    if context.settings.discovery_backend != "kubernetes":
        return
    account = f"{context.name}-k8s-service-discovery"
    yield _object("v1", "ServiceAccount", account, context)
    yield {**_object(f"{RBAC}/v1", "Role", f"{account}-role", context), "rules": DISCOVERY_RULES}
    yield {
        **_object(f"{RBAC}/v1", "RoleBinding", f"{account}-binding", context),
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": context.namespace}],
        "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": f"{account}-role"},
    }


def component_objects(
    graph: DynamoGraphDeployment, component: ComponentSpec, context: GraphContext
) -> Iterator[KubeObject]:
    """Yield the objects of one component, the DynamoComponentDeployment first."""
    name = context.object_name(component)
    spec = encode(component)
    if graph.spec.backend_framework:
        spec["backendFramework"] = graph.spec.backend_framework
    yield {**_object(V1BETA1, "DynamoComponentDeployment", name, context, component), "spec": spec}
    yield deployment(graph, component, context)
    if ports(component):
        yield service(component, context)
    if component.scaling_adapter is not None:
        reference = {"name": context.name, "componentName": component.name}
        adapter = service_name(context.name, component.name)
        yield {
            **_object(V1BETA1, "DynamoGraphDeploymentScalingAdapter", adapter, context, component),
            "spec": {"replicas": _replicas(component), "dgdRef": reference},
        }


def deployment(graph: DynamoGraphDeployment, component: ComponentSpec, context: GraphContext) -> KubeObject:
    """Return the Deployment of a component."""
    template = pod_template(component, context, graph.spec.env or [])
    metadata = template["metadata"]
    metadata["annotations"] = merged(graph.spec.annotations, metadata.get("annotations"))
    metadata["labels"] = merged(graph.spec.labels, metadata["labels"])
    if not metadata["annotations"]:
        del metadata["annotations"]
    return {
        **_object("apps/v1", "Deployment", context.object_name(component), context, component),
        "spec": {
            "replicas": _replicas(component),
            "selector": {"matchLabels": {SELECTOR: context.object_name(component)}},
            "strategy": ROLLING_UPDATE,
            "template": template,
        },
    }


def service(component: ComponentSpec, context: GraphContext) -> KubeObject:
    """Return the service of a component; its EndpointSlices are what discovery reads."""
    named = [
        {"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in ports(component).items()
    ]
    name = context.object_name(component) if is_worker(component) else service_name(context.name, component.name)
    return {
        **_object("v1", "Service", name, context, component),
        "spec": {"selector": {SELECTOR: context.object_name(component)}, "ports": named},
    }


def _replicas(component: ComponentSpec) -> int:
    return 1 if component.replicas is None else component.replicas


def _object(
    api_version: str, kind: str, name: str, context: GraphContext, component: ComponentSpec | None = None
) -> KubeObject:
    labels = {} if component is None else {"labels": context.labels(component)}
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {"name": name, "namespace": context.namespace, **labels},
    }
