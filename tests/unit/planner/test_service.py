"""Planner service: what a tick does when observations, the connector or another planner are in its way."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.settle import turns

from dynamo.core.clock import ManualClock
from dynamo.core.errors import ConfigError, HttpError, NotReady
from dynamo.core.metrics import MetricsRegistry
from dynamo.planner.config.planner_config import parse
from dynamo.planner.connectors.base import ScaleOutcome, ScaleStatus
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.decision_log import DecisionLog
from dynamo.planner.observation.observer import Observer
from dynamo.planner.observation.traffic import ObservedTraffic, RouterQueues
from dynamo.planner.service import PlannerParts, PlannerService
from dynamo.protocols.load import ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.protocols.planner import EngineCapabilities, FpmObservations, ScalingDecision, WorkerCounts

ENGINE = EngineCapabilities(num_gpu=1, max_kv_tokens=1000, max_num_batched_tokens=512, context_length=1000)
CONFIG = {
    "environment": "virtual",
    "mode": "agg",
    "optimization_target": "throughput",
    "load_adjustment_interval": 1,
    "max_gpu_budget": 4,
    "decode_engine_num_gpu": 1,
}
BUSY = ForwardPassMetrics(
    version=1,
    worker_id="1",
    dp_rank=0,
    counter_id=1,
    wall_time=0.1,
    scheduled_requests=ScheduledRequests(num_decode_requests=9, sum_decode_kv_tokens=1000),
    queued_requests=QueuedRequests(num_prefill_requests=50, sum_prefill_tokens=100_000),
)


class FakeDeployment:
    """Connector, steps and traffic of one busy worker."""

    def __init__(self) -> None:
        self.counts_error: Exception | None = None
        self.outcome: ScaleOutcome | Exception = ScaleOutcome(ScaleStatus.ACCEPTED, "")
        self.scaled: list[ScalingDecision] = []
        self._steps = 0

    async def start(self) -> None: ...

    async def counts(self) -> WorkerCounts:
        if self.counts_error is not None:
            raise self.counts_error
        return WorkerCounts(ready_num_decode=1, expected_num_decode=1)

    async def capabilities(self) -> WorkerCapabilities:
        return WorkerCapabilities(decode=ENGINE)

    async def scale(self, decision: ScalingDecision) -> ScaleOutcome:
        self.scaled.append(decision)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    async def steps(self) -> FpmObservations:
        self._steps += 1
        return FpmObservations(decode={("1", 0): BUSY})

    async def sample(self) -> None: ...

    def queues(self) -> RouterQueues:
        return RouterQueues()

    async def window(self, interval_s: float) -> ObservedTraffic:
        raise NotReady("no traffic here")

    async def close(self) -> None: ...


class PlannerHarness:
    """A started service and its deployment."""

    def __init__(self, hold: str | Callable[[], Awaitable[str]] = "", **settings: Any) -> None:
        self.deployment = FakeDeployment()
        self.registry = MetricsRegistry()
        self.clock = ManualClock()

        async def preceding() -> str:
            return hold if isinstance(hold, str) else await hold()

        parts = PlannerParts(
            connector=self.deployment,
            observer=Observer(self.deployment, self.deployment, self.deployment, self.clock),
            registry=self.registry,
            log=DecisionLog(None),
            clock=self.clock,
            hold=preceding,
        )
        self.service = PlannerService(parse({**CONFIG, **settings}), parts)

    async def tick(self) -> Any:
        self.clock.advance(1.0)
        return await self.service.tick()


async def started(hold: str = "", **settings: Any) -> PlannerHarness:
    scene = PlannerHarness(hold, **settings)
    await scene.service.start(await scene.deployment.capabilities())
    return scene


async def test_busy_worker_gets_a_second_one() -> None:
    scene = await started()
    summary = await scene.tick()
    assert scene.deployment.scaled == [ScalingDecision(num_decode=2)]
    assert (summary.outcome, summary.unknown) == ("accepted", [])


async def test_unknown_number_of_workers_changes_nothing_and_is_reported() -> None:
    scene = await started()
    scene.deployment.counts_error = NotReady("the registry is away")
    summary = await scene.tick()
    assert scene.deployment.scaled == []
    assert summary.unknown == ["workers: the registry is away"]


async def test_failed_scale_request_is_recorded_and_retried_at_the_next_tick() -> None:
    scene = await started()
    scene.deployment.outcome = NotReady("no answer")
    assert (await scene.tick()).outcome == "failed"
    scene.deployment.outcome = ScaleOutcome(ScaleStatus.ACCEPTED, "")
    assert (await scene.tick()).outcome == "accepted"
    assert scene.deployment.scaled == [ScalingDecision(num_decode=2)] * 2


async def test_advisory_planner_decides_and_does_not_scale() -> None:
    scene = await started(advisory=True)
    summary = await scene.tick()
    assert summary.scale_to == ScalingDecision(num_decode=2)
    assert (summary.outcome, scene.deployment.scaled) == ("advisory", [])


async def test_planner_with_a_preceding_one_holds() -> None:
    scene = await started(hold="planner 1 of the same namespace has precedence")
    summary = await scene.tick()
    assert (summary.outcome, summary.message) == ("held", "planner 1 of the same namespace has precedence")
    assert scene.deployment.scaled == []


async def test_status_has_limits_and_the_last_decisions() -> None:
    scene = await started()
    await scene.tick()
    status = scene.service.status()
    assert (status["limits"]["max_gpu_budget"], status["ticks"], len(status["decisions"])) == (4, 1, 1)


async def test_budget_below_the_minimum_number_of_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_gpu_budget: 1: must be at least 2"):
        await started(max_gpu_budget=1, min_endpoint=2)


async def test_loop_continues_after_a_tick_that_failed() -> None:
    scene = await started()
    errors = iter([RuntimeError("defect")])

    async def broken(scheduled: Any) -> Any:
        raise next(errors, asyncio.CancelledError())

    scene.service._parts.observer.observe = broken  # type: ignore[method-assign]
    running = asyncio.create_task(scene.service.run())
    for _ in range(2):
        await turns()
        scene.clock.advance(1.0)
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_changed_limit_applies_to_the_next_decision() -> None:
    scene = await started()
    assert (await scene.service.set_limits({"max_gpu_budget": 1}))["max_gpu_budget"] == 1
    await scene.tick()
    assert scene.deployment.scaled == []
    assert scene.service.status()["limits"]["max_gpu_budget"] == 1
    await scene.service.set_limits({"max_gpu_budget": 4})
    await scene.tick()
    assert scene.deployment.scaled == [ScalingDecision(num_decode=2)]


async def test_decision_made_before_a_change_of_the_limits_is_not_applied() -> None:
    async def change() -> str:
        await scene.service.set_limits({"max_gpu_budget": 1})
        return ""

    scene = PlannerHarness(hold=change)
    await scene.service.start(await scene.deployment.capabilities())
    summary = await scene.tick()
    assert (summary.outcome, scene.deployment.scaled) == ("held", [])
    assert summary.message == "minimum workers or GPU budgets were changed during the tick"


async def test_infeasible_limit_is_refused_without_effect() -> None:
    scene = await started()
    with pytest.raises(HttpError, match="requires 9 GPUs, exceeding max_gpu_budget=4"):
        await scene.service.set_limits({"min_endpoint": 9})
    assert (await scene.service.limits())["min_endpoint"] == 1
