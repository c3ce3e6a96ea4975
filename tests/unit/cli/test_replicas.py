"""Replicas: which worker processes are started and stopped, and that limits hold at every step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo.cli.graph import PREFILL, WORKER
from dynamo.cli.replicas import DevicePool, KillReplica, Replicas, StartReplica, StopReplica
from dynamo.core.errors import ConfigError

DRAIN_S = 30.0


def replicas(wanted: int = 1, limit: int = 4, devices: DevicePool | None = None) -> Replicas:
    return Replicas({WORKER: wanted}, limit=limit, drain_s=DRAIN_S, devices=devices)


def test_first_reconciliation_starts_the_workers_and_the_second_none() -> None:
    found = replicas(2)
    assert found.reconcile(0.0) == [StartReplica(WORKER, 1), StartReplica(WORKER, 2)]
    assert found.reconcile(1.0) == []
    assert found.is_settled


def test_newest_worker_is_stopped_first_and_the_state_settles_when_it_ends() -> None:
    found = replicas(3)
    found.reconcile(0.0)
    found.want({WORKER: 1})
    assert found.reconcile(1.0) == [StopReplica("worker-3"), StopReplica("worker-2")]
    assert not found.is_settled
    assert found.exited("worker-3")
    assert found.exited("worker-2")
    assert found.is_settled


def test_worker_that_does_not_end_is_killed_after_the_drain_timeout() -> None:
    found = replicas(2)
    found.reconcile(0.0)
    found.want({WORKER: 1})
    found.reconcile(1.0)
    assert found.reconcile(DRAIN_S) == []
    assert found.reconcile(1.0 + DRAIN_S) == [KillReplica("worker-2")]
    assert found.reconcile(2.0 + DRAIN_S) == []


def test_draining_worker_occupies_its_slot_until_it_ends() -> None:
    found = replicas(2, limit=2)
    found.reconcile(0.0)
    found.want({WORKER: 1})
    found.reconcile(1.0)
    found.want({WORKER: 2})
    assert found.reconcile(2.0) == []
    found.exited("worker-2")
    assert found.reconcile(3.0) == [StartReplica(WORKER, 2)]


def test_crash_is_not_counted_as_a_requested_exit() -> None:
    found = replicas(1)
    found.reconcile(0.0)
    assert not found.exited("worker-1")
    assert not found.exited("frontend")
    assert found.reconcile(1.0) == []


def test_crashing_worker_is_removed_unless_it_is_the_last() -> None:
    found = replicas(2)
    found.reconcile(0.0)
    assert found.lose("worker-2")
    assert found.wanted == {WORKER: 1}
    assert found.reconcile(1.0) == []
    assert not found.lose("worker-1")


def test_replica_counts_are_between_one_and_the_limit() -> None:
    found = Replicas({WORKER: 1, PREFILL: 1}, limit=4, drain_s=DRAIN_S)
    assert found.want({WORKER: 0, PREFILL: 9}) == {WORKER: 1, PREFILL: 3}
    assert found.want({"unknown": 3}) == {WORKER: 1, PREFILL: 3}


def test_each_worker_has_its_own_devices() -> None:
    found = replicas(2, devices=DevicePool(["0", "1", "2", "3", "4"], 2))
    assert found.reconcile(0.0) == [StartReplica(WORKER, 1, ("0", "1")), StartReplica(WORKER, 2, ("2", "3"))]
    found.want({WORKER: 3})
    assert found.reconcile(1.0) == []  # One device is left.
    found.want({WORKER: 1})
    found.reconcile(2.0)
    found.exited("worker-2")
    found.want({WORKER: 2})
    assert found.reconcile(3.0) == [StartReplica(WORKER, 2, ("2", "3"))]


def test_fewer_devices_than_one_worker_requires_are_refused() -> None:
    with pytest.raises(ConfigError, match="--gpus-per-worker 3: must be at most 2, the GPUs of this machine"):
        DevicePool(["0", "1"], 3)


@given(st.integers(1, 4), st.lists(st.text("ab", min_size=1), max_size=9, unique=True))
def test_device_pool_capacity_is_the_number_of_possible_allocations(per_worker: int, devices: list[str]) -> None:
    if per_worker > len(devices):
        return
    pool = DevicePool(devices, per_worker)
    taken = [pool.take(f"worker-{number}") for number in range(pool.capacity)]
    assert None not in taken
    assert pool.take("one more") is None


class ReplicasUnderChange(RuleBasedStateMachine):
    """Any sequence of decisions, ends, crashes and time."""

    LIMIT = 4

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = DevicePool([str(index) for index in range(2 * self.LIMIT)], 2)
        self.found = Replicas({WORKER: 1, PREFILL: 1}, limit=self.LIMIT, drain_s=DRAIN_S, devices=self.pool)
        self.alive: dict[str, tuple[str, ...]] = {}
        self.stopping: set[str] = set()

    @rule(worker=st.integers(0, 6), prefill=st.integers(0, 6))
    def decide(self, worker: int, prefill: int) -> None:
        self.found.want({WORKER: worker, PREFILL: prefill})

    @rule(seconds=st.floats(0, 40))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def reconcile(self) -> None:
        for action in self.found.reconcile(self.now):
            match action:
                case StartReplica():
                    assert action.name not in self.alive
                    self.alive[action.name] = action.devices
                case StopReplica():
                    self.stopping.add(action.name)
                case KillReplica():
                    assert action.name in self.stopping
                    self.end(action.name)

    @precondition(lambda self: self.stopping)
    @rule(data=st.data())
    def drained(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.stopping))))

    def end(self, name: str) -> None:
        self.stopping.discard(name)
        del self.alive[name]
        assert self.found.exited(name)

    @precondition(lambda self: set(self.alive) - self.stopping)
    @rule(data=st.data())
    def crash_for_good(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.alive) - self.stopping)))
        assert not self.found.exited(name)
        if self.found.lose(name):
            del self.alive[name]

    @invariant()
    def never_more_processes_than_the_limit_and_no_device_twice(self) -> None:
        assert set(self.found.names) == set(self.alive)
        assert len(self.alive) <= self.LIMIT
        devices = [device for held in self.alive.values() for device in held]
        assert len(devices) == len(set(devices))

    @invariant()
    def the_wanted_numbers_stay_within_their_limits(self) -> None:
        assert all(number >= 1 for number in self.found.wanted.values())
        assert sum(self.found.wanted.values()) <= self.LIMIT

    def teardown(self) -> None:
        for name in sorted(self.stopping):
            self.end(name)
        for _ in range(2):
            self.reconcile()
            for name in sorted(self.stopping):
                self.end(name)
        assert self.found.is_settled


TestReplicasUnderChange = ReplicasUnderChange.TestCase
