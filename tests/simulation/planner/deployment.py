"""Simulated deployment: connector, forward passes and traffic of replicas that start, with the faults of a scenario."""

import asyncio
import math
import random
from dataclasses import replace

from tests.simulation.planner.scenario import BUDGET, PlannerScenario

from dynamo.core.errors import NotReady
from dynamo.planner.connectors.base import ScaleOutcome, ScaleStatus
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.planner.observation.traffic import ObservedTraffic, RouterQueues
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.protocols.planner import (
    EngineCapabilities,
    FpmObservations,
    ScalingDecision,
    TrafficObservation,
    WorkerCounts,
)

ENGINE = EngineCapabilities(num_gpu=1, max_num_batched_tokens=8192, max_num_seqs=256, max_kv_tokens=1_000_000)
REQUEST_S = 0.2
"""Busy time of a request: 4,000 prompt tokens at 25 µs and 100 decode steps at 1 ms."""


def step(worker: int, counter: int, prompt: int, kv: int, queued: int = 0) -> ForwardPassMetrics:
    """Return a forward pass of the simulated engine."""
    return ForwardPassMetrics(
        FORWARD_PASS_VERSION,
        f"{worker}",
        0,
        counter,
        0.006 + 25e-6 * prompt + kv / 4050 * 1e-3,
        ScheduledRequests(
            num_prefill_requests=int(prompt > 0),
            sum_prefill_tokens=prompt,
            num_decode_requests=int(kv > 0),
            sum_decode_kv_tokens=kv,
        ),
        QueuedRequests(num_prefill_requests=int(queued > 0), sum_prefill_tokens=queued),
    )


def profile() -> list[ForwardPassMetrics]:
    """Return steps measured before the deployment."""
    return [step(0, 1, prompt, kv) for prompt in (0, 1000, 4000) for kv in (4050, 40_500, 405_000)]


class SimulatedDeployment:
    """Replicas of one graph. Counts, steps and traffic pass through the active faults."""

    def __init__(self, scenario: PlannerScenario) -> None:
        self.scenario = scenario
        self.rng = random.Random(f"deployment {scenario.seed}")
        self.ready = scenario.workers
        self.starting: list[float] = []
        self.requested: list[int] = []
        self.active: set[str] = set()
        self.began_s = 0.0
        self._counter = 0
        self._stale: ObservedTraffic | None = None

    @property
    def elapsed_s(self) -> float:
        return asyncio.get_running_loop().time() - self.began_s

    def advance(self) -> None:
        """Complete the starts that are due, and apply the present faults."""
        now_s = self.elapsed_s
        self.active = {fault.kind for fault in self.scenario.faults if fault.begin_s <= now_s < fault.end_s}
        if "scale never completes" not in self.active:
            self.ready += sum(at <= now_s for at in self.starting)
            self.starting = [at for at in self.starting if at > now_s]
        if "workers flap" in self.active:
            self.ready = self.rng.randint(0, BUDGET - len(self.starting))

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def capabilities(self) -> WorkerCapabilities:
        return WorkerCapabilities(decode=ENGINE)

    async def counts(self) -> WorkerCounts:
        self.advance()
        await self._faulty("workers unknown", hangs=False)
        pending = len(self.starting)
        return WorkerCounts(
            ready_num_decode=self.ready, expected_num_decode=self.ready + pending, pending_num_decode=pending
        )

    async def scale(self, decision: ScalingDecision) -> ScaleOutcome:
        await self._faulty("connector errors", hangs=False)
        await self._faulty("connector hangs", hangs=True)
        assert decision.num_decode is not None, "the only role"
        target = decision.num_decode
        self.requested.append(target)
        missing = target - self.ready - len(self.starting)
        self.starting += [self.elapsed_s + self.scenario.startup_s] * missing
        while self.starting and self.ready + len(self.starting) > target:
            self.starting.pop()
        self.ready = min(self.ready, target)
        return ScaleOutcome(ScaleStatus.ACCEPTED, f"{target} replicas")

    async def steps(self) -> FpmObservations:
        await self._faulty("observations gone", hangs=False)
        await self._faulty("observations hang", hangs=True)
        if "stale series" not in self.active:
            self._counter += 1
        found = {}
        for worker in range(self.ready):
            found[f"{worker}", 0] = step(worker, self._counter, 1000, 40_500, self.rng.choice((0, 0, 2000)))
        if "duplicated series" in self.active:
            found |= {
                (f"gone-{worker}", 0): replace_worker(one, f"gone-{worker}") for (worker, _), one in found.items()
            }
        if "values not finite" in self.active:
            found = {key: broken(one) for key, one in found.items()}
        return FpmObservations(decode=found)

    async def sample(self) -> None: ...

    def queues(self) -> RouterQueues:
        return RouterQueues()

    async def window(self, interval_s: float) -> ObservedTraffic:
        await self._faulty("observations gone", hangs=False)
        await self._faulty("observations hang", hangs=True)
        if "stale series" in self.active and self._stale is not None:
            return self._stale
        rate = self.scenario.rate if self.elapsed_s > 600 else self.rng.choice((0.0, 2.0, 15.0)) * self.rng.random()
        rate *= 2 if "duplicated series" in self.active else 1
        requests = max(0.0, rate * interval_s + self.rng.gauss(0, 0.3))
        traffic = TrafficObservation(duration_s=interval_s, num_req=requests, isl=4000.0, osl=100.0)
        if "values not finite" in self.active:
            traffic = replace(traffic, num_req=self.rng.choice((math.nan, math.inf, -1.0)), isl=math.nan, osl=math.inf)
        self._stale = ObservedTraffic(traffic=traffic)
        return self._stale

    async def _faulty(self, kind: str, *, hangs: bool) -> None:
        if kind not in self.active:
            return
        if hangs:
            await asyncio.get_running_loop().create_future()
        raise NotReady(f"simulated: {kind}")


def replace_worker(one: ForwardPassMetrics, worker: str) -> ForwardPassMetrics:
    """Return a step of another worker."""
    return ForwardPassMetrics(
        one.version, worker, one.dp_rank, one.counter_id, one.wall_time, one.scheduled_requests, one.queued_requests
    )


def broken(one: ForwardPassMetrics) -> ForwardPassMetrics:
    """Return a step whose time is not a number."""
    return ForwardPassMetrics(
        one.version, one.worker_id, one.dp_rank, one.counter_id, math.nan, one.scheduled_requests, one.queued_requests
    )
