"""Liveness of a worker with running calls, determined by periodic checks. Pure.

While calls are running, the caller checks at equal intervals whether data arrived since the last check. After the first
check without data it sends a probe, which a live worker answers immediately from its event loop, whatever its engine
does. A worker that was silent at all other checks of a period is unresponsive (SIGSTOP, frozen machine, hanging loop).

Checks are counted instead of seconds: a caller that was suspended itself checks late, but only once, so that a response
in its socket is read before the next check. A suspended caller therefore does not declare live workers unresponsive.
"""

LOOKS = 8  # Checks per period. More cost wakeups; fewer detect later, because silence may begin just after a check.


class KeepAlive:
    """Receptions on one connection as of the last checks."""

    __slots__ = ("_quiet", "_received")

    def __init__(self) -> None:
        self._received = 0
        self._quiet = 0

    def look(self, received: int) -> bool:
        """Check once; `received` is the number of receptions so far. Return True when a probe must be sent."""
        if received != self._received:
            self._received = received
            self._quiet = 0
            return False
        self._quiet += 1
        return self._quiet == 1

    def is_silent(self, received: int) -> bool:
        """Return True from the last check of a silent period until data arrives."""
        return self._quiet >= LOOKS - 1 and received == self._received
