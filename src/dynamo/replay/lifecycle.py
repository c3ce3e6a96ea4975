"""WorkerLifecycle: lifecycle of the workers of all pools: ids, places, worker time, and the totals of workers that left."""

from dataclasses import dataclass, field
from typing import NamedTuple

from dynamo.replay.fleet import Fleet
from dynamo.replay.outcome import Flight, RunOutcome
from dynamo.replay.plan import Role
from dynamo.replay.worker import SimulatedWorker


class StartingWorker(NamedTuple):
    """A worker that is starting."""

    role: Role
    worker_id: int


@dataclass(slots=True)
class Places:
    """Numbered places of the workers of all pools; the lowest free number is assigned first."""

    taken: dict[int, int] = field(default_factory=dict)
    """Place → id of the worker in service or starting there."""
    count: int = 0
    """Number of places used so far."""

    def take(self, worker_id: int, place: int | None = None) -> int:
        """Assign a place to a worker."""
        if place is None:
            place = next(at for at in range(self.count + 1) if at not in self.taken)
        assert place not in self.taken, "the place belongs to another worker"
        self.taken[place] = worker_id
        self.count = max(self.count, place + 1)
        return place

    def free(self, place: int) -> None:
        """Release a place."""
        del self.taken[place]


@dataclass(slots=True)
class WorkerLifecycle:
    """The workers of one run."""

    fleets: dict[Role, Fleet]
    outcome: RunOutcome
    _places: Places = field(init=False, default_factory=Places)
    _next_id: int = field(init=False, default=0)
    _counted_ms: float = field(init=False, default=0.0)
    """Time up to which `worker_ms` is counted."""

    def start(self, fleet: Fleet, now_ms: float, place: int | None = None) -> StartingWorker:
        """Start a worker."""
        self._count(now_ms)
        worker_id = self._next_id
        self._next_id += 1
        fleet.start(worker_id, self._places.take(worker_id, place))
        return StartingWorker(fleet.plan.role, worker_id)

    def cancel(self, fleet: Fleet, now_ms: float) -> None:
        """Cancel the start of the most recently started worker."""
        self._count(now_ms)
        worker_id, place = fleet.starting.popitem()
        self._places.free(place)
        self._log("start_cancelled", fleet, worker_id, now_ms)

    def join(self, fleet: Fleet, worker_id: int, now_ms: float) -> bool:
        """Put a started worker into service. Return False if its start was cancelled."""
        if worker_id not in fleet.starting:
            return False
        fleet.join(worker_id, now_ms)
        self._log("worker_ready", fleet, worker_id, now_ms)
        return True

    def worker_at(self, place: int) -> tuple[Fleet, int] | None:
        """Return the pool and id of the worker at a place."""
        for fleet in self.fleets.values():
            worker_id = fleet.at(place)
            if worker_id is not None:
                return fleet, worker_id
        return None

    def fail(self, fleet: Fleet, worker_id: int, now_ms: float) -> list[Flight]:
        """Remove a failed worker and return its requests."""
        self._count(now_ms)
        ranks = fleet.ranks_of(worker_id)
        for rank in ranks:
            self._collect(rank)
        lost = fleet.fail(worker_id, now_ms)
        self._places.free(ranks[0].slot)
        self._log("worker_failed", fleet, worker_id, now_ms)
        return lost

    def drain(self, fleet: Fleet, worker_id: int, now_ms: float) -> None:
        """Stop sending requests to a worker; it is removed after its last one."""
        ranks = fleet.drain(worker_id)
        self._log("worker_draining", fleet, worker_id, now_ms)
        self.dismiss(fleet, ranks[0], now_ms)

    def dismiss(self, fleet: Fleet, worker: SimulatedWorker, now_ms: float) -> None:
        """Remove a draining worker that is idle. Raise `AssertionError` if it holds blocks."""
        ranks = fleet.leaving.get(worker.worker_id)
        if ranks is None or not all(rank.is_quiet for rank in ranks):
            return
        self._count(now_ms)
        for rank in ranks:
            rank.simulation.validate()
            assert rank.simulation.pool.used == 0, "a removed worker has blocks in use"
            self._collect(rank)
        del fleet.leaving[worker.worker_id]
        self._places.free(worker.slot)
        self._log("worker_gone", fleet, worker.worker_id, now_ms)

    def close(self, now_ms: float) -> None:
        """Collect the totals of the remaining workers."""
        self._count(max(self._counted_ms, now_ms))
        for fleet in self.fleets.values():
            for worker in fleet.all_ranks():
                self._collect(worker)

    def _count(self, now_ms: float) -> None:
        there = sum(fleet.expected + len(fleet.leaving) for fleet in self.fleets.values())
        self.outcome.worker_ms += there * (now_ms - self._counted_ms)
        gpus = sum((fleet.expected + len(fleet.leaving)) * fleet.plan.gpus_per_worker for fleet in self.fleets.values())
        self.outcome.gpu_ms += gpus * (now_ms - self._counted_ms)
        self._counted_ms = now_ms

    def _collect(self, worker: SimulatedWorker) -> None:
        self.outcome.preemptions += worker.simulation.preemptions
        self.outcome.admitted_tokens += worker.simulation.admitted_tokens
        self.outcome.reused_tokens += worker.simulation.reused_tokens
        self.outcome.steps += worker.simulation.steps

    def _log(self, operation: str, fleet: Fleet, worker_id: int, now_ms: float) -> None:
        if self.outcome.planner is not None:
            self.outcome.planner.lifecycle_operations.append(
                {"at_s": now_ms / 1000, "operation": operation, "role": fleet.plan.role.value, "worker": worker_id}
            )
