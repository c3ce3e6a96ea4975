"""Reconcile of a DynamoGraphDeploymentScalingAdapter: its replicas become those of a component of its graph."""

from dynamo.operator.reconcile.names import COMPONENT, GRAPH, replicas_of
from dynamo.operator.reconcile.plan import EventNote, ObjectPatch, ObjectRef, Plan
from dynamo.protocols.kubernetes.common import V1BETA1, KubeObject, encode
from dynamo.protocols.kubernetes.v1beta1 import (
    DynamoGraphDeployment,
    DynamoGraphDeploymentScalingAdapter,
    ScalingAdapterStatus,
)

RETRY_S = 30.0
"""Interval in which a missing graph or component is looked for."""


def adapter_plan(adapter: DynamoGraphDeploymentScalingAdapter, graph: DynamoGraphDeployment | None, now: str) -> Plan:
    """Return the change of the graph that an adapter requires, and its status. `now` is a timestamp of RFC 3339.

    The patch tests the component's name, so that it is refused when the list has changed since; then the next pass
    makes a new one.
    """
    reference = adapter.spec.dgd_ref
    if graph is None:
        note = EventNote("Warning", "GraphNotFound", f"DynamoGraphDeployment {reference.name} does not exist")
        return Plan(events=[note], requeue_s=RETRY_S)
    components = graph.spec.components or []
    index = next((i for i, one in enumerate(components) if one.name == reference.component_name), None)
    if index is None:
        names = ", ".join(one.name for one in components) or "none"
        text = f"{reference.name} has no component {reference.component_name}: it has {names}"
        return Plan(events=[EventNote("Warning", "ComponentNotFound", text)], requeue_s=RETRY_S)
    component = components[index]
    before, wanted = replicas_of(component), adapter.spec.replicas
    known = adapter.status or ScalingAdapterStatus()
    reported = ((graph.status and graph.status.components) or {}).get(component.name)
    status = ScalingAdapterStatus(
        replicas=before if reported is None else reported.replicas or 0,
        selector=f"{GRAPH}={graph.metadata.name},{COMPONENT}={component.name}",
        last_scale_time=known.last_scale_time,
    )
    if before == wanted:
        return Plan(status=encode(status))
    status.last_scale_time = now
    path = f"/spec/components/{index}"
    ref = ObjectRef(V1BETA1, "DynamoGraphDeployment", graph.metadata.namespace, graph.metadata.name)
    patch: list[KubeObject] = [
        {"op": "test", "path": f"{path}/name", "value": component.name},
        {"op": "add", "path": f"{path}/replicas", "value": wanted},
    ]
    text = f"component {component.name} of {graph.metadata.name}: {before} to {wanted} replicas"
    return Plan(patch=[ObjectPatch(ref, patch)], status=encode(status), events=[EventNote("Normal", "Scaled", text)])
