"""Kubernetes connector: reads and scales the components of a DynamoGraphDeployment.

Replicas are set at the scale subresource of the component's DynamoGraphDeploymentScalingAdapter, and directly in the
DynamoGraphDeployment where there is none. Nothing is set while the graph is not ready or is changing, with one
exception: replicas that are still starting may be given up.
"""

from dataclasses import replace

from dynamo.core.config import setting
from dynamo.core.errors import ConfigError, WorkerUnavailable
from dynamo.k8s.client import KubeClient, KubeRefused
from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.connectors.base import ScaleOutcome, ScaleStatus
from dynamo.planner.connectors.graph import PlannedGraph
from dynamo.planner.connectors.graph_api import GraphApi
from dynamo.planner.connectors.workers import WorkerDirectory, capabilities_of
from dynamo.planner.core.scaling import DECODE, PREFILL, WorkerCapabilities
from dynamo.planner.errors import PlannerError
from dynamo.protocols.planner import EngineCapabilities, ScalingDecision, WorkerCounts
from dynamo.runtime.discovery.base import Discovery

GRAPH_VARIABLE = "DYN_PARENT_DGD_K8S_NAME"


class KubernetesConnector:
    """Connector of `environment: kubernetes`."""

    def __init__(
        self,
        config: PlannerConfig,
        discovery: Discovery,
        *,
        name: str | None = None,
        namespace: str | None = None,
        client: KubeClient | None = None,
    ) -> None:
        """Plan the graph `name`, by default that of the planner's own pod. Raise `ConfigError` without one."""
        self._config = config
        self.name = name or setting(GRAPH_VARIABLE, "", str)
        if not self.name:
            raise ConfigError(f"{GRAPH_VARIABLE}: missing; required with environment=kubernetes")
        self._client = client or KubeClient()
        self._api = GraphApi(self._client, namespace or setting("POD_NAMESPACE", "", str) or self._client.namespace)
        self._workers = WorkerDirectory(discovery, self.worker_namespace, config.model_name)
        self._worker_namespace = config.namespace

    def worker_namespace(self) -> str:
        """Return the Dynamo namespace of the present workers, as the last `counts` found it."""
        return self._worker_namespace

    async def start(self) -> None:
        """Check that the graph exists and has a component of each scaled role. Raise `ConfigError`."""
        try:
            graph = await self._graph()
            for role in self._roles():
                self._component(graph, role)
        except (WorkerUnavailable, KubeRefused) as error:
            raise ConfigError(f"environment: kubernetes: {error}") from None

    async def counts(self) -> WorkerCounts:
        """Return the serving replicas of each role, and the desired ones."""
        graph = await self._graph(with_pods=True)
        pending = graph.pending()
        found = {role: graph.replicas(self._component(graph, role)) for role in self._roles()}
        prefill, decode = found.get(PREFILL), found.get(DECODE)
        is_ending = graph.has_ending_pods
        return WorkerCounts(
            ready_num_prefill=prefill.serving if prefill else None,
            ready_num_decode=decode.serving if decode else None,
            expected_num_prefill=prefill.desired if prefill else None,
            expected_num_decode=decode.desired if decode else None,
            prefill_scaling_in_progress=prefill is not None and (is_ending or not prefill.is_stable),
            decode_scaling_in_progress=decode is not None and (is_ending or not decode.is_stable),
            pending_num_prefill=pending.get(prefill.component, 0) if prefill else 0,
            pending_num_decode=pending.get(decode.component, 0) if decode else 0,
            rollout=graph.rollout,
        )

    async def capabilities(self) -> WorkerCapabilities:
        """Return the limits that workers publish, with the GPUs and watts that the operator reports."""
        graph = await self._graph()
        known = capabilities_of(await self._workers.live(), self._config)
        settings = self._config
        return WorkerCapabilities(
            prefill=self._reported(known.prefill, graph, PREFILL, settings.prefill_engine_num_gpu),
            decode=self._reported(known.decode, graph, DECODE, settings.decode_engine_num_gpu),
        )

    async def scale(self, decision: ScalingDecision) -> ScaleOutcome:
        """Set the replicas of the roles whose number changes."""
        graph = await self._graph(with_pods=True)
        wanted = {PREFILL: decision.num_prefill, DECODE: decision.num_decode}
        changes = {
            name: replicas
            for name, replicas in ((self._component(graph, role), wanted[role]) for role in self._roles())
            if replicas is not None and replicas != graph.replicas(name).desired
        }
        if not changes:
            return ScaleOutcome(ScaleStatus.HELD, "the graph has these numbers already")
        refusal = graph.hold(changes)
        if refusal:
            return ScaleOutcome(ScaleStatus.HELD, refusal)
        numbers = ", ".join(f"{name}: {number}" for name, number in changes.items())
        try:
            await self._api.set_replicas(graph, changes)
        except KubeRefused as error:
            return ScaleOutcome(ScaleStatus.FAILED, f"{numbers}: {error}")
        return ScaleOutcome(ScaleStatus.ACCEPTED, numbers)

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()

    def _roles(self) -> list[str]:
        mode = self._config.mode
        return [role for role, is_scaled in ((PREFILL, mode.scales_prefill), (DECODE, mode.scales_decode)) if is_scaled]

    def _component(self, graph: PlannedGraph, role: str) -> str:
        """Return the component of a role. Raise `WorkerUnavailable` if the graph has none, or several."""
        try:
            return graph.component_of(role)
        except PlannerError as error:
            raise WorkerUnavailable(f"DynamoGraphDeployment {self._api.namespace}/{self.name}: {error}") from None

    def _reported(
        self, known: EngineCapabilities | None, graph: PlannedGraph, role: str, configured: int | None
    ) -> EngineCapabilities | None:
        if known is None:
            return None
        component = self._component(graph, role)
        engine, replica = graph.gpus(component)
        return replace(
            known,
            num_gpu=known.num_gpu if configured is not None or engine is None else engine,
            gpu_cost_per_replica=replica if configured is None else None,
            power_watts_per_replica=graph.watts(component),
        )

    async def _graph(self, *, with_pods: bool = False) -> PlannedGraph:
        graph = await self._api.graph(self.name, with_pods=with_pods)
        self._worker_namespace = graph.worker_namespace(self._config.namespace)
        return graph
