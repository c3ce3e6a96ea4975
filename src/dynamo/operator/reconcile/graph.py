"""Reconcile of a DynamoGraphDeployment: its components, scaling adapters and the account of its pods, and its status.

The components' workloads are those of their DynamoComponentDeployments (`component`).
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.operator.reconcile.component import runtime_namespace
from dynamo.operator.reconcile.conditions import is_true, with_condition
from dynamo.operator.reconcile.lws import VOLCANO_QUEUE
from dynamo.operator.reconcile.multinode.nodes import node_count
from dynamo.operator.reconcile.multinode.vllm import EXECUTOR_ANNOTATION, ORIGIN_ANNOTATION
from dynamo.operator.reconcile.multinode.wait_for_leader import config_map
from dynamo.operator.reconcile.names import (
    COMPONENT,
    CURRENT_WORKER_HASH,
    GRAPH,
    MAX_SURGE,
    MAX_UNAVAILABLE,
    RESTART_AT,
    WORKER_HASH,
    GraphContext,
    OperatorSettings,
    is_worker,
    merged,
    replicas_of,
    service_name,
    worker_hash,
)
from dynamo.operator.reconcile.plan import EventNote, ObjectPatch, ObjectRef, Plan, ref_of
from dynamo.operator.reconcile.pods import MAIN
from dynamo.operator.reconcile.preserved import claims, ingress, not_supported
from dynamo.operator.reconcile.restart import marked, next_restart
from dynamo.operator.reconcile.rollout import WorkerReplicas, generation_of, is_drained, replica_targets
from dynamo.protocols.kubernetes.common import V1ALPHA1, V1BETA1, Condition, KubeObject, RestartStatus, encode
from dynamo.protocols.kubernetes.v1beta1 import (
    ComponentSpec,
    ComponentStatus,
    DynamoComponentDeployment,
    DynamoGraphDeployment,
    GraphStatus,
    RolloutStatus,
)

ADAPTER = "DynamoGraphDeploymentScalingAdapter"
DEPLOYED = "DynamoComponentDeployment"
RBAC = "rbac.authorization.k8s.io"
DISCOVERY_RULES = [
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
    {
        "apiGroups": ["nvidia.com"],
        "resources": ["dynamoworkermetadatas"],
        "verbs": ["get", "list", "watch", "create", "patch"],
    },
]


PASSED_ON = (EXECUTOR_ANNOTATION, ORIGIN_ANNOTATION, VOLCANO_QUEUE)
"""Annotations of the graph itself that decide how its components run on several nodes."""
ONE_GROUP = {MAX_SURGE: "0", MAX_UNAVAILABLE: "1"}
"""Update of components of several nodes, unless annotations differ: a surge would need the GPUs of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedGraph:
    """Objects that a graph owns, as the cluster has them."""

    components: Sequence[DynamoComponentDeployment] = ()
    adapters: Sequence[str] = ()
    """Names of the scaling adapters."""
    entries: Sequence[str] = ()
    """Names of the Ingresses."""


@dataclass(slots=True)
class GraphPass:
    """One pass over one graph."""

    graph: DynamoGraphDeployment
    context: GraphContext
    observed: ObservedGraph
    now: str
    events: list[EventNote] = field(default_factory=list)

    @property
    def components(self) -> Sequence[ComponentSpec]:
        """Desired components."""
        return self.graph.spec.components or []

    @property
    def status(self) -> GraphStatus:
        """Status before this pass."""
        return self.graph.status or GraphStatus()

    def current(self, component: ComponentSpec) -> DynamoComponentDeployment | None:
        """Return the object of a component in its desired generation."""
        name = self.context.object_name(component)
        return next((one for one in self.observed.components if one.metadata.name == name), None)

    def earlier(self, component: ComponentSpec | None = None) -> list[DynamoComponentDeployment]:
        """Return the workers of other generations, of one component or of all."""
        return [
            one
            for one in self.observed.components
            if WORKER_HASH in one.metadata.labels
            and one.metadata.labels[WORKER_HASH] != self.context.worker_hash
            and (component is None or one.metadata.labels.get(COMPONENT) == component.name)
        ]

    def is_rolling(self) -> bool:
        """Return whether workers of another generation exist."""
        return bool(self.earlier())


def context_of_graph(graph: DynamoGraphDeployment, settings: OperatorSettings, namespace: str) -> GraphContext:
    """Return the graph as its components see it."""
    return GraphContext(
        name=graph.metadata.name, namespace=namespace, settings=settings, worker_hash=worker_hash(graph)
    )


def graph_plan(graph: DynamoGraphDeployment, observed: ObservedGraph, settings: OperatorSettings, now: str) -> Plan:
    """Return the objects of a graph and its next status. `now` is a timestamp of RFC 3339.

    A second pass over the state that results changes nothing. Objects are only deleted if the graph owns them.
    """
    context = context_of_graph(graph, settings, graph.metadata.namespace)
    one_pass = GraphPass(graph, context, observed, now)
    restart = _restart(one_pass)
    apply, adapters, patches = list(shared_objects(graph, context)), list[KubeObject](), list[ObjectPatch]()
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
        restart_at = graph.spec.restart.id if graph.spec.restart and component.name in with_restart else None
        apply.append(component_object(graph, component, context, targets.new, restart_at or _restart_annotation(state)))
        patches += [
            _replicas_patch(one, targets.old[one.metadata.name])
            for one in old
            if generation_of(one).declared != targets.old[one.metadata.name]
        ]
        adapter = adapter_object(component, context) if component.scaling_adapter is not None else None
        if adapter is not None:
            adapters.append(adapter)
        entry = ingress(graph, component, context)
        if entry is not None:
            apply.append(entry)
    wanted = {ref_of(one) for one in [*apply, *adapters]}
    one_pass.events += not_supported(graph)
    apply += [one for one in adapters if one["metadata"]["name"] not in observed.adapters]
    rollout = _rollout(one_pass)
    is_current = not one_pass.is_rolling() and _all_exist(one_pass)
    return Plan(
        create=list(claims(graph, context)),
        apply=apply,
        patch=patches,
        delete=list(_unwanted(one_pass, wanted)),
        describes_observed=True,
        annotations=_hash_annotation(one_pass, is_current),
        status=encode(_graph_status(one_pass, restart, rollout)),
        events=one_pass.events,
    )


def component_object(
    graph: DynamoGraphDeployment,
    component: ComponentSpec,
    context: GraphContext,
    replicas: int,
    restart_at: str | None = None,
) -> KubeObject:
    """Return the DynamoComponentDeployment of a component, with what the graph gives to all its components.

    Environment variables, labels and annotations of the component take precedence over those of the graph.
    """
    spec = encode(component)
    spec["replicas"] = replicas
    if graph.spec.backend_framework:
        spec["backendFramework"] = graph.spec.backend_framework
    template = copy.deepcopy(spec.get("podTemplate") or {})
    _add_environment(template, graph.spec.env or [])
    metadata = template.setdefault("metadata", {})
    restart = {RESTART_AT: restart_at} if restart_at else {}
    for name, found in (
        ("labels", merged(graph.spec.labels, metadata.get("labels"))),
        ("annotations", merged(graph.spec.annotations, metadata.get("annotations"), restart)),
    ):
        if found:
            metadata[name] = found
    if not metadata:
        del template["metadata"]
    if template:
        spec["podTemplate"] = template
    made = _object(V1BETA1, DEPLOYED, context.object_name(component), context, context.labels(component))
    own = {name: value for name, value in graph.metadata.annotations.items() if name in PASSED_ON}
    annotations = merged(own if node_count(component) > 1 else None, graph.spec.annotations, _annotations(component))
    if annotations:
        made["metadata"]["annotations"] = annotations
    return {**made, "spec": spec}


def adapter_object(component: ComponentSpec, context: GraphContext) -> KubeObject:
    """Return a new scaling adapter of a component, in the version in which it is stored.

    An existing one owns its replicas and is not applied again.
    """
    name = service_name(context.name, component.name)
    made = _object(V1ALPHA1, ADAPTER, name, context, context.labels(component))
    reference = {"name": context.name, "serviceName": component.name}
    return {**made, "spec": {"replicas": replicas_of(component), "dgdRef": reference}}


def shared_objects(graph: DynamoGraphDeployment, context: GraphContext) -> Iterator[KubeObject]:
    """Yield the objects that all components of a graph use."""
    yield from discovery_access(context)
    if any(node_count(one) > 1 and is_worker(one) for one in graph.spec.components or []):
        yield config_map(context)


def discovery_access(context: GraphContext) -> Iterator[KubeObject]:
    """Yield the account of the graph's pods and its role, which discovery in Kubernetes requires."""
    if context.settings.discovery_backend != "kubernetes":
        return
    account = f"{context.name}-k8s-service-discovery"
    labels = {GRAPH: context.name}
    yield _object("v1", "ServiceAccount", account, context, labels)
    yield {**_object(f"{RBAC}/v1", "Role", f"{account}-role", context, labels), "rules": DISCOVERY_RULES}
    yield {
        **_object(f"{RBAC}/v1", "RoleBinding", f"{account}-binding", context, labels),
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": context.namespace}],
        "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": f"{account}-role"},
    }


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


def _unwanted(one_pass: GraphPass, wanted: set[ObjectRef]) -> Iterator[ObjectRef]:
    """Yield drained generations after the update has ended, components and adapters that the graph no longer has."""
    namespace = one_pass.context.namespace
    workers = [one for one in one_pass.components if is_worker(one)]
    is_updated = all(_is_updated(one_pass, one) for one in workers)
    earlier = {one.metadata.name for one in one_pass.earlier()}
    for one in one_pass.observed.components:
        ref = ObjectRef(V1BETA1, DEPLOYED, namespace, one.metadata.name)
        if ref not in wanted and (one.metadata.name not in earlier or (is_updated and is_drained(one))):
            yield ref
    for name in one_pass.observed.adapters:
        ref = ObjectRef(V1ALPHA1, ADAPTER, namespace, name)
        if ref not in wanted:
            yield ref
    for name in one_pass.observed.entries:
        ref = ObjectRef("networking.k8s.io/v1", "Ingress", namespace, name)
        if ref not in wanted:
            yield ref


def _all_exist(one_pass: GraphPass) -> bool:
    return all(one_pass.current(one) is not None for one in one_pass.components)


def _hash_annotation(one_pass: GraphPass, is_current: bool) -> Mapping[str, str]:
    known = one_pass.graph.metadata.annotations.get(CURRENT_WORKER_HASH)
    wanted = one_pass.context.worker_hash
    return {CURRENT_WORKER_HASH: wanted} if is_current and known != wanted else {}


def _graph_status(one_pass: GraphPass, restart: RestartStatus | None, rollout: RolloutStatus | None) -> GraphStatus:
    graph, reasons = one_pass.graph, []
    statuses: dict[str, ComponentStatus] = {}
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
    ready = Condition(
        type="Ready",
        status="False" if reasons else "True",
        reason="some_resources_are_not_ready" if reasons else "all_resources_are_ready",
        message=f"Resources not ready: {'; '.join(reasons)}" if reasons else "All resources are ready",
        observed_generation=graph.metadata.generation,
    )
    before = one_pass.status
    if not reasons and not is_true(before.conditions, "Ready"):
        one_pass.events.append(EventNote("Normal", "Ready", "All resources are ready"))
    return GraphStatus(
        observed_generation=graph.metadata.generation,
        state="initializing" if is_first else "pending" if reasons else "successful",
        conditions=with_condition(before.conditions, ready, one_pass.now),
        components=statuses or None,
        restart=restart,
        checkpoints=before.checkpoints,
        rolling_update=rollout,
        placement=before.placement,
    )


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
    conditions = (state.status and state.status.conditions) or []
    found = next((one.message for one in conditions if one.type == "Available" and one.status != "True"), "")
    return found or "not reconciled yet"


def _replicas_patch(state: DynamoComponentDeployment, replicas: int) -> ObjectPatch:
    ref = ObjectRef(V1BETA1, DEPLOYED, state.metadata.namespace, state.metadata.name)
    return ObjectPatch(ref, {"spec": {"replicas": replicas}})


def _annotations(component: ComponentSpec) -> dict[str, str]:
    template = component.pod_template or {}
    return dict((template.get("metadata") or {}).get("annotations") or {})


def _add_environment(template: KubeObject, graph_env: Sequence[KubeObject]) -> None:
    if not graph_env:
        return
    containers = template.setdefault("spec", {}).setdefault("containers", [])
    main = next((one for one in containers if one.get("name") == MAIN), None)
    if main is None:
        main = {"name": MAIN}
        containers.insert(0, main)
    own = {one["name"] for one in main.get("env") or []}
    main["env"] = [*(one for one in graph_env if one["name"] not in own), *(main.get("env") or [])]


def _object(api_version: str, kind: str, name: str, context: GraphContext, labels: Mapping[str, str]) -> KubeObject:
    metadata = {"name": name, "namespace": context.namespace, "labels": dict(labels)}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}
