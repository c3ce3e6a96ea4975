"""Health: whether the engine still lives, asked every few seconds (serving-plane.md §5.10)."""

import asyncio
from collections.abc import Awaitable, Callable

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.config import setting

INTERVAL_S = 2.0
TIMEOUT_S = 30.0


async def watch(
    look: Callable[[], Awaitable[None]], on_death: Callable[[BaseException], None], clock: Clock | None = None
) -> None:
    """Looks until it is cancelled, or until the engine is dead or does not answer, which is told once.

    `look` raises what the engine died of.
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
            on_death(TimeoutError(f"the engine did not say within {timeout_s:g} s whether it lives"))
            return
        except Exception as error:  # Whatever it says of itself, it cannot go on.
            on_death(error)
            return
