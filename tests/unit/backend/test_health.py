"""Health of an engine that has failed, or that does not report its state."""

import asyncio

import pytest
from tests.settle import repeat

from dynamo.backend.health import watch
from dynamo.core.clock import ManualClock


async def test_engine_health_check_timeout_is_reported_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ENGINE_HEALTH_CHECK_TIMEOUT", "0.01")
    clock, reported = ManualClock(), []

    async def look() -> None:
        await asyncio.Event().wait()

    watching = asyncio.ensure_future(watch(look, reported.append, clock))
    await repeat(lambda: clock.advance(2.0), watching.done)
    assert [type(one) for one in reported] == [TimeoutError]
