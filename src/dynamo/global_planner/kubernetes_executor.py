"""Kubernetes executor: the DynamoGraphDeployments of one Kubernetes namespace, and those that planners name.

A deployment is `<Kubernetes namespace>/<graph>`. Its GPUs are those that the operator reports; while they are unknown for
one deployment, nothing is decided, so that the total is never too small.
"""

from collections.abc import Collection, Sequence
from typing import cast

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.config import setting
from dynamo.core.errors import Overloaded, WorkerUnavailable
from dynamo.global_planner.arbitration import ReplicaPool, ReplicaPools
from dynamo.global_planner.executor import CHECK_INTERVAL_S, MAX_CHECKS, MAX_DEPLOYMENTS
from dynamo.k8s.client import KubeClient
from dynamo.planner.connectors.graph import GENERIC_WORKER, PlannedGraph
from dynamo.planner.connectors.graph_api import GraphApi
from dynamo.planner.core.scaling import DECODE, PREFILL
from dynamo.planner.errors import DynamoGraphDeploymentNotReadyError
from dynamo.protocols.scaling import ScaleRequest, TargetReplica, WorkerRole

DEFAULT_NAMESPACE = "default"


class KubernetesExecutor:
    """Deployments in a cluster."""

    def __init__(
        self, managed: Collection[str], *, client: KubeClient | None = None, clock: Clock | None = None
    ) -> None:
        """Manage the graphs of `managed` Dynamo namespaces, `<Kubernetes namespace>-<graph>`, or all of this namespace."""
        self._client = client or KubeClient()
        self._clock = clock or SystemClock()
        self.namespace = setting("POD_NAMESPACE", DEFAULT_NAMESPACE, str)
        prefix = f"{self.namespace}-"
        self._managed = frozenset(name.removeprefix(prefix) for name in managed if name.startswith(prefix))
        self._manages_all = not managed
        self._apis: dict[str, GraphApi] = {}
        self._named: dict[str, dict[str, WorkerRole]] = {}
        """Deployments that sent requests, with the roles of the components that they named."""

    def participant(self, request: ScaleRequest) -> str:
        """Return the key of the graph that a request names."""
        return request.participant

    async def register(self, request: ScaleRequest) -> None:
        """Count the graph from now on, and keep the roles of its components. Raise `WorkerUnavailable` if it does not exist."""
        if request.participant not in self._named:
            if len(self._named) >= MAX_DEPLOYMENTS:
                raise Overloaded(
                    f"{MAX_DEPLOYMENTS} deployments are managed already; {request.participant} is not accepted"
                )
            await self._graph(request.participant)
        roles = self._named.setdefault(request.participant, {})
        roles.update(
            {one.component_name: one.sub_component_type for one in request.target_replicas if one.component_name}
        )

    async def observe(self) -> ReplicaPools:
        """Return the desired replicas and the GPUs of every graph. Raise `WorkerUnavailable` while a graph's GPUs are unknown."""
        graphs = {
            f"{self.namespace}/{name}": graph
            for name, graph in (await self._api(self.namespace).graphs()).items()
            if self._manages_all or name in self._managed
        }
        for key in self._named:
            if key not in graphs:
                graphs[key] = await self._graph(key)
        return {key: self._pools(key, graph) for key, graph in sorted(graphs.items())}

    async def scale(self, participant: str, targets: Sequence[TargetReplica]) -> None:
        """Set numbers of replicas. Raise `DynamoGraphDeploymentNotReadyError` while the graph is changing."""
        graph = await self._graph(participant, with_pods=True)
        components = self._components(participant, graph)
        wanted = {one.component_name or components[one.sub_component_type]: one.desired_replicas for one in targets}
        changes = {name: number for name, number in wanted.items() if graph.replicas(name).desired != number}
        if changes and graph.hold(changes):
            raise DynamoGraphDeploymentNotReadyError(graph.name, self._split(participant)[0])
        await self._api(self._split(participant)[0]).set_replicas(graph, changes)

    async def wait(self, participant: str) -> None:
        """Wait until no component of the graph changes. Raise `TimeoutError` after a minute."""
        for _ in range(MAX_CHECKS):
            if (await self._graph(participant, with_pods=True)).is_settled:
                return
            await self._clock.sleep(CHECK_INTERVAL_S)
        raise TimeoutError(f"{participant} was not ready within {MAX_CHECKS * CHECK_INTERVAL_S} s")

    async def current(self, participant: str) -> dict[str, int]:
        """Return the desired replicas by role."""
        graph = await self._graph(participant)
        return {role: graph.replicas(name).desired for role, name in self._components(participant, graph).items()}

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()

    def _components(self, participant: str, graph: PlannedGraph) -> dict[str, str]:
        """Return the component of each role; a generic worker without a named role has its own name, or is the decode worker."""
        named = self._named.get(participant, {})
        found: dict[str, str] = {}
        generic = []
        for name, component in graph.components.items():
            kind = component.get("type")
            if kind in (PREFILL, DECODE):
                found[kind] = name
            elif kind == GENERIC_WORKER and name in named:
                found[named[name]] = name
            elif kind == GENERIC_WORKER:
                generic.append(name)
        if len(generic) == 1 and DECODE not in found:
            return found | {DECODE: generic[0]}
        return found | {name: name for name in generic}

    def _pools(self, participant: str, graph: PlannedGraph) -> dict[WorkerRole, ReplicaPool]:
        pools = {}
        for role, name in self._components(participant, graph).items():
            _, gpus = graph.gpus(name)
            if gpus is None:
                raise WorkerUnavailable(f"{participant}: the GPUs of component {name} are not reported yet")
            pools[cast(WorkerRole, role)] = ReplicaPool(graph.replicas(name).desired, gpus, name)
        return pools

    def _api(self, namespace: str) -> GraphApi:
        return self._apis.setdefault(namespace, GraphApi(self._client, namespace))

    async def _graph(self, participant: str, *, with_pods: bool = False) -> PlannedGraph:
        namespace, name = self._split(participant)
        return await self._api(namespace).graph(name, with_pods=with_pods)

    @staticmethod
    def _split(participant: str) -> tuple[str, str]:
        namespace, _, name = participant.partition("/")
        return namespace, name
