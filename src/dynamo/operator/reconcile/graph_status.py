"""Status of a graph: its state, the condition Ready and the replicas of its components."""

from collections.abc import Mapping, Sequence

from dynamo.operator.reconcile.conditions import is_true, with_condition
from dynamo.operator.reconcile.graph_pass import GraphPass
from dynamo.operator.reconcile.plan import EventNote, Plan
from dynamo.operator.reconcile.restores import checkpoint_statuses, restore_notes
from dynamo.protocols.kubernetes.common import Condition, RestartStatus, encode
from dynamo.protocols.kubernetes.v1beta1 import ComponentStatus, GraphStatus, RolloutStatus

NOT_READY = "some_resources_are_not_ready"
READY = "all_resources_are_ready"


def graph_status(
    one_pass: GraphPass,
    statuses: Mapping[str, ComponentStatus],
    reasons: Sequence[str],
    *,
    is_first: bool,
    restart: RestartStatus | None = None,
    rollout: RolloutStatus | None = None,
    reason: str = NOT_READY,
    conditions: Sequence[Condition] = (),
) -> GraphStatus:
    """Return the status of a graph; `reasons` say what is not ready, and `conditions` are set besides Ready.

    `is_first` means that the graph has no workload yet.
    """
    graph = one_pass.graph
    ready = Condition(
        type="Ready",
        status="False" if reasons else "True",
        reason=reason if reasons else READY,
        message=f"Resources not ready: {'; '.join(reasons)}" if reasons else "All resources are ready",
    )
    before = one_pass.status
    one_pass.events += restore_notes(one_pass.context.restores, before.checkpoints)
    if not reasons and not is_true(before.conditions, "Ready"):
        one_pass.events.append(EventNote("Normal", "Ready", "All resources are ready"))
    found = before.conditions
    for condition in (ready, *conditions):
        condition.observed_generation = graph.metadata.generation
        found = with_condition(found, condition, one_pass.now)
    return GraphStatus(
        observed_generation=graph.metadata.generation,
        state="initializing" if is_first else "pending" if reasons else "successful",
        conditions=found,
        components=dict(statuses) or None,
        restart=restart,
        checkpoints=checkpoint_statuses(one_pass.context.restores),
        rolling_update=rollout,
        placement=before.placement,
    )


def failed_plan(one_pass: GraphPass, reason: str, message: str) -> Plan:
    """Return the plan of a graph that the cluster cannot run: nothing but the status, and an event when that is new."""
    before = one_pass.status
    condition = Condition(
        type="Ready",
        status="False",
        reason=reason,
        message=message,
        observed_generation=one_pass.graph.metadata.generation,
    )
    known = next((one for one in before.conditions or () if one.type == "Ready"), None)
    if known is None or (known.reason, known.message) != (reason, message):
        one_pass.events.append(EventNote("Warning", "CannotRender", message))
    status = GraphStatus(
        observed_generation=one_pass.graph.metadata.generation,
        state="failed",
        conditions=with_condition(before.conditions, condition, one_pass.now),
        components=before.components,
        restart=before.restart,
        checkpoints=before.checkpoints,
        rolling_update=before.rolling_update,
        placement=before.placement,
    )
    return Plan(status=encode(status), events=one_pass.events)
