"""LogRateLimit: rate limit of similar log lines: a few are written per window, the rest are counted.

A peer that sends invalid data, or a record that cannot be read, may cause the same warning a million times. The first
lines of a window are written; the others are suppressed, and the first line of a later window contains their number.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

BURST = 10  # Enough to identify the sources.
WINDOW_S = 10.0
KEYS_MAX = 1000  # More than our own messages; a library may produce a new message text per line.

Key = tuple[str, str]


class LogRateLimit:
    """Number of lines of each kind in the current window."""

    def __init__(self, burst: int = BURST, window_s: float = WINDOW_S, keys_max: int = KEYS_MAX) -> None:
        self._burst = burst
        self._window_s = window_s
        self._keys_max = keys_max
        self._seen: OrderedDict[Key, list[float]] = OrderedDict()
        """Window start, number of lines and number of suppressed lines, by kind of line."""

    def admit(self, key: Key, now: float) -> int | None:
        """Return how many similar lines were suppressed before this one; None if this one is to be suppressed too."""
        seen = self._seen.get(key)
        if seen is None:
            if len(self._seen) >= self._keys_max:
                self._seen.popitem(last=False)
            seen = self._seen[key] = [now, 0, 0]
        self._seen.move_to_end(key)
        if now - seen[0] >= self._window_s:
            kept_back = int(seen[2])
            seen[:] = [now, 1, 0]
            return kept_back
        seen[1] += 1
        if seen[1] <= self._burst:
            return 0
        seen[2] += 1
        return None


class LogRateLimitFilter(logging.Filter):
    """Applies the rate limit to warnings and errors; lower levels are chosen by the operator and pass."""

    def __init__(self, limit: LogRateLimit | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._limit = limit or LogRateLimit()
        self._clock = clock
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        with self._lock:
            kept_back = self._limit.admit((record.name, str(record.msg)), self._clock())
        if kept_back:
            record.kept_back = kept_back
        return kept_back is not None
