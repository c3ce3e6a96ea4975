"""Reconciles pods of graphs with a KV transfer policy: the topology label of their node is copied to them."""

from collections.abc import Callable
from typing import ClassVar

from dynamo.k8s.client import KubeRefused
from dynamo.k8s.informer import ObjectKey
from dynamo.k8s.kinds import NODES, PODS
from dynamo.operator.applier import EventLog, KubeWriter
from dynamo.operator.reconcile.provider import ClusterFacts
from dynamo.operator.reconcile.topology import missing_labels
from dynamo.operator.view import ClusterView

NOT_FOUND = 404
RETRY_S = 30.0
"""Interval in which a node is read again that lacks the label."""


class TopologyLabelReconciler:
    """Copies node labels. A pod's volume then shows the value to the worker, which waits for it."""

    kind: ClassVar = PODS

    def __init__(
        self, view: ClusterView, writer: KubeWriter, events: EventLog, facts: Callable[[], ClusterFacts]
    ) -> None:
        self._view = view
        self._writer = writer
        self._events = events
        self._facts = facts

    async def reconcile(self, key: ObjectKey) -> float | None:
        """Label one pod. Return the seconds after which to look again, or None."""
        pod = self._view.get(PODS, *key)
        wanted = missing_labels(pod, self._facts().topologies) if pod is not None else {}
        if pod is None or not wanted:
            return None
        node = await self._writer.get(NODES, pod["spec"]["nodeName"])
        present = (node or {}).get("metadata", {}).get("labels") or {}
        found = {label: present[key] for label, key in wanted.items() if key in present}
        if found:
            try:
                await self._writer.patch(PODS, key[1], {"metadata": {"labels": found}}, key[0])
            except KubeRefused as error:
                if error.code != NOT_FOUND:  # The pod ended in the meantime.
                    raise
        absent = sorted(one for label, one in wanted.items() if label not in found)
        if not absent:
            return None
        names = ", ".join(absent)
        text = f"node {pod['spec']['nodeName']} has no label {names}, which the graph's KV transfer policy names"
        self._events.record(PODS, pod, "Warning", "TopologyLabelMissing", text)
        return RETRY_S
