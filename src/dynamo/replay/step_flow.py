"""StepFlow: begin and end of the workers' steps, and delivery of their tokens and cache events."""

from dataclasses import dataclass

from dynamo.mocker.simulation.step import StepResult
from dynamo.replay.cluster_state import ClusterState, Happening
from dynamo.replay.fleet import Fleet
from dynamo.replay.outcome import Flight
from dynamo.replay.placement import DEVICE, HOST
from dynamo.replay.request_flow import RequestFlow
from dynamo.replay.worker import Doing, SimulatedWorker

CHECK_STEPS = 4096  # Steps between two full checks of a worker's state, which cost some 10 ms each; also at the end.


@dataclass(slots=True)
class StepFlow:
    """The steps of all workers."""

    _state: ClusterState
    _flow: RequestFlow

    def begin_step(self, worker: SimulatedWorker, now_ms: float) -> None:
        """Begin a worker's next step, or remove a draining worker that is idle."""
        fleet = self._state.fleet_of(worker)
        if worker.doing is not Doing.IDLE or not fleet.has(worker.worker_id):
            return
        self._state.note(worker, now_ms)
        crosses = self._state.crosses()
        if worker.begin(now_ms, crosses_borders=crosses, is_direct=crosses and not fleet.placement.learns):
            self._flow.expect_transfers(worker, now_ms)
            self._state.push(worker.until_ms, Happening.STEP_ENDS, (worker, worker.turn))
            self._expect_border(fleet, worker)
            if worker.real_steps % CHECK_STEPS == 0:
                worker.simulation.validate()
        else:
            self._state.lifecycle.dismiss(fleet, worker, now_ms)
        for flight in worker.reserved():
            self._flow.prefill(flight, now_ms)

    def end_step(self, worker: SimulatedWorker, now_ms: float) -> None:
        """Deliver the results of a step."""
        self._state.note(worker, now_ms)
        fleet = self._state.fleet_of(worker)
        result, passed = worker.end()
        if worker.changes:
            self._deliver_changes(fleet, worker, now_ms)
        if result is not None:
            self._deliver(fleet, worker, result, now_ms)
        if passed is not None:
            self._state.observe(fleet, worker, passed, now_ms)
        self._flow.admit(fleet, now_ms)
        heap = self._state.heap
        if heap and heap[0][0] <= now_ms:
            self._state.push(now_ms, Happening.STEP_BEGINS, worker)
        else:  # The next event would be this one.
            self.begin_step(worker, now_ms)

    def end_border(self, worker: SimulatedWorker, border: int, now_ms: float) -> None:
        """Deliver the results of a step of coasting that allocated blocks."""
        fleet, coast = self._state.fleet_of(worker), worker.coast
        assert coast is not None
        if coast.done <= border:
            self._state.cross(worker, coast)
        if worker.changes:
            self._deliver_changes(fleet, worker, now_ms)
        if fleet.placement.learns:
            for passed in worker.passed(border):
                self._state.observe(fleet, worker, passed, now_ms)
        self._flow.admit(fleet, now_ms)
        self._expect_border(fleet, worker)

    def _expect_border(self, fleet: Fleet, worker: SimulatedWorker) -> None:
        coast = worker.coast
        if coast is not None and fleet.placement.follows_caches and coast.border < len(coast.ends):
            border = coast.border
            self._state.push(coast.ends[border], Happening.BORDER_ENDS, (worker, worker.turn, border))

    def _deliver_changes(self, fleet: Fleet, worker: SimulatedWorker, now_ms: float) -> None:
        """Deliver the changes of a step of coasting."""
        changes, worker.changes = worker.changes, []
        self._state.deliver(fleet, worker, DEVICE, changes, now_ms)

    def _deliver(self, fleet: Fleet, worker: SimulatedWorker, result: StepResult[Flight], now_ms: float) -> None:
        worker.decoded(result, now_ms)
        is_serving = worker.worker_id in fleet.serving
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
            worker.first_token(sequence, now_ms)
        if result.changes:
            self._state.deliver(fleet, worker, DEVICE, result.changes, now_ms)
        if result.host_events:
            self._state.deliver(fleet, worker, HOST, result.host_events, now_ms)
        for sequence in result.finished:
            if sequence.owner.is_prefilling:
                self._flow.hand_over(worker, sequence, now_ms)
            else:
                self._flow.finish(fleet, sequence.owner, now_ms)
