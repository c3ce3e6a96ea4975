"""Virtual connector: publishes decisions in discovery for an external environment that starts and stops workers.

The environment (`VirtualConnectorClient`) reports the id of the decision that it has carried out. The numbers of ready workers
are those of discovery, never those of the decision.
"""

import logging

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.config import setting
from dynamo.llm.virtual_connector import UNSET_VALUE, PlannerDecision, VirtualConnectorCoordinator
from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.connectors.base import ScaleOutcome, ScaleStatus
from dynamo.planner.connectors.workers import LiveWorkers, WorkerDirectory, capabilities_of
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.protocols.planner import ScalingDecision, WorkerCounts
from dynamo.runtime.distributed import DistributedRuntime

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S, MAX_WAIT_S = 10, 1800
RESTART_WAIT_S = 60
"""Wait of a new planner for the workers of a decision that was carried out before: they may still be starting, or have ended."""


class VirtualConnector:
    """Connector of `environment: virtual`."""

    def __init__(self, runtime: DistributedRuntime, config: PlannerConfig, *, clock: Clock | None = None) -> None:
        interval_s = setting("SCALING_CHECK_INTERVAL", CHECK_INTERVAL_S, int)
        self._max_wait_s = setting("SCALING_MAX_WAIT_TIME", MAX_WAIT_S, int)
        self._config = config
        self._clock = clock or SystemClock()
        self._coordinator = VirtualConnectorCoordinator(
            runtime,
            config.namespace,
            interval_s,
            self._max_wait_s,
            self._max_wait_s // max(1, interval_s),
            clock=self._clock,
        )
        self._workers = WorkerDirectory(runtime.discovery, config.namespace, config.model_name)
        self._expected_until_s = 0.0
        """Time from which on the decided numbers are not expected any more."""

    async def start(self) -> None:
        """Read the last decision of the namespace, which an earlier planner may have left."""
        await self._coordinator.async_init()
        is_done = await self._coordinator.is_scaling_ready()
        self._expect(min(self._max_wait_s, RESTART_WAIT_S) if is_done else self._max_wait_s)

    async def counts(self) -> WorkerCounts:
        """Return the registered workers; the expected ones are those of the last decision, of this planner or another one."""
        live, decision = await self._workers.live(), await self._present_decision()
        prefill = self._expected(decision.num_prefill_workers, len(live.prefill))
        decode = self._expected(decision.num_decode_workers, len(live.decode))
        mode = self._config.mode
        return WorkerCounts(
            ready_num_prefill=len(live.prefill) if mode.scales_prefill else None,
            ready_num_decode=len(live.decode) if mode.scales_decode else None,
            expected_num_prefill=prefill if mode.scales_prefill else None,
            expected_num_decode=decode if mode.scales_decode else None,
        )

    async def _present_decision(self) -> PlannerDecision:
        """Read the decision again: another planner of the namespace may have had precedence until now."""
        before = self._coordinator.read_state()
        await self._coordinator.async_init()
        after = self._coordinator.read_state()
        if after != before:
            self._expect(self._max_wait_s)
        return after

    def _expect(self, wait_s: float) -> None:
        self._expected_until_s = self._clock.now() + wait_s

    def _expected(self, decided: int, ready: int) -> int:
        """Return the decided number; the present one without a decision, or when it was not reached in time.

        A worker that failed and does not return must not stop scaling for ever.
        """
        is_late = self._clock.now() > self._expected_until_s
        return ready if decided == UNSET_VALUE or is_late else decided

    async def capabilities(self) -> WorkerCapabilities:
        """Return the limits that the registered workers publish."""
        return capabilities_of(await self._workers.live(), self._config)

    async def scale(self, decision: ScalingDecision) -> ScaleOutcome:
        """Publish a decision; hold while an earlier one is pending."""
        before = self._coordinator.read_state()
        await self._coordinator.update_scaling_decision(decision.num_prefill, decision.num_decode)
        after = self._coordinator.read_state()
        if after.decision_id != before.decision_id:
            self._expect(self._max_wait_s)
            return ScaleOutcome(ScaleStatus.ACCEPTED, f"decision {after.decision_id} published")
        if not await self._coordinator.is_scaling_ready():
            return ScaleOutcome(ScaleStatus.HELD, f"decision {before.decision_id} is pending")
        if not self._differs(await self._workers.live(), before):
            return ScaleOutcome(ScaleStatus.HELD, f"decision {before.decision_id} has these numbers already")
        # Carried out, but not reached in time; or a planner ended after the numbers and before the id that announces them.
        await self._coordinator.publish_again()
        self._expect(self._max_wait_s)
        return ScaleOutcome(
            ScaleStatus.ACCEPTED, f"decision {before.decision_id + 1} published with the numbers of the last"
        )

    @staticmethod
    def _differs(live: LiveWorkers, decision: PlannerDecision) -> bool:
        """Return whether the registered workers are not those of a decision."""
        pairs = ((decision.num_prefill_workers, live.prefill), (decision.num_decode_workers, live.decode))
        return any(number not in (UNSET_VALUE, len(workers)) for number, workers in pairs)

    async def close(self) -> None:
        """Leave the last decision in discovery: a planner that restarts continues from it."""
