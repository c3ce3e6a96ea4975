"""Reconciles pods of graphs with a KV transfer policy: the topology label of their node is copied to them."""

from typing import ClassVar

from dynamo.k8s.client import KubeRefused
from dynamo.k8s.informer import ObjectKey
from dynamo.k8s.kinds import NODES, PODS
from dynamo.operator.applier import EventLog, KubeWriter
from dynamo.operator.reconcile.topology import wanted_label
from dynamo.operator.view import ClusterView

NOT_FOUND = 404
RETRY_S = 30.0
"""Interval in which a node is read again that lacks the label."""


class TopologyLabelReconciler:
    """Copies node labels. A pod's volume then shows the value to the worker, which waits for it."""

    kind: ClassVar = PODS

    def __init__(self, view: ClusterView, writer: KubeWriter, events: EventLog) -> None:
        self._view = view
        self._writer = writer
        self._events = events

    async def reconcile(self, key: ObjectKey) -> float | None:
        """Label one pod. Return the seconds after which to look again, or None."""
        pod = self._view.get(PODS, *key)
        label = wanted_label(pod) if pod is not None else None
        if pod is None or label is None:
            return None
        node = await self._writer.get(NODES, pod["spec"]["nodeName"])
        value = ((node or {}).get("metadata", {}).get("labels") or {}).get(label)
        if value is None:
            text = f"node {pod['spec']['nodeName']} has no label {label}, which the graph's KV transfer policy names"
            self._events.record(PODS, pod, "Warning", "TopologyLabelMissing", text)
            return RETRY_S
        try:
            await self._writer.patch(PODS, key[1], {"metadata": {"labels": {label: value}}}, key[0])
        except KubeRefused as error:
            if error.code != NOT_FOUND:  # The pod ended in the meantime.
                raise
        return None
