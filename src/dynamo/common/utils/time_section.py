"""Timers of code sections."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

logger = logging.getLogger(__name__)

DEFAULT_LOG_LEVEL = logging.DEBUG


class Timer:
    """Stopwatch that reports intervals and the total, in seconds, to the given functions."""

    def __init__(
        self,
        interval_func: Callable[[float], None] | None = None,
        stop_func: Callable[[float], None] | None = None,
    ) -> None:
        self._reports = (interval_func or _ignore, stop_func or _ignore)
        self._start = self._interval = time.perf_counter()

    def start_interval(self) -> None:
        """Begin an interval now."""
        self._interval = time.perf_counter()

    def stop_interval(self) -> float:
        """Report the seconds since the last interval and begin the next one."""
        begun = self._interval
        self.start_interval()
        return self._reported(0, self._interval - begun)

    def stop(self) -> float:
        """Report the seconds since the start."""
        return self._reported(1, time.perf_counter() - self._start)

    def _reported(self, which: int, seconds: float) -> float:
        self._reports[which](seconds)
        return seconds


def _ignore(seconds: float) -> None:
    """Report nothing."""


@contextmanager
def time_and_log_code_section(log_message: str, log_level: int = DEFAULT_LOG_LEVEL) -> Iterator[Timer]:
    """Log the duration of a block, and of each interval that it stops."""

    def log(seconds: float) -> None:
        logger.log(log_level, "%s: %.4f s", log_message, seconds)

    with ExitStack() as stack:
        timer = Timer(log, log)
        stack.callback(timer.stop)
        yield timer
