"""Cost of a request on each rank, and the choice between the ranks.

    prefill   = (active prefill tokens + prompt tokens) / block size
    adjusted  = max(0, prefill - credit·device - host weight·host - disk weight·disk - shared·beyond)
    decode    = active blocks + the prompt's blocks that are new to the rank
    cost      = prefill load scale·adjusted + decode + request weight·active requests        the lowest wins

`terms` is the definition. It is written so that it accepts arrays as well: with `slice(None)` as the slot and arrays by slot as
load and prompt it returns the terms of all ranks at once (`rank_arrays`, for many ranks). For few ranks `costs` is faster: most of
them hold no block of a prompt, so their costs differ by load alone and take one addition.
"""

import math
import random
from collections.abc import Mapping, Sequence

import msgspec

from dynamo.kv_router.config import CostWeights

NEVER = math.inf
"""The cost of an ineligible rank."""


class RankLoads(msgspec.Struct, gc=False):
    """The load of the ranks, by slot: parallel lists."""

    prefill_tokens: Sequence[float]
    blocks: Sequence[float]
    requests: Sequence[int]
    contexts: Sequence[float] = ()
    """Blocks that a decode step reads: a block that several requests share, once for each. Empty: as `blocks`."""
    recent: Sequence[float] = ()
    """Recent requests, finished ones as well, in a unit of which `recent_scale` makes multiples of the mean of all ranks."""
    recent_scale: float = 0.0
    """0: not counted."""


class Prompt(msgspec.Struct, gc=False):
    """The request's prompt and its overlaps: blocks from the start, by slot; a slot without an entry has none."""

    tokens: int
    blocks: int
    device: Mapping[int, int]
    host: Mapping[int, int]
    """Blocks in host memory beyond those on the device."""
    disk: Mapping[int, int]
    """Blocks on disk beyond those in host memory."""
    shared_beyond: Mapping[int, int]
    """Blocks in a shared cache beyond all of these."""
    active: Mapping[int, int]
    """Blocks that active requests already occupy."""
    beginning: tuple[int, int] = (0, 0)
    """Blocks of its longest cached beginning, and number of slots that have all of them; zeros if none is cached or known to be."""
    recompute_share: float = 1.0
    """Share of the weight of recomputation that applies (policy `balanced`)."""

    def deepest(self, slots: Sequence[int] | None = None) -> int:
        """Return the most blocks on the device of one of the slots, by default of all."""
        if slots is None:
            return max(self.device.values(), default=0)
        return max([self.device.get(slot, 0) for slot in slots], default=0) if self.device else 0


class Terms(msgspec.Struct, frozen=True):
    """The terms of a rank's cost, in blocks."""

    prefill: float
    """Queued prefill, including this prompt."""
    saved: float
    """Blocks saved by caches."""
    decode: float
    """Blocks occupied once the request runs."""
    requests: float
    cost: float


def positive(value: float) -> float:
    """Return the value, or 0 if it is negative; of an array, elementwise."""
    return max(0.0, value) if isinstance(value, float | int) else value.clip(0.0)


def terms(
    slot: int, load: RankLoads, prompt: Prompt, weights: CostWeights, block_size: int, least_prefill: float
) -> Terms:
    """Return the terms of one rank's cost; `least_prefill` is the least active prefill, in tokens, of the eligible ranks."""
    device = prompt.device.get(slot, 0)
    credit = weights.overlap_score_credit
    if weights.overlap_score_credit_decay and prompt.blocks:
        # Ranks that are not eligible may have less than the least; their cost is shown, but not used.
        excess = positive((load.prefill_tokens[slot] - least_prefill) / block_size / prompt.blocks)
        credit /= 1 + weights.overlap_score_credit_decay * excess
    saved = credit * device
    saved += weights.host_cache_hit_weight * prompt.host.get(slot, 0)
    saved += weights.disk_cache_hit_weight * prompt.disk.get(slot, 0)
    saved += weights.shared_cache_multiplier * prompt.shared_beyond.get(slot, 0)
    decode = load.blocks[slot] + prompt.blocks
    if weights.assume_kv_reuse:
        decode -= prompt.active.get(slot, 0)
    requests = weights.decode_active_request_weight * load.requests[slot]
    if not weights.track_prefill_tokens:  # Decode worker: cached blocks need not be transferred to it.
        return Terms(0.0, saved, decode, requests, positive(decode - saved) + requests)
    prefill = (load.prefill_tokens[slot] + prompt.tokens) / block_size
    adjusted = positive(prefill - saved)
    return Terms(prefill, saved, decode, requests, weights.prefill_load_scale * adjusted + decode + requests)


def costs(slots: Sequence[int], load: RankLoads, prompt: Prompt, weights: CostWeights, block_size: int) -> list[float]:
    """Return the cost of each of the slots, in their order."""
    if not weights.track_prefill_tokens or weights.overlap_score_credit_decay:
        least = min((load.prefill_tokens[slot] for slot in slots), default=0.0)
        return [terms(slot, load, prompt, weights, block_size, least).cost for slot in slots]
    fixed = float(prompt.blocks)
    scale = weights.prefill_load_scale / block_size
    fixed += scale * prompt.tokens
    weight = weights.decode_active_request_weight
    tokens, blocks, requests = load.prefill_tokens, load.blocks, load.requests
    if weight:
        found = [fixed + scale * tokens[slot] + blocks[slot] + weight * requests[slot] for slot in slots]
    else:
        found = [fixed + scale * tokens[slot] + blocks[slot] for slot in slots]
    saved = _saved(prompt, weights)
    active = prompt.active if weights.assume_kv_reuse else {}
    if saved or active:
        scale, prompt_tokens = weights.prefill_load_scale, prompt.tokens
        saved_of, active_of = saved.get, active.get
        for place, slot in enumerate(slots):  # Without calls but the two look-ups: there may be thousands of slots.
            less = saved_of(slot, 0.0)
            if less:
                prefill = (tokens[slot] + prompt_tokens) / block_size
                less = prefill if less > prefill else less
            found[place] -= scale * less + active_of(slot, 0)
    return found


def _saved(prompt: Prompt, weights: CostWeights) -> dict[int, float]:
    """Return the blocks that caches save on each slot, without decay."""
    credit = weights.overlap_score_credit
    saved = {slot: credit * blocks for slot, blocks in prompt.device.items()} if prompt.device else {}
    if not (prompt.host or prompt.disk or prompt.shared_beyond):
        return saved
    for weight, held in (
        (weights.host_cache_hit_weight, prompt.host),
        (weights.disk_cache_hit_weight, prompt.disk),
        (weights.shared_cache_multiplier, prompt.shared_beyond),
    ):
        for slot, blocks in held.items():
            saved[slot] = saved.get(slot, 0.0) + weight * blocks
    return saved


def taint_factor(taints: frozenset[str], preferred: Mapping[str, float]) -> float:
    """Return the factor of a worker's cost for preferred taints: e^-tanh(sum of weights), from 1/e to e."""
    wanted = sum(weight for taint, weight in preferred.items() if taint in taints)
    return math.exp(-math.tanh(wanted))


def choose(found: Sequence[float], temperature: float, rng: random.Random) -> int:
    """Return the position of the chosen cost: the lowest, ties broken at random, or a softmax draw of normalized costs.

    Raises `ValueError` if no cost is finite.
    """
    best = min(found)
    if best == NEVER:
        raise ValueError("no eligible rank")
    if temperature <= 0.0:
        if found.count(best) == 1:
            return found.index(best)
        return rng.choice([place for place, cost in enumerate(found) if cost == best])
    worst = max(cost for cost in found if cost != NEVER)
    if worst == best:
        return rng.choice([place for place, cost in enumerate(found) if cost != NEVER])
    spread = worst - best
    odds = [0.0 if cost == NEVER else math.exp(-(cost - best) / spread / temperature) for cost in found]
    return rng.choices(range(len(found)), odds)[0]
