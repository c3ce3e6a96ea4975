"""Grove's PodCliqueSet of a graph.

A component of one node is a clique, or where it is forced a scaling group of one; one of several nodes is a scaling group
with a clique for the leader and one for the workers; `memory_pods` has those of a GPU memory service between pods. Grove updates cliques in place, so that names have no generation of the workers.
"""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dynamo.operator.reconcile.failover import add_engines
from dynamo.operator.reconcile.grove_names import clique_set_name, name_length
from dynamo.operator.reconcile.memory_pods import memory_pods
from dynamo.operator.reconcile.multinode import framework_of, role_templates, single_node_template
from dynamo.operator.reconcile.multinode.nodes import (
    LEADER_SUFFIX,
    WORKER_SUFFIX,
    WorkloadError,
    grove_nodes,
    has_memory_pods,
    has_scaling_group,
    node_count,
)
from dynamo.operator.reconcile.names import GRAPH, PREFIX, GraphContext, merged, replicas_of
from dynamo.operator.reconcile.plan import ObjectPatch, ObjectRef
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec, DynamoGraphDeployment, GraphTopologyConstraint

API_VERSION = "grove.io/v1alpha1"
UPDATE_STRATEGY = f"{PREFIX}grove-update-strategy"
UPDATE_STRATEGIES = ("RollingRecreate", "OnDelete")
KAI, KAI_QUEUE, KAI_QUEUE_LABEL, DEFAULT_QUEUE = (
    "kai-scheduler",
    f"{PREFIX}kai-scheduler-queue",
    "kai.scheduler/queue",
    "dynamo",
)
VOLCANO, VOLCANO_QUEUE, GROVE_QUEUE = "volcano", f"{PREFIX}volcano-queue", "scheduling.grove.io/volcano-queue"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentCliques:
    """Part of a PodCliqueSet that runs one component."""

    cliques: tuple[KubeObject, ...]
    scaling_group: KubeObject | None = None
    claim_templates: tuple[KubeObject, ...] = ()
    """Resource claims that the scaling group's cliques share."""


def pod_clique_set_name(graph: str, components: Iterable[ComponentSpec]) -> str:
    """Return the name of a graph's PodCliqueSet: the graph's, shortened with a hash where the names of pods require it."""
    lengths = (
        name_length(
            one.name,
            is_multinode=node_count(one) > 1,
            has_group=has_scaling_group(one),
            memory_nodes=node_count(one) if has_memory_pods(one) else 0,
        )
        for one in components
    )
    return clique_set_name(graph, lengths)


def grove_component_name(graph: str, components: Iterable[ComponentSpec], component: ComponentSpec) -> str:
    """Return the name of the PodClique or PodCliqueScalingGroup that Grove creates for a component."""
    return f"{pod_clique_set_name(graph, components)}-0-{component.name.lower()}"


def pod_clique_set(
    graph: DynamoGraphDeployment,
    context: GraphContext,
    templates: Mapping[str, KubeObject],
    *,
    facts: ClusterFacts,
    termination_delay: str,
) -> KubeObject:
    """Return the PodCliqueSet of a graph.

    `templates` are the complete pod templates of the components by name; `termination_delay` is a Go duration, and empty
    for Grove's own. Raise `WorkloadError` for a component that cannot run.
    """
    if facts.has_kai and facts.has_volcano:
        raise WorkloadError("scheduler: KAI and Volcano are both enabled; Grove supports one")
    components = graph.spec.components or []
    annotations = graph.metadata.annotations or {}
    parts = [
        component_cliques(one, context, templates[one.name], graph=graph, scheduling=_scheduling(annotations, facts))
        for one in components
    ]
    cliques = [clique for one in parts for clique in one.cliques]
    groups = [one.scaling_group for one in parts if one.scaling_group is not None]
    is_ordered = any("startsAfter" in clique["spec"] for clique in cliques)
    template: KubeObject = {
        "cliques": cliques,
        "cliqueStartupType": f"CliqueStartupType{'Explicit' if is_ordered else 'AnyOrder'}",
        "headlessServiceConfig": {"publishNotReadyAddresses": True},
    }
    if termination_delay:
        template["terminationDelay"] = termination_delay
    if graph.spec.priority_class_name:
        template["priorityClassName"] = graph.spec.priority_class_name
    if groups:
        template["podCliqueScalingGroups"] = groups
    claims = [claim for one in parts for claim in one.claim_templates]
    if claims:
        template["resourceClaimTemplates"] = claims
    topology = graph.spec.topology_constraint
    if topology is not None and topology.pack_domain:
        template["topologyConstraint"] = _packed(topology.pack_domain, topology.cluster_topology_name)
    spec: KubeObject = {"replicas": 1, "template": template}
    if UPDATE_STRATEGY in annotations:
        spec["updateStrategy"] = {"type": _update_strategy(annotations[UPDATE_STRATEGY])}
    return {
        "apiVersion": API_VERSION,
        "kind": "PodCliqueSet",
        "metadata": _metadata(graph, context, facts),
        "spec": spec,
    }


def scale_patches(
    graph: DynamoGraphDeployment, context: GraphContext, observed: Collection[KubeObject]
) -> list[ObjectPatch]:
    """Return the changes of replicas of the PodCliques and PodCliqueScalingGroups that exist.

    Grove makes them from the PodCliqueSet, but does not scale those that exist when its template changes. Those that do
    not exist yet are made with the right replicas. A component without replicas keeps what others have set.
    """
    components = graph.spec.components or []
    known = {(one["kind"], one["metadata"]["name"]): one for one in observed}
    patches = []
    for component in components:
        kind = "PodCliqueScalingGroup" if has_scaling_group(component) else "PodClique"
        name = grove_component_name(context.name, components, component)
        found = known.get((kind, name))
        if found is None or component.replicas is None or found["spec"].get("replicas", 1) == component.replicas:
            continue
        ref = ObjectRef(API_VERSION, kind, context.namespace, name)
        patches.append(ObjectPatch(ref, {"spec": {"replicas": component.replicas}}, "scale"))
    return patches


def component_cliques(
    component: ComponentSpec,
    context: GraphContext,
    template: KubeObject,
    *,
    graph: DynamoGraphDeployment,
    scheduling: Mapping[str, str],
) -> ComponentCliques:
    """Return the cliques of a component and its scaling group, if it has one."""
    framework = framework_of(component, graph.spec.backend_framework)
    nodes, name = node_count(component), component.name.lower()
    # Grove refuses a set with 0 replicas; the clique or group is scaled to 0 once it exists.
    replicas = max(1, replicas_of(component))
    topology = _component_topology(component, graph.spec.topology_constraint)
    least = component.min_available or 1
    if has_memory_pods(component):
        made = memory_pods(
            component, context, template, framework=framework, annotations=graph.metadata.annotations or {}
        )
        cliques = tuple(
            _clique(own, count, 1, pod, component, context, scheduling, after)
            for own, count, pod, after in made.templates
        )
        group = _group(name, [one["name"] for one in cliques], replicas, least, topology)
        group["resourceSharing"] = list(made.sharing)
        return ComponentCliques(cliques=cliques, scaling_group=group, claim_templates=tuple(made.claim_templates))
    if nodes == 1:
        pod = single_node_template(template, framework)
        add_engines(component, pod, framework)
        if has_scaling_group(component):
            clique = _clique(name, 1, 1, pod, component, context, scheduling)
            return ComponentCliques(cliques=(clique,), scaling_group=_group(name, [name], replicas, least, topology))
        clique = _clique(name, replicas, least, pod, component, context, scheduling)
        return ComponentCliques(cliques=({**clique, **topology},))
    roles = role_templates(
        component,
        context,
        template,
        grove_nodes(component.name, nodes),
        framework=framework,
        annotations=graph.metadata.annotations or {},
    )
    for pod in (roles.leader, roles.worker):
        add_engines(component, pod, framework)
    leader_name, worker_name = f"{name}-{LEADER_SUFFIX}", f"{name}-{WORKER_SUFFIX}"
    leader = _clique(leader_name, 1, 1, roles.leader, component, context, scheduling)
    worker = _clique(worker_name, nodes - 1, nodes - 1, roles.worker, component, context, scheduling)
    if framework == "trtllm":  # mpirun connects to the workers' SSH servers.
        leader["spec"]["startsAfter"] = [worker_name]
    group = _group(name, [leader_name, worker_name], replicas, least, topology)
    return ComponentCliques(cliques=(leader, worker), scaling_group=group)


def _group(name: str, cliques: Sequence[str], replicas: int, least: int, topology: KubeObject) -> KubeObject:
    """Return a scaling group. Its `minAvailable` are scheduled together; with fewer, Grove ends the gang."""
    return {"name": name, "cliqueNames": list(cliques), "replicas": replicas, "minAvailable": least, **topology}


def _clique(
    name: str,
    replicas: int,
    least: int,
    template: KubeObject,
    component: ComponentSpec,
    context: GraphContext,
    scheduling: Mapping[str, str],
    after: str = "",
) -> KubeObject:
    """Return one clique; labels and annotations are those of its pods. `scheduling` is the scheduler's name and queue.

    It starts once the clique `after` has, if one is given.
    """
    metadata = template.get("metadata") or {}
    labels = dict(metadata.get("labels") or {})
    pod = copy.deepcopy(template["spec"])
    scheduler = scheduling.get("name")
    if scheduler and pod.setdefault("schedulerName", scheduler) == scheduler and "queue" in scheduling:
        labels[KAI_QUEUE_LABEL] = scheduling["queue"]
    clique: KubeObject = {"name": name, "labels": labels}
    if metadata.get("annotations"):
        clique["annotations"] = dict(metadata["annotations"])
    clique["spec"] = {"roleName": name, "replicas": replicas, "minAvailable": least, "podSpec": pod}
    if after:
        clique["spec"]["startsAfter"] = [after]
    return clique


def _metadata(graph: DynamoGraphDeployment, context: GraphContext, facts: ClusterFacts) -> KubeObject:
    metadata: KubeObject = {
        "name": pod_clique_set_name(context.name, graph.spec.components or []),
        "namespace": context.namespace,
        "labels": merged(graph.spec.labels, {GRAPH: context.name}),
    }
    queue = (graph.metadata.annotations or {}).get(VOLCANO_QUEUE, "").strip()
    annotations = merged(graph.spec.annotations, {GROVE_QUEUE: queue} if queue and facts.has_volcano else None)
    return {**metadata, "annotations": annotations} if annotations else metadata


def _scheduling(annotations: Mapping[str, str], facts: ClusterFacts) -> dict[str, str]:
    if facts.has_kai:
        return {"name": KAI, "queue": annotations.get(KAI_QUEUE, "").strip() or DEFAULT_QUEUE}
    return {"name": VOLCANO} if facts.has_volcano else {}


def _component_topology(component: ComponentSpec, graph: GraphTopologyConstraint | None) -> dict[str, KubeObject]:
    """Return a component's constraint; it names the topology unless the set's own constraint does."""
    if component.topology_constraint is None:
        return {}
    is_named_by_set = graph is None or graph.pack_domain
    name = "" if is_named_by_set or graph is None else graph.cluster_topology_name
    return {"topologyConstraint": _packed(component.topology_constraint.pack_domain, name)}


def _packed(domain: str, topology: str) -> KubeObject:
    pack: KubeObject = {"pack": {"required": domain}}
    return {"topologyName": topology, **pack} if topology else pack


def _update_strategy(given: str) -> str:
    if given not in UPDATE_STRATEGIES:
        allowed = " and ".join(UPDATE_STRATEGIES)
        raise WorkloadError(
            f"metadata.annotations[{UPDATE_STRATEGY}]: {given!r} is not supported; {allowed} are allowed"
        )
    return given
