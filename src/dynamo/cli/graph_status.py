"""State of a deployed graph: one row for each component, from the graph, its pods and its events. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dynamo.operator.validation.facts import part
from dynamo.operator.validation.views import components_of
from dynamo.protocols.kubernetes.common import GROUP, V1ALPHA1, KubeObject

GRAPH_LABEL = f"{GROUP}/dynamo-graph-deployment-name"
COMPONENT_LABEL = f"{GROUP}/dynamo-component"
HEAD = ("COMPONENT", "READY", "PHASE", "LAST EVENT", "WHY NOT READY")
NONE = "-"


class ComponentRow(NamedTuple):
    """State of one component."""

    name: str
    ready: int
    desired: int
    phase: str
    event: str
    reason: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of the table."""
        return (self.name, f"{self.ready}/{self.desired}", self.phase, self.event or NONE, self.reason or NONE)


def rows_of(graph: KubeObject, pods: Sequence[KubeObject], events: Sequence[KubeObject]) -> list[ComponentRow]:
    """Return the rows in the order of the graph's components."""
    is_alpha = graph.get("apiVersion") == V1ALPHA1
    status = part(graph, "status", "services" if is_alpha else "components")
    rows = []
    for one in components_of(part(graph, "spec"), is_alpha=is_alpha):
        own = [
            pod for pod in pods if part(pod, "metadata", "labels").get(COMPONENT_LABEL, "").lower() == one.name.lower()
        ]
        state = part(status, one.name)
        ready = state.get("readyReplicas", state.get("availableReplicas"))  # Groups of Grove have the second only.
        if ready is None and not state:
            ready = sum(is_ready(pod) for pod in own) // (one.node_count or 1)
        ready, desired = int(ready or 0), one.replicas_or_default
        is_complete = ready >= desired
        rows.append(
            ComponentRow(
                name=one.name,
                ready=ready,
                desired=desired,
                phase="Ready" if is_complete else _phase(own),
                event=last_event(events, {_name(graph), *(_name(pod) for pod in own)}, one.name),
                reason="" if is_complete else _reason(graph, own),
            )
        )
    return rows


def is_ready(pod: KubeObject) -> bool:
    """Return whether a pod has the condition Ready."""
    return condition(pod, "Ready").get("status") == "True"


def condition(value: KubeObject, kind: str) -> KubeObject:
    """Return a condition of an object, empty if it has none of this type."""
    found: list[KubeObject] = part(value, "status").get("conditions") or []
    return next((one for one in found if one.get("type") == kind), {})


def last_event(events: Iterable[KubeObject], names: set[str], component: str) -> str:
    """Return the reason and message of the newest event of the objects with these names that concerns a component."""
    return _newest(
        one for one in events if part(one, "involvedObject").get("name") in names and _concerns(one, component, names)
    )


def last_event_of(events: Iterable[KubeObject], kind: str, name: str) -> str:
    """Return the reason and message of the newest event of one object."""
    abouts = ((part(one, "involvedObject"), one) for one in events)
    return _newest(one for about, one in abouts if (about.get("kind"), about.get("name")) == (kind, name))


def _newest(events: Iterable[KubeObject]) -> str:
    newest = max(events, key=_time, default=None)
    return "" if newest is None else _line(f"{newest.get('reason') or ''}: {newest.get('message') or ''}")


def _concerns(event: KubeObject, component: str, names: set[str]) -> bool:
    """Return whether an event is of a pod, or of the graph with the component in its message."""
    return part(event, "involvedObject").get("kind") == "Pod" or component in str(event.get("message") or "")


def _time(event: KubeObject) -> str:
    series: Any = part(event, "series").get("lastObservedTime")
    return str(event.get("lastTimestamp") or series or event.get("eventTime") or "")


def _phase(pods: Sequence[KubeObject]) -> str:
    phases = [str(part(pod, "status").get("phase") or "Pending") for pod in pods if not is_ready(pod)]
    for phase in ("Failed", "Pending", "Running"):
        if phase in phases:
            return "Starting" if phase == "Running" else phase
    return "NoPods" if not pods else "Scaling"


def _reason(graph: KubeObject, pods: Sequence[KubeObject]) -> str:
    for pod in pods:
        if not is_ready(pod):
            reason = pod_reason(pod)
            if reason:
                return _line(f"{_name(pod)}: {reason}")
    for kind in ("DynamoComponentReady", "Ready", "Available"):
        one = condition(graph, kind)
        if one.get("status") not in {None, "True"}:
            return _line(f"{one.get('reason') or kind}: {one.get('message') or ''}")
    return "no pod exists; is the operator running?" if not pods else "fewer pods than replicas"


def pod_reason(pod: KubeObject) -> str:
    """Return why a pod is not ready: scheduling, image, crash, or its readiness probe."""
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason')}: {scheduled.get('message')}"
    status = part(pod, "status")
    for one in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        for state in ("waiting", "terminated"):
            found = part(one, "state", state)
            if found and found.get("reason") != "Completed":
                return f"{one.get('name')} {found.get('reason') or state}: {found.get('message') or ''}".rstrip(": ")
    ready = condition(pod, "Ready")
    return f"{ready.get('reason') or 'NotReady'}: {ready.get('message') or ''}".rstrip(": ") if ready else ""


def _name(value: KubeObject) -> str:
    return str(part(value, "metadata").get("name") or "")


def _line(text: str) -> str:
    return " ".join(text.split()).rstrip(": ")
