"""Balanced: our cost function, the seconds that a request adds to the world on each rank (docs/balanced.md has what it is worth).

Upstream's cost weighs blocks to be computed against blocks that are occupied, and so buys a short wait for the first
token with slower ones afterwards: whoever holds a popular prefix is given ever more requests. Here both are counted in
seconds, for the request itself and for those whom it delays:

    own      = prefill pace x its tokens that are not cached                                 counted AGAIN times
    wait     = prefill pace x prefill tokens ahead of it  x  COMPANY
    decode   = output x step(requests + 1, tokens + its own)
    others   = requests x (own x DECODING  +  output/2 x what it adds to a step)
    room     = what is missing in the cache / what answers that end give back in a second   x  ROOM

`step(n, t) = base + per request x n + per token x t` is the time of one decode step. The others are on average half
through when it comes, hence output/2. Long prompts so gather where few are delayed by them, and many short ones where no
long one is. A cache has room for `ROOMY` of its blocks: the rest is for what nobody foretold. The paces are learned from the steps that workers report (`Pace.observe`); until then they are those of a
mid-sized model on one accelerator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo.kv_router.config import Weights
from dynamo.kv_router.cost import Load, Prompt

SMOOTHING = 0.02
"""How much a new observation counts against all before it: some fifty to forget a change."""
STEP_MEMORY = 0.9995
"""What a step of decoding counts for after another one: some two thousand are remembered."""
RIDGE = 1e-3
"""How strongly the paces before any step was seen hold against what steps say, where steps are all alike."""
SOLVE_EVERY = 64
"""Steps between two looks at what they say: solving costs more than noting."""
COMPANY = 4.0
"""Who comes while a queue lasts waits in it as well. The best of 1 to 6 on the first half of the conversation trace."""
AGAIN = 8.0
"""What is computed twice is held twice, and takes the room of what would not be computed again. Up to 16 is better for
conversations of five turns, less for short prompts with long common beginnings; others hardly mind."""
DECODING = 0.6
"""How many of a worker's requests are held up by a prompt: those that wait themselves are not. The best of 0.6 to 1.5."""
ROOM = 6.0
"""Who waits for room in the cache is waited for by all who come after. The best of 1 to 30: from there on latency pays for it."""
ROOMY = 0.8
"""The part of a cache that may be spoken for: answers are longer than thought, and who finds no room throws another one out."""
SWEEPS = 8
"""Over the three paces, each time they are solved for; where they are not found by then, the next time goes on."""


@dataclass(slots=True)
class Pace:
    """How fast workers compute. Seconds."""

    prefill_token_s: float = 2e-5
    """50,000 prompt tokens a second."""
    step_s: float = 6e-3
    step_request_s: float = 1e-5
    step_token_s: float = 5e-8
    output_tokens: float = 256.0
    """How long an answer is, where nobody says."""
    _prefill_tokens: float = 0.0
    _prefill_seconds: float = 0.0
    _normal: list[float] = field(default_factory=lambda: [0.0] * 9)
    """What steps of decoding said, weighted by their age: sums of 1, n, t, nn, nt, tt, s, ns, ts."""
    _until_solved: int = SOLVE_EVERY

    def step(self, requests: float, tokens: float) -> float:
        """How long a step of decoding takes."""
        return self.step_s + self.step_request_s * requests + self.step_token_s * tokens

    def observe_output(self, tokens: int) -> None:
        """An answer ended after so many tokens."""
        self.output_tokens += SMOOTHING * (tokens - self.output_tokens)

    def observe(self, prefill_tokens: int, requests: int, context_tokens: int, seconds: float) -> None:
        """A step of some worker took so long: prompt tokens that it computed, and requests that it decoded."""
        if seconds <= 0:
            return
        if prefill_tokens > 0:
            decode = self.step(requests, context_tokens) if requests else 0.0
            self._prefill_tokens += prefill_tokens - SMOOTHING * self._prefill_tokens
            self._prefill_seconds += max(0.0, seconds - decode) - SMOOTHING * self._prefill_seconds
            if self._prefill_seconds > 0:
                self.prefill_token_s = self._prefill_seconds / self._prefill_tokens
        elif requests > 0:
            self._note(requests / 100, context_tokens / 1e6, seconds)

    def _note(self, requests: float, tokens: float, seconds: float) -> None:
        said = (
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
        self._normal = [STEP_MEMORY * old + new for old, new in zip(self._normal, said, strict=True)]
        self._until_solved -= 1
        if self._until_solved == 0:
            self._until_solved = SOLVE_EVERY
            self._learn()

    def _learn(self) -> None:
        """The paces that explain the steps best, near those before where steps cannot tell. None is negative."""
        one, n, t, nn, nt, tt, s, ns, ts = self._normal
        known = [self.step_s, self.step_request_s * 100, self.step_token_s * 1e6]
        matrix = [[one, n, t], [n, nn, nt], [t, nt, tt]]
        right = [s, ns, ts]
        for at in range(3):
            hold = RIDGE * matrix[at][at] + 1e-9
            matrix[at][at] += hold
            right[at] += hold * known[at]
        found = known
        for _ in range(SWEEPS):  # Gauss-Seidel with a floor: converges for such a matrix, and never leaves the allowed.
            for at in range(3):
                rest = sum(matrix[at][other] * found[other] for other in range(3) if other != at)
                found[at] = max(0.0, (right[at] - rest) / matrix[at][at])
        self.step_s, self.step_request_s, self.step_token_s = found[0], found[1] / 100, found[2] / 1e6


def balanced_costs(
    seats: Sequence[int],
    load: Load,
    prompt: Prompt,
    weights: Weights,
    pace: Pace,
    block_size: int,
    expected_output_tokens: int | None,
    room: Sequence[float],
) -> list[float]:
    """The seconds that the request adds on each of the seats, in their order; `room`: blocks of each seat's cache, by seat."""
    output = pace.output_tokens if expected_output_tokens is None else float(max(1, expected_output_tokens))
    found = []
    for seat in seats:
        saved = float(prompt.device.get(seat, 0))
        saved += weights.host_cache_hit_weight * prompt.host.get(seat, 0)
        saved += weights.disk_cache_hit_weight * prompt.disk.get(seat, 0)
        saved += weights.shared_cache_multiplier * prompt.shared_beyond.get(seat, 0)
        own = wait = 0.0
        if weights.track_prefill_tokens:
            own = pace.prefill_token_s * max(0.0, prompt.tokens - saved * block_size)
            wait = pace.prefill_token_s * load.prefill_tokens[seat] * COMPANY
        blocks = float(prompt.blocks) - (prompt.active.get(seat, 0) if weights.assume_kv_reuse else 0)
        added = pace.step_request_s + pace.step_token_s * (blocks * block_size + output / 2)
        requests = load.requests[seat]
        tokens = load.blocks[seat] * block_size
        step = pace.step(requests, tokens)
        others = requests * (own * DECODING + output / 2 * added)
        cost = own * AGAIN + wait + output * (step + added) + others
        held = tokens + requests * pace.output_tokens / 2
        missing = held + blocks * block_size - ROOMY * room[seat] * block_size
        if missing > 0 and held > 0:  # All that is held is given back in the time of an answer.
            cost += ROOM * missing / held * pace.output_tokens * step
        found.append(cost)
    return found
