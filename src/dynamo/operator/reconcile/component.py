"""Reconcile of a DynamoComponentDeployment: its workload and its Service, and its status from what they report.

The workload is a Deployment, or a LeaderWorkerSet when a replica has several nodes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.operator.reconcile.conditions import with_condition
from dynamo.operator.reconcile.failover import add_engines
from dynamo.operator.reconcile.graph_objects import discovery_access
from dynamo.operator.reconcile.lws import leader_worker_set, pod_group
from dynamo.operator.reconcile.memory_service import claim_template
from dynamo.operator.reconcile.multinode import framework_of, single_node_template
from dynamo.operator.reconcile.multinode.nodes import WorkloadError, has_memory_pods, node_count
from dynamo.operator.reconcile.names import (
    BASE_MODEL_HASH,
    COMPONENT,
    GRAPH,
    MAIN,
    MAX_SURGE,
    MAX_UNAVAILABLE,
    NAMESPACE,
    SELECTOR,
    STRATEGY,
    WORKER_HASH,
    ClaimedGpus,
    GraphContext,
    OperatorSettings,
    Restore,
    dns_label,
    replicas_of,
)
from dynamo.operator.reconcile.plan import EventNote, Plan
from dynamo.operator.reconcile.pods import pod_template, service_ports
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.operator.reconcile.readiness import leader_worker_set_readiness
from dynamo.operator.reconcile.rollout import DEFAULT_PERCENT
from dynamo.operator.reconcile.shared import joint_objects
from dynamo.protocols.kubernetes.common import Condition, KubeObject, decode, encode
from dynamo.protocols.kubernetes.v1beta1 import (
    ComponentDeploymentStatus,
    ComponentSpec,
    ComponentStatus,
    DynamoComponentDeployment,
)

GPU = "nvidia.com/gpu"
POWER_LIMIT = "dynamo.nvidia.com/gpu-power-limit"


def component_plan(
    deployed: DynamoComponentDeployment,
    workload: KubeObject | None,
    settings: OperatorSettings,
    facts: ClusterFacts,
    now: str,
    restore: Restore | None = None,
) -> Plan:
    """Return the objects of a component and its status. `workload` is its workload as observed, or None.

    `now` is a timestamp of RFC 3339. A component that the cluster cannot run gets a condition and an event, no objects.
    """
    name = deployed.metadata.name
    component = component_of(deployed)
    context = context_of(deployed, component, settings)
    is_alone = not deployed.metadata.labels.get(GRAPH)
    own_claims: list[KubeObject] = []
    try:
        objects = component_objects(deployed, settings, facts, restore)
        template = claim_template(component, context, has_claims=facts.has_resource_claims) if is_alone else None
        own_claims += [template] if template else []
    except WorkloadError as error:
        refused = Condition(type="Available", status="False", reason="CannotRender", message=str(error))
        status = _status(deployed, None, refused, now, {})
        return Plan(status=encode(status), events=[EventNote("Warning", "CannotRender", f"{name}: {error}")])
    kind = objects[0]["kind"]
    if kind == "LeaderWorkerSet":
        found = leader_worker_set_readiness(objects[0]["metadata"]["name"], workload)
        ready, reported = found.is_ready, None if workload is None else found.status
    else:
        ready, reported = is_ready(workload), _deployment_status(workload)
    available = Condition(
        type="Available",
        status="True" if ready else "False",
        reason=f"{kind}Ready" if ready else f"{kind}NotReady",
        message=f"{kind} is ready" if ready else f"{kind} is not ready",
    )
    if restore is not None and restore.is_awaited:
        available = Condition(type="Available", status="False", reason="WaitingForCheckpoint", message=restore.text)
    joint = list(joint_objects([component], context)) if is_alone else []
    if is_alone:
        objects = [*discovery_access(context), *objects, *own_claims]
    return Plan(
        joint=joint,
        apply=objects,
        describes_observed=True,
        status=encode(_status(deployed, reported, available, now, settings.claimed_gpus)),
    )


def component_objects(
    deployed: DynamoComponentDeployment,
    settings: OperatorSettings,
    facts: ClusterFacts,
    restore: Restore | None = None,
) -> list[KubeObject]:
    """Return the objects of a component, its workload first. Raise `WorkloadError` if the cluster cannot run it."""
    component = component_of(deployed)
    context = context_of(deployed, component, settings)
    if restore is not None:
        context = dataclasses.replace(context, restores={component.name or "": restore})
        if restore.is_awaited:
            component = msgspec.structs.replace(component, replicas=0)
    annotations = deployed.metadata.annotations
    framework = framework_of(component, deployed.spec.backend_framework)
    template = pod_template(component, context, [])
    groups: list[KubeObject] = []
    if has_memory_pods(component):
        raise WorkloadError("spec.experimental.gpuMemoryService.mode: InterPod requires Grove")
    if node_count(component) > 1:
        if not facts.has_lws:
            raise WorkloadError("spec.multinode: requires LeaderWorkerSet, which is not installed")
        workload = leader_worker_set(
            component, context, template, framework=framework, annotations=annotations, has_volcano=facts.has_volcano
        )
        if facts.has_volcano:
            groups.append(pod_group(component, context, annotations))
    else:
        pod = single_node_template(template, framework)
        add_engines(component, pod, framework)
        workload = deployment(component, context, pod, annotations)
    return [workload, service(component, context), *groups]


def workload_name(deployed: DynamoComponentDeployment) -> tuple[str, str]:
    """Return the kind and the name of a component's workload."""
    if node_count(component_of(deployed)) > 1:
        return "LeaderWorkerSet", f"{deployed.metadata.name}-0"
    return "Deployment", deployed.metadata.name


def component_of(deployed: DynamoComponentDeployment) -> ComponentSpec:
    """Return the component that a DynamoComponentDeployment describes; its name defaults to the object's."""
    spec = encode(deployed.spec)
    spec.setdefault("name", deployed.metadata.labels.get(COMPONENT) or deployed.metadata.name)
    return decode(ComponentSpec, spec)


def context_of(
    deployed: DynamoComponentDeployment, component: ComponentSpec, settings: OperatorSettings
) -> GraphContext:
    """Return what the labels of a component's object say of its graph; without a graph it is one of its own."""
    metadata = deployed.metadata
    return GraphContext(
        name=metadata.labels.get(GRAPH) or metadata.name,
        namespace=metadata.namespace,
        settings=settings,
        worker_hash=metadata.labels.get(WORKER_HASH, ""),
        workload=metadata.name,
    )


def deployment(
    component: ComponentSpec, context: GraphContext, template: KubeObject, annotations: dict[str, str]
) -> KubeObject:
    """Return the Deployment of a component. Annotations give its update strategy."""
    return {
        **_object("apps/v1", "Deployment", context.object_name(component), component, context),
        "spec": {
            "replicas": replicas_of(component),
            "selector": {"matchLabels": {SELECTOR: context.object_name(component)}},
            "strategy": update_strategy(annotations),
            "template": template,
        },
    }


def service(component: ComponentSpec, context: GraphContext) -> KubeObject:
    """Return the service of a component; its EndpointSlices are what discovery reads."""
    made = _object("v1", "Service", dns_label(context.object_name(component)), component, context)
    made["metadata"]["labels"].pop(BASE_MODEL_HASH, None)  # That of the service of all pods of the base model.
    return {
        **made,
        "spec": {"selector": {SELECTOR: context.object_name(component)}, "ports": service_ports(component)},
    }


def update_strategy(annotations: dict[str, str]) -> KubeObject:
    """Return the strategy of a Deployment, of the annotations deployment-strategy and deployment-rolling-update-*."""
    if annotations.get(STRATEGY) == "Recreate":
        return {"type": "Recreate"}
    return {
        "type": "RollingUpdate",
        "rollingUpdate": {
            "maxSurge": _int_or_percent(annotations.get(MAX_SURGE) or DEFAULT_PERCENT),
            "maxUnavailable": _int_or_percent(annotations.get(MAX_UNAVAILABLE) or DEFAULT_PERCENT),
        },
    }


def is_ready(workload: KubeObject | None) -> bool:
    """Return whether a Deployment has as many current and available pods as it should, and no others."""
    if workload is None or workload.get("spec", {}).get("paused"):
        return False
    desired = workload["spec"].get("replicas", 1)
    if desired == 0:
        return True
    status = workload.get("status") or {}
    return (
        status.get("observedGeneration", 0) >= workload["metadata"].get("generation", 0)
        and status.get("updatedReplicas", 0) >= desired
        and status.get("availableReplicas", 0) >= desired
        and status.get("replicas", 0) == desired
        and any(one["type"] == "Available" and one["status"] == "True" for one in status.get("conditions") or [])
    )


def gpus(template: KubeObject | None) -> int:
    """Return the GPUs of one pod; 0 if its limits do not say."""
    containers: Sequence[KubeObject] = ((template or {}).get("spec") or {}).get("containers") or []
    main = next((one for one in containers if one.get("name") == MAIN), {})
    resources = main.get("resources") or {}
    found = (resources.get("limits") or {}).get(GPU, (resources.get("requests") or {}).get(GPU, 0))
    return int(found) if str(found).isdigit() else 0


def _status(
    deployed: DynamoComponentDeployment,
    reported: ComponentStatus | None,
    available: Condition,
    now: str,
    claimed: ClaimedGpus,
) -> ComponentDeploymentStatus:
    generation = deployed.metadata.generation
    component_ready = Condition(
        type="DynamoComponentReady",
        status=available.status,
        reason="ComponentReady" if available.status == "True" else "ComponentNotReady",
        message="DynamoComponent is ready" if available.status == "True" else "DynamoComponent is not ready",
    )
    conditions = (deployed.status and deployed.status.conditions) or []
    for one in (available, component_ready):
        one.observed_generation = generation
        conditions = with_condition(conditions, one, now)
    return ComponentDeploymentStatus(
        conditions=conditions,
        pod_selector={SELECTOR: deployed.metadata.name},
        component=reported and described(reported, component_of(deployed), runtime_namespace(deployed), claimed),
        observed_generation=generation,
    )


def _deployment_status(workload: KubeObject | None) -> ComponentStatus | None:
    if workload is None:
        return None
    reported = workload.get("status") or {}
    return ComponentStatus(
        component_kind="Deployment",
        component_names=[workload["metadata"]["name"]],
        replicas=reported.get("replicas", 0),
        updated_replicas=reported.get("updatedReplicas", 0),
        ready_replicas=reported.get("readyReplicas", 0),
        available_replicas=reported.get("availableReplicas", 0),
    )


def described(
    reported: ComponentStatus, component: ComponentSpec, namespace: str, claimed: ClaimedGpus
) -> ComponentStatus:
    """Return the replicas of a component with its Dynamo namespace, GPUs and power limit."""
    template = component.pod_template
    annotations = ((template or {}).get("metadata") or {}).get("annotations") or {}
    limit: Any = annotations.get(POWER_LIMIT, "")
    own = claimed.get(component.name or "", 0)
    count = (gpus(template) or (own if isinstance(own, int) else 0)) * node_count(component)
    return msgspec.structs.replace(
        reported,
        available_replicas=reported.ready_replicas
        if reported.available_replicas is None
        else reported.available_replicas,
        runtime_namespace=namespace,
        runtime_component_name=component.name,
        gpus_per_engine=count or None,
        gpus_per_replica=count or None,
        gpu_power_limit_watts=int(limit) if limit.isdigit() else None,
    )


def runtime_namespace(deployed: DynamoComponentDeployment) -> str:
    """Return the Dynamo namespace in which a component's processes register."""
    labels = deployed.metadata.labels
    base = labels.get(NAMESPACE) or f"{deployed.metadata.namespace}-{labels.get(GRAPH) or deployed.metadata.name}"
    suffix = labels.get(WORKER_HASH)
    return f"{base}-{suffix}" if suffix else base


def _int_or_percent(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _object(api_version: str, kind: str, name: str, component: ComponentSpec, context: GraphContext) -> KubeObject:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {"name": name, "namespace": context.namespace, "labels": context.labels(component)},
    }
