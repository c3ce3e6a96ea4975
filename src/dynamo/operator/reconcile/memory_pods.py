"""GPU memory service between pods, with Grove: a pod per node that holds the weights, and the engines that use them. Pure.

Each replica is a scaling group. Its cliques of one node share that node's GPUs by a resource claim of Grove, and a
directory of the host with the sockets of the service. With failover a node has standby engines too, of which those with
the same index on all nodes form a group: one that ends does so with its whole group (`failover_groups`).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.operator.reconcile.failover import HEALTH_OF_ENDPOINTS, PROBES, SHADOW_MODE, STARTING_STATUS
from dynamo.operator.reconcile.memory_service import (
    DEVICE_CLASS,
    SERVER_COMMAND,
    VARIABLE,
    add_gpu_toleration,
    gpu_count,
    without_gpus,
)
from dynamo.operator.reconcile.multinode import main_of, role_templates
from dynamo.operator.reconcile.multinode.commands import CommandLine
from dynamo.operator.reconcile.multinode.nodes import (
    LEADER_SUFFIX,
    MEMORY_SUFFIX,
    WORKER_SUFFIX,
    WorkloadError,
    grove_shadow_nodes,
    node_count,
)
from dynamo.operator.reconcile.multinode.vllm import MODULE
from dynamo.operator.reconcile.names import (
    DISCOVERY_BACKEND,
    DISCOVERY_ENABLED,
    PREFIX,
    GraphContext,
    main_container,
)
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

GROUP_MEMBER = f"{PREFIX}dynamo-failover-engine-group-member"
"""Label of engines that end together."""
POD_INDEX = "grove.io/podclique-pod-index"
VOLUME, HOST_DIRECTORY, DIRECTORY = "gms-shared", "/run/gms", "/run/gms/shared"
REPLICA_DIRECTORY = "$(GROVE_PCSG_NAME)-$(GROVE_PCSG_INDEX)"
LOCK = f"{DIRECTORY}/failover.lock"
SOCKETS_PER_GPU = 2
"""Sockets of the service for each GPU: of the weights and of the KV cache."""
STARTUP = {"periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 150}
PERMISSIONS = "fix-gms-perms"
SERVER_SCRIPT = f"""rm -f {DIRECTORY}/gms_*.sock
{" ".join(SERVER_COMMAND)} &
server=$!
trap 'kill -TERM "$server" 2>/dev/null' TERM INT
wait "$server"; status=$?
trap - TERM INT
wait "$server" 2>/dev/null
exit "$status"
"""
"""Sockets of an earlier container are removed, because the startup probe counts them."""


@dataclass(frozen=True, slots=True)
class MemoryPods:
    """Templates of one component's cliques, and the claims that they share."""

    templates: Sequence[tuple[str, int, KubeObject, str]]
    """Name, replicas and pod template of each clique, with the clique after which it starts."""
    claim_templates: Sequence[KubeObject]
    sharing: Sequence[KubeObject]


def memory_pods(
    component: ComponentSpec,
    context: GraphContext,
    template: KubeObject,
    *,
    framework: str | None,
    annotations: dict[str, str],
) -> MemoryPods:
    """Return the cliques of a component. `template` is its complete pod template, which stays unchanged.

    Raise `WorkloadError` for another framework than vLLM, and without GPUs.
    """
    path = f"spec.components[{component.name}].experimental.gpuMemoryService"
    if framework != "vllm":
        raise WorkloadError(f"{path}.mode: InterPod requires vllm, not {framework or 'an unknown framework'}")
    gpus = gpu_count(main_container(component))
    if not gpus:
        raise WorkloadError(f"{path}: requires a GPU limit of at least 1 on the main container")
    found: list[tuple[str, int, KubeObject, str]] = []
    claims, sharing = list[KubeObject](), list[KubeObject]()
    for rank in range(node_count(component)):
        server, engine = clique_names(component, rank)
        found.append((server, 1, _server(template, rank, gpus), ""))
        pod = _engine(component, context, template, rank, annotations)
        found.append((engine, engines_of(component), pod, server))
        claim = f"{component.name.lower().replace('.', '-')}-gpu-rank-{rank}"
        claims.append({"name": claim, "templateSpec": {"spec": {"devices": {"requests": [_request(component, gpus)]}}}})
        sharing.append({"name": claim, "scope": "PerReplica", "filter": {"childCliqueNames": [server, engine]}})
    return MemoryPods(found, claims, sharing)


def clique_names(component: ComponentSpec, rank: int) -> tuple[str, str]:
    """Return the names of a node's cliques: of the memory service and of the engines."""
    name = component.name.lower()
    server = f"{name}-{MEMORY_SUFFIX}-{rank}"
    if node_count(component) == 1:
        return server, name
    return server, f"{name}-{WORKER_SUFFIX}-{rank}" if rank else f"{name}-{LEADER_SUFFIX}"


def has_shadows(component: ComponentSpec) -> bool:
    """Return whether a component has standby engines in pods of their own."""
    failover = component.experimental.failover if component.experimental else None
    return failover is not None and failover.mode == "InterPod"


def engines_of(component: ComponentSpec) -> int:
    """Return the engine pods of one node of a replica, standby ones included."""
    failover = component.experimental.failover if component.experimental else None
    return 1 + (failover.num_shadows or 1) if failover is not None and has_shadows(component) else 1


def _server(template: KubeObject, rank: int, gpus: int) -> KubeObject:
    made = copy.deepcopy(template)
    main = main_of(made)
    main["command"], main["args"] = ["bash", "-c"], [SERVER_SCRIPT]
    for probe in PROBES:
        main.pop(probe, None)
    test = f"test $(ls {DIRECTORY}/gms_*.sock 2>/dev/null | wc -l) -ge {SOCKETS_PER_GPU * gpus}"
    main["startupProbe"] = {"exec": {"command": ["sh", "-c", test]}, **STARTUP}
    _set(main, {"name": VARIABLE, "value": DIRECTORY})
    _share(made["spec"], main, rank)
    for label in (DISCOVERY_BACKEND, DISCOVERY_ENABLED):  # It serves no endpoint.
        made["metadata"]["labels"].pop(label, None)
    return made


def _engine(
    component: ComponentSpec, context: GraphContext, template: KubeObject, rank: int, annotations: dict[str, str]
) -> KubeObject:
    made = copy.deepcopy(template)
    main = main_of(made)
    command = CommandLine.of(main)
    if command.value("--load-format") != "gms":
        command.with_options(["--load-format", "gms"], MODULE).write_to(main)
    if node_count(component) > 1:
        group = grove_shadow_nodes(component.name, node_count(component), rank)
        roles = role_templates(component, context, made, group, framework="vllm", annotations=annotations)
        made = roles.worker if rank else roles.leader
        main = main_of(made)
    main["env"] = [one for one in main["env"] if one["name"] != HEALTH_OF_ENDPOINTS]
    index = {"fieldRef": {"fieldPath": f"metadata.labels['{POD_INDEX}']"}}
    for one in (
        {"name": "ENGINE_ID", "valueFrom": index},
        {"name": VARIABLE, "value": DIRECTORY},
        {"name": "FAILOVER_LOCK_PATH", "value": LOCK},
        STARTING_STATUS,
    ):
        _set(main, one)
    _share(made["spec"], main, rank)
    if has_shadows(component):
        _set(main, {"name": SHADOW_MODE, "value": "true"})
        made["spec"]["restartPolicy"] = "Never"  # The group's state does not survive one container's restart.
        made["metadata"]["labels"][GROUP_MEMBER] = "true"
    return made


def _share(spec: KubeObject, main: KubeObject, rank: int) -> None:
    """Give a pod the GPUs of Grove's claim in place of its own, and the directory of its replica and node."""
    without_gpus(main)
    add_gpu_toleration(spec)
    mount = {"name": VOLUME, "mountPath": DIRECTORY, "subPathExpr": f"{REPLICA_DIRECTORY}/rank-{rank}"}
    host = {"path": HOST_DIRECTORY, "type": "DirectoryOrCreate"}
    spec["volumes"] = [*(spec.get("volumes") or ()), {"name": VOLUME, "hostPath": host}]
    main["volumeMounts"] = [*(main.get("volumeMounts") or ()), mount]
    # The kubelet makes the directory for root only.
    container: KubeObject = {"name": PERMISSIONS, "command": ["sh", "-c", f"chmod 1777 {DIRECTORY}"]}
    container |= {name: main[name] for name in ("image", "imagePullPolicy") if name in main}
    container |= {"securityContext": {"runAsUser": 0, "runAsNonRoot": False}, "volumeMounts": [mount]}
    spec["initContainers"] = [*(spec.get("initContainers") or ()), container]


def _request(component: ComponentSpec, gpus: int) -> KubeObject:
    service = component.experimental.gpu_memory_service if component.experimental else None
    device_class = (service and service.device_class_name) or DEVICE_CLASS
    exactly = {"deviceClassName": device_class, "allocationMode": "ExactCount", "count": gpus}
    return {"name": "gpu", "exactly": exactly}


def _set(main: KubeObject, variable: KubeObject) -> None:
    main["env"] = [*(one for one in main["env"] if one["name"] != variable["name"]), variable]
