"""Environment of a component's main container: what the operator sets, and what precedes it.

Variables of the component precede those of the graph, which precede the operator's.
"""

from collections.abc import Iterable, Mapping

from dynamo.operator.reconcile.names import (
    HTTP_PORT,
    NIXL_PORT,
    PLANNER_METRICS_PORT,
    STEP_METRICS_PORT,
    SYSTEM_PORT,
    GraphContext,
    is_worker,
)
from dynamo.operator.reconcile.runtime_version import HEALTH_CHECKS, has_reached
from dynamo.operator.validation.facts import DISCOVERY_MODE
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

POD_FIELDS = {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "POD_UID": "metadata.uid"}


def environment(
    component: ComponentSpec,
    context: GraphContext,
    graph_env: Iterable[KubeObject],
    own_env: Iterable[KubeObject],
    container: str,
) -> list[KubeObject]:
    """Return the environment of a container, each variable once."""
    found = {one["name"]: one for one in operator_environment(component, context, container)}
    for given in (graph_env, own_env):
        found.update((one["name"], dict(one)) for one in given)
    return list(found.values())


def operator_environment(component: ComponentSpec, context: GraphContext, container: str) -> list[KubeObject]:
    """Return the variables that the operator sets for a component of this type."""
    values = {**_common(component, context, container), **_of_type(component, context), **_services(context)}
    return [
        *({"name": name, "value": value} for name, value in values.items() if value),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in POD_FIELDS.items()),
    ]


def sidecar_environment(
    component: ComponentSpec, context: GraphContext, own_env: Iterable[KubeObject], container: str
) -> list[KubeObject]:
    """Return the environment of a frontend in a worker's pod."""
    frontend = ComponentSpec(
        name=component.name, type="frontend", global_dynamo_namespace=component.global_dynamo_namespace
    )
    return environment(frontend, context, (), own_env, container)


def annotation_of(component: ComponentSpec, name: str) -> str:
    """Return an annotation of a component's pods; empty if it is absent."""
    metadata = (component.pod_template or {}).get("metadata") or {}
    return str((metadata.get("annotations") or {}).get(name) or "")


def _common(component: ComponentSpec, context: GraphContext, container: str) -> Mapping[str, str]:
    values = {
        "DYN_NAMESPACE": context.dynamo_namespace(component),
        "DYN_COMPONENT": component.type or "",
        "DYN_PARENT_DGD_K8S_NAME": context.name,
        "DYN_PARENT_DGD_K8S_NAMESPACE": context.namespace,
        "DYN_DISCOVERY_BACKEND": context.discovery_backend(component),
    }
    if annotation_of(component, DISCOVERY_MODE) == "container":
        values |= {"CONTAINER_NAME": container, "DYN_KUBE_DISCOVERY_MODE": "container"}
    return values


def _of_type(component: ComponentSpec, context: GraphContext) -> Mapping[str, str]:
    if is_worker(component):
        return {
            "DYN_SYSTEM_ENABLED": "true",
            "DYN_SYSTEM_PORT": str(SYSTEM_PORT),
            "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]',
            "DYN_HEALTH_CHECK_ENABLED": "true" if has_reached(component, HEALTH_CHECKS) else "false",
            "NIXL_TELEMETRY_ENABLE": "n",
            "NIXL_TELEMETRY_EXPORTER": "prometheus",
            "NIXL_TELEMETRY_PROMETHEUS_PORT": str(NIXL_PORT),
            "DYN_NAMESPACE_WORKER_SUFFIX": context.worker_hash,
            "DYN_FORWARDPASS_METRIC_PORT": str(STEP_METRICS_PORT),
        }
    match component.type:
        case "frontend":
            port, prefix = str(HTTP_PORT), context.dynamo_namespace(component)
            return {"DYNAMO_PORT": port, "DYN_HTTP_PORT": port, "DYN_NAMESPACE_PREFIX": prefix}
        case "planner":
            return {"PLANNER_PROMETHEUS_PORT": str(PLANNER_METRICS_PORT), "DYN_SYSTEM_PORT": str(SYSTEM_PORT)}
        case "epp":
            return {
                "USE_STREAMING": "true",
                "RUST_LOG": "info",
                "DYN_ENFORCE_DISAGG": "false",
                "DYN_NAMESPACE_PREFIX": context.dynamo_namespace(component),
                "NVIDIA_VISIBLE_DEVICES": "void",  # It needs no GPU, and may run on a node without a driver.
            }
        case _:
            return {}


def _services(context: GraphContext) -> Mapping[str, str]:
    settings = context.settings
    return {
        "NATS_SERVER": settings.nats_address,
        "ETCD_ENDPOINTS": settings.etcd_endpoints,
        "MODEL_EXPRESS_URL": settings.model_express_url,
        "PROMETHEUS_ENDPOINT": settings.prometheus_endpoint,
    }
