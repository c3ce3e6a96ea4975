"""Paced input: received data is parsed in slices, for a few milliseconds per iteration of the loop.

One read of a connection may contain thousands of requests, chunks or frames, and an iteration may have reads of many
connections. Parsing them at once would delay the tokens of all other clients. What does not fit into the time is parsed in
later iterations, and until then no more data of the connection is read.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from dynamo.core.uvicorn_parts import FlowControl

TURN_S = 0.002
"""Time after which the rest of the data waits for another iteration."""


class InputTurns:
    """Time that the connections of one service take in an iteration of the loop, and those that wait for a later one."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._until_s: float | None = None
        """End of the time in this iteration; None before its first work."""
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def is_busy(self) -> bool:
        """Return whether a connection waits for its turn."""
        return bool(self._waiting)

    def has_time(self) -> bool:
        """Return whether a connection may work in this iteration."""
        if self._waiting:
            return False
        if self._until_s is None:
            self._until_s = self.now() + TURN_S
            asyncio.get_running_loop().call_soon(self._next_iteration)
            return True
        return self.now() < self._until_s

    def run(self, work: Callable[[], None]) -> None:
        """Do work of a connection now, or after all that waits."""
        if self.has_time():
            work()
        else:
            self.add(work)

    def add(self, turn: Callable[[], None]) -> None:
        """Call `turn` once, in a later iteration."""
        self._waiting.append(turn)
        if self._until_s is None:
            self._until_s = self.now()
            asyncio.get_running_loop().call_soon(self._next_iteration)

    def _next_iteration(self) -> None:
        """Do what waits, for the time of one iteration."""
        if not self._waiting:
            self._until_s = None
            return
        asyncio.get_running_loop().call_soon(self._next_iteration)
        until_s = self._until_s = self.now() + TURN_S
        for _ in range(len(self._waiting)):  # What a turn adds is for a later iteration.
            turn = self._waiting[0]
            try:
                turn()
            finally:
                self._waiting.popleft()
            if self.now() >= until_s:
                return


class InputParser(Protocol):
    """Parser of a connection's data."""

    def feed(self, data: bytes) -> None:
        """Parse a slice."""

    def slice_bytes(self) -> int:
        """Return the size of the next slice."""

    def is_ready(self) -> bool:
        """Return whether it can parse more now; otherwise it calls `PacedInput.resume` later."""

    def hold_reading(self) -> None:
        """Read no more data of the connection."""

    def release_reading(self) -> None:
        """Read again: all data has been parsed."""


class PacedInput:
    """Data of one connection on its way to the parser."""

    __slots__ = ("_data", "_is_queued", "_parser", "_start", "_turns")

    def __init__(self, parser: InputParser, turns: InputTurns) -> None:
        self._parser = parser
        self._turns = turns
        self._data = b""
        self._start = 0
        """Place in the data up to which it has been parsed."""
        self._is_queued = False

    @property
    def is_empty(self) -> bool:
        """Return whether all data has been parsed."""
        return self._start >= len(self._data)

    def add(self, data: bytes) -> None:
        """Parse data now, or keep it until the connection's turn."""
        if not self.is_empty:  # A transport may deliver one more read after `pause_reading`.
            self._data, self._start = self._data[self._start :] + data, 0
            return
        self._data, self._start = data, 0
        if self._turns.has_time():
            self._parse()
        else:
            self._wait()

    def resume(self) -> None:
        """Parse the rest of the data in the connection's next turn."""
        if not self.is_empty:
            self._wait()

    def clear(self) -> bytes:
        """Return the data that is not parsed, and drop it."""
        data, self._data, self._start = self._data[self._start :], b"", 0
        return data

    def close(self) -> None:
        """Drop the data and the reference to the parser, which would otherwise stay until the garbage collector runs."""
        self.clear()
        del self._parser

    def _wait(self) -> None:
        self._parser.hold_reading()
        if not self._is_queued:
            self._is_queued = True
            self._turns.add(self._turn)

    def _turn(self) -> None:
        self._is_queued = False
        if not self.is_empty:
            self._parse()

    def _parse(self) -> None:
        until_s = self._turns.now() + TURN_S
        while not self.is_empty:
            if not self._parser.is_ready():
                self._parser.hold_reading()
                return
            part = self._data[self._start : self._start + self._parser.slice_bytes()]
            self._start += len(part)
            self._parser.feed(part)
            if not self.is_empty and self._turns.now() > until_s:
                self._wait()
                return
        self._data, self._start = b"", 0
        self._parser.release_reading()


class InputFlow(FlowControl):
    """uvicorn's flow control for two reasons to read no more: a request's application is behind, or data is not parsed yet."""

    is_held = False
    """Whether received data is not parsed yet."""
    is_behind = False
    """Whether an application has not taken what it was given, or a request waits for the responses before it."""

    def hold(self) -> None:
        """Read no more data until `release`."""
        self.is_held = True
        super().pause_reading()

    def release(self, *, reads: bool) -> None:
        """Hold reading no longer; read again if `reads`, unless an application is behind."""
        self.is_held = False
        if reads and not self.is_behind:
            super().resume_reading()

    def pause_reading(self) -> None:
        """Read no more data until the application has caught up."""
        self.is_behind = True
        super().pause_reading()

    def resume_reading(self) -> None:
        """Read again, unless reading is held."""
        self.is_behind = False
        if not self.is_held:
            super().resume_reading()
