"""WorkerFlow: workers that start, fail, restart and drain, and the planner that decides their number."""

from dataclasses import dataclass

from dynamo.protocols.planner import ScheduledTick
from dynamo.replay.cluster_state import ClusterState, Happening
from dynamo.replay.fleet import Fleet
from dynamo.replay.lifecycle import StartingWorker
from dynamo.replay.outcome import ClusterEvent
from dynamo.replay.plan import Failure, PlannedRestart
from dynamo.replay.request_flow import RequestFlow


@dataclass(slots=True)
class WorkerFlow:
    """The workers of a run."""

    _state: ClusterState
    _flow: RequestFlow

    def join(self, starting: StartingWorker, now_ms: float) -> None:
        """Put a started worker into service."""
        fleet = self._state.fleets[starting.role]
        if self._state.lifecycle.join(fleet, starting.worker_id, now_ms):
            for _ in range(len(self._state.unplaced)):
                self._flow.place(self._state.unplaced.popleft(), now_ms)
            self._flow.admit(fleet, now_ms)

    def start(self, fleet: Fleet, now_ms: float, after_ms: float, place: int | None = None) -> None:
        """Start a worker that joins after `after_ms`."""
        starting = self._state.lifecycle.start(fleet, now_ms, place)
        self._state.push(now_ms + after_ms, Happening.WORKER_JOINS, starting)

    def fail(self, failure: Failure, now_ms: float) -> None:
        """Remove a failed worker; its requests migrate."""
        found = self._state.lifecycle.worker_at(failure.slot)
        if found is None:
            return
        fleet, worker_id = found
        self._state.outcome.events.append(ClusterEvent(now_ms, f"worker {failure.slot} fails"))
        for worker in fleet.ranks_of(worker_id):
            self._state.note(worker, now_ms)
        lost = self._state.lifecycle.fail(fleet, worker_id, now_ms)
        if failure.restart_ms is not None:
            self.start(fleet, now_ms, failure.restart_ms + fleet.plan.startup_ms, failure.slot)
        for flight in lost:
            flight.migrations += 1
            self._state.outcome.migrations += 1
            flight.is_transferred = False
            if flight.key in self._state.transfers:  # The failed worker had not reserved blocks for it.
                self._flow.let_go(self._state.transfers.pop(flight.key), now_ms)
            self._flow.withdraw(flight, now_ms)
            self._flow.begin(flight, now_ms)
        self._flow.admit(fleet, now_ms)

    def restart(self, restart: PlannedRestart, now_ms: float) -> None:
        """Drain the worker and start a successor, at another place while the worker has requests."""
        found = self._state.lifecycle.worker_at(restart.slot)
        if found is not None and found[0].is_serving(found[1]):
            self._state.outcome.events.append(ClusterEvent(now_ms, f"worker {restart.slot} is restarted"))
            self._drain(*found, now_ms)
            self.start(found[0], now_ms, found[0].plan.startup_ms)

    def _drain(self, fleet: Fleet, worker_id: int, now_ms: float) -> None:
        for worker in fleet.ranks_of(worker_id):
            self._state.note(worker, now_ms)
        self._state.lifecycle.drain(fleet, worker_id, now_ms)
        self._flow.admit(fleet, now_ms)

    def expect_planner(self, tick: ScheduledTick | None, now_ms: float) -> None:
        """Schedule the planner's next tick."""
        if tick is not None:
            self._state.push(max(now_ms, tick.at_s * 1000), Happening.PLANNER_TICKS, tick)

    def tick_planner(self, tick: ScheduledTick, now_ms: float) -> None:
        """Let the planner decide, and scale."""
        assert self._state.planner is not None
        if not self._state.open_requests:  # All requests are done: no planning is needed.
            return
        effects = self._state.planner.tick(tick, self._state.fleets, self._state.outcome.flights, now_ms)
        if effects.scale_to is not None:
            if effects.scale_to.num_prefill is not None and self._state.entry is not self._state.exit:
                self._scale(self._state.entry, effects.scale_to.num_prefill, now_ms)
            if effects.scale_to.num_decode is not None:
                self._scale(self._state.exit, effects.scale_to.num_decode, now_ms)
        self.expect_planner(effects.next_tick, now_ms)

    def _scale(self, fleet: Fleet, wanted: int, now_ms: float) -> None:
        """Set the number of workers of a role: start more, or cancel starting workers and then drain the newest."""
        assert self._state.planner is not None
        expected, wanted = fleet.expected, max(1, wanted)
        if wanted != expected:
            self._state.planner.log.scaling_events.append(
                {"at_s": now_ms / 1000, "role": fleet.plan.role.value, "from": expected, "to": wanted}
            )
        for _ in range(wanted - expected):
            self.start(fleet, now_ms, fleet.plan.startup_ms)
        for _ in range(expected - wanted):
            if fleet.starting:
                self._state.lifecycle.cancel(fleet, now_ms)
            else:
                self._drain(fleet, next(reversed(fleet.serving)), now_ms)
