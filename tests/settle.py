"""Waiting without fixed delays: for a number of turns of the event loop, or until a condition holds."""

import asyncio
import inspect
import time
from collections.abc import Callable

TIMEOUT_S = 30.0  # For conditions that hold within milliseconds on an idle machine.
FREE_TURNS = 200
POLL_S = 0.001
UNMET = "the condition does not hold"


async def turns(count: int = 1) -> None:
    """Give the event loop `count` turns, in which tasks that are ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object], message: str = UNMET) -> None:
    """Return when the condition holds; it is checked each turn at first and each millisecond afterwards.

    The later checks leave time to threads, processes and the kernel. Raises AssertionError with the message after
    `TIMEOUT_S`.
    """
    for _ in range(FREE_TURNS):
        if condition():
            return
        await asyncio.sleep(0)
    await repeat(lambda: None, condition, message)


async def repeat(step: Callable[[], object], condition: Callable[[], object], message: str = UNMET) -> None:
    """Call `step`, which may be asynchronous, each millisecond until the condition holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, message
        result = step()
        if inspect.isawaitable(result):
            await result
        await asyncio.sleep(POLL_S)


def until_blocking(condition: Callable[[], object], message: str = UNMET) -> None:
    """Return when the condition holds, which another thread or process brings about."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(POLL_S)
