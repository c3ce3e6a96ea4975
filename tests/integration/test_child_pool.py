"""The child pool's processes: limits, replacement and bounds on their number."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dynamo.core.child_pool import ChildError, ChildOutOfMemory, ChildPool, ChildPoolBusy, ChildTimeout, ChildUnwanted
from dynamo.core.errors import HttpError, InvalidArgument

MODULE = "tests.integration.pool_child"
TIMEOUT_S = 60.0


@pytest.fixture
def make() -> Iterator[Callable[..., ChildPool]]:
    pools: list[ChildPool] = []

    def build(**options: Any) -> ChildPool:
        pools.append(ChildPool(MODULE, **{"deadline_s": TIMEOUT_S, "memory_bytes": 256 << 20, **options}))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def test_child_pool_returns_results_and_reuses_its_child(make: Callable[..., ChildPool]) -> None:
    pool = make()
    for value in ("text", [1, {"a": None}], "x" * 3_000_000):
        assert pool.call(("echo", value)) == value
    assert pool.children == 1


def test_child_pool_raises_what_the_computation_raised(make: Callable[..., ChildPool]) -> None:
    pool = make()
    with pytest.raises(InvalidArgument, match="no") as refused:
        pool.call(("refuse", None))
    assert refused.value.param == "field"
    with pytest.raises(HttpError) as chosen:
        pool.call(("http", None))
    assert chosen.value.code == 501
    with pytest.raises(ChildError, match="ZeroDivisionError"):
        pool.call(("fail", None))
    assert pool.call(("echo", 1)) == 1


def test_child_pool_kills_a_child_whose_result_is_no_longer_wanted(make: Callable[..., ChildPool]) -> None:
    pool = make(children_max=1)
    pool.call(("echo", 1), is_wanted=lambda: True)
    is_wanted = threading.Event()
    is_wanted.set()
    with ThreadPoolExecutor(2) as threads:
        computing, waiting = (
            threads.submit(lambda: pool.call(("spin", None), is_wanted=is_wanted.is_set)) for _ in range(2)
        )
        until_s = time.monotonic() + TIMEOUT_S
        while not pool._waiting:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        began_s = time.monotonic()
        is_wanted.clear()
        for one in (computing, waiting):
            with pytest.raises(ChildUnwanted):
                one.result(TIMEOUT_S)
    assert time.monotonic() - began_s < pool.deadline_s / 2
    assert pool.children == 0
    assert pool.call(("echo", 1)) == 1


@pytest.mark.parametrize("kind", ["spin", "square"])
def test_child_pool_kills_a_child_at_its_deadline(make: Callable[..., ChildPool], kind: str) -> None:
    pool = make()
    pool.call(("echo", 1))
    with pytest.raises((ChildTimeout, ChildOutOfMemory)):
        pool.call((kind, None), deadline_s=0.3)
    assert pool.children == 0
    assert pool.call(("echo", 1)) == 1


def test_child_pool_bounds_memory(make: Callable[..., ChildPool]) -> None:
    pool = make()
    with pytest.raises(ChildOutOfMemory):
        pool.call(("allocate", 1 << 30))
    assert pool.call(("allocate", 1 << 20)) == 1 << 20


def test_child_pool_replaces_a_child_that_grew(make: Callable[..., ChildPool]) -> None:
    pool = make(memory_bytes=1 << 30)
    assert pool.call(("keep", 200 << 20)) == 200 << 20
    assert pool.children == 0


def test_child_pool_keeps_one_key_from_occupying_all_children(make: Callable[..., ChildPool]) -> None:
    pool = make(children_max=2, per_key_max=1)
    pool.call(("echo", 1))
    with ThreadPoolExecutor(2) as threads:
        slow = [threads.submit(pool.call, ("spin", None), key="slow", deadline_s=3.0) for _ in range(2)]
        for _ in range(5):
            assert pool.call(("echo", 1), key="other", deadline_s=TIMEOUT_S) == 1
        assert pool.children <= 2
        for one in slow:
            with pytest.raises((ChildTimeout, ChildPoolBusy)):
                one.result(TIMEOUT_S)


def test_child_pool_refuses_more_callers_than_may_wait(make: Callable[..., ChildPool]) -> None:
    pool = make(children_max=1, waiting_max=0)
    with pytest.raises(ChildPoolBusy, match="wait for a free process"):
        pool.call(("echo", 1))


def test_child_pool_ends_idle_children(make: Callable[..., ChildPool]) -> None:
    pool = make(idle_s=0.1)
    pool.call(("echo", 1))
    until_s = time.monotonic() + TIMEOUT_S
    while pool.children:
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_closed_child_pool_ends_calls_under_way(make: Callable[..., ChildPool]) -> None:
    pool = make(deadline_s=TIMEOUT_S)
    pool.call(("echo", 1))
    failures: list[Exception] = []

    def call() -> None:
        try:
            pool.call(("spin", None))
        except ChildError as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    until_s = time.monotonic() + TIMEOUT_S
    while not pool._busy:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    pool.close()
    thread.join(TIMEOUT_S)
    assert isinstance(failures[0], ChildOutOfMemory)
    with pytest.raises(ChildPoolBusy):
        pool.call(("echo", 1))
