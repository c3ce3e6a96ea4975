"""Amortized: work whose cost grows with the number of workers, done so rarely that it takes a bounded share of the time."""

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SHARE = 0.1
"""Share of the time that such work may take."""
TURN_S = 0.005
"""Time for which one task may occupy the event loop with a series of records."""
CHEAP_S = 0.0005
"""Duration up to which it is done at each use: a few hundred workers."""


class AmortizedValue(Generic[T]):
    """A value that is computed at each use while that is cheap; otherwise it is kept for ten times as long as it took."""

    def __init__(self, compute: Callable[[], T], clock: Callable[[], float] | None = None) -> None:
        """`clock`: the time in seconds, by default `time.perf_counter`."""
        self._compute = compute
        self._clock = clock or time.perf_counter
        self._value: T
        self._fresh_until = float("-inf")

    def get(self) -> T:
        """Return the value, which may be old by ten times the duration of its computation."""
        began = self._clock()
        if began >= self._fresh_until:
            self._value = self._compute()
            took = self._clock() - began
            self._fresh_until = began + took / SHARE if took > CHEAP_S else began
        return self._value


class LoopTurn:
    """Turn of a task that handles a series of records, which may all be there at once."""

    def __init__(self) -> None:
        self._ends_at = time.perf_counter() + TURN_S

    async def yield_if_long(self) -> None:
        """Let other tasks run if the last time was more than `TURN_S` ago."""
        if time.perf_counter() > self._ends_at:
            await asyncio.sleep(0)
            self._ends_at = time.perf_counter() + TURN_S


class SingleTurns:
    """Turns of the loop for long pieces of work of several tasks, so that other tasks run between any two pieces."""

    def __init__(self) -> None:
        self._taken_on: asyncio.AbstractEventLoop | None = None
        """The loop on which a piece was begun last; a loop that was closed since does not matter to another one."""

    async def take(self) -> None:
        """Wait until all else that was ready after the last piece, sockets included, has run."""
        loop = asyncio.get_running_loop()
        while self._taken_on is loop:  # noqa: ASYNC110 - turns pass without an event
            await asyncio.sleep(0)
        self._taken_on = loop
        # In the next turn the loop looks at its sockets, whose callbacks it appends to those that are ready.
        loop.call_soon(loop.call_soon, self._end)

    def _end(self) -> None:
        self._taken_on = None


class AmortizedUpdate:
    """An update that is run at each request while that is cheap; otherwise requests are merged and delayed."""

    def __init__(self, update: Callable[[], object], clock: Callable[[], float] | None = None) -> None:
        """`clock`: the time in seconds, by default `time.perf_counter`."""
        self._update = update
        self._clock = clock or time.perf_counter
        self._next_at = float("-inf")
        self._pending: asyncio.TimerHandle | None = None

    def request(self) -> None:
        """Run the update, now or within ten times its duration. Call it in the event loop."""
        if self._pending is not None:
            return
        delay = self._next_at - self._clock()
        if delay <= 0:
            self._run()
        else:
            self._pending = asyncio.get_running_loop().call_later(delay, self._run)

    @property
    def is_pending(self) -> bool:
        """Whether an update is delayed."""
        return self._pending is not None

    def close(self) -> None:
        """Cancel a delayed update."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None

    def _run(self) -> None:
        self._pending = None
        began = self._clock()
        self._update()
        took = self._clock() - began
        self._next_at = began + took / SHARE if took > CHEAP_S else began
