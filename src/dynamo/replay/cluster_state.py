"""ClusterState: pools, requests and pending events of a simulated cluster, shared by the parts that change them."""

import enum
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dynamo.mocker.simulation.blocks import Change
from dynamo.mocker.simulation.sequence import SimulatedSequence
from dynamo.protocols.kv_events import KvEvent
from dynamo.replay.coast import Coast, CompletedSteps
from dynamo.replay.fleet import DelayedCacheEvents, Fleet
from dynamo.replay.held import HeldRequests
from dynamo.replay.lifecycle import WorkerLifecycle
from dynamo.replay.load import TurnSource
from dynamo.replay.names import Namer
from dynamo.replay.outcome import Flight, RunOutcome
from dynamo.replay.placement import PlacementPolicy
from dynamo.replay.plan import ClusterPlan, Role
from dynamo.replay.planning import PlannerAdapter
from dynamo.replay.telemetry import TelemetrySampler
from dynamo.replay.timeline import Timeline
from dynamo.replay.worker import SimulatedWorker


class Happening(enum.IntEnum):
    """Kinds of events, in the order in which simultaneous events are processed."""

    STEP_ENDS = 0
    BORDER_ENDS = 1
    CACHE_EVENT = 2
    LET_GO = 3
    WORKER_FAILS = 4
    WORKER_RESTARTS = 5
    WORKER_JOINS = 6
    PLANNER_TICKS = 7
    ARRIVAL = 8
    STEP_BEGINS = 9
    QUEUE_TIMEOUT = 10
    SAMPLE = 11


class SourcePrompt(NamedTuple):
    """A prompt on its prefill worker, which holds the blocks until the end of their transfer."""

    worker: SimulatedWorker
    sequence: SimulatedSequence[Flight]


@dataclass(slots=True, eq=False)
class Reservation:
    """A request on the decode worker that reserves blocks for its prompt before that is computed (SGLang)."""

    worker: SimulatedWorker
    sequence: SimulatedSequence[Flight]
    prompt: SourcePrompt | None = None
    """The prompt on its prefill worker, once it is sent there."""


@dataclass(slots=True)
class ClusterState:
    """State of one simulation run."""

    plan: ClusterPlan
    load: TurnSource
    namer: Namer
    placements: dict[Role, PlacementPolicy]
    planner: PlannerAdapter | None = None
    sampler: TelemetrySampler | None = None
    outcome: RunOutcome = field(init=False)
    fleets: dict[Role, Fleet] = field(init=False)
    entry: Fleet = field(init=False)
    """The pool to which new requests are sent."""
    exit: Fleet = field(init=False)
    """The pool that generates answers; the same as `entry` for aggregated workers."""
    lifecycle: WorkerLifecycle = field(init=False)
    heap: list[tuple[float, Happening, int, object]] = field(init=False, default_factory=list)
    """Pending events: time, kind, number, object."""
    unplaced: deque[Flight] = field(init=False, default_factory=deque)
    """Requests that wait because no worker is in service."""
    held: HeldRequests = field(init=False)
    computed: dict[str, SourcePrompt] = field(init=False, default_factory=dict)
    """Computed prompts for which no decode worker is chosen yet, by request."""
    transfers: dict[str, SourcePrompt] = field(init=False, default_factory=dict)
    """Computed prompts whose decode worker has not reserved blocks yet, by request."""
    reservations: dict[str, Reservation] = field(init=False, default_factory=dict)
    """Requests whose prompts have not arrived on their decode worker, which reserves blocks first, by request."""
    arrived: int = field(init=False, default=0)
    open_requests: int = field(init=False, default=0)
    _count: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.outcome = RunOutcome([], 0.0, Timeline(self.plan.interval_ms))
        self.fleets = {
            pool.role: Fleet(pool, self.placements[pool.role], self.plan.seed, self.outcome.gaps)
            for pool in self.plan.pools
        }
        self.entry, self.exit = self.fleets[self.plan.pools[0].role], self.fleets[self.plan.pools[-1].role]
        self.held = HeldRequests(self.plan.queue_timeout_ms)
        if self.planner is not None:
            self.outcome.planner = self.planner.log
        self.lifecycle = WorkerLifecycle(self.fleets, self.outcome)

    def push(self, at_ms: float, kind: Happening, what: object) -> None:
        """Add an event."""
        self._count += 1
        heapq.heappush(self.heap, (at_ms, kind, self._count, what))

    @property
    def reserves_first(self) -> bool:
        """Return whether decode workers reserve blocks before the prompts are computed: those of SGLang."""
        return self.entry is not self.exit and self.exit.plan.limits.engine_type == "sglang"

    def crosses(self) -> bool:
        """Return whether ranks coast over steps that allocate blocks; a planner and a sampler see each of these."""
        return self.planner is None and self.sampler is None

    def fleet_of(self, worker: SimulatedWorker) -> Fleet:
        """Return the pool of a worker."""
        if self.entry is self.exit or self.entry.has(worker.worker_id):
            return self.entry
        return self.exit

    def observe(self, fleet: Fleet, worker: SimulatedWorker, passed: CompletedSteps, now_ms: float) -> None:
        """Record completed steps of a worker in its placement and the timeline."""
        worker.latest, worker.passes = passed.forward_pass, worker.passes + passed.steps
        if passed.forward_pass.scheduled_requests.sum_prefill_tokens:
            worker.prompts = worker.passes, passed.forward_pass
        if fleet.placement.learns and worker.worker_id in fleet.serving:
            fleet.placement.observe((worker.worker_id, worker.rank), passed.forward_pass)
        if passed.ends:  # No prompts.
            self.outcome.timeline.count_steps(worker.slot, passed.tokens // passed.steps, passed.ends)
            return
        scheduled, sim = passed.forward_pass.scheduled_requests, worker.simulation
        admitted, reused = worker.tallied
        worker.tallied = sim.admitted_tokens, sim.reused_tokens
        counts = (
            sim.admitted_tokens - admitted,
            sim.reused_tokens - reused,
            passed.tokens,
            scheduled.sum_prefill_tokens,
        )
        self.outcome.timeline.count(worker.slot, counts, now_ms)

    def deliver(
        self, fleet: Fleet, worker: SimulatedWorker, tier: str, events: Sequence[Change | KvEvent], now_ms: float
    ) -> None:
        """Deliver cache events to the placement, immediately or after the lag."""
        if not fleet.placement.follows_caches:
            return
        if self.plan.event_lag_ms:
            delayed = DelayedCacheEvents(fleet.plan.role, worker.rank_id, tier, events)
            self.push(now_ms + self.plan.event_lag_ms, Happening.CACHE_EVENT, delayed)
        elif worker.worker_id in fleet.serving:
            rank_id = worker.rank_id
            for change in events:
                fleet.placement.apply(rank_id, change, tier)

    def note(self, worker: SimulatedWorker, now_ms: float) -> None:
        """Add the worker's levels since the previous call to the timeline, and execute the step of coasting that is in progress."""
        coast = worker.coast
        if coast is not None:
            while coast.crossing_ms < now_ms:
                self.cross(worker, coast)
        if now_ms > worker.noted_ms:
            self._hold(worker, now_ms)

    def cross(self, worker: SimulatedWorker, coast: Coast) -> None:
        """Execute the next step of a worker's coasting that allocates blocks."""
        if coast.crossing_ms > worker.noted_ms:
            self._hold(worker, coast.crossing_ms)
        worker.changes += coast.cross()

    def _hold(self, worker: SimulatedWorker, now_ms: float) -> None:
        since, worker.noted_ms = worker.noted_ms, now_ms
        sim = worker.simulation
        pool, running = sim.pool, len(sim.decoding) + (sim.partial is not None)
        waiting = len(sim.waiting) + len(sim.loading) + len(sim.loaded)
        self.outcome.timeline.hold(worker.slot, running, waiting, pool.held + pool.private, since, now_ms)
