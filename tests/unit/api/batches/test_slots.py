"""How many lines are sent in addition to the requests of clients."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from tests.settle import turns

from dynamo.api.batches.slots import TICK_S, Slots, share
from dynamo.core.clock import ManualClock


@given(st.integers(1, 100), st.integers(0, 1000))
def test_clients_go_first_and_batches_go_on(concurrency: int, live: int) -> None:
    assert 1 <= share(concurrency, live) <= concurrency
    assert share(concurrency, live) == concurrency - live or share(concurrency, live) == 1


async def turn() -> None:
    await turns(5)


async def test_a_slot_is_free_when_one_is_given_back_or_a_client_is_gone() -> None:
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


async def test_who_gives_up_takes_no_slot() -> None:
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
