"""Circuit breaker of plugins: after repeated failures a plugin is not called for a time, then tried once. Time is an argument."""

from dataclasses import dataclass

from dynamo.planner.plugins.types import CircuitState

FAILURES_MAX = 5
COOLDOWN_S = 30.0


@dataclass(slots=True)
class Circuit:
    """State of one plugin's breaker."""

    failures_max: int = FAILURES_MAX
    cooldown_s: float = COOLDOWN_S
    failures: int = 0
    """Consecutive failures."""
    opened_at_s: float | None = None

    def state(self, now_s: float) -> CircuitState:
        """Return the state at a time."""
        if self.opened_at_s is None:
            return CircuitState.CLOSED
        # A clock that jumped back must not keep the circuit open.
        return CircuitState.OPEN if 0 <= now_s - self.opened_at_s < self.cooldown_s else CircuitState.HALF_OPEN

    def can_call(self, now_s: float) -> bool:
        """Return whether the plugin may be called: always, or once after the cool-down."""
        return self.state(now_s) is not CircuitState.OPEN

    def succeeded(self) -> None:
        """Close the circuit."""
        self.failures, self.opened_at_s = 0, None

    def failed(self, now_s: float) -> bool:
        """Count a failure; return whether it opened the circuit."""
        was_half_open = self.state(now_s) is CircuitState.HALF_OPEN
        self.failures += 1
        if was_half_open or (self.opened_at_s is None and self.failures >= self.failures_max):
            self.opened_at_s = now_s
            return True
        return False
