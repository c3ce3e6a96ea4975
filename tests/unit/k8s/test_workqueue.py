"""Work queue: no key is processed twice at a time, and no addition is lost."""

import asyncio
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.settle import turns

from dynamo.core.clock import ManualClock
from dynamo.k8s.workqueue import RetryLimits, WorkQueue

LIMITS = RetryLimits(first_s=1.0, max_s=5.0, per_s=1000.0, burst=1000)


class Queued:
    """A queue with a manual clock."""

    def __init__(self, limits: RetryLimits = LIMITS, max_keys: int = 1000) -> None:
        self.clock = ManualClock()
        self.queue = WorkQueue[str](limits, max_keys=max_keys, clock=self.clock)

    async def advance(self, seconds: float) -> None:
        await turns(3)
        self.clock.advance(seconds)
        await turns(5)

    async def process(self) -> list[str | None]:
        """Process the keys that wait now."""
        keys = [await self.queue.get() for _ in range(self.queue.depth)]
        for key in keys:
            assert key is not None
            self.queue.done(key)
        return keys


async def test_waiting_key_is_queued_once_and_keys_are_ordered() -> None:
    queued = Queued()
    for key in "abab":
        assert queued.queue.add(key)
    assert (queued.queue.depth, queued.queue.adds) == (2, 2)
    assert await queued.process() == ["a", "b"]


async def test_key_added_while_it_is_processed_is_processed_once_more_afterwards() -> None:
    queue = Queued().queue
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    queue.add("a")
    assert (queue.depth, queue.processing) == (0, 1)
    queue.done("a")
    assert queue.depth == 1
    assert await queue.get() == "a"
    queue.done("a")
    assert (queue.depth, queue.processing) == (0, 0)


async def test_each_key_is_delivered_to_one_waiting_worker() -> None:
    queue = Queued().queue
    waiting = [asyncio.ensure_future(queue.get()) for _ in range(3)]
    await turns(2)
    queue.add("a")
    queue.add("b")
    await turns(5)
    assert sorted(str(one.result()) for one in waiting if one.done()) == ["a", "b"]
    await queue.close()
    assert None in [await one for one in waiting]


async def test_earliest_of_several_delays_applies_once() -> None:
    queued = Queued()
    for seconds in (30.0, 10.0, 20.0):
        queued.queue.add_after("a", seconds)
    queued.queue.add_after("b", 15.0)
    assert queued.queue.delayed == 2
    await queued.advance(9.9)
    assert queued.queue.depth == 0
    await queued.advance(0.1)
    assert await queued.process() == ["a"]
    await queued.advance(5.0)
    assert await queued.process() == ["b"]
    await queued.advance(60.0)
    assert await queued.process() == []


async def test_delay_of_zero_queues_at_once() -> None:
    queue = Queued().queue
    queue.add_after("a", 0.0)
    assert queue.depth == 1


async def test_key_with_repeatedly_shorter_delays_has_one_timer() -> None:
    queued = Queued()
    for step in range(1000):
        queued.queue.add_after("a", 2000.0 - step)
    await queued.advance(1001.0)
    assert await queued.process() == ["a"]
    await queued.advance(2000.0)
    assert queued.queue.depth == 0


async def test_retries_of_a_key_back_off_until_it_is_forgotten() -> None:
    queued = Queued()
    waits = []
    for attempt in range(6):
        if attempt == 5:
            queued.queue.forget("a")
        queued.queue.add_rate_limited("a")
        waited = 0
        while not queued.queue.depth:
            await queued.advance(1.0)
            waited += 1
        waits.append(waited)
        await queued.process()
    assert waits == [1, 2, 4, 5, 5, 1]
    assert (queued.queue.retries, queued.queue.failures("a"), queued.queue.failures("b")) == (6, 1, 0)


async def test_retries_of_many_keys_are_spread_by_the_common_rate() -> None:
    queued = Queued(RetryLimits(first_s=0.001, per_s=10.0, burst=5))
    for number in range(25):
        queued.queue.add_rate_limited(str(number))
    counts = []
    for _ in range(4):
        await queued.advance(1.0)
        counts.append(len(await queued.process()))
    assert counts == [15, 10, 0, 0]


def test_default_limits_are_those_of_client_go() -> None:
    limits = RetryLimits()
    assert [limits.delay_s(failures) for failures in (0, 1, 2, 17, 18, 10_000)] == pytest.approx(
        [0.005, 0.01, 0.02, 655.36, 1000.0, 1000.0]
    )
    assert (limits.per_s, limits.burst) == (10.0, 100)


async def test_full_queue_refuses_new_keys_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    queue = Queued(max_keys=2).queue
    assert queue.add("a")
    assert queue.add_after("b", 5.0)
    assert not queue.add("c")
    assert not queue.add_after("c", 5.0)
    assert not queue.add_rate_limited("c")
    assert await queue.get() == "a"
    assert queue.add("a")
    assert queue.add_rate_limited("b")
    assert queue.refused == 3
    assert "work queue is full with 2 keys; c is not queued" in caplog.text


async def test_longest_running_key_is_measured() -> None:
    queued = Queued()
    assert queued.queue.longest_running_s == 0.0
    for key in "ab":
        queued.queue.add(key)
        await queued.queue.get()
        await queued.advance(2.0)
    assert queued.queue.longest_running_s == 4.0
    queued.queue.done("a")
    assert queued.queue.longest_running_s == 2.0


async def test_closed_queue_returns_none_and_accepts_no_keys() -> None:
    queue = Queued().queue
    for key in "ab":
        queue.add(key)
    assert await queue.get() == "a"
    queue.add("a")
    queue.add_after("c", 1.0)
    await queue.close()
    assert await queue.get() is None
    assert not queue.add("d")
    assert not queue.add_after("d", 1.0)
    assert not queue.add_rate_limited("a")
    queue.done("a")
    assert (queue.depth, queue.delayed, queue.processing) == (0, 0, 0)
    await queue.close()


KEYS = st.sampled_from("abc")
STEPS = st.one_of(
    st.tuples(st.sampled_from(["add", "done", "forget", "retry"]), KEYS, st.just(0)),
    st.tuples(st.just("after"), KEYS, st.integers(1, 8)),
    st.tuples(st.just("get"), st.just(""), st.just(0)),
    st.tuples(st.just("advance"), st.just(""), st.integers(1, 8)),
)


class QueueModel:
    """Reference model of a queue."""

    def __init__(self) -> None:
        self.queued = Queued()
        self.owed: set[str] = set()
        """Keys that were added, or came due, since their processing last began."""
        self.due: dict[str, float] = {}
        self.processing: set[str] = set()
        self.failures: dict[str, int] = {}

    def delay(self, key: str, seconds: float) -> None:
        at = self.queued.clock.now() + seconds
        self.due[key] = min(at, self.due.get(key, at))

    async def step(self, action: str, key: str, seconds: int) -> None:
        queue = self.queued.queue
        match action:
            case "add":
                queue.add(key)
                self.owed.add(key)
            case "after":
                queue.add_after(key, seconds)
                self.delay(key, seconds)
            case "retry":
                queue.add_rate_limited(key)
                self.delay(key, LIMITS.delay_s(self.failures.get(key, 0)))
                self.failures[key] = self.failures.get(key, 0) + 1
            case "forget":
                queue.forget(key)
                self.failures.pop(key, None)
            case "done" if key in self.processing:
                queue.done(key)
                self.processing.discard(key)
            case "get" if self.owed - self.processing:
                got = await queue.get()
                assert got in self.owed - self.processing
                self.owed.discard(got)
                self.processing.add(got)
            case "advance":
                await self.queued.advance(seconds)
                for one in [one for one, at in self.due.items() if at <= self.queued.clock.now()]:
                    del self.due[one]
                    self.owed.add(one)

    def check(self) -> None:
        queue = self.queued.queue
        assert queue.depth == len(self.owed - self.processing)
        assert queue.processing == len(self.processing)
        assert queue.delayed == len(self.due)
        assert {key: queue.failures(key) for key in self.failures} == self.failures


@given(st.lists(STEPS, max_size=40))
def test_queue_contains_exactly_the_added_and_unprocessed_keys(steps: list[tuple[str, str, int]]) -> None:
    async def run() -> None:
        model = QueueModel()
        for step in steps:
            await model.step(*step)
            model.check()
        await model.queued.queue.close()

    asyncio.run(run())
