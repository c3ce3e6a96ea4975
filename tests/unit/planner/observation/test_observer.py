"""Observer: parts of a tick, and the causes of those that are unknown."""

import asyncio
import dataclasses
import math

import msgspec
import pytest

from dynamo.core.clock import ManualClock
from dynamo.core.errors import Unknown
from dynamo.planner.connectors.base import ScaleOutcome, ScaleStatus
from dynamo.planner.core.router_queue import QueuedPrompts
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.observation.observer import Observer, is_valid_step
from dynamo.planner.observation.traffic import ObservedTraffic, RouterQueues
from dynamo.protocols.load import ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.protocols.planner import FpmObservations, ScalingDecision, ScheduledTick, TrafficObservation, WorkerCounts

COUNTS = WorkerCounts(ready_num_decode=2)
TRAFFIC = TrafficObservation(duration_s=5, num_req=1, isl=2, osl=3)


class ScriptedDeployment:
    """Connector, step source and traffic source whose parts can fail."""

    def __init__(self, *, counts: Exception | None = None, steps: Exception | None = None, stuck: bool = False) -> None:
        self.counts_error, self.steps_error, self.is_stuck = counts, steps, stuck
        self.found = ObservedTraffic(traffic=TRAFFIC)
        self.waiting, self.passes = RouterQueues(), FpmObservations()
        self.samples, self.windows, self.closed = 0, list[float](), 0

    async def start(self) -> None:
        pass

    async def counts(self) -> WorkerCounts:
        if self.counts_error is not None:
            raise self.counts_error
        return COUNTS

    async def capabilities(self) -> WorkerCapabilities:
        return WorkerCapabilities()

    async def scale(self, decision: ScalingDecision) -> ScaleOutcome:
        return ScaleOutcome(ScaleStatus.HELD)

    async def steps(self) -> FpmObservations:
        if self.steps_error is not None:
            raise self.steps_error
        return self.passes

    async def sample(self) -> None:
        self.samples += 1
        if self.is_stuck:
            await asyncio.Event().wait()

    async def window(self, interval_s: float) -> ObservedTraffic:
        self.windows.append(interval_s)
        return self.found

    def queues(self) -> RouterQueues:
        return self.waiting

    async def close(self) -> None:
        self.closed += 1


def observer_of(deployment: ScriptedDeployment, deadline_s: float = 10.0) -> Observer:
    return Observer(deployment, deployment, deployment, ManualClock(7.0), deadline_s=deadline_s)


def tick(has_traffic: bool = True) -> ScheduledTick:
    return ScheduledTick(at_s=7.0, need_traffic_metrics=has_traffic, traffic_metrics_duration_s=60.0)


async def test_tick_contains_all_parts() -> None:
    deployment = ScriptedDeployment()
    found = await observer_of(deployment).observe(tick())
    assert (found.seen.now_s, found.seen.worker_counts, found.seen.traffic) == (7.0, COUNTS, TRAFFIC)
    assert found.unknown == [] and deployment.windows == [60.0]


async def test_counters_are_sampled_at_ticks_that_do_not_end_a_window() -> None:
    deployment = ScriptedDeployment()
    found = await observer_of(deployment).observe(tick(has_traffic=False))
    assert (deployment.samples, deployment.windows, found.traffic) == (1, [], None)


async def test_failed_parts_are_unknown_and_the_others_are_kept() -> None:
    deployment = ScriptedDeployment(counts=Unknown("no cluster"), steps=OSError("no bus"))
    found = await observer_of(deployment).observe(tick())
    assert (found.seen.worker_counts, found.seen.fpm_observations, found.seen.traffic) == (None, None, TRAFFIC)
    assert found.unknown == ["workers: no cluster", "steps: no bus"]


async def test_part_that_exceeds_its_deadline_is_unknown() -> None:
    found = await observer_of(ScriptedDeployment(stuck=True), 0.01).observe(tick())
    assert found.unknown == ["traffic: no result within 0.01 s"]


async def test_unknown_traffic_names_its_cause() -> None:
    deployment = ScriptedDeployment()
    deployment.found = ObservedTraffic(unknown="the window is empty")
    assert (await observer_of(deployment).observe(tick())).unknown == ["traffic: the window is empty"]


async def test_close_ends_the_steps_and_the_traffic() -> None:
    deployment = ScriptedDeployment()
    await observer_of(deployment).close()
    assert deployment.closed == 2


@pytest.mark.parametrize(
    "changes",
    [{"num_req": math.nan}, {"isl": math.inf}, {"osl": -1.0}, {"kv_hit_rate": math.nan}, {"duration_s": math.nan}],
)
async def test_traffic_with_invalid_values_is_unknown_with_the_values(changes: dict[str, float]) -> None:
    deployment = ScriptedDeployment()
    deployment.found = ObservedTraffic(traffic=dataclasses.replace(TRAFFIC, **changes))
    found = await observer_of(deployment).observe(ScheduledTick(at_s=5.0, need_traffic_metrics=True))
    assert found.seen.traffic is None
    assert found.unknown[0].startswith("traffic: invalid values: TrafficObservation(")


async def test_averages_of_an_idle_window_are_zero() -> None:
    deployment = ScriptedDeployment()
    deployment.found = ObservedTraffic(traffic=dataclasses.replace(TRAFFIC, num_req=0.0, isl=math.nan, osl=math.nan))
    found = await observer_of(deployment).observe(ScheduledTick(at_s=5.0, need_traffic_metrics=True))
    assert found.seen.traffic == TrafficObservation(duration_s=5, num_req=0.0, isl=0.0, osl=0.0)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_step_with_an_invalid_time_is_not_valid(seconds: float) -> None:
    step = ForwardPassMetrics(1, "1", 0, 1, seconds, ScheduledRequests(), QueuedRequests())
    assert not is_valid_step(step)
    assert is_valid_step(msgspec.structs.replace(step, wall_time=0.1))


async def test_requests_in_the_routers_queues_count_as_queued_at_the_ranks() -> None:
    deployment = ScriptedDeployment()
    deployment.passes = FpmObservations(
        {}, {(one, 0): ForwardPassMetrics(1, one, 0, 1, 0.01, ScheduledRequests(), QueuedRequests()) for one in "12"}
    )
    deployment.waiting = RouterQueues(decode=QueuedPrompts(3, 5001))
    found = (await observer_of(deployment).observe(tick())).seen.fpm_observations
    assert found is not None
    queued = [one.queued_requests for one in found.decode.values()]
    assert [(one.num_prefill_requests, one.sum_prefill_tokens) for one in queued] == [(1, 2500), (2, 2501)]
