"""Access to the graphs of one Kubernetes namespace: read them with their pods, and set replicas."""

import logging
from collections.abc import Mapping

from dynamo.core.errors import WorkerUnavailable
from dynamo.k8s.client import JSON_PATCH, KubeClient, KubeRefused
from dynamo.k8s.kinds import GRAPHS, PODS, SCALING_ADAPTERS
from dynamo.planner.connectors.graph import GRAPH_LABEL, PlannedGraph, adapter_name, replicas_patch
from dynamo.protocols.kubernetes.common import KubeObject

logger = logging.getLogger(__name__)

NOT_FOUND, FORBIDDEN = 404, 403


class GraphApi:
    """The DynamoGraphDeployments of a namespace."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self.namespace = namespace
        self._client = client
        self._may_list_pods = True

    async def graph(self, name: str, *, with_pods: bool = False) -> PlannedGraph:
        """Return a graph. Raise `WorkerUnavailable` if it does not exist."""
        value = await self._client.get(GRAPHS, name, self.namespace)
        if value is None:
            raise WorkerUnavailable(f"DynamoGraphDeployment {self.namespace}/{name} does not exist")
        return PlannedGraph(value, await self._pods(name) if with_pods else None)

    async def graphs(self) -> dict[str, PlannedGraph]:
        """Return all graphs of the namespace by name, without pods."""
        listed = await self._client.list(GRAPHS, self.namespace)
        return {item["metadata"]["name"]: PlannedGraph(item) for item in listed.items}

    async def set_replicas(self, graph: PlannedGraph, changes: Mapping[str, int]) -> None:
        """Set the replicas of components: at their scaling adapters, or in the graph where there is none."""
        for component, replicas in changes.items():
            body = {"spec": {"replicas": replicas}}
            adapter = adapter_name(graph.name, component)
            try:
                await self._client.patch(SCALING_ADAPTERS, adapter, body, self.namespace, subresource="scale")
            except KubeRefused as error:
                if error.code != NOT_FOUND:
                    raise
                patch = replicas_patch(graph, component, replicas)
                await self._client.patch(GRAPHS, graph.name, patch, self.namespace, content_type=JSON_PATCH)

    async def _pods(self, name: str) -> list[KubeObject] | None:
        """Return the pods of a graph, or None where the role of an older operator does not allow it."""
        try:
            pods = (await self._client.list(PODS, self.namespace, f"{GRAPH_LABEL}={name}")).items
        except KubeRefused as error:
            if error.code != FORBIDDEN:
                raise
            if self._may_list_pods:
                logger.warning("pods of %s cannot be listed, so that starting replicas are unknown: %s", name, error)
            self._may_list_pods = False
            return None
        self._may_list_pods = True
        return pods
