"""Number of batch lines in flight in addition to clients' requests."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from tests.settle import turns

from dynamo.api.batches.slots import TICK_S, Slots, share
from dynamo.core.clock import ManualClock


@given(st.integers(1, 100), st.integers(0, 1000))
def test_batch_slots_shrink_with_live_requests_but_never_below_one(concurrency: int, live: int) -> None:
    assert 1 <= share(concurrency, live) <= concurrency
    assert share(concurrency, live) == concurrency - live or share(concurrency, live) == 1


async def turn() -> None:
    await turns(5)


async def test_slot_is_granted_after_a_release_or_a_drop_of_live_requests() -> None:
    clock, live = ManualClock(), [2]
    slots = Slots(3, lambda: live[0], clock)
    await slots.take()
    second, third = asyncio.ensure_future(slots.take()), asyncio.ensure_future(slots.take())
    await turn()
    assert (second.done(), slots.running) == (False, 1)
    live[0] = 1
    clock.advance(TICK_S)
    await turn()
    assert (second.done(), third.done(), slots.running) == (True, False, 2)
    slots.give_back()
    clock.advance(TICK_S)
    await turn()
    assert (third.done(), slots.running) == (True, 2)


async def test_cancelled_slot_waiter_takes_no_slot() -> None:
    clock = ManualClock()
    slots = Slots(1, lambda: 0, clock)
    await slots.take()
    waiting = asyncio.ensure_future(slots.take())
    await turn()
    waiting.cancel()
    await turn()
    slots.give_back()
    await slots.take()
    assert slots.running == 1
