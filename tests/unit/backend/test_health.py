"""Health: an engine that is dead, or that does not say whether it lives."""

import asyncio

import pytest

from dynamo.backend.health import watch
from dynamo.core.clock import ManualClock


async def test_an_engine_that_does_not_answer_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ENGINE_HEALTH_CHECK_TIMEOUT", "0.01")
    clock, told = ManualClock(), []

    async def look() -> None:
        await asyncio.Event().wait()

    watching = asyncio.ensure_future(watch(look, told.append, clock))
    async with asyncio.timeout(30):
        while not watching.done():
            clock.advance(2.0)
            await asyncio.sleep(0.001)
    assert [type(one) for one in told] == [TimeoutError]
