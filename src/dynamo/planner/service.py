"""Planner service: observes a deployment at each tick, decides, scales it, and records every step.

The time of ticks is monotonic, so that a change of the wall clock moves none. A tick that cannot observe the workers, whose request
fails, or that another planner of the same deployment precedes, changes nothing and records the reason.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from dynamo.core.boundaries import ErrorBoundary
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import ConfigError, DynamoException, HttpError
from dynamo.core.metrics import MetricsRegistry
from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.connectors.base import PlannerConnector, ScaleOutcome, ScaleStatus
from dynamo.planner.core.engine import PlannerCore, TickDecision
from dynamo.planner.core.pipeline import PluginPipeline, PluginSpec
from dynamo.planner.core.record import Recording, Start, recorded
from dynamo.planner.core.scaling import DECODE, PREFILL, WorkerCapabilities
from dynamo.planner.decision_log import DecisionLog, DecisionSummary
from dynamo.planner.metrics import PlannerMetrics
from dynamo.planner.observation.observer import Observation, Observer
from dynamo.planner.observation.traffic import ObservedTraffic
from dynamo.planner.plugin_metrics import PluginMetrics
from dynamo.planner.plugins.types import OverrideResult, RejectResult
from dynamo.planner.reports.recorder import ReportRecorder
from dynamo.planner.reports.snapshots import is_reported, snapshot_of
from dynamo.planner.runtime_limits import limits_of, updated
from dynamo.planner.start import Steps, prepare_start
from dynamo.protocols.planner import ScheduledTick

logger = logging.getLogger(__name__)

CONNECTOR_S = 30.0
"""Deadline of one call of the connector."""
DECISION_LOCK_S = 10.0
"""Time that a change of the limits waits for the decision of the present tick."""
ADVISORY = "advisory"
LIMITS_CHANGED = "minimum workers or GPU budgets were changed during the tick"


class TickPlugins(Protocol):
    """Plugins that are not built in (`plugin_transport.host`)."""

    @property
    def specs(self) -> Sequence[PluginSpec]:
        """The present plugins."""

    async def start(self) -> None:
        """Connect to the plugins."""

    def apply_changes(self, pipeline: PluginPipeline) -> bool:
        """Apply registrations since the last tick; return whether there were any."""

    async def finish(self, recording: Recording) -> None:
        """Make the calls of a tick until it is decided; a failed call is a reply with its cause."""

    async def close(self) -> None:
        """Close the connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerParts:
    """What a planner acts with."""

    connector: PlannerConnector
    observer: Observer
    registry: MetricsRegistry
    log: DecisionLog
    clock: Clock = field(default_factory=SystemClock)
    plugins: TickPlugins | None = None
    reports: ReportRecorder | None = None
    hold: Callable[[], Awaitable[str]] | None = None
    """Returns why this planner must not scale now; empty: it may."""


class PlannerService:
    """One planner. `start`, then `run` until cancelled, then `close`."""

    def __init__(self, config: PlannerConfig, parts: PlannerParts) -> None:
        self.config = config
        self.log = parts.log
        self.metrics = PlannerMetrics(parts.registry, config)
        self._plugin_metrics = PluginMetrics(parts.registry)
        self._parts = parts
        self._clock = parts.clock
        self._core: PlannerCore | None = None
        self._next: ScheduledTick | None = None
        self._ticks = 0
        self._gpus: Mapping[str, int] = {}
        self._watts: Mapping[str, int | None] = {}
        self._traffic: ObservedTraffic | None = None
        self._deciding = asyncio.Lock()
        self._generation = 0
        """Number of changes of the limits: a decision of an earlier one is not carried out."""

    async def start(self, capabilities: WorkerCapabilities, measured: Steps | None = None) -> None:
        """Create the planner for workers of these capabilities. Raise `ConfigError` for settings that cannot work."""
        self._gpus = {
            role: (one.gpus_per_replica or 0) if one is not None else 0
            for role, one in ((PREFILL, capabilities.prefill), (DECODE, capabilities.decode))
        }
        self._watts = {
            role: None if one is None else one.power_watts_per_replica
            for role, one in ((PREFILL, capabilities.prefill), (DECODE, capabilities.decode))
        }
        if self._parts.reports is not None and capabilities.decode is not None:
            self._parts.reports.max_kv_tokens = capabilities.decode.max_kv_tokens
        check_budget(self.config, self._gpus)
        plugins = self._parts.plugins
        if plugins is not None:
            await plugins.start()
        specs = () if plugins is None else plugins.specs
        start = prepare_start(self.config, capabilities, measured=measured, plugins=specs, start_s=self._clock.now())
        self._core = start.planner()
        self._next = self._core.first_tick(start.start_s)
        self.log.begin(start)

    async def run(self) -> None:
        """Run ticks until cancelled. A failure inside a tick is logged and the next tick follows."""
        while True:
            scheduled = self._scheduled()
            await self._clock.sleep(max(0.0, scheduled.at_s - self._clock.now()))
            with ErrorBoundary(self._on_tick_error):  # A fault of one tick must not stop the control of the deployment.
                await self.tick()

    async def tick(self) -> DecisionSummary:
        """Run the tick that is due now: observe, decide, scale, record."""
        scheduled, core = self._scheduled(), self._planner()
        began_s = self._clock.now()
        self._ticks += 1
        self._next = core.next_tick(scheduled, began_s)
        interval_s = self.config.scheduling.scale_interval_seconds
        missed = round((self._next.at_s - scheduled.at_s) / interval_s) - 1
        observation = await self._parts.observer.observe(scheduled)
        for part in observation.failed:
            self.metrics.failed(f"observe {part}")
        self.metrics.observed(observation.seen, self._gpus, self._watts)
        if observation.traffic is not None:
            self.metrics.traffic(observation.traffic)
        async with self._deciding:
            generation = self._generation
            recording = await self._decided(scheduled, observation)
        decision = recording.decision
        assert decision is not None, "a finished recording has a decision"
        self._next = core.next_tick(scheduled, began_s)  # Its parts depend on the scaling methods that ran.
        self.metrics.decided(decision, float(self.config.throughput_adjustment_interval_seconds), scheduled)
        outcome = await self._act(decision, observation, generation)
        duration_s = self._clock.now() - began_s
        self.metrics.missed(missed)
        summary = self._summary(decision, observation, outcome, duration_s)
        self.log.add(summary, recording.tick)
        level = logging.INFO if decision.scale_to is not None or summary.unknown else logging.DEBUG
        logger.log(level, "%s", summary.line)
        await self._report(scheduled, decision, observation)
        return summary

    def status(self, count: int = 20) -> dict[str, Any]:
        """Return the state of the planner and its last decisions, for `GET /v1/planner`."""
        config = self.config
        return {
            "mode": config.mode.value,
            "environment": config.environment.value,
            "optimization_target": config.optimization_target.value,
            "advisory": config.advisory,
            "ttft_ms": config.ttft_ms,
            "itl_ms": config.itl_ms,
            "ticks": self._ticks,
            "limits": {
                "prefill_min_endpoint": config.prefill_floor if config.mode.scales_prefill else None,
                "decode_min_endpoint": config.decode_floor if config.mode.scales_decode else None,
                "min_gpu_budget": config.min_gpu_budget,
                "max_gpu_budget": config.max_gpu_budget,
            },
            "log": None if self.log.path is None else str(self.log.path),
            "decisions": [msgspec.to_builtins(one) for one in self.log.recent(count)],
        }

    async def limits(self) -> dict[str, Any]:
        """Return the present minimum workers and GPU budgets. Raise `HttpError` if a decision takes too long."""
        async with self._between_decisions():
            return limits_of(self.config)

    async def set_limits(self, update: dict[str, int]) -> dict[str, Any]:
        """Change minimum workers and GPU budgets between two decisions, and return them. Raises `HttpError`."""
        async with self._between_decisions():
            core = self._planner()
            changed = updated(self.config, update, core.state.capabilities)
            before, after = limits_of(self.config), limits_of(changed)
            self.config = changed
            self._generation += 1
            core.set_limits(changed)
            self.log.begin(Start.of(core))  # A record has one configuration.
            logger.info("limits changed: %s became %s", before, after)
            return after

    @asynccontextmanager
    async def _between_decisions(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(DECISION_LOCK_S):
                await self._deciding.acquire()
        except TimeoutError:
            raise HttpError(503, "planner decision in progress; retry the request") from None
        try:
            yield
        finally:
            self._deciding.release()

    async def close(self) -> None:
        """Write the last report, and release observer and connector; workers keep running."""
        if self._parts.reports is not None:
            await self._parts.reports.close()
        await self._parts.observer.close()
        if self._parts.plugins is not None:
            await self._parts.plugins.close()
        await self._parts.connector.close()

    def _planner(self) -> PlannerCore:
        if self._core is None:
            raise DynamoException("the planner is not started")
        return self._core

    def _scheduled(self) -> ScheduledTick:
        if self._next is None:
            raise DynamoException("the planner is not started")
        return self._next

    def _on_tick_error(self, error: Exception) -> None:
        self.metrics.failed("tick")
        logger.error("tick %d failed; the deployment stays as it is", self._ticks, exc_info=error)

    async def _decided(self, scheduled: ScheduledTick, observation: Observation) -> Recording:
        """Return the tick with its decision; its record starts again where plugins have come or gone, or its file is full."""
        core, plugins = self._planner(), self._parts.plugins
        has_changed = plugins is not None and plugins.apply_changes(core.pipeline)
        if has_changed or self.log.is_full:
            self.log.begin(Start.of(core))
        began_s, limit_s = self._clock.now(), self.config.scheduling.tick_max_duration_seconds
        recording = recorded(core, scheduled, observation.seen)
        if plugins is not None:
            await plugins.finish(recording)
        decision = recording.decision
        assert decision is not None, "a finished recording has a decision"
        self._plugin_metrics.finished(self._clock.now() - began_s, limit_s)
        self._plugin_metrics.tick(core.pipeline, decision.stages, decision.now_s)
        return recording

    async def _act(self, decision: TickDecision, observation: Observation, generation: int) -> ScaleOutcome | None:
        """Carry a decision out; return None if it changes nothing."""
        if decision.scale_to is None:
            await self._notice_precedence()
            return None
        if self.config.advisory:
            return ScaleOutcome(ScaleStatus.HELD, ADVISORY)
        if observation.seen.worker_counts is None:
            return ScaleOutcome(ScaleStatus.HELD, "the numbers of workers are unknown")
        try:
            async with asyncio.timeout(CONNECTOR_S):
                cause = await self._parts.hold() if self._parts.hold is not None else ""
                if cause:
                    return ScaleOutcome(ScaleStatus.HELD, cause)
                if generation != self._generation:
                    return ScaleOutcome(ScaleStatus.HELD, LIMITS_CHANGED)
                outcome = await self._parts.connector.scale(decision.scale_to)
        except TimeoutError:
            outcome = ScaleOutcome(ScaleStatus.FAILED, f"no result within {CONNECTOR_S:g} s")
        except (DynamoException, OSError) as error:
            outcome = ScaleOutcome(ScaleStatus.FAILED, str(error))
        if outcome.status is ScaleStatus.FAILED:
            self.metrics.failed("scale")
            logger.error("failed to scale to %s: %s", decision.scale_to, outcome.message)
        return outcome

    async def _notice_precedence(self) -> None:
        """Let a change of the planner that may scale be logged when it occurs, not at the next decision that scales."""
        if self._parts.hold is None:
            return
        with contextlib.suppress(TimeoutError, DynamoException, OSError):  # Nothing depends on it at this tick.
            async with asyncio.timeout(CONNECTOR_S):
                await self._parts.hold()

    async def _report(self, scheduled: ScheduledTick, decision: TickDecision, observation: Observation) -> None:
        """Add the tick to the reports."""
        if observation.traffic is not None:
            self._traffic = observation.traffic
        reports = self._parts.reports
        if reports is None or not is_reported(scheduled, decision):
            return
        await reports.record(
            snapshot_of(
                self.config,
                observation.seen,
                decision,
                self._traffic,
                time_s=self._clock.wall(),
                gpu_hours=self.metrics.gpu_hours,
            )
        )

    def _summary(
        self, decision: TickDecision, observation: Observation, outcome: ScaleOutcome | None, duration_s: float
    ) -> DecisionSummary:
        seen, traffic = observation.seen, observation.traffic
        is_advisory = outcome is not None and outcome.message == ADVISORY
        return DecisionSummary(
            tick=self._ticks,
            time=datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(timespec="milliseconds"),
            action=decision.action.value,
            load_reason=decision.load.reason.value,
            throughput_reason=decision.throughput.reason.value,
            counts=seen.worker_counts,
            traffic=seen.traffic,
            ttft_ms=None if traffic is None else traffic.ttft_ms,
            itl_ms=None if traffic is None else traffic.itl_ms,
            estimated_ttft_ms=decision.load.estimated_ttft_ms,
            estimated_itl_ms=decision.load.estimated_itl_ms,
            predictions=None if decision.predictions is None else msgspec.to_builtins(decision.predictions),
            proposals=proposals_of(decision),
            clamped=list(decision.clamped),
            scale_to=decision.scale_to,
            outcome="" if outcome is None else ADVISORY if is_advisory else outcome.status.value,
            message="" if outcome is None or is_advisory else outcome.message,
            unknown=observation.unknown,
            duration_s=round(duration_s, 4),
        )


def proposals_of(decision: TickDecision) -> list[str]:
    """Return each stage's results in words."""
    found = []
    for stage in decision.stages:
        for one in stage.results:
            if isinstance(one.result, OverrideResult):
                targets = ", ".join(
                    f"{target.sub_component_type} {target.type.name} {target.replicas}" for target in one.result.targets
                )
                found.append(f"{stage.stage.value} {one.plugin_id}: {targets}")
            elif isinstance(one.result, RejectResult):
                found.append(f"{stage.stage.value} {one.plugin_id}: rejected: {one.result.reason}")
        found += [f"{stage.stage.value} {plugin_id}: failed: {cause}" for plugin_id, cause in stage.failed]
        found += [f"{stage.stage.value} {plugin_id}: skipped: {cause}" for plugin_id, cause in stage.skipped]
    return found


def check_budget(config: PlannerConfig, gpus: Mapping[str, int]) -> None:
    """Raise `ConfigError` if the minimum numbers of workers exceed the GPU budget."""
    mode = config.mode
    required = (config.prefill_floor * gpus.get(PREFILL, 0) if mode.scales_prefill else 0) + (
        config.decode_floor * gpus.get(DECODE, 0) if mode.scales_decode else 0
    )
    if 0 <= config.max_gpu_budget < required:
        raise ConfigError(
            f"max_gpu_budget: {config.max_gpu_budget}: must be at least {required}, the GPUs of the minimum numbers of "
            "workers, or negative for no limit"
        )
