"""StepFlow: begin and end of the workers' steps, and delivery of their tokens and cache events."""

from dataclasses import dataclass

from dynamo.mocker.simulation.step import StepResult
from dynamo.replay.cluster_state import ClusterState, Happening
from dynamo.replay.fleet import DelayedCacheEvents, Fleet
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
        if worker.begin(now_ms):
            self._flow.expect_transfers(worker, now_ms)
            self._state.push(worker.until_ms, Happening.STEP_ENDS, (worker, worker.turn))
            if worker.real_steps % CHECK_STEPS == 0:
                worker.simulation.validate()
        else:
            self._state.lifecycle.dismiss(fleet, worker, now_ms)

    def end_step(self, worker: SimulatedWorker, now_ms: float) -> None:
        """Deliver the results of a step."""
        self._state.note(worker, now_ms)
        fleet = self._state.fleet_of(worker)
        result, passed = worker.end()
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
        if result.changes or result.host_events:
            for tier, events in ((DEVICE, result.changes), (HOST, result.host_events)):
                if events:
                    self._deliver_cache_event(
                        fleet, DelayedCacheEvents(fleet.plan.role, worker.rank_id, tier, events), now_ms
                    )
        for sequence in result.finished:
            if sequence.owner.is_prefilling:
                self._flow.hand_over(worker, sequence, now_ms)
            else:
                self._flow.finish(fleet, sequence.owner, now_ms)

    def _deliver_cache_event(self, fleet: Fleet, event: DelayedCacheEvents, now_ms: float) -> None:
        if self._state.plan.event_lag_ms:
            self._state.push(now_ms + self._state.plan.event_lag_ms, Happening.CACHE_EVENT, event)
        else:
            fleet.apply(event)
