"""Cluster: discrete-event simulation of routers, workers and their failures in virtual time.

    arrivals ──▶ placement ──▶ worker ── step ends ──▶ tokens: placement, next arrivals
                    ▲             │          └───────▶ cache events, immediately or after a lag
                    │             └── prefill done, KV transfer ──▶ placement of decode workers ──▶ worker
                    ├── failures, restarts
                    └── planner: number of workers

Simultaneous events are processed in this order: steps end, cache events are delivered, workers join and leave, the
planner ticks, requests arrive, steps begin. A request whose worker fails is migrated with the tokens that it has.
"""

import enum
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from dynamo.core.errors import ConfigError, NotReady, Overloaded
from dynamo.mocker.simulation.scheduler import StepResult
from dynamo.mocker.simulation.sequence import SimulatedSequence
from dynamo.protocols.planner import Planner, ScheduledTick
from dynamo.replay.fleet import DelayedCacheEvents, Fleet
from dynamo.replay.held import HeldRequests
from dynamo.replay.lifecycle import StartingWorker, WorkerLifecycle
from dynamo.replay.load import Due, TurnSource
from dynamo.replay.names import Namer
from dynamo.replay.outcome import ClusterEvent, Flight, RunOutcome
from dynamo.replay.placement import DEVICE, HOST, PlacementPolicy, PlacementRequest, RankId
from dynamo.replay.plan import ClusterPlan, Failure, PlannedRestart, Role
from dynamo.replay.planning import PlannerAdapter
from dynamo.replay.telemetry import TelemetrySampler
from dynamo.replay.timeline import Timeline
from dynamo.replay.worker import CompletedSteps, Doing, SimulatedWorker

CHECK_STEPS = 4096  # Steps between two full checks of a worker's state, which cost some 10 ms each; also at the end.
PROGRESS_EVENTS = 512  # Events between two progress updates.


class Happening(enum.IntEnum):
    """Kinds of events, in the order in which simultaneous events are processed."""

    STEP_ENDS = 0
    CACHE_EVENT = 1
    LET_GO = 2
    WORKER_FAILS = 3
    WORKER_RESTARTS = 4
    WORKER_JOINS = 5
    PLANNER_TICKS = 6
    ARRIVAL = 7
    STEP_BEGINS = 8
    QUEUE_TIMEOUT = 9
    SAMPLE = 10


class CompletedTransfer(NamedTuple):
    """A completed KV transfer: the prefill worker can release the blocks."""

    worker: SimulatedWorker
    sequence: SimulatedSequence[Flight]


@dataclass(slots=True)
class Cluster:
    """One simulation run."""

    plan: ClusterPlan
    load: TurnSource
    namer: Namer
    placements: dict[Role, PlacementPolicy]
    planner: Planner | None = None
    sampler: TelemetrySampler | None = None
    outcome: RunOutcome = field(init=False)
    fleets: dict[Role, Fleet] = field(init=False)
    _entry: Fleet = field(init=False)
    """The pool to which new requests are sent."""
    _exit: Fleet = field(init=False)
    """The pool that generates answers; the same as `_entry` for aggregated workers."""
    _planner: PlannerAdapter | None = field(init=False, default=None)
    _lifecycle: WorkerLifecycle = field(init=False)
    _heap: list[tuple[float, int, int, object]] = field(init=False, default_factory=list)
    _count: int = field(init=False, default=0)
    _known: Iterator[Due] = field(init=False)
    _unplaced: deque[Flight] = field(init=False, default_factory=deque)
    """Requests that wait because no worker is in service."""
    _held: HeldRequests = field(init=False)
    _computed: dict[str, CompletedTransfer] = field(init=False, default_factory=dict)
    """Computed prompts for which no decode worker is chosen yet, by request."""
    _arrived: int = field(init=False, default=0)
    _open: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.fleets = {pool.role: Fleet(pool, self.placements[pool.role], self.plan.seed) for pool in self.plan.pools}
        self._entry, self._exit = self.fleets[self.plan.pools[0].role], self.fleets[self.plan.pools[-1].role]
        self._held = HeldRequests(self.plan.queue_timeout_ms)
        self.outcome = RunOutcome([], 0.0, Timeline(self.plan.interval_ms))
        if self.planner is not None:
            self._planner = PlannerAdapter(self.planner)
            self.outcome.planner = self._planner.log
        self._lifecycle = WorkerLifecycle(self.fleets, self.outcome)
        self._known = iter(self.load.first())

    def run(self, progress: Callable[[int, float], None] | None = None) -> RunOutcome:
        """Run to the end. `progress` is called periodically with the number of answered requests and the time in ms."""
        self._open_up()
        now_ms = 0.0
        events = 0
        while self._heap:
            at_ms, kind, _, what = heapq.heappop(self._heap)
            if kind == Happening.SAMPLE and len(self._heap) == self._held.is_timed and not self._held:
                break  # Nothing else happens: the final sample follows.
            if kind == Happening.QUEUE_TIMEOUT and not self._held:
                self._held.is_timed = False
                continue
            if self.plan.max_sim_time_ms is not None and at_ms > self.plan.max_sim_time_ms:
                self.outcome.unfinished = self._open
                break
            assert at_ms >= now_ms, "an event is earlier than the current time"
            now_ms = at_ms
            self._happen(Happening(kind), what, now_ms)
            events += 1
            if progress is not None and events % PROGRESS_EVENTS == 0:
                progress(self._arrived - self._open, now_ms)
        self._close(now_ms)
        return self.outcome

    def validate(self) -> None:
        """Raise `AssertionError` if requests or blocks are lost or the router's state is wrong. Call only when idle."""
        for fleet in self.fleets.values():
            fleet.validate()
        assert not self._unplaced, "requests wait for a worker at the end"
        assert not self._held, "requests are queued at the end"
        assert self._open == 0, "a request was lost"
        assert all(flight.finished_ms >= flight.first_ms >= flight.arrived_ms for flight in self.outcome.flights)

    # Clock.

    def _open_up(self) -> None:
        for fleet in self.fleets.values():
            for _ in range(fleet.plan.workers):
                self._start(fleet, 0.0, 0.0)
        while self._heap:  # Initial workers join before any other event.
            starting = heapq.heappop(self._heap)[3]
            assert isinstance(starting, StartingWorker)
            self._join(starting, 0.0)
        for failure in self.plan.failures:
            self._push(failure.at_ms, Happening.WORKER_FAILS, failure)
        for restart in self.plan.restarts:
            self._push(restart.at_ms, Happening.WORKER_RESTARTS, restart)
        if self._planner is not None:
            self._expect_planner(self._planner.begin(self.plan.pools), 0.0)
        self._expect_arrival()
        if self.sampler is not None:
            self.sampler.sample("baseline", self.fleets, 0, 0, 0.0)
            self._push(self.sampler.interval_ms, Happening.SAMPLE, self.sampler)

    def _push(self, at_ms: float, kind: Happening, what: object) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at_ms, int(kind), self._count, what))

    def _happen(self, kind: Happening, what: object, now_ms: float) -> None:
        if kind is Happening.STEP_ENDS:
            assert isinstance(what, tuple)
            worker, turn = what
            if worker.turn == turn and worker.doing is not Doing.IDLE:
                self._end_step(worker, now_ms)
        elif kind is Happening.STEP_BEGINS:
            assert isinstance(what, SimulatedWorker)
            self._begin_step(what, now_ms)
        elif kind is Happening.ARRIVAL:
            assert isinstance(what, tuple)
            flight, is_known = what
            if is_known:
                self._expect_arrival()
            self._arrive(flight, now_ms)
        elif isinstance(what, DelayedCacheEvents):
            self.fleets[what.role].apply(what)
        elif isinstance(what, CompletedTransfer):
            self._let_go(what, now_ms)
        elif isinstance(what, Failure):
            self._fail(what, now_ms)
        elif isinstance(what, PlannedRestart):
            self._restart(what, now_ms)
        elif isinstance(what, HeldRequests):
            self._time_out(now_ms)
        elif isinstance(what, TelemetrySampler):
            what.sample("periodic", self.fleets, len(self.outcome.flights), len(self._held), now_ms)
            self._push(now_ms + what.interval_ms, Happening.SAMPLE, what)
        elif isinstance(what, ScheduledTick):
            self._look(what, now_ms)
        else:
            assert isinstance(what, StartingWorker)
            self._join(what, now_ms)

    # Requests.

    def _expect_arrival(self) -> None:
        """Schedule the next independent arrival; one at a time, so that long traces do not fill the heap."""
        due = next(self._known, None)
        if due is not None:
            self._announce(due, is_known=True)

    def _announce(self, due: Due, *, is_known: bool = False) -> None:
        at_ms, session, place = due
        self._arrived += 1
        self._open += 1
        flight = Flight(f"{self._arrived}", session, place, session.turns[place], at_ms)
        self._push(at_ms + self.plan.overhead_ms, Happening.ARRIVAL, (flight, is_known))

    def _arrive(self, flight: Flight, now_ms: float) -> None:
        limit = self.plan.max_model_len
        if limit is not None and flight.turn.input_tokens >= limit:
            self._reject(flight, now_ms)
            return
        if limit is not None:
            answer_tokens = min(flight.turn.output_tokens, limit - flight.turn.input_tokens)
            flight.turn = replace(flight.turn, output_tokens=answer_tokens)
        turn = flight.turn
        flight.names = self.namer.names(turn.hash_ids, turn.input_tokens)
        tokens = turn.input_tokens + turn.output_tokens
        for fleet in self.fleets.values():
            limits = fleet.plan.limits
            if -(-tokens // limits.block_tokens) > limits.num_blocks:
                raise ConfigError(f"request {turn.request_id}: {tokens} tokens exceed the KV cache of every worker")
        self.outcome.flights.append(flight)
        self._begin(flight, now_ms)

    def _reject(self, flight: Flight, now_ms: float) -> None:
        """End a request that is too long at its arrival; its session continues."""
        self.outcome.rejected.append(flight)
        self._open -= 1
        for due in (
            *self.load.begun(flight.session, flight.place, now_ms),
            *self.load.after(flight.session, flight.place, now_ms),
        ):
            self._announce(due)

    def _refuse(self, flight: Flight, reason: str, now_ms: float) -> None:
        """End a request that the router refuses, and its session, as a client does that receives status 503 or 529."""
        flight.refusal, flight.names = reason, None
        self._computed_away(flight, now_ms)
        self.outcome.rejected.append(flight)
        self.outcome.failures[reason] += 1
        self._open -= 1
        for due in self.load.after(flight.session, len(flight.session.turns) - 1, now_ms):
            self._announce(due)

    def _computed_away(self, flight: Flight, now_ms: float) -> None:
        """Release the computed prompt of a request that is refused a decode worker."""
        if flight.key in self._computed:
            self._let_go(self._computed.pop(flight.key), now_ms)

    def _time_out(self, now_ms: float) -> None:
        """Refuse the requests that waited too long in a router's queue."""
        late, next_ms = self._held.expire(now_ms)
        if next_ms is not None:
            self._push(next_ms, Happening.QUEUE_TIMEOUT, self._held)
        for flight in late:
            fleet = self._entry if flight.is_prefilling else self._exit
            fleet.placement.withdraw(flight.key)
            seconds = self.plan.queue_timeout_ms / 1000
            self._refuse(flight, f"Overloaded: no worker had capacity within {seconds:g} s", now_ms)

    def _begin(self, flight: Flight, now_ms: float) -> None:
        """Send a request to a worker that computes its prompt, for itself or for a decode worker."""
        flight.sent_ms = now_ms
        flight.is_prefilling = self._entry is not self._exit and not self._bypasses_prefill(flight, now_ms)
        self._place(flight, now_ms)

    def _bypasses_prefill(self, flight: Flight, now_ms: float) -> bool:
        """Return whether the decode worker should compute the prompt as well."""
        if self.plan.bypass is None or flight.names is None:
            return False
        tokens = flight.turn.input_tokens + flight.migrated_tokens
        held = self._exit.placement.deepest(flight.names.packed, now_ms / 1000) * self._exit.plan.limits.block_tokens
        is_bypassed = self.plan.bypass.applies(tokens, max(0, tokens - held))
        self.outcome.bypassed += is_bypassed
        return is_bypassed

    def _place(self, flight: Flight, now_ms: float) -> None:
        assert flight.names is not None
        turn, session = flight.turn, flight.session
        request = PlacementRequest(
            flight.key,
            turn.input_tokens + flight.migrated_tokens,
            flight.names.packed,
            session.session_id if len(session.turns) > 1 else None,
            turn.priority,
            turn.strict_priority,
            is_remote=flight.key in self._computed,
        )
        fleet = self._entry if flight.is_prefilling else self._exit
        try:
            rank_id, is_anybody = fleet.place(request, now_ms)
        except Overloaded as error:
            self._refuse(flight, f"{type(error).__name__}: {error}", now_ms)
            return
        if rank_id is not None:
            self._send(fleet, flight, rank_id, now_ms)
        elif is_anybody:
            timeout_ms = self._held.add(flight, now_ms)
            if timeout_ms is not None:
                self._push(timeout_ms, Happening.QUEUE_TIMEOUT, self._held)
        else:
            self._unplaced.append(flight)

    def _admit(self, fleet: Fleet, now_ms: float) -> None:
        if self._held:
            for key, rank_id in fleet.placement.admit(now_ms / 1000):
                flight = self._held.pop(key)
                if isinstance(rank_id, NotReady):
                    self._unplaced.append(flight)
                elif isinstance(rank_id, Exception):
                    self._refuse(flight, f"{type(rank_id).__name__}: {rank_id}", now_ms)
                else:
                    self._send(fleet, flight, rank_id, now_ms)

    def _send(self, fleet: Fleet, flight: Flight, rank_id: RankId, now_ms: float) -> None:
        worker = fleet.rank(rank_id)
        is_first = flight.placed_ms < 0
        is_remote = flight.key in self._computed
        flight.waited_ms += now_ms - flight.sent_ms
        if not is_remote and flight.first_ms < 0:
            flight.placed_ms = now_ms
        flight.worker, flight.slot = rank_id[0], worker.slot
        self._note(worker, now_ms)
        ready_ms = self._transfer(flight, worker, now_ms) if is_remote else None
        passed = worker.submit(flight, now_ms, ready_ms)
        self._wake(fleet, worker, passed, now_ms)
        if is_first:
            for due in self.load.begun(flight.session, flight.place, now_ms):
                self._announce(due)

    def _wake(self, fleet: Fleet, worker: SimulatedWorker, passed: CompletedSteps | None, now_ms: float) -> None:
        """Schedule the end of an interrupted step, or the start of a step on an idle worker."""
        if passed is not None:
            self._observe(fleet, worker, passed, now_ms)
            self._push(worker.until_ms, Happening.STEP_ENDS, (worker, worker.turn))
        elif worker.doing is Doing.IDLE:
            self._push(now_ms, Happening.STEP_BEGINS, worker)

    def _transfer(self, flight: Flight, to: SimulatedWorker, now_ms: float) -> float:
        """Start the KV transfer to a decode worker; return the time at which it completes."""
        tokens = flight.turn.input_tokens + flight.migrated_tokens
        rules = self._exit.plan.limits.transfer
        if rules.only_missing and flight.names is not None:
            limits = self._exit.plan.limits
            tokens -= to.simulation.pool.match(flight.names.sequence_hashes) * limits.block_tokens
        takes_ms = rules.transfer_ms(tokens)
        self.outcome.transfers += 1
        self.outcome.transfer_ms += takes_ms
        self._push(now_ms + takes_ms, Happening.LET_GO, self._computed.pop(flight.key))
        flight.is_transferred = True
        return now_ms + takes_ms

    def _let_go(self, transfer: CompletedTransfer, now_ms: float) -> None:
        worker, sequence = transfer
        if not self._entry.has(worker.worker_id):  # The worker failed after the transfer had begun.
            return
        self._note(worker, now_ms)
        passed = worker.interrupt(now_ms)
        worker.simulation.let_go(sequence)
        if passed is not None or not worker.is_quiet:
            self._wake(self._entry, worker, passed, now_ms)
        else:
            self._lifecycle.dismiss(self._entry, worker, now_ms)

    def _handed_over(self, worker: SimulatedWorker, sequence: SimulatedSequence[Flight], now_ms: float) -> None:
        """Choose the decode worker of a computed prompt."""
        flight = sequence.owner
        if self._entry.is_serving(worker.worker_id):
            self._entry.placement.finish(flight.key, 1, now_ms / 1000)
        flight.is_prefilling, flight.sent_ms = False, now_ms
        flight.prefill_slot, flight.cached_tokens = worker.slot, sequence.cached_tokens
        self._computed[flight.key] = CompletedTransfer(worker, sequence)
        self._place(flight, now_ms)

    def _finish(self, fleet: Fleet, flight: Flight, now_ms: float) -> None:
        flight.finished_ms = now_ms
        flight.names = None
        self._open -= 1
        if fleet.is_serving(flight.worker):
            fleet.placement.finish(flight.key, flight.turn.output_tokens, now_ms / 1000)
        if self._planner is not None:
            self._planner.ended(flight, now_ms)
        if self.sampler is not None:
            self.sampler.ended(flight)
        for due in self.load.after(flight.session, flight.place, now_ms):
            self._announce(due)

    # Steps.

    def _fleet_of(self, worker: SimulatedWorker) -> Fleet:
        if self._entry is self._exit or self._entry.has(worker.worker_id):
            return self._entry
        return self._exit

    def _begin_step(self, worker: SimulatedWorker, now_ms: float) -> None:
        fleet = self._fleet_of(worker)
        if worker.doing is not Doing.IDLE or not fleet.has(worker.worker_id):
            return
        self._note(worker, now_ms)
        if worker.begin(now_ms):
            self._push(worker.until_ms, Happening.STEP_ENDS, (worker, worker.turn))
            if worker.real_steps % CHECK_STEPS == 0:
                worker.simulation.validate()
        else:
            self._lifecycle.dismiss(fleet, worker, now_ms)

    def _end_step(self, worker: SimulatedWorker, now_ms: float) -> None:
        self._note(worker, now_ms)
        fleet = self._fleet_of(worker)
        result, passed = worker.end()
        if result is not None:
            self._deliver(fleet, worker, result, now_ms)
        if passed is not None:
            self._observe(fleet, worker, passed, now_ms)
        self._admit(fleet, now_ms)
        self._push(now_ms, Happening.STEP_BEGINS, worker)

    def _deliver(self, fleet: Fleet, worker: SimulatedWorker, result: StepResult[Flight], now_ms: float) -> None:
        begun, is_serving = worker.begun, fleet.is_serving(worker.worker_id)
        if begun:
            for sequence in begun:
                if worker.simulation.generated_tokens(sequence) > 1:
                    sequence.owner.second_ms = now_ms
            begun[:] = [sequence for sequence in begun if sequence.owner.second_ms < 0]
        for sequence in result.prefilled:
            flight = sequence.owner
            if is_serving:
                fleet.placement.prefilled(flight.key, now_ms / 1000)
            if flight.is_prefilling:
                continue
            if flight.first_ms < 0:
                flight.first_ms = now_ms
                if not flight.is_transferred:
                    flight.cached_tokens = sequence.cached_tokens
                if flight.turn.output_tokens > 1:
                    begun.append(sequence)
            elif flight.second_ms < 0 and flight.migrations:
                flight.second_ms = now_ms
        for tier, events in ((DEVICE, result.events), (HOST, result.host_events)):
            if events:
                self._deliver_cache_event(
                    fleet, DelayedCacheEvents(fleet.plan.role, worker.rank_id, tier, events), now_ms
                )
        for sequence in result.finished:
            if sequence.owner.is_prefilling:
                self._handed_over(worker, sequence, now_ms)
            else:
                self._finish(fleet, sequence.owner, now_ms)

    def _deliver_cache_event(self, fleet: Fleet, event: DelayedCacheEvents, now_ms: float) -> None:
        if self.plan.event_lag_ms:
            self._push(now_ms + self.plan.event_lag_ms, Happening.CACHE_EVENT, event)
        else:
            fleet.apply(event)

    def _observe(self, fleet: Fleet, worker: SimulatedWorker, passed: CompletedSteps, now_ms: float) -> None:
        worker.latest, worker.passes = passed.forward_pass, worker.passes + passed.steps
        if passed.forward_pass.scheduled_requests.sum_prefill_tokens:
            worker.prompts = worker.passes, passed.forward_pass
        if fleet.is_serving(worker.worker_id):
            fleet.placement.observe(worker.rank_id, passed.forward_pass)
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

    def _note(self, worker: SimulatedWorker, now_ms: float) -> None:
        """Add the worker's levels since the previous call to the timeline."""
        since, worker.noted_ms = worker.noted_ms, now_ms
        if now_ms > since:
            sim = worker.simulation
            running = len(sim.decoding) + (sim.partial is not None)
            waiting = len(sim.waiting) + len(sim.loading) + len(sim.loaded)
            levels = (float(running), float(waiting), float(sim.pool.used))
            self.outcome.timeline.hold(worker.slot, levels, since, now_ms)

    # Workers.

    def _join(self, starting: StartingWorker, now_ms: float) -> None:
        fleet = self.fleets[starting.role]
        if self._lifecycle.join(fleet, starting.worker_id, now_ms):
            for _ in range(len(self._unplaced)):
                self._place(self._unplaced.popleft(), now_ms)
            self._admit(fleet, now_ms)

    def _start(self, fleet: Fleet, now_ms: float, after_ms: float, place: int | None = None) -> None:
        """Start a worker that joins after `after_ms`."""
        starting = self._lifecycle.start(fleet, now_ms, place)
        self._push(now_ms + after_ms, Happening.WORKER_JOINS, starting)

    def _fail(self, failure: Failure, now_ms: float) -> None:
        found = self._lifecycle.worker_at(failure.slot)
        if found is None:
            return
        fleet, worker_id = found
        self.outcome.events.append(ClusterEvent(now_ms, f"worker {failure.slot} fails"))
        for worker in fleet.ranks_of(worker_id):
            self._note(worker, now_ms)
        lost = self._lifecycle.fail(fleet, worker_id, now_ms)
        if failure.restart_ms is not None:
            self._start(fleet, now_ms, failure.restart_ms + fleet.plan.startup_ms, failure.slot)
        for flight in lost:
            flight.migrations += 1
            self.outcome.migrations += 1
            flight.is_transferred = False
            self._begin(flight, now_ms)
        self._admit(fleet, now_ms)

    def _restart(self, restart: PlannedRestart, now_ms: float) -> None:
        """Drain the worker and start a successor, at another place while the worker has requests."""
        found = self._lifecycle.worker_at(restart.slot)
        if found is not None and found[0].is_serving(found[1]):
            self.outcome.events.append(ClusterEvent(now_ms, f"worker {restart.slot} is restarted"))
            self._drain(*found, now_ms)
            self._start(found[0], now_ms, found[0].plan.startup_ms)

    def _drain(self, fleet: Fleet, worker_id: int, now_ms: float) -> None:
        for worker in fleet.ranks_of(worker_id):
            self._note(worker, now_ms)
        self._lifecycle.drain(fleet, worker_id, now_ms)
        self._admit(fleet, now_ms)

    # The planner.

    def _expect_planner(self, tick: ScheduledTick | None, now_ms: float) -> None:
        if tick is not None:
            self._push(max(now_ms, tick.at_s * 1000), Happening.PLANNER_TICKS, tick)

    def _look(self, tick: ScheduledTick, now_ms: float) -> None:
        assert self._planner is not None
        if not self._open:  # All requests are done: no planning is needed.
            return
        effects = self._planner.tick(tick, self.fleets, self.outcome.flights, now_ms)
        if effects.scale_to is not None:
            if effects.scale_to.num_prefill is not None and self._entry is not self._exit:
                self._scale(self._entry, effects.scale_to.num_prefill, now_ms)
            if effects.scale_to.num_decode is not None:
                self._scale(self._exit, effects.scale_to.num_decode, now_ms)
        self._expect_planner(effects.next_tick, now_ms)

    def _scale(self, fleet: Fleet, wanted: int, now_ms: float) -> None:
        """Set the number of workers of a role: start more, or cancel starting workers and then drain the newest."""
        assert self._planner is not None
        expected, wanted = fleet.expected, max(1, wanted)
        if wanted != expected:
            self._planner.log.scaling_events.append(
                {"at_s": now_ms / 1000, "role": fleet.plan.role.value, "from": expected, "to": wanted}
            )
        for _ in range(wanted - expected):
            self._start(fleet, now_ms, fleet.plan.startup_ms)
        for _ in range(expected - wanted):
            if fleet.starting:
                self._lifecycle.cancel(fleet, now_ms)
            else:
                self._drain(fleet, next(reversed(fleet.serving)), now_ms)

    # The end.

    def _close(self, now_ms: float) -> None:
        ended = (flight.finished_ms for flight in self.outcome.flights if flight.finished_ms >= 0)
        self.outcome.duration_ms = max(ended, default=now_ms)
        self.outcome.flights = [flight for flight in self.outcome.flights if not flight.refusal]
        if self.sampler is not None:
            self.sampler.sample("final", self.fleets, len(self.outcome.flights), len(self._held), now_ms)
        self._lifecycle.close(self.outcome.duration_ms)
        if self._unplaced or self._held:
            self.outcome.unfinished = self._open
        if not self.outcome.unfinished:
            self.validate()
