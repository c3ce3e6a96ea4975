"""Latency-based cost: estimated seconds a request adds on each rank, for itself and for the requests it delays.

Upstream's cost weighs blocks to be computed against occupied blocks. It buys a short time to first token with slower
decoding afterwards: a worker with a popular prefix receives ever more requests. Here both are counted in seconds
(measurements: docs/balanced.md):

    own      = prefill pace x tokens of the prompt that are not cached                x  recompute weight
    wait     = prefill pace x prefill tokens ahead of it  x  QUEUE_DELAY_WEIGHT
    decode   = output x step(requests + 1, tokens + its own)
    others   = requests x (own x DECODING  +  output/2 x what it adds to a step)
    room     = missing cache blocks / blocks that finishing requests free per second  x  EVICTION_DELAY_WEIGHT

`step(n, t) = base + per request x n + per token x t` is the duration of one decode step. Requests in progress are on average
half done, hence output/2. Long prompts therefore gather where they delay few requests, and short prompts where there is no
long one. A cache counts as full at `MAX_CACHE_FILL` of its blocks; the rest absorbs estimation errors. The paces are learned from the
steps that workers report (`Pace.observe`); initial values are those of a mid-sized model on one accelerator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo.kv_router.config import CostWeights
from dynamo.kv_router.cost import Prompt, RankLoads, positive

SMOOTHING = 0.02
"""Weight of a new observation against all earlier ones: about fifty observations to adapt to a change."""
STEP_MEMORY = 0.9995
"""Weight of a decode step after each later one: about two thousand steps are remembered."""
RIDGE = 1e-3
"""Weight of the initial paces in the regression; they decide only where all observed steps are alike."""
SOLVE_EVERY = 64
"""Steps between two solutions of the regression: solving costs more than accumulating."""
QUEUE_DELAY_WEIGHT = 4.0
"""Requests that arrive while a queue lasts wait in it as well. Best value of 1 to 6 on the first half of the
conversation trace."""
RECOMPUTE_WEIGHT_MAX = 8.0
"""A block computed twice is stored twice, displaces another one, and delays the prompts behind it. Values up to 16 are better
for conversations of five turns and worse for short prompts with long common prefixes; other loads hardly change."""
RECOMPUTE_WEIGHT_IDLE = 2.0
"""Weight while no worker computes a prompt: recomputation then delays the request itself only, and the next one with its prefix
if its cache is full. On the training loads of docs/balanced.md 1 has 0.5 % less latency and 5 % more time to first token; 3 has 1 % more
latency, 5 % of it with agents."""
RECOMPUTE_FULL_SHARE = 0.4
"""Share of workers that compute a prompt from which the weight is at its maximum. Below, it grows with the square of the share:
the probability that another prompt waits behind this one, and that its own recomputation is affected. 0.35 and 0.5 differ by
less than 1 % on all loads tried."""
BUSY_SMOOTHING = 0.05
"""Weight of a decision's view of the workers against all earlier ones: about twenty decisions to adapt."""
DECODING = 0.6
"""Share of a worker's requests that a prefill delays; requests that are waiting themselves are not delayed. Best of
0.6 to 1.5."""
EVICTION_DELAY_WEIGHT = 6.0
"""Weight of the wait for free cache blocks, which delays every later request as well. Best of 1 to 30."""
MAX_CACHE_FILL = 0.8
"""Usable part of a cache: answers are longer than estimated, and a request without free blocks preempts another one."""
SPEED_DEAD_BAND = 0.2
"""Relative deviation of a rank's steps from the model below which it counts as equal to the others: what the model does not
describe (kernels, shapes of batches) is of that size."""
SPEED_STEPS = 200
"""Steps of a rank before its own speed is used."""
SPEED_SMOOTHING = 0.005
"""Weight of a step in a rank's speed."""
SWEEPS = 8
"""Sweeps over the three paces per solution; if they have not converged, the next solution continues from there."""


@dataclass(slots=True)
class Pace:
    """Measured speed of the workers, in seconds."""

    prefill_token_s: float = 2e-5
    """50,000 prompt tokens a second."""
    step_s: float = 6e-3
    step_request_s: float = 1e-5
    step_token_s: float = 5e-8
    output_tokens: float = 256.0
    """Length of an answer whose limit is unknown."""
    busy_share: float = 0.0
    """Share of the workers that compute a prompt, smoothed over decisions."""
    uneven: dict[tuple[int, int], float] = field(default_factory=dict)
    """Duration of steps relative to the model of all ranks, of the ranks that differ."""
    _speeds: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)
    """By rank: number of observed steps, and smoothed ratio of their duration to that of the model."""
    _prefill_tokens: float = 0.0
    _prefill_seconds: float = 0.0
    _normal: list[float] = field(default_factory=lambda: [0.0] * 9)
    """Age-weighted sums over decode steps, for n requests, t tokens, s seconds: 1, n, t, nn, nt, tt, s, ns, ts."""
    _until_solved: int = SOLVE_EVERY

    def step(self, requests: float, tokens: float) -> float:
        """Return the duration of one decode step in seconds."""
        return self.step_s + self.step_request_s * requests + self.step_token_s * tokens

    def output_of(self, expected_tokens: int | None) -> float:
        """Return the length of an answer, in tokens, given the expectation of its client, if any."""
        return self.output_tokens if expected_tokens is None else float(max(1, expected_tokens))

    @property
    def recompute_weight(self) -> float:
        """Return the weight of recomputation at the present load."""
        fullness = min(1.0, self.busy_share / RECOMPUTE_FULL_SHARE) ** 2
        return RECOMPUTE_WEIGHT_IDLE + (RECOMPUTE_WEIGHT_MAX - RECOMPUTE_WEIGHT_IDLE) * fullness

    def observe_busy(self, share: float) -> None:
        """Record the share of the eligible workers that compute a prompt, at a decision."""
        self.busy_share += BUSY_SMOOTHING * (share - self.busy_share)

    def observe_output(self, tokens: int) -> None:
        """Record the length of a finished answer, in tokens."""
        self.output_tokens += SMOOTHING * (tokens - self.output_tokens)

    def forget(self, rank: tuple[int, int]) -> None:
        """Drop the speed of a rank that left."""
        self._speeds.pop(rank, None)
        self.uneven.pop(rank, None)

    def observe(
        self,
        prefill_tokens: int,
        requests: int,
        context_tokens: int,
        seconds: float,
        rank: tuple[int, int] | None = None,
    ) -> None:
        """Record one engine step: prompt tokens computed, requests decoded, their context tokens, duration in seconds."""
        if seconds <= 0:
            return
        if rank is not None:
            self._note_speed(rank, prefill_tokens, requests, context_tokens, seconds)
        if prefill_tokens > 0:
            decode = self.step(requests, context_tokens) if requests else 0.0
            self._prefill_tokens += prefill_tokens - SMOOTHING * self._prefill_tokens
            self._prefill_seconds += max(0.0, seconds - decode) - SMOOTHING * self._prefill_seconds
            if self._prefill_seconds > 0:
                self.prefill_token_s = self._prefill_seconds / self._prefill_tokens
        elif requests > 0:
            self._note(requests / 100, context_tokens / 1e6, seconds)

    def _note_speed(self, rank: tuple[int, int], prefill: int, requests: int, context: int, seconds: float) -> None:
        """Update a rank's speed by the ratio of a step's duration to the expected one."""
        expected = self.prefill_token_s * prefill + (self.step(requests, context) if requests else 0.0)
        if expected <= 0:
            return
        steps, ratio = self._speeds.get(rank, (0, 1.0))
        weight = max(SPEED_SMOOTHING, 1 / (steps + 1))
        ratio += weight * (seconds / expected - ratio)
        self._speeds[rank] = steps + 1, ratio
        if steps >= SPEED_STEPS and abs(ratio - 1) > SPEED_DEAD_BAND:
            self.uneven[rank] = ratio
        else:
            self.uneven.pop(rank, None)

    def _note(self, requests: float, tokens: float, seconds: float) -> None:
        sample = (
            1.0,
            requests,
            tokens,
            requests * requests,
            requests * tokens,
            tokens * tokens,
            seconds,
            requests * seconds,
            tokens * seconds,
        )
        self._normal = [STEP_MEMORY * old + new for old, new in zip(self._normal, sample, strict=True)]
        self._until_solved -= 1
        if self._until_solved == 0:
            self._until_solved = SOLVE_EVERY
            self._learn()

    def _learn(self) -> None:
        """Solve for the paces; where the steps do not determine them, stay near the previous ones. None becomes negative."""
        one, n, t, nn, nt, tt, s, ns, ts = self._normal
        known = [self.step_s, self.step_request_s * 100, self.step_token_s * 1e6]
        matrix = [[one, n, t], [n, nn, nt], [t, nt, tt]]
        right = [s, ns, ts]
        for at in range(3):
            hold = RIDGE * matrix[at][at] + 1e-9
            matrix[at][at] += hold
            right[at] += hold * known[at]
        found = known
        for _ in range(SWEEPS):  # Gauss-Seidel with a lower bound: converges for this matrix and stays feasible.
            for at in range(3):
                rest = sum(matrix[at][other] * found[other] for other in range(3) if other != at)
                found[at] = max(0.0, (right[at] - rest) / matrix[at][at])
        self.step_s, self.step_request_s, self.step_token_s = found[0], found[1] / 100, found[2] / 1e6


def balanced_costs(
    slots: Sequence[int],
    load: RankLoads,
    prompt: Prompt,
    weights: CostWeights,
    pace: Pace,
    block_size: int,
    expected_output_tokens: int | None,
    capacity: Sequence[float],
    slowness: Sequence[float] | None = None,
) -> list[float]:
    """Return the seconds that the request adds on each of the slots, in their order.

    `capacity`: cache blocks by slot; `slowness`: relative duration of steps by slot, None for equal workers.
    """
    output = pace.output_of(expected_output_tokens)
    found = [added_s(slot, load, prompt, weights, pace, block_size, output, capacity) for slot in slots]
    return found if slowness is None else [cost * slowness[slot] for slot, cost in zip(slots, found, strict=True)]


def added_s(
    slot: int,
    load: RankLoads,
    prompt: Prompt,
    weights: CostWeights,
    pace: Pace,
    block_size: int,
    output: float,
    capacity: Sequence[float],
) -> float:
    """Return the seconds that the request adds on a rank of ordinary speed; `output`: expected tokens of its answer.

    The formula accepts arrays as well, as `cost.terms` does.
    """
    saved = 1.0 * prompt.device.get(slot, 0)
    saved += weights.host_cache_hit_weight * prompt.host.get(slot, 0)
    saved += weights.disk_cache_hit_weight * prompt.disk.get(slot, 0)
    saved += weights.shared_cache_multiplier * prompt.shared_beyond.get(slot, 0)
    own = wait = 0.0
    if weights.track_prefill_tokens:
        own = pace.prefill_token_s * positive(prompt.tokens - saved * block_size)
        wait = pace.prefill_token_s * load.prefill_tokens[slot] * QUEUE_DELAY_WEIGHT
    blocks = float(prompt.blocks) - (prompt.active.get(slot, 0) if weights.assume_kv_reuse else 0)
    added = pace.step_request_s + pace.step_token_s * (blocks * block_size + output / 2)
    requests = load.requests[slot]
    tokens = load.blocks[slot] * block_size
    step = pace.step(requests, tokens)
    others = requests * (own * DECODING + output / 2 * added)
    cost = own * pace.recompute_weight + wait + output * (step + added) + others
    held = tokens + requests * pace.output_tokens / 2
    missing = positive(held + blocks * block_size - MAX_CACHE_FILL * capacity[slot] * block_size) * (held > 0)
    # All held blocks are freed within the duration of one answer.
    return cost + EVICTION_DELAY_WEIGHT * missing / (held + (held == 0)) * pace.output_tokens * step
