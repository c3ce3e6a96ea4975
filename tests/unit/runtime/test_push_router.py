"""Push router: selection of the worker for the next request."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynamo.runtime.push_router import PushRouter, RouterMode


def router(mode: RouterMode, *ids: int) -> PushRouter:
    made = PushRouter(mode, inhibited_s=5.0, seed=1)
    made.update(ids)
    return made


def test_round_robin_router_picks_workers_in_turn() -> None:
    r = router(RouterMode.ROUND_ROBIN, 3, 1, 2)
    assert [r.pick(0.0) for _ in range(5)] == [1, 2, 3, 1, 2]


def test_random_router_picks_every_worker() -> None:
    r = router(RouterMode.RANDOM, 1, 2, 3)
    assert {r.pick(0.0) for _ in range(100)} == {1, 2, 3}


def test_least_loaded_router_picks_fewest_requests_and_alternates_on_ties() -> None:
    r = router(RouterMode.LEAST_LOADED, 1, 2, 3)
    r.begin(1)
    r.begin(3)
    assert r.pick(0.0) == 2
    r.begin(2)
    assert {r.pick(0.0) for _ in range(3)} == {1, 2, 3}
    r.end(3)
    assert r.pick(0.0) == 3


def test_device_aware_router_balances_by_device_weight_and_evenly_within_a_device_kind() -> None:
    r = PushRouter(RouterMode.DEVICE_AWARE_WEIGHTED, seed=1, device_ratio=2.0)
    r.update([1, 2, 3], cpus=[3])
    given = {1: 0, 2: 0, 3: 0}
    for _ in range(50):
        worker = r.pick(0.0)
        assert worker is not None
        r.begin(worker)
        given[worker] += 1
    assert given == {1: 20, 2: 20, 3: 10}
    assert r.pick(0.0, exclude={1, 2}) == 3
    assert r.pick(0.0, exclude={3}) in {1, 2}


def test_cpus_are_idle_until_the_other_devices_have_as_many_requests_as_a_cpu_equals() -> None:
    r = PushRouter(RouterMode.DEVICE_AWARE_WEIGHTED, seed=1)
    r.update([1, 2], cpus=[1])
    for _ in range(8):
        assert r.pick(0.0) == 2
        r.begin(2)
    assert r.pick(0.0) == 1


def test_device_aware_router_with_one_device_kind_picks_the_least_loaded() -> None:
    r = PushRouter(RouterMode.DEVICE_AWARE_WEIGHTED, seed=1)
    r.update([1, 2], cpus=[1, 2])
    r.begin(1)
    assert r.pick(0.0) == 2


def test_power_of_two_router_picks_the_less_loaded_worker() -> None:
    r = router(RouterMode.POWER_OF_TWO, 1, 2)
    r.begin(1)
    assert {r.pick(0.0) for _ in range(20)} == {2}


@pytest.mark.parametrize("mode", RouterMode)
def test_push_router_does_not_pick_a_departed_worker(mode: RouterMode) -> None:
    r = router(mode, 1, 2)
    r.update([2])
    assert {r.pick(0.0) for _ in range(10)} == {2}
    r.update([])
    assert r.pick(0.0) is None


def test_push_router_skips_a_failed_worker_during_the_inhibition_period() -> None:
    r = router(RouterMode.ROUND_ROBIN, 1, 2)
    r.inhibit(1, now=10.0)
    assert {r.pick(14.9) for _ in range(4)} == {2}
    assert {r.pick(15.0) for _ in range(4)} == {1, 2}


def test_push_router_picks_the_only_worker_even_after_a_failure() -> None:
    r = router(RouterMode.ROUND_ROBIN, 1)
    r.inhibit(1, now=10.0)
    assert r.pick(10.0) == 1


def test_push_router_never_picks_an_excluded_worker() -> None:
    r = router(RouterMode.ROUND_ROBIN, 1, 2)
    r.inhibit(2, now=0.0)
    assert r.pick(0.0, exclude={1}) == 2
    assert r.pick(0.0, exclude={1, 2}) is None


def test_push_router_zero_duration_disables_inhibition() -> None:
    r = PushRouter(RouterMode.ROUND_ROBIN, inhibited_s=0.0)
    r.update([1, 2])
    r.inhibit(1, now=0.0)
    assert {r.pick(0.0) for _ in range(4)} == {1, 2}


def test_pick_accepts_a_mode_for_one_request() -> None:
    r = router(RouterMode.DIRECT, 1, 2)
    r.begin(1)
    assert r.pick(0.0, mode=RouterMode.LEAST_LOADED) == 2


class Traffic(RuleBasedStateMachine):
    """Workers start, stop and fail while requests run; only present, allowed workers are ever chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.router = PushRouter(RouterMode.LEAST_LOADED, inhibited_s=5.0, seed=3)
        self.present: set[int] = set()
        self.running: list[int] = []
        self.now = 0.0

    @rule(ids=st.sets(st.integers(1, 6)))
    def change(self, ids: set[int]) -> None:
        self.present = ids
        self.router.update(ids)

    @rule(exclude=st.sets(st.integers(1, 6), max_size=3), mode=st.sampled_from(list(RouterMode)))
    def begin(self, exclude: set[int], mode: RouterMode) -> None:
        worker = self.router.pick(self.now, exclude, mode)
        if worker is None:
            assert self.present <= exclude
            return
        assert worker in self.present - exclude
        self.router.begin(worker)
        self.running.append(worker)

    @rule(which=st.integers(0, 100), fails=st.booleans())
    def end(self, which: int, fails: bool) -> None:
        if self.running:
            worker = self.running.pop(which % len(self.running))
            self.router.end(worker)
            if fails:
                self.router.inhibit(worker, self.now)

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def counts_agree(self) -> None:
        self.router.validate()
        for worker in range(1, 7):
            assert self.router.inflight(worker) == self.running.count(worker)


Traffic.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestTraffic = Traffic.TestCase
