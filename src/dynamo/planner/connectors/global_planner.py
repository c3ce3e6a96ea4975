"""Global-planner connector: forwards decisions to `{global_planner_namespace}.GlobalPlanner.scale_request`."""

from collections.abc import Mapping

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.config import setting
from dynamo.core.errors import Unknown
from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.connectors.base import ScaleOutcome, ScaleStatus
from dynamo.planner.connectors.clients.remote_client import send
from dynamo.planner.connectors.workers import WorkerDirectory, capabilities_of
from dynamo.planner.core.scaling import DECODE, PREFILL, WorkerCapabilities
from dynamo.protocols.planner import ScalingDecision, WorkerCounts
from dynamo.protocols.scaling import ScaleRequest, TargetReplica, WorkerRole
from dynamo.runtime.client import Client
from dynamo.runtime.distributed import DistributedRuntime

ENDPOINT = "GlobalPlanner.scale_request"
STATUSES = {
    "success": ScaleStatus.ACCEPTED,
    "scaling": ScaleStatus.ACCEPTED,
    "rejected": ScaleStatus.HELD,
    "error": ScaleStatus.FAILED,
}


class GlobalPlannerConnector:
    """Connector of `environment: global-planner`: the workers are those of discovery, another process scales them."""

    def __init__(self, runtime: DistributedRuntime, config: PlannerConfig, *, clock: Clock | None = None) -> None:
        self._runtime = runtime
        self._config = config
        self._clock = clock or SystemClock()
        self._workers = WorkerDirectory(runtime.discovery, config.namespace, config.model_name)
        self._client: Client | None = None
        self._expected: Mapping[str, int] = {}

    async def start(self) -> None:
        """Follow the global planner's instances."""
        self._client = await self._runtime.endpoint(f"{self._config.global_planner_namespace}.{ENDPOINT}").client()

    async def counts(self) -> WorkerCounts:
        """Return the registered workers, and the numbers of the last accepted request."""
        live, mode = await self._workers.live(), self._config.mode
        self._expected = {role: n for role, n in self._expected.items() if n != len(live.of(role))}
        return WorkerCounts(
            ready_num_prefill=len(live.prefill) if mode.scales_prefill else None,
            ready_num_decode=len(live.decode) if mode.scales_decode else None,
            expected_num_prefill=self._expected.get(PREFILL, len(live.prefill)) if mode.scales_prefill else None,
            expected_num_decode=self._expected.get(DECODE, len(live.decode)) if mode.scales_decode else None,
        )

    async def capabilities(self) -> WorkerCapabilities:
        """Return the limits that the registered workers publish."""
        return capabilities_of(await self._workers.live(), self._config)

    async def scale(self, decision: ScalingDecision) -> ScaleOutcome:
        """Send a scale request; a rejected one holds at this tick."""
        if self._client is None:
            raise Unknown("the global-planner connector is not started")
        numbers: dict[WorkerRole, int | None] = {"prefill": decision.num_prefill, "decode": decision.num_decode}
        targets = [
            TargetReplica(sub_component_type=role, desired_replicas=number)
            for role, number in numbers.items()
            if number is not None
        ]
        request = ScaleRequest(
            caller_namespace=self._config.namespace,
            graph_deployment_name=setting("DYN_PARENT_DGD_K8S_NAME", self._config.namespace, str),
            k8s_namespace=setting("POD_NAMESPACE", "default", str),
            target_replicas=targets,
            timestamp=self._clock.wall(),
        )
        reply = await send(self._client, request)
        status = STATUSES[reply.status]
        if status is ScaleStatus.ACCEPTED:
            accepted: dict[str, int] = {one.sub_component_type: one.desired_replicas for one in targets}
            self._expected = {**self._expected, **accepted}
        return ScaleOutcome(status, f"global planner: {reply.status}: {reply.message}".removesuffix(": "))

    async def close(self) -> None:
        """Stop following the global planner."""
        if self._client is not None:
            await self._client.close()
