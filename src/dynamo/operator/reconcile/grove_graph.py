"""Graph of the Grove provider: one PodCliqueSet, whose cliques are updated in place, and the status they report."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.operator.reconcile.component import described, service
from dynamo.operator.reconcile.graph_objects import (
    common_objects,
    component_fields,
    new_adapters,
    refs_of,
    restart_id,
    unwanted,
)
from dynamo.operator.reconcile.graph_pass import GraphPass
from dynamo.operator.reconcile.graph_status import NOT_READY, graph_status
from dynamo.operator.reconcile.grove import grove_component_name, pod_clique_set, pod_clique_set_name, scale_patches
from dynamo.operator.reconcile.multinode.nodes import has_scaling_group
from dynamo.operator.reconcile.names import COMPONENT, CURRENT_WORKER_HASH, RESTART_AT, is_worker
from dynamo.operator.reconcile.plan import EventNote, Plan
from dynamo.operator.reconcile.pods import pod_template
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.operator.reconcile.readiness import CAPACITY, PODS, UPDATING, GroveKind, WorkloadReadiness, grove_readiness
from dynamo.operator.reconcile.restart import marked, next_restart
from dynamo.protocols.kubernetes.common import Condition, KubeObject, RestartStatus, decode, encode
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec, ComponentStatus, GraphStatus

TOPOLOGY = "TopologyLevelsAvailable"
TOPOLOGY_OF_GROVE = "TopologyLevelsUnavailable"
SEVERITY = (CAPACITY, UPDATING, PODS)
"""Reasons of components that are not ready; the first that applies is the graph's."""


def grove_plan(one_pass: GraphPass, facts: ClusterFacts) -> Plan:
    """Return the objects of a graph and its next status. Raise `WorkloadError` if the cluster cannot run it."""
    graph, context, observed = one_pass.graph, one_pass.context, one_pass.observed
    found = {one.name: _readiness(one_pass, one) for one in one_pass.components}
    restart = _restart(one_pass, found)
    names = [one.name for one in one_pass.components]
    with_restart = marked(graph.spec.restart, restart, names)
    common = common_objects(one_pass, facts)
    apply, templates = list(common.apply), dict[str, KubeObject]()
    for component in one_pass.components:
        restart_at = restart_id(graph, component.name, with_restart) or _restart_annotation(one_pass, component.name)
        complete = decode(ComponentSpec, component_fields(graph, component, facts.topologies, restart_at))
        templates[component.name] = pod_template(complete, context, [])
        apply.append(service(component, context))
    wanted = pod_clique_set(
        graph, context, templates, facts=facts, termination_delay=context.settings.grove_termination_delay
    )
    apply.append(with_observed(wanted, observed.clique_set))
    status = _status(one_pass, found, restart)
    return Plan(
        create=common.create,
        keys=common.keys,
        joint=common.joint,
        apply=[*apply, *new_adapters(one_pass, common)],
        patch=scale_patches(graph, context, observed.cliques),
        delete=list(unwanted(one_pass, refs_of(apply, common.adapters))),
        describes_observed=True,
        annotations=_hash_annotation(one_pass),
        status=encode(status),
        events=one_pass.events,
    )


def with_observed(wanted: KubeObject, observed: KubeObject | None) -> KubeObject:
    """Return a PodCliqueSet with the replicas and the order of cliques that the existing one has.

    Grove scales existing cliques and groups by their scale subresource and does not allow their order to change. A
    change of replicas therefore leaves the set as it is.
    """
    if observed is None:
        return wanted
    template, before = wanted["spec"]["template"], (observed.get("spec") or {}).get("template") or {}
    grouped = {name for one in template.get("podCliqueScalingGroups") or () for name in one["cliqueNames"]}
    cliques = {one["name"]: one for one in before.get("cliques") or ()}
    groups = {one["name"]: one for one in before.get("podCliqueScalingGroups") or ()}
    made = [
        one
        if one["name"] in grouped or one["name"] not in cliques
        else {**one, "spec": {**one["spec"], **_replicas(cliques[one["name"]].get("spec") or {})}}
        for one in template["cliques"]
    ]
    result = {**template, "cliques": _in_order(made, list(cliques))}
    if template.get("podCliqueScalingGroups"):
        scaled = [{**one, **_replicas(groups.get(one["name"]) or {})} for one in template["podCliqueScalingGroups"]]
        result["podCliqueScalingGroups"] = _in_order(scaled, list(groups))
    return {**wanted, "spec": {**wanted["spec"], "template": result}}


def _replicas(value: Mapping[str, Any]) -> dict[str, Any]:
    return {"replicas": value["replicas"]} if value.get("replicas") is not None else {}


def _in_order(items: Sequence[KubeObject], names: Sequence[str]) -> list[KubeObject]:
    place = {name: index for index, name in enumerate(names)}
    return sorted(items, key=lambda one: place.get(one["name"], len(names)))


def _readiness(one_pass: GraphPass, component: ComponentSpec) -> WorkloadReadiness:
    kind: GroveKind = "PodCliqueScalingGroup" if has_scaling_group(component) else "PodClique"
    name = grove_component_name(one_pass.context.name, one_pass.components, component)
    cliques = one_pass.observed.cliques
    value = next((one for one in cliques if one["kind"] == kind and one["metadata"]["name"] == name), None)
    return grove_readiness(kind, name, value)


def _restart(one_pass: GraphPass, found: Mapping[str, WorkloadReadiness]) -> RestartStatus | None:
    graph, observed = one_pass.graph, one_pass.observed.clique_set
    wanted = graph.spec.restart

    def has_restarted(name: str) -> bool:
        """Return whether the set has the restart, Grove has processed it, and the component is ready with it."""
        if wanted is None or _restart_annotation(one_pass, name) != wanted.id or not is_processed(observed):
            return False
        return found[name].is_ready

    names = [one.name for one in one_pass.components]
    return next_restart(wanted, one_pass.status.restart, names, is_rolling=False, has_restarted=has_restarted)


def is_processed(clique_set: KubeObject | None) -> bool:
    """Return whether Grove has processed the present PodCliqueSet and is not in the middle of an update."""
    if clique_set is None:
        return False
    status = clique_set.get("status") or {}
    seen = status.get("observedGeneration")
    if seen is None or int(seen) < int(clique_set["metadata"].get("generation") or 0):
        return False
    progress = status.get("updateProgress") or status.get("rollingUpdateProgress")
    return not progress or bool(progress.get("updateEndedAt"))


def _restart_annotation(one_pass: GraphPass, name: str) -> str | None:
    """Return the restart that the existing set gives to the pods of a component."""
    template = ((one_pass.observed.clique_set or {}).get("spec") or {}).get("template") or {}
    for clique in template.get("cliques") or ():
        if (clique.get("labels") or {}).get(COMPONENT) == name:
            found: str | None = (clique.get("annotations") or {}).get(RESTART_AT)
            return found
    return None


def _hash_annotation(one_pass: GraphPass) -> Mapping[str, str]:
    """Return the workers' generation if it has changed, with an event that Grove updates them and not the operator."""
    known = one_pass.graph.metadata.annotations.get(CURRENT_WORKER_HASH)
    wanted = one_pass.context.worker_hash
    if known == wanted or not any(is_worker(one) for one in one_pass.components):
        return {}
    if known is not None:
        text = "the workers changed: Grove updates their pods in place, without the graph's rolling update settings"
        one_pass.events.append(EventNote("Warning", "RollingUpdateNotSupported", text))
    return {CURRENT_WORKER_HASH: wanted}


def _status(one_pass: GraphPass, found: Mapping[str, WorkloadReadiness], restart: RestartStatus | None) -> GraphStatus:
    set_name = pod_clique_set_name(one_pass.context.name, one_pass.components)
    statuses, reasons, codes = dict[str, ComponentStatus](), [], set[str]()
    for component in one_pass.components:
        one = found[component.name]
        statuses[component.name] = _described(one_pass, component, one.status)
        if not one.is_ready:
            codes.add(one.reason)
            name = (one.status.component_names or [""])[0]
            reasons.append(f"{set_name}: {(one.status.component_kind or '').lower()}/{name}: {one.message}")
    return graph_status(
        one_pass,
        statuses,
        reasons,
        is_first=one_pass.observed.clique_set is None,
        restart=restart,
        reason=next((one for one in SEVERITY if one in codes), NOT_READY),
        conditions=_topology(one_pass),
    )


def _described(one_pass: GraphPass, component: ComponentSpec, reported: ComponentStatus) -> ComponentStatus:
    context = one_pass.context
    base = context.dynamo_namespace(component)
    namespace = f"{base}-{context.worker_hash}" if is_worker(component) else base
    named = msgspec.structs.replace(reported, component_name=next(iter(reported.component_names or ()), None))
    return described(named, component, namespace, context.settings.claimed_gpus)


def _topology(one_pass: GraphPass) -> list[Condition]:
    """Return the condition of a graph with topology constraints, from what Grove reports of its set."""
    spec, observed = one_pass.graph.spec, one_pass.observed.clique_set
    has_any = spec.topology_constraint or any(one.topology_constraint for one in one_pass.components)
    if not has_any or observed is None:
        return []
    reported = next(
        (one for one in (observed.get("status") or {}).get("conditions") or () if one.get("type") == TOPOLOGY_OF_GROVE),
        None,
    )
    if reported is None:
        text = "Waiting for topology condition from the scheduling framework"
        return [Condition(type=TOPOLOGY, status="Unknown", reason="TopologyConditionPending", message=text)]
    if reported.get("status") != "True":
        text = "All required topology levels are available in the cluster topology"
        return [Condition(type=TOPOLOGY, status="True", reason="AllTopologyLevelsAvailable", message=text)]
    is_absent = reported.get("reason") == "ClusterTopologyNotFound"
    reason = "TopologyDefinitionNotFound" if is_absent else "TopologyLevelsUnavailable"
    message = str(reported.get("message") or "")
    before = next((one for one in one_pass.status.conditions or () if one.type == TOPOLOGY), None)
    if before is None or (before.status, before.reason, before.message) != ("False", reason, message):
        text = f"Topology constraints no longer enforced: {message}"
        one_pass.events.append(EventNote("Warning", reason, text))
    return [Condition(type=TOPOLOGY, status="False", reason=reason, message=message)]
