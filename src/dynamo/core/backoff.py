"""Backoff: exponential retry delays with jitter."""


class Backoff:
    """Exponential delays: each doubles up to a limit, with jitter so that clients do not retry in lockstep."""

    def __init__(self, first_s: float, max_s: float) -> None:
        assert 0 < first_s <= max_s, "expected 0 < first_s <= max_s"
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s

    def next(self, fraction: float) -> float:
        """Return the next delay in seconds: half to all of it, chosen by `fraction` (0 to 1); then double the delay."""
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._max_s)
        return wait_s * (0.5 + 0.5 * fraction)

    def reset(self) -> None:
        """Start again with the first delay, after a successful period."""
        self._next_s = self._first_s
