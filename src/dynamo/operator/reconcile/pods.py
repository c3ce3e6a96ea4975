"""Pod templates: a component's own template with the operator's environment, probes, ports and shared memory.

What the component's template sets takes precedence.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.operator.reconcile.environment import annotation_of, environment, sidecar_environment
from dynamo.operator.reconcile.epp import EPP_ACCOUNT, EPP_GRACE_S, add_epp, epp_ports
from dynamo.operator.reconcile.memory_service import add_memory_service
from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.names import (
    ENABLE_METRICS,
    HTTP_PORT,
    MAIN,
    METRICS_ENABLED,
    NIXL_PORT,
    PLANNER_METRICS_PORT,
    PREFIX,
    SUB_COMPONENT_TYPE,
    SYSTEM_PORT,
    GraphContext,
    is_worker,
    merged,
)
from dynamo.operator.reconcile.probes import add_probes, frontend_probes, probes
from dynamo.operator.reconcile.restores import add_restore
from dynamo.operator.validation.facts import PLANNER_ACCOUNT
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

SHARED_MEMORY = "shared-memory"
SHARED_MEMORY_SIZE = "8Gi"
TERMINATION_GRACE_S = 60
IMAGE_HOME = "/root"
"""Home of the user that engine images run as."""
DEFAULT_CACHE = f"{IMAGE_HOME}/.cache/vllm"
"""Directory of vLLM's compilation cache; other engines have none without a path."""
FRONTEND = ["-m", "dynamo.frontend"]
NO_PULL_SECRETS = f"{PREFIX}disable-image-pull-secret-discovery"
ISTIO_INJECT = "sidecar.istio.io/inject"


def pod_template(component: ComponentSpec, context: GraphContext, graph_env: Sequence[KubeObject]) -> KubeObject:
    """Return the pod template of a component's workload. Raise `WorkloadError` for a template that cannot run."""
    template = copy.deepcopy(component.pod_template or {})
    spec: KubeObject = template.setdefault("spec", {})
    containers: list[KubeObject] = spec.setdefault("containers", [])
    main = next((one for one in containers if one.get("name") == MAIN), None)
    if main is None:
        main = {"name": MAIN}
        containers.insert(0, main)
    main["env"] = environment(component, context, graph_env, main.get("env") or [], MAIN)
    add_command(component, main)
    main["ports"] = with_ports(main.get("ports") or [], ports(component))
    add_probes(main, probes(component))
    add_shared_memory(component, spec, main)
    add_compilation_cache(component, spec, main)
    if component.type == "epp":
        add_epp(component, context.name, context.namespace, spec, main)
    if component.frontend_sidecar:
        add_frontend_sidecar(component, context, containers, main)
    add_claim_volumes(spec, main)
    grace_s = EPP_GRACE_S if component.type == "epp" else TERMINATION_GRACE_S
    spec.setdefault("terminationGracePeriodSeconds", grace_s)
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("securityContext", {"fsGroup": 1000})
    account = account_name(component, context)
    if account:
        spec.setdefault("serviceAccountName", account)
    add_pull_secrets(component, context, spec)
    metadata = template.setdefault("metadata", {})
    if component.type == "epp":  # It serves TLS itself, which a proxy in its pod would wrap again.
        metadata["annotations"] = {ISTIO_INJECT: "false", **(metadata.get("annotations") or {})}
    kind = {SUB_COMPONENT_TYPE: component.type} if component.type in ("prefill", "decode") else None
    metadata["labels"] = merged(kind, metadata.get("labels"), context.labels(component), metrics_label(metadata))
    add_memory_service(component, context, spec)
    restore = context.restores.get(component.name or "")
    if restore is not None and restore.is_ready:
        add_restore(component, restore, template)
    return template


def account_name(component: ComponentSpec, context: GraphContext) -> str:
    """Return the service account of a component's pods; empty where they need none."""
    if component.type == "planner":
        return PLANNER_ACCOUNT
    if component.type == "epp":
        return EPP_ACCOUNT
    is_kubernetes = context.discovery_backend(component) == "kubernetes"
    return f"{context.name}-k8s-service-discovery" if is_kubernetes else ""


def add_command(component: ComponentSpec, main: KubeObject) -> None:
    """Give a container without a command the one of its type: a frontend, or a shell that runs its arguments.

    The endpoint picker, and a container without arguments, run what their image contains.
    """
    if main.get("command") or component.type == "epp":
        return
    if component.type == "frontend":
        main["command"] = ["python3"]
        main.setdefault("args", list(FRONTEND))
    elif main.get("args"):
        main["command"] = ["/bin/sh", "-c"]


def metrics_label(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the label by which pods are scraped, unless an annotation opts out."""
    return {} if (metadata.get("annotations") or {}).get(ENABLE_METRICS) == "false" else {METRICS_ENABLED: "true"}


def ports(component: ComponentSpec) -> dict[str, int]:
    """Return the ports of a component by name."""
    if component.type == "frontend":
        return {"http": HTTP_PORT}
    if is_worker(component):
        return {"system": SYSTEM_PORT, "nixl": NIXL_PORT}
    if component.type == "epp":
        return epp_ports()
    return {"metrics": PLANNER_METRICS_PORT, "system": SYSTEM_PORT} if component.type == "planner" else {}


def service_ports(component: ComponentSpec) -> list[KubeObject]:
    """Return the ports of a component's service. A component of no type has its system port, if it serves one."""
    if component.type == "epp":
        grpc = epp_ports()["grpc"]
        return [{"name": "grpc", "port": grpc, "targetPort": grpc, "protocol": "TCP", "appProtocol": "http2"}]
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
    if all(one["name"] != "VLLM_CACHE_ROOT" for one in main["env"]):
        main["env"].append({"name": "VLLM_CACHE_ROOT", "value": path})


def add_claim_volumes(spec: KubeObject, main: KubeObject) -> None:
    """Add a volume for each mount that names none: it is the claim of that name."""
    known = {one.get("name") for one in spec.get("volumes") or ()}
    names = dict.fromkeys(one["name"] for one in main.get("volumeMounts") or () if one.get("name"))
    added = [{"name": one, "persistentVolumeClaim": {"claimName": one}} for one in names if one not in known]
    if added:
        spec["volumes"] = [*(spec.get("volumes") or ()), *added]


def add_frontend_sidecar(
    component: ComponentSpec, context: GraphContext, containers: Sequence[KubeObject], main: KubeObject
) -> None:
    """Complete the container that runs a frontend in the pods of a worker. Raise `WorkloadError` if there is none."""
    name = component.frontend_sidecar or ""
    sidecar = next((one for one in containers if one.get("name") == name and name != MAIN), None)
    if sidecar is None:
        path = f"spec.components[{component.name}].frontendSidecar"
        raise WorkloadError(f"{path}: {name!r} is not a further container of podTemplate")
    if not sidecar.get("command"):
        sidecar["command"] = ["python3"]
        sidecar.setdefault("args", list(FRONTEND))
    sidecar["env"] = sidecar_environment(component, context, sidecar.get("env") or [], name)
    sidecar["ports"] = with_ports(sidecar.get("ports") or [], {"http": HTTP_PORT})
    add_probes(sidecar, frontend_probes(component))
    own = {one["name"] for one in sidecar.get("volumeMounts") or ()}
    shared = [
        dict(one) for one in main.get("volumeMounts") or () if one["name"] not in own and one["name"] != SHARED_MEMORY
    ]
    if shared:
        sidecar["volumeMounts"] = [*(sidecar.get("volumeMounts") or ()), *shared]


def add_pull_secrets(component: ComponentSpec, context: GraphContext, spec: KubeObject) -> None:
    """Add the pull secrets of the registries of a pod's images, unless an annotation disables this."""
    if annotation_of(component, NO_PULL_SECRETS) == "true":
        return
    found = {one.get("name"): one for one in spec.get("imagePullSecrets") or ()}
    for container in spec["containers"]:
        for name in context.settings.pull_secrets(context.namespace, str(container.get("image") or "")):
            found.setdefault(name, {"name": name})
    if found:
        spec["imagePullSecrets"] = list(found.values())
