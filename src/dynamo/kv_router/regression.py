"""Regression: fit of durations that are linear in two counts, from a stream of observations.

    seconds = constant + rate of x * x + rate of y * y

Sums of products are kept, with a weight that falls with age, so an observation costs the same at any time. Where the observations
do not determine a coefficient, it keeps its previous value; none becomes negative.
"""

from dataclasses import dataclass, field

RIDGE = 1e-3
"""Weight of the previous coefficients; they decide only where all observations are alike."""
SWEEPS = 8
"""Sweeps over the coefficients per solution; if they have not converged, the next solution continues from there."""


@dataclass(slots=True)
class Regression:
    """Sums of observations, from which the coefficients are solved."""

    memory: float
    """Weight of an observation after each later one."""
    solve_every: int
    """Observations between two solutions: solving costs more than accumulating."""
    x_unit: float = 1.0
    """Typical size of x, by which it is divided so that the sums are of similar size."""
    y_unit: float = 1.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 9)
    """For x, y, s seconds: 1, x, y, xx, xy, yy, s, xs, ys."""
    _until_solved: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._until_solved = self.solve_every

    def note(self, x: float, y: float, seconds: float) -> bool:
        """Add an observation. Return True if a solution is due."""
        x, y = x / self.x_unit, y / self.y_unit
        old, memory = self._sums, self.memory
        self._sums = [
            memory * old[0] + 1.0, memory * old[1] + x, memory * old[2] + y,
            memory * old[3] + x * x, memory * old[4] + x * y, memory * old[5] + y * y,
            memory * old[6] + seconds, memory * old[7] + x * seconds, memory * old[8] + y * seconds,
        ]  # fmt: skip
        self._until_solved -= 1
        if self._until_solved == 0:
            self._until_solved = self.solve_every
            return True
        return False

    def solve(self, known: tuple[float, float, float]) -> tuple[float, float, float]:
        """Return constant, rate of x and rate of y, in seconds; `known` are the previous ones."""
        one, x, y, xx, xy, yy, s, xs, ys = self._sums
        found = [known[0], known[1] * self.x_unit, known[2] * self.y_unit]
        matrix = [[one, x, y], [x, xx, xy], [y, xy, yy]]
        right = [s, xs, ys]
        for at in range(3):
            hold = RIDGE * matrix[at][at] + 1e-9
            matrix[at][at] += hold
            right[at] += hold * found[at]
        for _ in range(SWEEPS):  # Gauss-Seidel with a lower bound: converges for this matrix and stays feasible.
            for at in range(3):
                rest = sum(matrix[at][other] * found[other] for other in range(3) if other != at)
                found[at] = max(0.0, (right[at] - rest) / matrix[at][at])
        return found[0], found[1] / self.x_unit, found[2] / self.y_unit
