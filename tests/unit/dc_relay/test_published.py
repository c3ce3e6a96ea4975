"""Published and Windows: waiting for the next value, and values that are gone."""

import asyncio

from tests.settle import turns

from dynamo.dc_relay.published import Published, Windows


async def test_change_wakes_a_waiter_and_an_equal_value_does_not() -> None:
    published = Published(1)
    waiting = asyncio.create_task(published.wait(0))
    await turns()
    published.set(1)
    await turns()
    assert not waiting.done()
    published.set(2)
    await waiting
    assert (published.value, published.revision) == (2, 1)


async def test_waiter_with_an_old_version_does_not_wait() -> None:
    published = Published(1)
    published.set(2)
    await published.wait(0)


async def test_windows_are_read_in_order_until_they_are_dropped() -> None:
    windows: Windows[str] = Windows(2)
    waiting = asyncio.create_task(windows.get(1))
    await turns()
    for value in "abc":
        windows.add(value)
    assert await waiting is None
    assert [await windows.get(number) for number in (2, 3)] == ["b", "c"]
