"""Event loop and clock of the planner simulation: time passes only when nothing is left to run."""

import asyncio
import selectors
from typing import Any

WALL_S = 1_700_000_000.0


class InstantSelector(selectors.DefaultSelector):
    """Selector that advances the time instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout is not None:
            self.now_s += max(0.0, timeout)
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop in virtual time."""

    def __init__(self) -> None:
        self._instant = InstantSelector()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.now_s


class SkewedClock:
    """Clock of the running loop.

    `ahead_s` jumps forward, as after a pause of the machine; `wall_s` jumps in any direction.
    """

    def __init__(self) -> None:
        self.ahead_s = self.wall_s = 0.0

    def now(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s

    def wall(self) -> float:
        return WALL_S + self.now() + self.wall_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run_virtual(work: Any) -> Any:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
