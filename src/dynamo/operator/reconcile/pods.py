"""Pod templates: a component's own template with the operator's environment, probes, ports and shared memory.

What the component's template sets takes precedence. Environment variables of the component precede those of the graph,
which precede the operator's.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dynamo.operator.reconcile.names import ENABLE_METRICS, METRICS_ENABLED, GraphContext, is_worker, merged
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

MAIN = "main"
HTTP_PORT, SYSTEM_PORT, NIXL_PORT, PLANNER_METRICS_PORT, STEP_METRICS_PORT = 8000, 9090, 19090, 9085, 20380
SHARED_MEMORY = "shared-memory"
SHARED_MEMORY_SIZE = "8Gi"
TERMINATION_GRACE_S = 60
IMAGE_HOME = "/root"
"""Home of the user that engine images run as."""
DEFAULT_CACHE = f"{IMAGE_HOME}/.cache/vllm"
"""Directory of vLLM's compilation cache; other engines have none without a path."""
FRONTEND_COMMAND = ["python3", "-m", "dynamo.frontend"]
HEALTHY = f"curl -s http://localhost:{HTTP_PORT}/health | jq -e '.status == \"healthy\"'"
FRONTEND_TIMES = {"initialDelaySeconds": 60, "periodSeconds": 60, "timeoutSeconds": 30, "failureThreshold": 10}
SERVED = frozenset({"planner", "worker", "prefill", "decode"})
"""Component types with a system server."""


def pod_template(component: ComponentSpec, context: GraphContext, graph_env: Sequence[KubeObject]) -> KubeObject:
    """Return the pod template of a component's workload."""
    template = copy.deepcopy(component.pod_template or {})
    spec: KubeObject = template.setdefault("spec", {})
    containers: list[KubeObject] = spec.setdefault("containers", [])
    main = next((one for one in containers if one.get("name") == MAIN), None)
    if main is None:
        main = {"name": MAIN}
        containers.insert(0, main)
    main["env"] = environment(component, context, graph_env, main.get("env") or [])
    if component.type == "frontend" and not main.get("command") and not main.get("args"):
        main["command"] = list(FRONTEND_COMMAND)
    main["ports"] = with_ports(main.get("ports") or [], ports(component))
    for name, probe in probes(component).items():
        main.setdefault(name, probe)
    add_shared_memory(component, spec, main)
    add_compilation_cache(component, spec, main)
    spec.setdefault("terminationGracePeriodSeconds", TERMINATION_GRACE_S)
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("securityContext", {"fsGroup": 1000})
    spec.setdefault("serviceAccountName", account_name(component, context))
    metadata = template.setdefault("metadata", {})
    metadata["labels"] = merged(metadata.get("labels"), context.labels(component), metrics_label(metadata))
    return template


def account_name(component: ComponentSpec, context: GraphContext) -> str:
    """Return the service account of a component's pods."""
    return "planner-serviceaccount" if component.type == "planner" else f"{context.name}-k8s-service-discovery"


def metrics_label(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the label by which pods are scraped, unless an annotation opts out."""
    return {} if (metadata.get("annotations") or {}).get(ENABLE_METRICS) == "false" else {METRICS_ENABLED: "true"}


def environment(
    component: ComponentSpec,
    context: GraphContext,
    graph_env: Iterable[KubeObject],
    own_env: Iterable[KubeObject],
) -> list[KubeObject]:
    """Return the environment of the main container, each variable once."""
    found = {one["name"]: one for one in operator_environment(component, context)}
    for given in (graph_env, own_env):
        found.update((one["name"], dict(one)) for one in given)
    return list(found.values())


def operator_environment(component: ComponentSpec, context: GraphContext) -> list[KubeObject]:
    """Return the variables that the operator sets for a component of this type."""
    settings = context.settings
    values = {
        "DYN_NAMESPACE": context.dynamo_namespace(component),
        "DYN_COMPONENT": component.type or "",
        "DYN_PARENT_DGD_K8S_NAME": context.name,
        "DYN_PARENT_DGD_K8S_NAMESPACE": context.namespace,
        "DYN_DISCOVERY_BACKEND": settings.discovery_backend,
        "NATS_SERVER": settings.nats_address,
        "ETCD_ENDPOINTS": settings.etcd_endpoints,
        "MODEL_EXPRESS_URL": settings.model_express_url,
        "PROMETHEUS_ENDPOINT": settings.prometheus_endpoint,
    }
    if component.type == "frontend":
        values |= {"DYNAMO_PORT": str(HTTP_PORT), "DYN_HTTP_PORT": str(HTTP_PORT)}
        values["DYN_NAMESPACE_PREFIX"] = context.dynamo_namespace(component)
    elif is_worker(component):
        values |= {
            "DYN_SYSTEM_ENABLED": "true",
            "DYN_SYSTEM_PORT": str(SYSTEM_PORT),
            "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]',
            "DYN_HEALTH_CHECK_ENABLED": "false",
            "NIXL_TELEMETRY_ENABLE": "n",
            "NIXL_TELEMETRY_EXPORTER": "prometheus",
            "NIXL_TELEMETRY_PROMETHEUS_PORT": str(NIXL_PORT),
            "DYN_NAMESPACE_WORKER_SUFFIX": context.worker_hash,
            "DYN_FORWARDPASS_METRIC_PORT": str(STEP_METRICS_PORT),
        }
    elif component.type == "planner":
        values |= {"PLANNER_PROMETHEUS_PORT": str(PLANNER_METRICS_PORT), "DYN_SYSTEM_PORT": str(SYSTEM_PORT)}
    fields = {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "POD_UID": "metadata.uid"}
    return [
        *({"name": name, "value": value} for name, value in values.items() if value),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
    ]


def ports(component: ComponentSpec) -> dict[str, int]:
    """Return the ports of a component by name."""
    if component.type == "frontend":
        return {"http": HTTP_PORT}
    if is_worker(component):
        return {"system": SYSTEM_PORT, "nixl": NIXL_PORT}
    return {"metrics": PLANNER_METRICS_PORT, "system": SYSTEM_PORT} if component.type == "planner" else {}


def service_ports(component: ComponentSpec) -> list[KubeObject]:
    """Return the ports of a component's service. A component of no type has its system port, if it serves one."""
    named = ports(component)
    if not named:
        return [{"name": "system", "port": SYSTEM_PORT, "targetPort": SYSTEM_PORT, "protocol": "TCP"}]
    return [{"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in named.items()]


def with_ports(own: Sequence[KubeObject], wanted: Mapping[str, int]) -> list[KubeObject]:
    """Return the container's own ports and those of the operator whose name and number it does not use."""
    used = {one.get("name") for one in own} | {one.get("containerPort") for one in own}
    added = [
        {"name": name, "containerPort": port, "protocol": "TCP"}
        for name, port in wanted.items()
        if not {name, port} & used
    ]
    return [*own, *added]


def probes(component: ComponentSpec) -> dict[str, KubeObject]:
    """Return the probes of the main container."""
    if component.type == "frontend":
        return {
            "livenessProbe": {**_get("/live", HTTP_PORT), **FRONTEND_TIMES},
            "readinessProbe": {"exec": {"command": ["/bin/sh", "-c", HEALTHY]}, **FRONTEND_TIMES},
        }
    if component.type not in SERVED:
        return {}
    live, health = _get("/live", SYSTEM_PORT), _get("/health", SYSTEM_PORT)
    return {
        "livenessProbe": {**live, "periodSeconds": 5, "timeoutSeconds": 4, "failureThreshold": 3},
        "readinessProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 4, "failureThreshold": 3},
        "startupProbe": {**live, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 720},
    }


def add_shared_memory(component: ComponentSpec, spec: KubeObject, main: KubeObject) -> None:
    """Mount a memory file system at /dev/shm, unless its size is 0 or the template mounts something there."""
    size = SHARED_MEMORY_SIZE if component.shared_memory_size is None else str(component.shared_memory_size)
    mounts: list[KubeObject] = main.setdefault("volumeMounts", [])
    if size != "0" and all(one.get("mountPath") != "/dev/shm" for one in mounts):  # noqa: S108 - a mount of the pod
        mounts.append({"name": SHARED_MEMORY, "mountPath": "/dev/shm"})  # noqa: S108
        spec.setdefault("volumes", []).append(
            {"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": size}}
        )
    if not mounts:
        del main["volumeMounts"]


def add_compilation_cache(component: ComponentSpec, spec: KubeObject, main: KubeObject) -> None:
    """Mount the claim of the engine's compilation cache, and point vLLM to it."""
    cache = component.compilation_cache
    if cache is None:
        return
    path = cache.mount_path or DEFAULT_CACHE
    mounts: list[KubeObject] = main.setdefault("volumeMounts", [])
    if all(one.get("mountPath") != path for one in mounts):
        mounts.append({"name": cache.pvc_name, "mountPath": path})
    volumes: list[KubeObject] = spec.setdefault("volumes", [])
    if all(one.get("name") != cache.pvc_name for one in volumes):
        volumes.append({"name": cache.pvc_name, "persistentVolumeClaim": {"claimName": cache.pvc_name}})
    if all(one["name"] != "VLLM_CACHE_ROOT" for one in main["env"]):
        main["env"].append({"name": "VLLM_CACHE_ROOT", "value": path})


def _get(path: str, port: int) -> KubeObject:
    return {"httpGet": {"path": path, "port": port}}
