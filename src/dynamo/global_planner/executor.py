"""Executors: the global planner's access to the deployments, which it observes and scales."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from dynamo.core.errors import Overloaded
from dynamo.global_planner.arbitration import ReplicaPool, ReplicaPools
from dynamo.llm.virtual_connector import UNSET_VALUE, VirtualConnectorCoordinator
from dynamo.planner.connectors.workers import WorkerDirectory
from dynamo.planner.errors import DynamoGraphDeploymentNotReadyError
from dynamo.protocols.scaling import ScaleRequest, TargetReplica, WorkerRole
from dynamo.runtime.distributed import DistributedRuntime

MAX_DEPLOYMENTS = 1024
"""Deployments that one process manages: each has a record in memory."""
CHECK_INTERVAL_S = 1
MAX_WAIT_S = 1800
"""Time after which a decision that the environment has not carried out is replaced, as in the planner's own connector."""
MAX_CHECKS = 60
"""Polls of a blocking request: one minute at most."""


class ScaleExecutor(Protocol):
    """Deployments by key."""

    def participant(self, request: ScaleRequest) -> str:
        """Return the key of the deployment that a request names."""

    async def register(self, request: ScaleRequest) -> None:
        """Count the deployment of a request from now on. Raise `Overloaded` beyond the limit."""

    async def observe(self) -> ReplicaPools:
        """Return the pools of all deployments. Raise `OSError` or `DynamoException` rather than leave one out."""

    async def scale(self, participant: str, targets: Sequence[TargetReplica]) -> None:
        """Request numbers of replicas. Raise `DynamoGraphDeploymentNotReadyError` while an earlier change is pending."""

    async def wait(self, participant: str) -> None:
        """Wait until the last change is complete. Raise `TimeoutError` if it takes too long."""

    async def current(self, participant: str) -> dict[str, int]:
        """Return the numbers of replicas by role."""


class VirtualExecutor:
    """Deployments whose environment reads decisions from discovery (`VirtualConnectorClient`); one per Dynamo namespace.

    The replicas are those of the last decision, or the registered workers where no decision was made. The GPUs of a replica
    are settings, because discovery does not contain them.
    """

    def __init__(self, runtime: DistributedRuntime, managed: Collection[str], gpus: Mapping[WorkerRole, int]) -> None:
        self._runtime = runtime
        self._workers = WorkerDirectory(runtime.discovery)
        self._managed = frozenset(managed)
        self._gpus = gpus
        self._coordinators: dict[str, VirtualConnectorCoordinator] = {}

    def participant(self, request: ScaleRequest) -> str:
        """Return the caller's namespace: a virtual deployment is a Dynamo namespace, whatever the graph is called."""
        return request.caller_namespace

    async def register(self, request: ScaleRequest) -> None:
        """Count the caller's namespace from now on."""
        await self._coordinator(request.caller_namespace)

    async def observe(self) -> ReplicaPools:
        """Return the pools of the managed namespaces; without such a list, of all that have workers or have sent requests."""
        live = await self._live()
        names = self._managed or {*live, *self._coordinators}
        return {name: await self._pools(name, live.get(name, {})) for name in sorted(names)}

    async def scale(self, participant: str, targets: Sequence[TargetReplica]) -> None:
        """Publish a decision; a pending one is an error until it has waited too long."""
        coordinator = await self._coordinator(participant)
        wanted = {one.sub_component_type: one.desired_replicas for one in targets}
        await coordinator.update_scaling_decision(wanted.get("prefill"), wanted.get("decode"))
        decided = coordinator.read_state()
        state = {"prefill": decided.num_prefill_workers, "decode": decided.num_decode_workers}
        if any(state[role] != number for role, number in wanted.items()):
            raise DynamoGraphDeploymentNotReadyError(participant)

    async def wait(self, participant: str) -> None:
        """Wait until the environment has carried out the last decision."""
        await (await self._coordinator(participant)).wait_for_scaling_completion()

    async def current(self, participant: str) -> dict[str, int]:
        """Return the decided or registered numbers of workers."""
        live = await self._live()
        return {
            role: pool.replicas for role, pool in (await self._pools(participant, live.get(participant, {}))).items()
        }

    async def _coordinator(self, namespace: str) -> VirtualConnectorCoordinator:
        """Return the coordinator of a namespace, created at its first use."""
        found = self._coordinators.get(namespace)
        if found is None:
            if len(self._coordinators) >= MAX_DEPLOYMENTS:
                raise Overloaded(f"{MAX_DEPLOYMENTS} deployments are managed already; {namespace} is not accepted")
            made = VirtualConnectorCoordinator(self._runtime, namespace, CHECK_INTERVAL_S, MAX_WAIT_S, MAX_CHECKS)
            await made.async_init()
            found = self._coordinators.setdefault(namespace, made)
        return found

    async def _pools(self, namespace: str, live: Mapping[WorkerRole, int]) -> dict[WorkerRole, ReplicaPool]:
        decided = (await self._coordinator(namespace)).read_state()
        roles: tuple[tuple[WorkerRole, int], ...] = (
            ("prefill", decided.num_prefill_workers),
            ("decode", decided.num_decode_workers),
        )
        return {
            role: ReplicaPool(live.get(role, 0) if number == UNSET_VALUE else number, self._gpus[role])
            for role, number in roles
        }

    async def _live(self) -> dict[str, dict[WorkerRole, int]]:
        """Return the number of registered workers by namespace and role."""
        return {
            namespace: {"prefill": len(workers.prefill), "decode": len(workers.decode)}
            for namespace, workers in (await self._workers.by_namespace()).items()
        }
