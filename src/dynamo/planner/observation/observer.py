"""Observer: everything that a tick needs to know, each part with a deadline; what fails is unknown and named."""

import asyncio
import logging
import math
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.errors import DynamoException
from dynamo.planner.connectors.base import PlannerConnector
from dynamo.planner.connectors.workers import WorkerDirectory
from dynamo.planner.core.engine import without_nan
from dynamo.planner.core.router_queue import with_queue
from dynamo.planner.observation.steps import StepObserver
from dynamo.planner.observation.traffic import ObservedTraffic, RouterQueues
from dynamo.protocols.load import ForwardPassMetrics
from dynamo.protocols.planner import FpmObservations, ScheduledTick, TickInput, TrafficObservation

logger = logging.getLogger(__name__)

T = TypeVar("T")

OBSERVE_S = 10.0
"""Deadline of each observation; the parts of a tick are observed at the same time."""


class TrafficSource(Protocol):
    """Traffic of the deployment. A failure is a `DynamoException` or an `OSError`."""

    async def sample(self) -> None:
        """Read the counters once, at every tick."""

    async def window(self, interval_s: float) -> ObservedTraffic:
        """Return the traffic of the interval that ends now."""

    def queues(self) -> RouterQueues:
        """Return the queues of the routers at the last `sample`."""

    async def close(self) -> None:
        """Close the connections."""


class StepSource(Protocol):
    """Forward passes of the workers. A failure is a `DynamoException` or an `OSError`."""

    async def steps(self) -> FpmObservations:
        """Return the latest step of each rank."""

    async def close(self) -> None:
        """End the subscriptions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Input of a tick, the latencies that clients saw, and what could not be observed."""

    seen: TickInput
    traffic: ObservedTraffic | None = None
    failed: dict[str, str] = field(default_factory=dict)
    """Cause by part: `workers`, `steps`, `traffic`."""

    @property
    def unknown(self) -> list[str]:
        """The parts that are not known, each with its cause."""
        causes = [f"{part}: {cause}" for part, cause in self.failed.items()]
        if self.traffic is not None and self.traffic.unknown:
            causes.append(f"traffic: {self.traffic.unknown}")
        return causes


class LiveSteps:
    """Forward passes of the workers that discovery lists."""

    def __init__(self, directory: WorkerDirectory, observer: StepObserver) -> None:
        self._directory = directory
        self._observer = observer

    async def steps(self) -> FpmObservations:
        """Return the latest step of each rank of the live workers."""
        return self._observer.observe(await self._directory.live())

    async def close(self) -> None:
        """End the subscriptions."""
        self._observer.close()


class Observer:
    """Reader of all parts of a tick."""

    def __init__(
        self,
        connector: PlannerConnector,
        steps: StepSource,
        traffic: TrafficSource,
        clock: Clock,
        *,
        deadline_s: float = OBSERVE_S,
    ) -> None:
        self._connector = connector
        self._steps = steps
        self._traffic = traffic
        self._clock = clock
        self._deadline_s = deadline_s

    async def observe(self, scheduled: ScheduledTick) -> Observation:
        """Return what a tick requires. Nothing raises but a cancellation."""
        failed: dict[str, str] = {}
        counts, steps, traffic = await asyncio.gather(
            self._part("workers", self._connector.counts(), failed),
            self._part("steps", self._steps.steps(), failed),
            self._part("traffic", self._observed_traffic(scheduled), failed),
        )
        known = None if traffic is None else traffic.traffic
        if known is not None and known.num_req == 0:
            known = without_nan(known)  # An idle window has no averages.
        if known is not None and not is_valid_traffic(known):
            failed["traffic"] = f"invalid values: {known}"
            known = None
        if steps is not None:
            steps = with_queues(self._valid_steps(steps, failed), self._traffic.queues())
        seen = TickInput(
            now_s=self._clock.now(),
            traffic=known,
            worker_counts=counts,
            fpm_observations=steps,
        )
        return Observation(seen=seen, traffic=traffic, failed=failed)

    async def close(self) -> None:
        """Close all sources but the connector."""
        await self._steps.close()
        await self._traffic.close()

    @staticmethod
    def _valid_steps(steps: FpmObservations, failed: dict[str, str]) -> FpmObservations:
        """Return the steps with valid values; the others are named in `failed`."""
        invalid = [key for of in (steps.prefill, steps.decode) for key, one in of.items() if not is_valid_step(one)]
        if not invalid:
            return steps
        worker, rank = invalid[0]
        failed["steps"] = f"invalid values of {len(invalid)} rank(s), first worker {worker} rank {rank}"
        return FpmObservations(
            {key: one for key, one in steps.prefill.items() if is_valid_step(one)},
            {key: one for key, one in steps.decode.items() if is_valid_step(one)},
        )

    async def _observed_traffic(self, scheduled: ScheduledTick) -> ObservedTraffic | None:
        await self._traffic.sample()
        if not scheduled.need_traffic_metrics:
            return None
        return await self._traffic.window(scheduled.traffic_metrics_duration_s)

    async def _part(self, name: str, work: Awaitable[T], failed: dict[str, str]) -> T | None:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await work
        except TimeoutError:
            failed[name] = f"no result within {self._deadline_s:g} s"
        except (DynamoException, OSError) as error:
            failed[name] = f"{error}"
        logger.warning("failed to observe %s: %s", name, failed[name])
        return None


def with_queues(steps: FpmObservations, queues: RouterQueues) -> FpmObservations:
    """Return the steps with the requests in the routers' queues as queued at the ranks."""
    return replace(
        steps, prefill=with_queue(steps.prefill, queues.prefill), decode=with_queue(steps.decode, queues.decode)
    )


def is_valid_traffic(traffic: TrafficObservation) -> bool:
    """Return whether all numbers are finite and not negative, and the interval is positive."""
    optional = (traffic.kv_hit_rate, traffic.accept_length)
    values = (traffic.num_req, traffic.isl, traffic.osl, *(one for one in optional if one is not None))
    return traffic.duration_s > 0 and all(math.isfinite(one) and one >= 0 for one in (traffic.duration_s, *values))


def is_valid_step(step: ForwardPassMetrics) -> bool:
    """Return whether all numbers of a forward pass are finite and not negative."""
    parts: list[Any] = [
        step.wall_time,
        *msgspec.structs.astuple(step.scheduled_requests),
        *msgspec.structs.astuple(step.queued_requests),
    ]
    return all(math.isfinite(one) and one >= 0 for one in parts)
