"""Clock: time passes only by advance."""

import asyncio

import pytest
from tests.settle import turns

from dynamo.core.clock import ManualClock, SystemClock


def test_manual_clock_changes_only_when_advanced() -> None:
    clock = ManualClock(start=5.0, wall=1000.0)
    assert (clock.now(), clock.wall()) == (5.0, 1000.0)
    clock.advance(2.5)
    assert (clock.now(), clock.wall()) == (7.5, 1002.5)


async def test_manual_clock_wakes_sleepers_in_order_of_their_times() -> None:
    clock = ManualClock()
    woken: list[str] = []

    async def sleep(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(name)

    tasks = [asyncio.create_task(sleep("late", 3)), asyncio.create_task(sleep("early", 1))]
    await turns()
    clock.advance(0.5)
    await turns()
    assert woken == []
    clock.advance(5)
    await asyncio.gather(*tasks)
    assert woken == ["early", "late"]


async def test_manual_clock_ignores_a_cancelled_sleeper() -> None:
    clock = ManualClock()
    gone, stays = asyncio.create_task(clock.sleep(1)), asyncio.create_task(clock.sleep(1))
    await turns()
    gone.cancel()
    await turns()
    clock.advance(1)
    await stays
    assert gone.cancelled()


def test_manual_clock_does_not_run_backwards() -> None:
    with pytest.raises(AssertionError, match="backwards"):
        ManualClock().advance(-1)


async def test_system_clock_is_monotonic() -> None:
    clock = SystemClock()
    before = clock.now()
    await clock.sleep(0)
    assert clock.now() >= before
    assert clock.wall() > 1_700_000_000
