"""Ends the group of a standby or active engine that has ended, so that Grove starts the group again.

Engines of one index on the nodes of a replica work together: the others cannot continue without one that has ended, and
what they hold is lost. They are therefore deleted without a grace period.
"""

from typing import ClassVar, Protocol

from dynamo.k8s.informer import ObjectKey
from dynamo.k8s.kinds import PODS, ObjectKind
from dynamo.operator.applier import EventLog
from dynamo.operator.reconcile.memory_pods import GROUP_MEMBER, POD_INDEX
from dynamo.operator.view import ClusterView
from dynamo.protocols.kubernetes.common import KubeObject

SCALING_GROUP, REPLICA = "grove.io/podcliquescalinggroup", "grove.io/podcliquescalinggroup-replica-index"
GROUP = (SCALING_GROUP, REPLICA, POD_INDEX)
"""Labels of Grove that the pods of one group share."""
MEMBERS = f"{GROUP_MEMBER}=true"
ENDED = frozenset({"Failed", "Succeeded"})


class PodRemover(Protocol):
    """Deletes pods: `KubeClient`, or a fake in tests."""

    async def delete(
        self, kind: ObjectKind, name: str, namespace: str | None = None, *, grace_s: int | None = None
    ) -> object: ...


class FailoverGroupReconciler:
    """Deletes the pods of a group of which one has ended. Without all labels of Grove, it leaves the pod alone."""

    kind: ClassVar = PODS

    def __init__(self, view: ClusterView, remover: PodRemover, events: EventLog) -> None:
        self._view = view
        self._remover = remover
        self._events = events

    async def reconcile(self, key: ObjectKey) -> None:
        """Delete the group of one pod, if it has ended and nothing deletes it already."""
        pod = self._view.get(PODS, *key)
        if pod is None or "deletionTimestamp" in pod["metadata"] or not _is_ended(pod):
            return
        group = _group(pod)
        if group is None:
            return
        members = [
            name
            for (namespace, name), value in self._view.objects(PODS).items()
            if namespace == key[0] and _group(value) == group
        ]
        for name in sorted(members):
            await self._remover.delete(PODS, name, key[0], grace_s=0)
        place = f"{group[0]}, replica {group[1]}, index {group[2]}"
        text = (
            f"pod {key[1]} has ended ({pod['status']['phase']}); deleted the {len(members)} pods of its group: {place}"
        )
        self._events.record(PODS, pod, "Warning", "FailoverCascade", text)


def _is_ended(pod: KubeObject) -> bool:
    return (pod.get("status") or {}).get("phase") in ENDED


def _group(pod: KubeObject) -> tuple[str, ...] | None:
    """Return the group of an engine; None for another pod."""
    labels = pod["metadata"].get("labels") or {}
    found = tuple(labels.get(one, "") for one in GROUP)
    return found if labels.get(GROUP_MEMBER) == "true" and all(found) else None
