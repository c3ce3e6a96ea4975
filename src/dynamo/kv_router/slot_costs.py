"""SlotCosts: the cost of a request on each slot, by the configured policy, and what the policy learns from decisions. Pure.

A part of `router`: `cost` and `balanced` have the formulas, `rank_arrays` evaluates them over many ranks.
"""

from collections.abc import Sequence

from dynamo.kv_router.balanced import balanced_costs, initial_pace, recompute_share
from dynamo.kv_router.config import CostWeights, RoutingConfig
from dynamo.kv_router.cost import Prompt, RankLoads, costs, taint_factor
from dynamo.kv_router.decision import Decision, RouteRequest
from dynamo.kv_router.index import KvIndex
from dynamo.kv_router.prefix_use import Beginning, PrefixUse
from dynamo.kv_router.runs import WIDTH
from dynamo.kv_router.worker_slots import WorkerSlots


class SlotCosts:
    """The cost function of one router."""

    def __init__(self, config: RoutingConfig, workers: WorkerSlots, index: KvIndex) -> None:
        self.pace = initial_pace(config.weights)
        """Measured speed of the workers (policy `balanced`)."""
        self.prefix_use = PrefixUse()
        """Use of cached prefixes (policy `balanced`)."""
        self._config = config
        self._workers = workers
        self._index = index

    def of(
        self, route_request: RouteRequest, slots: Sequence[int], load: RankLoads, prompt: Prompt, weights: CostWeights
    ) -> Sequence[float]:
        """Return the cost of each slot, by the configured policy and the request's preferred taints.

        In blocks, or in seconds with the policy `balanced`.
        """
        workers, block_size = self._workers, self._config.block_size
        arrays = workers.arrays
        if self._config.policy == "balanced":
            balanced = balanced_costs if arrays is None else arrays.balanced_costs
            output, pace = route_request.expected_output_tokens, self.pace
            if weights.track_prefill_tokens:
                prompt.recompute_share = self._recompute_share(route_request, prompt)
            slowness, far = self._slowness(), self._far(route_request)
            found = balanced(slots, load, prompt, weights, pace, block_size, output, workers.capacity, slowness, far)
        else:
            found = (costs if arrays is None else arrays.costs)(slots, load, prompt, weights, block_size)
        onward, preferred = route_request.onward, route_request.preferred_taints
        if onward:
            further = (
                max((onward[one] for one in workers.taints_of(slot) if one in onward), default=0.0) for slot in slots
            )
            found = [cost + more for cost, more in zip(found, further, strict=True)]
        if not preferred:
            return found
        if arrays is not None:
            return arrays.scaled(slots, found, lambda taints: taint_factor(taints, preferred), workers.taints_of)
        return [
            cost * taint_factor(workers.taints_of(slot), preferred) for slot, cost in zip(slots, found, strict=True)
        ]

    def _recompute_share(self, route_request: RouteRequest, prompt: Prompt) -> float:
        """Return the share of the weight of recomputation that applies to a prompt."""
        beginning = beginning_of(route_request, prompt)
        if beginning is None:
            return 1.0
        ranks = len(self._workers.ranks)
        return recompute_share(prompt.beginning[1], self.prefix_use.share(beginning, ranks), ranks)

    def _slowness(self) -> list[float] | None:
        """Return the relative duration of steps by slot; None while no rank differs from the others."""
        if not self.pace.uneven:
            return None
        found = [1.0] * len(self._workers.capacity)
        for rank, ratio in self.pace.uneven.items():
            slot = self._workers.slots.get(rank)
            if slot is not None:
                found[slot] = ratio
        return found

    def _far(self, route_request: RouteRequest) -> list[float] | None:
        """Return 1 for slots out of the transfer domain of the worker that computes the prompt; None without domains."""
        if route_request.near_taint is None:
            return None
        found = [0.0] * len(self._workers.capacity)
        for slot in self._workers.ranks:
            found[slot] = float(self._workers.is_far(route_request, slot))
        return found

    def uncached_tokens(self, prompt: Prompt, slot: int, weights: CostWeights) -> int:
        """Return the prompt tokens to be computed at a slot.

        A block in a slower tier saves a fraction of a block; a whole one with `balanced`, which counts its copy separately.
        """
        block_size, cached = self._config.block_size, float(prompt.device.get(slot, 0))
        if not (prompt.host or prompt.disk or prompt.shared_beyond):
            return max(0, prompt.tokens - round(cached * block_size))
        is_whole = self._config.policy == "balanced"
        cached += (1.0 if is_whole else weights.host_cache_hit_weight) * prompt.host.get(slot, 0)
        cached += (1.0 if is_whole else weights.disk_cache_hit_weight) * prompt.disk.get(slot, 0)
        if prompt.shared_beyond:
            cached += weights.shared_cache_multiplier * prompt.shared_beyond.get(slot, 0)
        return max(0, prompt.tokens - round(cached * block_size))

    def learn_from(self, route_request: RouteRequest, slot: int, decision: Decision, now: float) -> None:
        """Update `pace` and `prefix_use` by a decision that is recorded (policy `balanced`)."""
        snapshot, pace, block_size = decision.snapshot, self.pace, self._config.block_size
        load = snapshot.load
        step_s = pace.step(load.requests[slot] + 1, load.contexts[slot] * block_size)
        request_id, movement = route_request.request_id, pace.movement
        if not snapshot.weights.track_prefill_tokens:
            if route_request.is_computed:
                cached = min(decision.device_blocks * block_size, route_request.tokens)
                times = movement.far if self._workers.is_far(route_request, slot) else movement.near
                movement.sent(request_id, times, route_request.tokens - cached, cached, step_s, now)
            return
        self.prefix_use.note(beginning_of(route_request, snapshot.prompt), len(self._workers.ranks))
        capacity = self._workers.capacity[slot]
        cached_blocks = 0 if self._index.lower else self._index.held(decision.worker_id, decision.dp_rank)
        computing = self._computing(load.prefill_tokens) / len(self._workers.ranks)
        pace.observe_load(computing, load.blocks[slot] / capacity, cached_blocks / capacity)
        if self._index.lower and not load.prefill_tokens[slot]:
            host, disk = decision.host_blocks * block_size, decision.disk_blocks * block_size
            uncached = self.uncached_tokens(snapshot.prompt, slot, snapshot.weights)
            expected_s = pace.prefill_token_s * uncached + step_s
            movement.sent(request_id, movement.tiers, host, disk, expected_s, now)

    def _computing(self, prefill_tokens: Sequence[float]) -> int:
        """Return the number of ranks with active prefill tokens."""
        if self._workers.arrays is not None:
            return self._workers.arrays.computing(prefill_tokens)
        return sum(prefill_tokens[slot] > 0 for slot in self._workers.ranks)


def beginning_of(route_request: RouteRequest, prompt: Prompt) -> Beginning | None:
    """Return the longest cached beginning of a prompt; None if no worker has a block of it."""
    depth = prompt.beginning[0]
    return (depth, route_request.blocks[(depth - 1) * WIDTH : depth * WIDTH]) if depth else None
