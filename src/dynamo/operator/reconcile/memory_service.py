"""GPU memory service within a pod: a server that holds weights on the GPUs, which it shares with the engine. Pure.

The containers share the GPUs by a resource claim in place of the device plugin's resource, and reach the server over
sockets in a directory of the pod.
"""

from collections.abc import Mapping
from typing import Any

from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.names import GRAPH, MAIN, GraphContext, main_container, service_name
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec, GpuMemoryService

API_VERSION, TEMPLATE = "resource.k8s.io/v1", "ResourceClaimTemplate"
CLAIM = "intrapod-shared-gpu"
DEVICE_CLASS = "gpu.nvidia.com"
SERVER, SERVER_COMMAND = "gms-server", ("python3", "-m", "gpu_memory_service.cli.server")
VOLUME, DIRECTORY, VARIABLE = "gms-intrapod-control", "/gms-intrapod-control", "GMS_SOCKET_DIR"
TAINT = "nvidia.com/gpu"
"""Taint of GPU nodes; the device plugin adds its toleration only to pods with its resource."""


def memory_service_of(component: ComponentSpec) -> GpuMemoryService | None:
    """Return the memory service of a component's pods; None without one, and for one between pods."""
    service = component.experimental.gpu_memory_service if component.experimental else None
    return service if service is not None and service.mode in (None, "IntraPod") else None


def claim_template(component: ComponentSpec, context: GraphContext, *, has_claims: bool) -> KubeObject | None:
    """Return the template of the claims by which the containers of each pod share GPUs; None without a memory service.

    Raise `WorkloadError` for a cluster without resource claims, and without GPUs.
    """
    service = memory_service_of(component)
    if service is None:
        return None
    path = f"spec.components[{component.name}].experimental.gpuMemoryService"
    if not has_claims:
        raise WorkloadError(f"{path}: requires {TEMPLATE}s of {API_VERSION}, which Kubernetes has from 1.34 on")
    count = gpu_count(main_container(component))
    if not count:
        raise WorkloadError(f"{path}: requires a GPU limit of at least 1 on the main container")
    request = {
        "name": "gpus",
        "exactly": {
            "deviceClassName": service.device_class_name or DEVICE_CLASS,
            "allocationMode": "ExactCount",
            "count": count,
        },
    }
    name = claim_template_name(component, context)
    metadata = {"name": name, "namespace": context.namespace, "labels": {GRAPH: context.name}}
    spec = {"spec": {"devices": {"requests": [request]}}}
    return {"apiVersion": API_VERSION, "kind": TEMPLATE, "metadata": metadata, "spec": spec}


def claim_template_name(component: ComponentSpec, context: GraphContext) -> str:
    """Return the name of a component's claim template."""
    return f"{service_name(context.name, component.name)}-gpu"


def add_memory_service(component: ComponentSpec, context: GraphContext, spec: KubeObject) -> None:
    """Add the server and the claim to the pods of a component that has a memory service."""
    service = memory_service_of(component)
    if service is None:
        return
    clients = {MAIN, *(service.extra_client_containers or ())}
    for container in spec["containers"]:
        if container.get("name") in clients:
            _add_client(container)
    _add(spec, "volumes", {"name": VOLUME, "emptyDir": {}})
    claim = {"name": CLAIM, "resourceClaimTemplateName": claim_template_name(component, context)}
    _add(spec, "resourceClaims", claim)
    add_gpu_toleration(spec)
    main = next(one for one in spec["containers"] if one["name"] == MAIN)
    server: KubeObject = {"name": SERVER, "command": list(SERVER_COMMAND), "restartPolicy": "Always"}
    if main.get("image"):
        server["image"] = main["image"]
    _add_client(server)
    _add(spec, "initContainers", server)  # With its restart policy it runs beside the containers, and ends after them.


def gpu_count(container: Mapping[str, Any]) -> int:
    """Return the GPUs that a container requires of the device plugin, whole or as MIG devices."""
    resources = container.get("resources") or {}
    for kind in ("limits", "requests"):
        found = sorted(name for name in resources.get(kind) or {} if is_gpu_resource(name))
        if found:
            amount = str(resources[kind][found[0]])
            return int(amount) if amount.isdigit() else 0
    return 0


def is_gpu_resource(name: str) -> bool:
    """Return whether a resource is one of GPUs."""
    lower = name.lower()
    return lower == "gpu" or lower.endswith("/gpu") or "/mig-" in lower or lower.startswith("gpu.")


def add_gpu_toleration(spec: KubeObject) -> None:
    """Let a pod with a resource claim run on GPU nodes."""
    tolerations: list[KubeObject] = spec.setdefault("tolerations", [])
    if all((one.get("key"), one.get("effect")) != (TAINT, "NoSchedule") for one in tolerations):
        tolerations.append({"key": TAINT, "operator": "Exists", "effect": "NoSchedule"})


def without_gpus(container: KubeObject) -> KubeObject:
    """Remove the device plugin's GPUs from a container and return its resources."""
    resources: KubeObject = container.setdefault("resources", {})
    for kind in ("limits", "requests"):
        if kind in resources:
            resources[kind] = {name: one for name, one in resources[kind].items() if not is_gpu_resource(name)}
            if not resources[kind]:
                del resources[kind]
    return resources


def _add_client(container: KubeObject) -> None:
    resources = without_gpus(container)
    _add(resources, "claims", {"name": CLAIM})
    _add(container, "volumeMounts", {"name": VOLUME, "mountPath": DIRECTORY})
    _add(container, "env", {"name": VARIABLE, "value": DIRECTORY})


def _add(place: KubeObject, field: str, value: KubeObject) -> None:
    """Add an entry, in place of one of the same name."""
    place[field] = [*(one for one in place.get(field) or () if one.get("name") != value["name"]), value]
