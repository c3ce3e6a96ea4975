"""Token bucket: the rate limit of API keys and of the Kubernetes client."""

LEAST = 1e-3
"""Tokens from which something is left."""
ROUNDING = 1e-4
"""Tokens that may be missing: after exactly the returned wait, sums of fractions may lack the last digit."""


class TokenBucket:
    """Tokens that refill at a constant rate up to a size."""

    __slots__ = ("_at_s", "_left", "_rate", "_size")

    def __init__(self, size: float, rate_per_s: float) -> None:
        assert size > 0 < rate_per_s, "expected a size and a rate above 0"
        self._size = size
        self._rate = rate_per_s
        self._left = size
        self._at_s: float | None = None

    def wait_s(self, now: float, amount: float = 0.0) -> float:
        """Return the seconds until `amount` is available, or, for 0, until anything is left; 0.0 if it is now."""
        self._fill(now)
        missing = max(amount, LEAST) - self._left
        return 0.0 if missing <= ROUNDING else missing / self._rate

    def take(self, amount: float, now: float) -> None:
        """Take an amount, which may exceed the rest: later callers wait until the difference has refilled."""
        self._fill(now)
        self._left -= amount

    def resize(self, size: float, rate_per_s: float) -> None:
        """Change the size and the rate."""
        self._left = min(self._left, size)
        self._size, self._rate = size, rate_per_s

    @property
    def state(self) -> tuple[float, float]:
        """Return what is left and when it was counted; a time of 0 means never."""
        return self._left, self._at_s or 0.0

    def restore(self, state: tuple[float, float]) -> None:
        """Continue from a state, perhaps of another process; one that was never counted is full."""
        left, at_s = state
        self._left, self._at_s = (min(left, self._size), at_s) if at_s else (self._size, None)

    def _fill(self, now: float) -> None:
        if self._at_s is not None:
            self._left = min(self._size, self._left + max(0.0, now - self._at_s) * self._rate)
        self._at_s = now
