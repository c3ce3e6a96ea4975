"""Latency-based cost: estimated seconds a request adds on each rank, for itself and for the requests it delays.

Upstream's cost weighs blocks to be computed against occupied blocks. It buys a short time to first token with slower
decoding afterwards: a worker with a popular prefix receives ever more requests. Here both are counted in seconds
(measurements: docs/balanced.md):

    own      = prefill pace x tokens of the prompt that no tier has                   x  recompute weight  x  its share
    copy     = duration of the copy from host memory and disk                         x  COPY_WEIGHT
    wait     = prefill pace x prefill tokens ahead of it  x  QUEUE_DELAY_WEIGHT
    decode   = output x step(requests + 1, tokens + its own)
    others   = requests x (own x DECODING  +  output/2 x what it adds to a step)
    room     = missing cache blocks / blocks that finishing requests free per second  x  EVICTION_DELAY_WEIGHT
    recent   = duration of an answer  x  recent requests / those of the mean rank (up to 2)  x  RECENT_WEIGHT

A decode worker, whose prompts others compute, has `transfer` instead of the first three: the duration of the transfer of the blocks
that it lacks x TRANSFER_WEIGHT. Both durations are learned (`kv_router.movement`).

`step(n, t) = base + per request x n + per token x t` is the duration of one decode step. Requests in progress are on average
half done, hence output/2. Long prompts therefore gather where they delay few requests, and short prompts where there is no
long one. The share is below 1 for a prefix whose copies are few for its use (`recompute_share`). A cache counts as full at `MAX_CACHE_FILL` of its blocks; the rest absorbs estimation errors. The paces are learned from the
steps that workers report (`Pace.observe`); initial values are those of a mid-sized model on one accelerator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo.kv_router.config import CostWeights
from dynamo.kv_router.cost import Prompt, RankLoads, positive
from dynamo.kv_router.movement import Movement
from dynamo.kv_router.regression import Regression

SMOOTHING = 0.02
"""Weight of a new observation against all earlier ones: about fifty observations to adapt to a change."""
STEP_MEMORY = 0.9995
"""Weight of a decode step after each later one: about two thousand steps are remembered."""
SOLVE_EVERY = 64
"""Steps between two solutions of the regression: solving costs more than accumulating."""
QUEUE_DELAY_WEIGHT = 8.0
"""Requests that arrive while a queue lasts wait in it as well. With 4, the p99 of the first token is 4 % higher on the training loads
of docs/balanced.md (33 % on the recorded trace over saturation) and latency 0.4 % lower; with 12, it is 1 % lower and latency 0.5 % higher."""
RECOMPUTE_WEIGHT_MAX = 12.0
"""A block computed twice is stored twice, displaces another one, and delays the prompts behind it."""
RECOMPUTE_WEIGHT_IDLE = 4.0
"""Weight while no worker computes a prompt and caches have room: recomputation then delays the request and nothing else. With 3, latency is 0.3 %
lower on the training loads at light load, the first token 0.2 % and its p99 1.4 % later; with 5, latency is 0.2 % higher."""
ANSWER_S = 1.2
"""Duration of an answer, in seconds, above which both weights of an idle cluster grow in proportion. Recomputation is the larger part of a
short request's latency and a small one of a long answer's, but the whole time to its first token. On twenty random shapes at light load the first
token comes 2 % earlier with it, and latency is 0.5 % higher; a constant weight of 6 costs as much latency for 0.5 %."""
ANSWER_FACTOR_MAX = 4.0
"""Largest factor of the weights for long answers."""
RECOMPUTE_WEIGHT_FILLED = 6.0
"""Weight while no worker computes a prompt and caches are full: a block computed twice displaces another one, whose next request computes
it again. On the training load `tenants` at light load, latency is 0.7 % below the best other policy with 6, and 1.0 and 1.3 % above it with
9 and 12, whose first token comes 12 and 15 % earlier than with 6."""
RECOMPUTE_FULL_SHARE = 0.4
"""Share of workers that compute a prompt from which the weight is at its maximum. Below, it grows with the square of the share:
the probability that another prompt waits behind this one, and that its own recomputation is affected. 0.35 and 0.5 differ by
less than 1 % on all loads tried."""
OCCUPANCY_WEIGHT = 40.0
"""Weight of recomputation while requests occupy the whole cache, in addition: the less is left for cached blocks, the more of them a
block computed twice displaces. It belongs to the mean occupancy and not to that of each worker, because tokens that no worker has
are computed wherever the request goes."""
CACHE_FILLING, CACHE_FULL = 0.7, 0.95
"""Shares of a worker's cache that hold blocks, of requests or of earlier ones: from the first the weight rises from
`RECOMPUTE_WEIGHT_IDLE` to `RECOMPUTE_WEIGHT_FILLED`, which it reaches at the second."""
BUSY_SMOOTHING = 0.05
"""Weight of a decision's view of the workers against all earlier ones: about twenty decisions to adapt."""
COPIES = 3.0
"""Wanted copies of a prefix, in relation to its share of the recent requests times the number of workers. While there are fewer, the weight of
recomputation is reduced in proportion: one more copy serves the requests that follow, too, and lets them use an idle or faster worker. At light load on
twenty random shapes latency was 1.7 % lower with it (up to 15 %) and the first token 1.1 % earlier; with 1 instead of 3, 1.1 and 1.0 %."""
RECOMPUTE_SHARE_MIN = 0.3
"""Lowest share of the weight of recomputation that applies to a prefix with too few copies."""
DECODING = 0.6
"""Share of a worker's requests that a prefill delays; requests that are waiting themselves are not delayed. With 1, latency is 0.3 %
lower on the training loads, and the longest prompts of the recorded trace wait longer: its p99 of the first token is 17 % higher."""
EVICTION_DELAY_WEIGHT = 6.0
"""Weight of the wait for free cache blocks, which delays every later request as well. Best of 1 to 30."""
TRANSFER_WEIGHT = 8.0
"""Weight of the transfer to a decode worker: it delays the first token. With 8 that comes 4 % earlier than with 4 on the disaggregated
training load, and latency is 0.2 % higher; with 16 it comes 6 % earlier, and latency is 1.5 % higher."""
COPY_WEIGHT = 3.0
"""Weight of copies from host memory and disk: a copy delays the request and nothing else, as a prefill on an idle cluster does."""
RECENT_WEIGHT = 0.03
"""Weight of the recent requests of a rank, which chooses between ranks that are otherwise about equal, for example idle ones: sessions and prefixes
then spread evenly, and fewer of their later requests meet on one rank. At random instead, latency is 0.3 % higher on twenty random shapes at light
load and the first token comes 3 % later."""
RECENT_MAX = 2.0
"""Recent requests of a rank that count at most, in multiples of the mean: a rank with a popular prefix is not avoided for its use alone."""
MAX_CACHE_FILL = 0.8
"""Usable part of a cache: answers are longer than estimated, and a request without free blocks preempts another one."""
SPEED_DEAD_BAND = 0.2
"""Relative deviation of a rank's steps from the model below which it counts as equal to the others: what the model does not
describe (kernels, shapes of batches) is of that size."""
SPEED_STEPS = 200
"""Steps of a rank before its own speed is used."""
SPEED_SMOOTHING = 0.005
"""Weight of a step in a rank's speed."""
SPEED_PREFILL_TOKENS = 1024
"""Prompt tokens of a step from which the step counts for a rank's speed: starting a prefill takes as long as some hundred tokens, which the pace does not contain."""


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
    occupied_share: float = 0.0
    """Share of a worker's cache that its requests occupy, smoothed over decisions."""
    cached_share: float = 0.0
    """Share of a worker's cache that holds blocks, smoothed over decisions; 0 with host memory."""
    recompute_weight: float = RECOMPUTE_WEIGHT_IDLE
    """Weight of recomputation at the present load: the same for all workers, so it is determined once for each decision."""
    uneven: dict[tuple[int, int], float] = field(default_factory=dict)
    """Duration of steps relative to the model of all ranks, of the ranks that differ."""
    movement: Movement = field(default_factory=Movement)
    """Duration of block movements."""
    _speeds: dict[tuple[int, int], tuple[int, float, float]] = field(default_factory=dict)
    """By rank: number of observed steps, and their smoothed duration, measured and by the model."""
    _prefill_tokens: float = 0.0
    _prefill_seconds: float = 0.0
    _steps: Regression = field(default_factory=lambda: Regression(STEP_MEMORY, SOLVE_EVERY, 100, 1e6))
    """Decode steps by requests and tokens."""

    def step(self, requests: float, tokens: float) -> float:
        """Return the duration of one decode step in seconds."""
        return self.step_s + self.step_request_s * requests + self.step_token_s * tokens

    def output_of(self, expected_tokens: int | None) -> float:
        """Return the length of an answer, in tokens, given the expectation of its client, if any."""
        return self.output_tokens if expected_tokens is None else float(max(1, expected_tokens))

    def observe_load(self, busy: float, occupied: float, cached: float = 0.0) -> None:
        """Record the load at a decision, and determine the weight of recomputation.

        `busy`: share of workers that compute a prompt; of the chosen one's cache, `occupied`: share that requests occupy, `cached`: share
        that holds blocks, 0 if displaced ones are kept in host memory.
        """
        self.busy_share += BUSY_SMOOTHING * (busy - self.busy_share)
        self.occupied_share += BUSY_SMOOTHING * (occupied - self.occupied_share)
        self.cached_share += BUSY_SMOOTHING * (cached - self.cached_share)
        busiest = min(1.0, self.busy_share / RECOMPUTE_FULL_SHARE) ** 2
        displaced = min(1.0, max(0.0, (self.cached_share - CACHE_FILLING) / (CACHE_FULL - CACHE_FILLING)))
        least = RECOMPUTE_WEIGHT_IDLE + (RECOMPUTE_WEIGHT_FILLED - RECOMPUTE_WEIGHT_IDLE) * displaced
        least *= min(ANSWER_FACTOR_MAX, max(1.0, self.output_tokens * self.step_s / ANSWER_S))
        weight = least + max(0.0, RECOMPUTE_WEIGHT_MAX - least) * busiest
        self.recompute_weight = weight + OCCUPANCY_WEIGHT * self.occupied_share

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
        elif requests > 0 and self._steps.note(requests, context_tokens, seconds):
            known = self.step_s, self.step_request_s, self.step_token_s
            self.step_s, self.step_request_s, self.step_token_s = self._steps.solve(known)

    def _note_speed(self, rank: tuple[int, int], prefill: int, requests: int, context: int, seconds: float) -> None:
        """Update a rank's speed: the ratio of its steps' duration to the expected one, over decode steps and long prefills."""
        if 0 < prefill < SPEED_PREFILL_TOKENS:
            return
        expected = self.prefill_token_s * prefill + (self.step(requests, context) if requests else 0.0)
        if expected <= 0:
            return
        steps, measured_s, expected_s = self._speeds.get(rank, (0, 0.0, 0.0))
        weight = max(SPEED_SMOOTHING, 1 / (steps + 1))
        measured_s += weight * (seconds - measured_s)
        expected_s += weight * (expected - expected_s)
        self._speeds[rank] = steps + 1, measured_s, expected_s
        ratio = measured_s / expected_s
        if steps >= SPEED_STEPS and abs(ratio - 1) > SPEED_DEAD_BAND:
            self.uneven[rank] = ratio
        elif rank in self.uneven:
            del self.uneven[rank]


def recompute_share(copies: int, used_share: float, workers: int) -> float:
    """Return the share of the weight of recomputation that applies to a prefix with so many copies and that share of the requests."""
    wanted = COPIES * used_share * workers
    return 1.0 if copies >= wanted else max(RECOMPUTE_SHARE_MIN, copies / wanted)


def initial_pace(weights: CostWeights) -> Pace:
    """Return the paces before any observation; a copy from a lower tier takes what upstream's weight leaves of a prefill."""
    pace = Pace()
    pace.movement.tiers.first = max(0.0, 1 - weights.host_cache_hit_weight) * pace.prefill_token_s
    pace.movement.tiers.second = max(0.0, 1 - weights.disk_cache_hit_weight) * pace.prefill_token_s
    return pace


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
    far: Sequence[float] | None = None,
) -> list[float]:
    """Return the seconds that the request adds on each of the slots, in their order.

    `capacity`: cache blocks by slot; `slowness`: relative duration of steps by slot, None for equal workers; `far`: 1 for slots out of
    the transfer domain of the worker that computed the prompt, else 0.
    """
    output = pace.output_of(expected_output_tokens)
    found = [added_s(slot, load, prompt, weights, pace, block_size, output, capacity, far) for slot in slots]
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
    far: Sequence[float] | None = None,
) -> float:
    """Return the seconds that the request adds on a rank of ordinary speed; `output`: expected tokens of its answer.

    The formula accepts arrays as well, as `cost.terms` does.
    """
    tokens = prompt.tokens - 1.0 * block_size * prompt.device.get(slot, 0)
    requests = load.requests[slot]
    step = pace.step(requests, block_size * (load.contexts if len(load.contexts) else load.blocks)[slot])
    added = pace.step_request_s + pace.step_token_s * (prompt.tokens + output / 2)
    cost = output * (step + added) + requests * (output / 2 * added)
    if weights.track_prefill_tokens:
        if prompt.host or prompt.disk or prompt.shared_beyond:
            host, disk = block_size * prompt.host.get(slot, 0), block_size * prompt.disk.get(slot, 0)
            cost += COPY_WEIGHT * pace.movement.tiers.seconds(host, disk) * (host + disk > 0)
            tokens -= host + disk + block_size * weights.shared_cache_multiplier * prompt.shared_beyond.get(slot, 0)
        own = pace.prefill_token_s * positive(tokens)
        cost += own * (pace.recompute_weight * prompt.recompute_share + requests * DECODING)
        cost += pace.prefill_token_s * QUEUE_DELAY_WEIGHT * load.prefill_tokens[slot]
    else:  # Another worker computes the prompt.
        cost += TRANSFER_WEIGHT * _transfer_s(
            positive(tokens), prompt.tokens, pace.movement, 0 if far is None else far[slot]
        )
    if load.recent_scale:
        unused = positive(RECENT_MAX - load.recent_scale * load.recent[slot])
        cost += RECENT_WEIGHT * (RECENT_MAX - unused) * output * pace.step_s
    held = load.blocks[slot] + requests * (pace.output_tokens / 2 / block_size)
    shared = prompt.active.get(slot, 0) if weights.assume_kv_reuse else 0
    missing = positive(held + float(prompt.blocks) - shared - MAX_CACHE_FILL * capacity[slot]) * (held > 0)
    # All held blocks are freed within the duration of one answer.
    return cost + EVICTION_DELAY_WEIGHT * missing / (held + (held == 0)) * pace.output_tokens * step


def _transfer_s(missing: float, tokens: int, movement: Movement, far: float) -> float:
    """Return the seconds to transfer a prompt of which the rank lacks `missing` tokens; `far`: 1 out of the domain, else 0."""
    near_s = movement.near.seconds(missing, tokens - missing)
    return near_s + far * (movement.far.seconds(missing, tokens - missing) - near_s)
