"""Health: periodic liveness check of an engine."""

import asyncio
from collections.abc import Awaitable, Callable

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.config import setting

INTERVAL_S = 2.0
TIMEOUT_S = 30.0


async def watch(
    look: Callable[[], Awaitable[None]], on_death: Callable[[BaseException], None], clock: Clock | None = None
) -> None:
    """Check until cancelled, or until the engine is dead or does not respond, which is reported once.

    `look` raises the error that the engine died of.
    """
    clock = clock or SystemClock()
    interval_s = setting("DYN_ENGINE_HEALTH_CHECK_INTERVAL", INTERVAL_S, float)
    timeout_s = setting("DYN_ENGINE_HEALTH_CHECK_TIMEOUT", TIMEOUT_S, float)
    while True:
        await clock.sleep(interval_s)
        try:
            async with asyncio.timeout(timeout_s):
                await look()
        except TimeoutError:
            on_death(TimeoutError(f"the engine did not respond to the liveness check within {timeout_s:g} s"))
            return
        except Exception as error:  # noqa: BLE001 - an engine that reports any error cannot continue
            on_death(error)
            return
