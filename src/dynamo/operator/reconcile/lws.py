"""LeaderWorkerSet of a component whose replicas have several nodes."""

from collections.abc import Mapping

from dynamo.operator.reconcile.failover import add_engines
from dynamo.operator.reconcile.multinode import RoleTemplates, main_of, role_templates
from dynamo.operator.reconcile.multinode.nodes import WorkloadError, leader_worker_set_nodes, node_count
from dynamo.operator.reconcile.names import MAIN, PREFIX, GraphContext
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

API_VERSION = "leaderworkerset.x-k8s.io/v1"
ROLE = "role"
ROLLOUT = {"type": "RollingUpdate", "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0}}
"""One group at a time: a surge requires the GPUs of all nodes of a group."""
VOLCANO = "volcano"
VOLCANO_QUEUE = f"{PREFIX}volcano-queue"
QUEUE_NAME = "scheduling.volcano.sh/queue-name"
POD_GROUP_VERSION = "scheduling.volcano.sh/v1beta1"
GROUP_NAME = "scheduling.k8s.io/group-name"
"""Annotation of pods: the PodGroup to which they belong."""


def leader_worker_set_name(component: ComponentSpec, context: GraphContext) -> str:
    """Return the name of a LeaderWorkerSet.

    It differs from that of the component's service, because the controller creates a headless service with the same
    name as the LeaderWorkerSet.
    """
    return f"{context.object_name(component)}-0"


def leader_worker_set(
    component: ComponentSpec,
    context: GraphContext,
    template: KubeObject,
    *,
    framework: str | None,
    annotations: Mapping[str, str],
    has_volcano: bool = False,
) -> KubeObject:
    """Return the LeaderWorkerSet of a component.

    `template` is the component's complete pod template; `annotations` are those of the graph. With Volcano, pods use its
    scheduler and start together. Raise `WorkloadError` when the pods cannot run.
    """
    main = main_of(template)
    if not main.get("command") and not main.get("args"):
        path = f"spec.components[{component.name}].podTemplate.spec.containers[{MAIN}].command"
        raise WorkloadError(f"{path}: is required for several nodes with LeaderWorkerSet")
    size = node_count(component)
    group = leader_worker_set_nodes(size)
    roles = role_templates(component, context, template, group, framework=framework, annotations=annotations)
    for pod in (roles.leader, roles.worker):
        add_engines(component, pod, framework)
    metadata: KubeObject = {
        "name": leader_worker_set_name(component, context),
        "namespace": context.namespace,
        "labels": context.labels(component),
    }
    queue = annotations.get(VOLCANO_QUEUE, "").strip() if has_volcano else ""
    if queue:
        metadata["annotations"] = {QUEUE_NAME: queue}
    _add_roles(roles, metadata["name"] if has_volcano else "", queue)
    return {
        "apiVersion": API_VERSION,
        "kind": "LeaderWorkerSet",
        "metadata": metadata,
        "spec": {
            "replicas": 1 if component.replicas is None else component.replicas,
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": ROLLOUT,
            "leaderWorkerTemplate": {
                "size": size,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": roles.leader,
                "workerTemplate": roles.worker,
            },
        },
    }


def pod_group(component: ComponentSpec, context: GraphContext, annotations: Mapping[str, str]) -> KubeObject:
    """Return the PodGroup of a component's LeaderWorkerSet: Volcano starts all its pods or none."""
    replicas = 1 if component.replicas is None else component.replicas
    spec: KubeObject = {"minMember": replicas * node_count(component)}
    queue = annotations.get(VOLCANO_QUEUE, "").strip()
    if queue:
        spec["queue"] = queue
    metadata = {
        "name": leader_worker_set_name(component, context),
        "namespace": context.namespace,
        "labels": context.labels(component),
    }
    return {"apiVersion": POD_GROUP_VERSION, "kind": "PodGroup", "metadata": metadata, "spec": spec}


def _add_roles(roles: RoleTemplates, group: str, queue: str) -> None:
    for role, template in (("leader", roles.leader), ("worker", roles.worker)):
        metadata = template.setdefault("metadata", {})
        metadata.setdefault("labels", {})[ROLE] = role
        if group and template["spec"].setdefault("schedulerName", VOLCANO) == VOLCANO:
            metadata.setdefault("annotations", {})[GROUP_NAME] = group
            if queue:
                metadata["annotations"][QUEUE_NAME] = queue
