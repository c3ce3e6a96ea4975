"""Turns: how many calls go on in one iteration of the event loop, if very many could.

gRPC passes on everything that has arrived at once. A client that sends thousands of requests over one connection would have
hundreds of them started in one iteration, at half a millisecond each, and then as many responses written in one: of 2,000, some 100 ms.
"""

import asyncio
from collections import deque

CALLS_PER_TURN = 8
"""Calls that go on in one iteration: some four milliseconds; fewer cost more processor time for each."""


class CallTurns:
    """The calls of one service. Each waits at its start, and before its response, for an iteration with room for it."""

    def __init__(self, limit: int = CALLS_PER_TURN) -> None:
        """`limit`: calls of one iteration."""
        self._limit = limit
        self._passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    async def next(self) -> None:
        """Return at once if few calls went on in this iteration, else in a later one, after those that waited before."""
        if not self._waiting and self._passed < self._limit:
            self._passed += 1
            self._schedule()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._schedule()
        await turn

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_iteration)

    def _next_iteration(self) -> None:
        """Let the next calls go on, after what the last ones have scheduled."""
        self._passed, self._is_scheduled = 0, False
        while self._waiting and self._passed < self._limit:
            turn = self._waiting.popleft()
            if not turn.done():  # A call that was cancelled takes no turn.
                turn.set_result(None)
                self._passed += 1
        if self._passed:
            self._schedule()
