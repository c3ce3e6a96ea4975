"""PrefillModel: duration of a prefill (`--router-prefill-load-model ais`).

    seconds = base + per token x new tokens + per pair x new tokens x (cached tokens + new tokens / 2)

The last term is attention: every new token attends to all tokens before it. The three coefficients start from an estimate and
are fitted to the steps that workers report, by least squares with exponential forgetting; none becomes negative.
"""

from dataclasses import dataclass, field

from dynamo.kv_router.config import ESTIMATE

MEMORY = 0.998
"""Weight of a step after each later one: about five hundred steps are remembered."""
HOLD = 1e-3
"""Weight of the previous coefficients where the steps do not determine them, because they are all alike."""
SOLVE_EVERY = 16
SWEEPS = 16
TOKENS, PAIRS = 1e3, 1e6
"""Units that bring the coefficients to a similar magnitude."""


@dataclass(slots=True)
class PrefillModel:
    """Speed of prefill, in seconds."""

    base_s: float = ESTIMATE[0]
    token_s: float = ESTIMATE[1]
    pair_s: float = ESTIMATE[2]
    steps: int = 0
    """Number of observed steps."""
    _normal: list[float] = field(default_factory=lambda: [0.0] * 9)
    """Age-weighted sums over steps, for n tokens, p pairs, s seconds: 1, n, p, nn, np, pp, s, ns, ps."""

    def seconds(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Return the duration of a prefill; 0 if the prompt is fully cached."""
        if new_tokens <= 0:
            return 0.0
        return self.base_s + self.token_s * new_tokens + self.pair_s * new_tokens * (cached_tokens + new_tokens / 2)

    def observe(self, prompts: int, new_tokens: int, cached_tokens: int, seconds: float) -> None:
        """Record a step that computed prompts only: number of prompts, new tokens, cached tokens, duration in seconds."""
        if prompts < 1 or new_tokens < 1 or seconds <= 0:
            return
        n = new_tokens / TOKENS
        p = new_tokens * (cached_tokens + new_tokens / 2) / prompts / PAIRS
        sample = (1.0, n, p, n * n, n * p, p * p, seconds, n * seconds, p * seconds)
        self._normal = [MEMORY * old + new for old, new in zip(self._normal, sample, strict=True)]
        self.steps += 1
        if self.steps % SOLVE_EVERY == 0:
            self._learn()

    def _learn(self) -> None:
        one, n, p, nn, np, pp, s, ns, ps = self._normal
        known = [self.base_s, self.token_s * TOKENS, self.pair_s * PAIRS]
        matrix = [[one, n, p], [n, nn, np], [p, np, pp]]
        right = [s, ns, ps]
        for at in range(3):
            hold = HOLD * matrix[at][at] + 1e-12
            matrix[at][at] += hold
            right[at] += hold * known[at]
        found = known
        for _ in range(SWEEPS):
            for at in range(3):
                rest = sum(matrix[at][other] * found[other] for other in range(3) if other != at)
                found[at] = max(0.0, (right[at] - rest) / matrix[at][at])
        self.base_s, self.token_s, self.pair_s = found[0], found[1] / TOKENS, found[2] / PAIRS
