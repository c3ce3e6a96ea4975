"""Work that grows with the number of workers is merged once it is no longer cheap."""

import asyncio
import os
import time
from collections.abc import Callable

import pytest

from dynamo.core.amortized import AmortizedUpdate, AmortizedValue, LoopTurn, SingleTurns


class Work:
    """Work that takes a given time on a clock of its own."""

    def __init__(self, took_s: float) -> None:
        self.took_s = took_s
        self.now = 0.0
        self.count = 0
        self.then: Callable[[], None] = lambda: None

    def __call__(self) -> int:
        self.count += 1
        self.now += self.took_s
        self.then()
        return self.count

    def clock(self) -> float:
        return self.now


def test_amortized_value_is_computed_at_each_use_while_it_is_cheap() -> None:
    work = Work(0.0001)
    value = AmortizedValue(work, work.clock)
    assert [value.get() for _ in range(3)] == [1, 2, 3]


def test_amortized_value_is_kept_for_ten_times_the_duration_of_its_computation() -> None:
    work = Work(0.01)
    value = AmortizedValue(work, work.clock)
    assert [value.get() for _ in range(3)] == [1, 1, 1]
    work.now = 0.0999
    assert value.get() == 1
    work.now = 0.1
    assert value.get() == 2


async def test_amortized_update_merges_requests_once_it_is_no_longer_cheap() -> None:
    work = Work(0.0001)
    update = AmortizedUpdate(work, work.clock)
    update.request()
    update.request()
    assert work.count == 2, "a cheap update runs at once"
    work.took_s = 0.001
    update.request()
    assert work.count == 3
    ran = asyncio.Event()
    work.then = ran.set
    for _ in range(5):
        update.request()
    assert work.count == 3
    async with asyncio.timeout(5):
        await ran.wait()
    assert work.count == 4, "the requests meanwhile are merged"


async def test_loop_turn_yields_once_it_has_lasted_long(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = LoopTurn()
    ran: list[int] = []
    asyncio.get_running_loop().call_soon(ran.append, 1)
    monkeypatch.setattr(turn, "_ends_at", float("inf"))
    await turn.yield_if_long()
    assert not ran
    monkeypatch.setattr(turn, "_ends_at", 0.0)
    await turn.yield_if_long()
    assert ran
    assert turn._ends_at > 0, "its next turn begins"


async def test_what_arrives_during_a_single_turn_is_read_before_the_next() -> None:
    single, ran = SingleTurns(), list[str]()
    readable, writable = os.pipe()

    async def work(name: str) -> None:
        for _ in range(2):
            await single.take()
            ran.append(name)
            os.write(writable, b"x")

    asyncio.get_running_loop().add_reader(readable, lambda: ran.append(os.read(readable, 9).decode()))
    try:
        await asyncio.gather(work("a"), work("b"), work("c"))
        await single.take()
    finally:
        asyncio.get_running_loop().remove_reader(readable)
        os.close(readable)
        os.close(writable)
    assert sorted(ran[::2]) == ["a", "a", "b", "b", "c", "c"]
    assert ran[1::2] == ["x"] * 6


def test_single_turn_of_a_closed_loop_is_free_for_another_one() -> None:
    single = SingleTurns()
    for _ in range(2):
        loop = asyncio.new_event_loop()
        taking = loop.create_task(single.take())
        taking.add_done_callback(lambda _, loop=loop: loop.stop())  # type: ignore[misc]
        loop.run_forever()
        loop.close()
        assert taking.done()


async def test_amortized_update_does_not_run_once_closed() -> None:
    work = Work(0.001)
    update = AmortizedUpdate(work, work.clock)
    update.request()
    update.request()
    update.close()
    assert not update.is_pending
    update.close()
    assert work.count == 1


def test_the_clock_is_the_one_in_force_when_the_object_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[float] = []

    def read() -> float:
        reads.append(0.0)
        return 0.0

    monkeypatch.setattr(time, "perf_counter", read)
    AmortizedValue(lambda: None).get()
    of_value = len(reads)
    AmortizedUpdate(lambda: None).request()
    assert 0 < of_value < len(reads)
