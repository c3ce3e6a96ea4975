"""LoopDelay: the delay of the event loop, measured by a timer that should fire every tenth of a second.

A late loop delays tokens, health checks and heartbeats. A delay beyond `STALL_S` counts as a stall: a callback has
blocked the loop.
"""

import asyncio
import time
from collections.abc import Callable

from dynamo.core.metrics import Counter, Histogram, MetricsRegistry

PERIOD_S = 0.1  # Ten wakeups a second cost little; a longer period would miss most stalls.
STALL_S = 0.05
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class LoopDelay:
    """Measures the running loop until it is closed."""

    def __init__(self, registry: MetricsRegistry, prefix: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._delay: Histogram = registry.histogram(
            f"{prefix}_event_loop_delay_seconds", "Delay of a timer of the event loop", (), BUCKETS
        ).labels()
        self._stalls: Counter = registry.counter(
            f"{prefix}_event_loop_stall_total", f"Timers that fired more than {STALL_S * 1e3:g} ms late"
        ).labels()
        self._clock = clock  # Not the loop's own time, which does not advance while a callback runs.
        self._loop = asyncio.get_running_loop()
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start measuring."""
        self._due_s = self._clock() + PERIOD_S
        self._timer = self._loop.call_later(PERIOD_S, self._fire)

    def close(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()

    def observe(self, late_s: float) -> None:
        """Record that the timer fired `late_s` late."""
        self._delay.observe(max(late_s, 0.0))
        if late_s > STALL_S:
            self._stalls.inc()

    def _fire(self) -> None:
        self.observe(self._clock() - self._due_s)
        self.start()
