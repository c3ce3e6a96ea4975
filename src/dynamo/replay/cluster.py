"""Cluster: discrete-event simulation of routers, workers and their failures in virtual time.

    arrivals ──▶ placement ──▶ worker ── step ends ──▶ tokens: placement, next arrivals
                    ▲             │          └───────▶ cache events, immediately or after a lag
                    │             └── prefill done, KV transfer ──▶ placement of decode workers ──▶ worker
                    ├── failures, restarts
                    └── planner: number of workers

Simultaneous events are processed in this order: steps end, cache events are delivered, workers join and leave, the
planner ticks, requests arrive, steps begin. A request whose worker fails is migrated with the tokens that it has.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dynamo.protocols.planner import Planner, ScheduledTick
from dynamo.replay.cluster_state import ClusterState, Happening, Reservation, SourcePrompt
from dynamo.replay.fleet import DelayedCacheEvents
from dynamo.replay.held import HeldRequests
from dynamo.replay.lifecycle import StartingWorker
from dynamo.replay.load import TurnSource
from dynamo.replay.names import Namer
from dynamo.replay.outcome import RunOutcome
from dynamo.replay.placement import PlacementPolicy
from dynamo.replay.plan import ClusterPlan, Failure, PlannedRestart, Role
from dynamo.replay.planning import PlannerAdapter
from dynamo.replay.request_flow import RequestFlow
from dynamo.replay.step_flow import StepFlow
from dynamo.replay.telemetry import TelemetrySampler
from dynamo.replay.worker import Doing
from dynamo.replay.worker_flow import WorkerFlow

STEP_ENDS, BORDER_ENDS, ARRIVAL, STEP_BEGINS, QUEUE_TIMEOUT, SAMPLE = (
    Happening.STEP_ENDS, Happening.BORDER_ENDS, Happening.ARRIVAL, Happening.STEP_BEGINS, Happening.QUEUE_TIMEOUT, Happening.SAMPLE,
)  # fmt: skip
"""The kinds that are compared with each event: a member of the class takes several times as long to read."""
PROGRESS_EVENTS = 512  # Events between two progress updates.


@dataclass(slots=True)
class Cluster:
    """One simulation run."""

    state: ClusterState
    _flow: RequestFlow = field(init=False)
    _steps: StepFlow = field(init=False)
    _workers: WorkerFlow = field(init=False)

    @classmethod
    def of(
        cls,
        plan: ClusterPlan,
        load: TurnSource,
        namer: Namer,
        placements: dict[Role, PlacementPolicy],
        planner: Planner | None = None,
        sampler: TelemetrySampler | None = None,
    ) -> "Cluster":
        """Return the cluster of a plan."""
        adapter = None if planner is None else PlannerAdapter(planner)
        return cls(ClusterState(plan, load, namer, placements, adapter, sampler))

    def __post_init__(self) -> None:
        self._flow = RequestFlow(self.state)
        self._steps = StepFlow(self.state, self._flow)
        self._workers = WorkerFlow(self.state, self._flow)

    def run(self, progress: Callable[[int, float], None] | None = None) -> RunOutcome:
        """Run to the end. `progress` is called periodically with the number of answered requests and the time in ms."""
        self._open_up()
        state, heap = self.state, self.state.heap
        limit_ms = math.inf if state.plan.max_sim_time_ms is None else state.plan.max_sim_time_ms
        now_ms = 0.0
        events = 0
        while heap:
            at_ms, kind, _, what = heapq.heappop(heap)
            if kind is SAMPLE and len(heap) == state.held.is_timed and not state.held:
                break  # Nothing else happens: the final sample follows.
            if kind is QUEUE_TIMEOUT and not state.held:
                state.held.is_timed = False
                continue
            if at_ms > limit_ms:
                state.outcome.unfinished = state.open_requests
                break
            assert at_ms >= now_ms, "an event is earlier than the current time"
            now_ms = at_ms
            self._happen(kind, what, now_ms)
            events += 1
            if progress is not None and events % PROGRESS_EVENTS == 0:
                progress(state.arrived - state.open_requests, now_ms)
        self._close(now_ms)
        return state.outcome

    def validate(self) -> None:
        """Raise `AssertionError` if requests or blocks are lost or the router's state is wrong. Call only when idle."""
        for fleet in self.state.fleets.values():
            fleet.validate()
        assert not self.state.unplaced, "requests wait for a worker at the end"
        assert not self.state.held, "requests are queued at the end"
        assert not self.state.reservations, "blocks are reserved at the end"
        assert self.state.open_requests == 0, "a request was lost"
        assert all(flight.finished_ms >= flight.first_ms >= flight.arrived_ms for flight in self.state.outcome.flights)

    def _open_up(self) -> None:
        for fleet in self.state.fleets.values():
            for _ in range(fleet.plan.workers):
                self._workers.start(fleet, 0.0, 0.0)
        while self.state.heap:  # Initial workers join before any other event.
            starting = heapq.heappop(self.state.heap)[3]
            assert isinstance(starting, StartingWorker)
            self._workers.join(starting, 0.0)
        for failure in self.state.plan.failures:
            self.state.push(failure.at_ms, Happening.WORKER_FAILS, failure)
        for restart in self.state.plan.restarts:
            self.state.push(restart.at_ms, Happening.WORKER_RESTARTS, restart)
        if self.state.planner is not None:
            self._workers.expect_planner(self.state.planner.begin(self.state.plan.pools), 0.0)
        self._flow.expect_arrival()
        if self.state.sampler is not None:
            self.state.sampler.sample("baseline", self.state.fleets, 0, 0, 0.0)
            self.state.push(self.state.sampler.interval_ms, Happening.SAMPLE, self.state.sampler)

    def _happen(self, kind: Happening, what: Any, now_ms: float) -> None:
        if kind is STEP_ENDS:
            worker, turn = what
            if worker.turn == turn and worker.doing is not Doing.IDLE:
                self._steps.end_step(worker, now_ms)
        elif kind is BORDER_ENDS:
            worker, turn, border = what
            if worker.turn == turn and worker.coast is not None:
                self._steps.end_border(worker, border, now_ms)
        elif kind is STEP_BEGINS:
            self._steps.begin_step(what, now_ms)
        elif kind is ARRIVAL:
            flight, is_known = what
            if is_known:
                self._flow.expect_arrival()
            self._flow.arrive(flight, now_ms)
        elif isinstance(what, DelayedCacheEvents):
            self.state.fleets[what.role].apply(what)
        elif isinstance(what, SourcePrompt):
            self._flow.let_go(what, now_ms)
        elif isinstance(what, Reservation):
            self._flow.receive(what, now_ms)
        elif isinstance(what, Failure):
            self._workers.fail(what, now_ms)
        elif isinstance(what, PlannedRestart):
            self._workers.restart(what, now_ms)
        elif isinstance(what, HeldRequests):
            self._flow.time_out(now_ms)
        elif isinstance(what, TelemetrySampler):
            what.sample("periodic", self.state.fleets, len(self.state.outcome.flights), len(self.state.held), now_ms)
            self.state.push(now_ms + what.interval_ms, Happening.SAMPLE, what)
        elif isinstance(what, ScheduledTick):
            self._workers.tick_planner(what, now_ms)
        else:
            assert isinstance(what, StartingWorker)
            self._workers.join(what, now_ms)

    def _close(self, now_ms: float) -> None:
        ended = (flight.finished_ms for flight in self.state.outcome.flights if flight.finished_ms >= 0)
        self.state.outcome.duration_ms = max(ended, default=now_ms)
        self.state.outcome.flights = [flight for flight in self.state.outcome.flights if not flight.refusal]
        if self.state.sampler is not None:
            self.state.sampler.sample(
                "final", self.state.fleets, len(self.state.outcome.flights), len(self.state.held), now_ms
            )
        self.state.lifecycle.close(self.state.outcome.duration_ms)
        if self.state.unplaced or self.state.held:
            self.state.outcome.unfinished = self.state.open_requests
        if not self.state.outcome.unfinished:
            self.validate()
