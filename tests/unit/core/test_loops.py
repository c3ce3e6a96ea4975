"""Calls between event loops, from other loops and from threads without one."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tests.settle import turns

from dynamo.core.loops import ForeignStream, LoopThread, is_foreign, on_loop, read_ahead

WAIT_S = 10.0


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    loop = asyncio.new_event_loop()
    made = LoopThread(loop)
    yield made
    made.stop()
    loop.close()


async def current() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_coroutine_runs_on_the_loop_of_its_owner_from_every_other_loop(thread: LoopThread) -> None:
    assert asyncio.run(thread.run(current())) is thread.loop
    assert asyncio.run(thread.run(current())) is thread.loop
    assert asyncio.run(thread.run(on_loop(thread.loop, current()))) is thread.loop


def test_thread_without_a_loop_builds_objects_on_the_loop(thread: LoopThread) -> None:
    built: list[object] = []
    assert is_foreign(thread.loop)
    thread.offer(lambda: built.append(asyncio.get_running_loop()), WAIT_S)
    assert built == [thread.loop]
    with pytest.raises(ZeroDivisionError):
        thread.offer(lambda: 1 / 0, WAIT_S)


async def test_offer_to_a_blocked_loop_times_out() -> None:
    built: list[object] = []
    mine = LoopThread(asyncio.get_running_loop())
    waiter = threading.Thread(target=lambda: mine.offer(lambda: built.append(is_foreign(mine.loop)), 0.01))
    waiter.start()
    waiter.join(WAIT_S)
    assert not waiter.is_alive() and not built
    await turns(5)
    assert built == [False]


def test_a_thread_waits_for_work_and_gets_its_error(thread: LoopThread) -> None:
    ended = threading.Event()

    async def work() -> None:
        await turns(50)
        ended.set()
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        thread.wait(work, WAIT_S)
    assert ended.is_set()


async def test_a_loop_that_is_blocked_is_not_waited_for_and_runs_the_work_later() -> None:
    ran = asyncio.Event()

    async def work() -> None:
        ran.set()

    waiter = threading.Thread(target=LoopThread(asyncio.get_running_loop()).wait, args=(work, 0.01))
    waiter.start()
    waiter.join(WAIT_S)
    assert not waiter.is_alive()
    assert not ran.is_set()
    await asyncio.wait_for(ran.wait(), WAIT_S)


def test_exception_of_another_loop_is_raised_in_the_caller(thread: LoopThread) -> None:
    async def fail() -> None:
        raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        asyncio.run(thread.run(fail()))


def test_stopped_loop_can_be_run_by_its_caller(thread: LoopThread) -> None:
    thread.ensure_running()
    thread.stop()
    assert thread.loop.run_until_complete(thread.run(current())) is thread.loop


def test_closed_loop_is_refused() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        LoopThread(loop).ensure_running()


def test_stream_of_another_loop_is_read_and_closed(thread: LoopThread) -> None:
    seen: list[Any] = []

    async def elements() -> AsyncIterator[int]:
        try:
            for number in range(3):
                seen.append(asyncio.get_running_loop())
                yield number
        finally:
            seen.append("closed")

    async def read() -> list[int]:
        return [element async for element in ForeignStream(elements(), thread.loop)]

    async def leave() -> int:
        stream = ForeignStream(elements(), thread.loop)
        first: int = await anext(stream)
        await stream.aclose()
        return first

    thread.ensure_running()
    assert asyncio.run(read()) == [0, 1, 2]
    assert seen == [thread.loop] * 3 + ["closed"]
    seen.clear()
    assert asyncio.run(leave()) == 0
    assert seen == [thread.loop, "closed"]


def test_read_ahead_elements_keep_their_values_when_the_producer_reuses_its_object(thread: LoopThread) -> None:
    async def elements() -> AsyncIterator[dict[str, int]]:
        element: dict[str, int] = {}
        for number in range(3):
            element["number"] = number
            yield element
        raise ValueError("why")

    async def read() -> list[int]:
        stream = read_ahead(elements, thread.loop)
        seen = [(await anext(stream))["number"] for _ in range(3)]
        with pytest.raises(ValueError, match="why"):
            await anext(stream)
        return seen

    thread.ensure_running()
    assert asyncio.run(read()) == [0, 1, 2]


def test_read_ahead_producer_pauses_at_the_limit_and_ends_with_its_reader(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.core.loops.READ_AHEAD_MAX", 2)
    produced: list[int] = []
    closed = threading.Event()

    async def elements() -> AsyncIterator[int]:
        try:
            for number in range(100):
                produced.append(number)
                yield number
        finally:
            closed.set()

    async def leave() -> Any:
        stream = read_ahead(elements, thread.loop)
        first = await anext(stream)
        await stream.aclose()
        return first

    thread.ensure_running()
    assert asyncio.run(leave()) == 0
    assert closed.wait(30)
    assert len(produced) <= 4
