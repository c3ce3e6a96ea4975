"""Graph of the component provider: a DynamoComponentDeployment for each component, and their managed updates.

The components' workloads are those of their DynamoComponentDeployments (`component`).
"""

from collections.abc import Iterator, Mapping, Sequence

from dynamo.operator.reconcile.component import runtime_namespace
from dynamo.operator.reconcile.conditions import FAILED, RECONCILED, is_true
from dynamo.operator.reconcile.deployment_config import with_deployment_config
from dynamo.operator.reconcile.graph_objects import (
    PASSED_ON,
    common_objects,
    component_fields,
    graph_object,
    new_adapters,
    refs_of,
    restart_id,
    unwanted,
)
from dynamo.operator.reconcile.graph_pass import GraphPass
from dynamo.operator.reconcile.graph_status import graph_status
from dynamo.operator.reconcile.lws import VOLCANO_QUEUE
from dynamo.operator.reconcile.multinode.nodes import node_count
from dynamo.operator.reconcile.names import (
    CURRENT_WORKER_HASH,
    MAX_SURGE,
    MAX_UNAVAILABLE,
    RESTART_AT,
    GraphContext,
    is_worker,
    merged,
    replicas_of,
)
from dynamo.operator.reconcile.plan import EventNote, ObjectPatch, ObjectRef, Plan
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.operator.reconcile.restart import marked, next_restart
from dynamo.operator.reconcile.rollout import WorkerReplicas, generation_of, is_drained, replica_targets
from dynamo.operator.reconcile.topology import Topologies
from dynamo.protocols.kubernetes.common import V1BETA1, KubeObject, RestartStatus, encode
from dynamo.protocols.kubernetes.v1beta1 import (
    ComponentSpec,
    ComponentStatus,
    DynamoComponentDeployment,
    DynamoGraphDeployment,
    GraphStatus,
    RolloutStatus,
)

DEPLOYED = "DynamoComponentDeployment"
PASSED_TO_GROUPS = (*PASSED_ON, VOLCANO_QUEUE)
"""Annotations of the graph itself that decide how its components run on several nodes."""
ONE_GROUP = {MAX_SURGE: "0", MAX_UNAVAILABLE: "1"}
"""Update of components of several nodes, unless annotations differ: a surge would need the GPUs of a group."""


def components_plan(one_pass: GraphPass, facts: ClusterFacts) -> Plan:
    """Return the objects of a graph and its next status. Raise `WorkloadError` if it cannot run."""
    graph = one_pass.graph = with_deployment_config(one_pass.graph)
    context = one_pass.context
    restart = _restart(one_pass)
    common = common_objects(one_pass, facts)
    apply, patches = list(common.apply), list[ObjectPatch]()
    with_restart = marked(graph.spec.restart, restart, [one.name for one in one_pass.components])
    for component in one_pass.components:
        state = one_pass.current(component)
        old = one_pass.earlier(component)
        targets = replica_targets(
            component,
            generation_of(state) if state else WorkerReplicas(),
            old,
            merged(ONE_GROUP if node_count(component) > 1 else None, graph.spec.annotations, _annotations(component)),
        )
        restart_at = restart_id(graph, component.name, with_restart) or _restart_annotation(state)
        apply.append(component_object(graph, component, context, targets.new, facts.topologies, restart_at))
        patches += [
            _replicas_patch(one, targets.old[one.metadata.name])
            for one in old
            if generation_of(one).declared != targets.old[one.metadata.name]
        ]
    wanted = refs_of(apply, common.adapters)
    rollout = _rollout(one_pass)
    is_current = not one_pass.is_rolling() and _all_exist(one_pass)
    return Plan(
        create=common.create,
        keys=common.keys,
        joint=common.joint,
        apply=[*apply, *new_adapters(one_pass, common)],
        patch=patches,
        delete=[*_former(one_pass, wanted), *unwanted(one_pass, wanted)],
        describes_observed=True,
        annotations=_hash_annotation(one_pass, is_current),
        status=encode(_status(one_pass, restart, rollout)),
        events=one_pass.events,
    )


def component_object(
    graph: DynamoGraphDeployment,
    component: ComponentSpec,
    context: GraphContext,
    replicas: int,
    topologies: Topologies = None,
    restart_at: str | None = None,
) -> KubeObject:
    """Return the DynamoComponentDeployment of a component, with what the graph gives to all its components."""
    spec = component_fields(graph, component, topologies, restart_at)
    spec["replicas"] = replicas
    if graph.spec.backend_framework:
        spec["backendFramework"] = graph.spec.backend_framework
    made = graph_object(V1BETA1, DEPLOYED, context.object_name(component), context, context.labels(component))
    own = {name: value for name, value in graph.metadata.annotations.items() if name in PASSED_TO_GROUPS}
    annotations = merged(own if node_count(component) > 1 else None, graph.spec.annotations, _annotations(component))
    if annotations:
        made["metadata"]["annotations"] = annotations
    return {**made, "spec": spec}


def _restart(one_pass: GraphPass) -> RestartStatus | None:
    wanted = one_pass.graph.spec.restart
    by_name = {one.name: one for one in one_pass.components}

    def has_restarted(name: str) -> bool:
        state = one_pass.current(by_name[name])
        if state is None or wanted is None or _restart_annotation(state) != wanted.id or not _is_ready(state):
            return False
        reported = state.status.component if state.status else None
        return ((reported and reported.updated_replicas) or 0) >= generation_of(state).declared

    names = list(by_name)
    is_rolling = one_pass.is_rolling()
    status = one_pass.status.restart
    return next_restart(wanted, status, names, is_rolling=is_rolling, has_restarted=has_restarted)


def _restart_annotation(state: DynamoComponentDeployment | None) -> str | None:
    template = (state and state.spec.pod_template) or {}
    found: str | None = ((template.get("metadata") or {}).get("annotations") or {}).get(RESTART_AT)
    return found


def _rollout(one_pass: GraphPass) -> RolloutStatus | None:
    """Return the next status of the managed update of the workers."""
    before = one_pass.status.rolling_update
    workers = [one for one in one_pass.components if is_worker(one)]
    updated = sorted(one.name for one in workers if _is_updated(one_pass, one))
    if one_pass.is_rolling():
        is_running = before is not None and before.phase in ("Pending", "InProgress")
        start = before.start_time if before is not None and is_running else one_pass.now
        if not is_running:
            one_pass.events.append(
                EventNote("Normal", "RollingUpdateStarted", f"workers of generation {one_pass.context.worker_hash}")
            )
        return RolloutStatus(phase="InProgress", start_time=start, updated_components=updated or None)
    if before is not None and before.phase in ("Pending", "InProgress"):
        names = sorted(one.name for one in workers)
        return RolloutStatus(
            phase="Completed", start_time=before.start_time, end_time=one_pass.now, updated_components=names
        )
    return before


def _is_updated(one_pass: GraphPass, component: ComponentSpec) -> bool:
    state = one_pass.current(component)
    reported = state.status.component if state and state.status else None
    ready = (reported and reported.ready_replicas) or 0
    return ready >= replicas_of(component) and all(
        not (one.status and one.status.component and one.status.component.ready_replicas)
        for one in one_pass.earlier(component)
    )


def _former(one_pass: GraphPass, wanted: set[ObjectRef]) -> Iterator[ObjectRef]:
    """Yield drained generations after the update has ended, and components that the graph no longer has."""
    workers = [one for one in one_pass.components if is_worker(one)]
    is_updated = all(_is_updated(one_pass, one) for one in workers)
    earlier = {one.metadata.name for one in one_pass.earlier()}
    for one in one_pass.observed.components:
        ref = ObjectRef(V1BETA1, DEPLOYED, one_pass.context.namespace, one.metadata.name)
        if ref not in wanted and (one.metadata.name not in earlier or (is_updated and is_drained(one))):
            yield ref


def _all_exist(one_pass: GraphPass) -> bool:
    return all(one_pass.current(one) is not None for one in one_pass.components)


def _hash_annotation(one_pass: GraphPass, is_current: bool) -> Mapping[str, str]:
    known = one_pass.graph.metadata.annotations.get(CURRENT_WORKER_HASH)
    wanted = one_pass.context.worker_hash
    return {CURRENT_WORKER_HASH: wanted} if is_current and known != wanted else {}


def _status(one_pass: GraphPass, restart: RestartStatus | None, rollout: RolloutStatus | None) -> GraphStatus:
    reasons, statuses = [], dict[str, ComponentStatus]()
    for component in one_pass.components:
        state = one_pass.current(component)
        if state is None:
            reasons.append(f"{one_pass.context.object_name(component)}: not created yet")
        elif not _is_ready(state):
            reasons.append(f"{state.metadata.name}: {_why_not(state)}")
        found = _component_status(state, one_pass.earlier(component))
        if found is not None:
            statuses[component.name] = found
    reasons += [f"{one.metadata.name}: earlier generation is not removed yet" for one in one_pass.earlier()]
    is_first = not one_pass.observed.components
    return graph_status(one_pass, statuses, reasons, is_first=is_first, restart=restart, rollout=rollout)


def _component_status(
    state: DynamoComponentDeployment | None, earlier: Sequence[DynamoComponentDeployment]
) -> ComponentStatus | None:
    """Return the replicas of a component in all generations; only those of the current one count as updated."""
    found = [one for one in (state, *earlier) if one is not None and one.status and one.status.component]
    reported = [one.status.component for one in found if one.status and one.status.component]
    if not reported:
        return None
    first = reported[0]
    serving = next((one for one in earlier if generation_of(one).declared), state)
    return ComponentStatus(
        component_kind=first.component_kind,
        component_names=sorted(name for one in reported for name in one.component_names or []),
        replicas=sum(one.replicas or 0 for one in reported),
        updated_replicas=first.updated_replicas if state is found[0] else 0,
        ready_replicas=sum(one.ready_replicas or 0 for one in reported),
        available_replicas=sum(one.available_replicas or 0 for one in reported),
        runtime_namespace=runtime_namespace(serving) if serving else None,
        runtime_component_name=first.runtime_component_name,
        gpus_per_engine=first.gpus_per_engine,
        gpus_per_replica=first.gpus_per_replica,
        gpu_power_limit_watts=first.gpu_power_limit_watts,
    )


def _is_ready(state: DynamoComponentDeployment) -> bool:
    status = state.status
    return (
        status is not None
        and (status.observed_generation or 0) >= state.metadata.generation
        and is_true(status.conditions, "Available")
    )


def _why_not(state: DynamoComponentDeployment) -> str:
    """Return what the object of a component waits for: first that its objects were refused."""
    known = {one.type: one for one in (state.status and state.status.conditions) or []}
    failed, available = known.get(RECONCILED), known.get("Available")
    if failed is not None and failed.reason == FAILED:
        return failed.message or FAILED
    return (available and available.status != "True" and available.message) or "not reconciled yet"


def _replicas_patch(state: DynamoComponentDeployment, replicas: int) -> ObjectPatch:
    ref = ObjectRef(V1BETA1, DEPLOYED, state.metadata.namespace, state.metadata.name)
    return ObjectPatch(ref, {"spec": {"replicas": replicas}})


def _annotations(component: ComponentSpec) -> dict[str, str]:
    template = component.pod_template or {}
    return dict((template.get("metadata") or {}).get("annotations") or {})
