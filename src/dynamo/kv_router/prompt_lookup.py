"""PromptLookup: the ranks' cached blocks of a prompt, from the index, predictions and active requests. Pure; a part of `router`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dynamo.kv_router.active import ActiveLoad
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.cost import Prompt
from dynamo.kv_router.decision import Rank, RouteRequest
from dynamo.kv_router.hicache import held_from
from dynamo.kv_router.index import KvIndex, Overlap
from dynamo.kv_router.predicted import Predicted
from dynamo.kv_router.prompts import overlap_by_slot
from dynamo.kv_router.runs import TIERS, WIDTH, slots_of
from dynamo.kv_router.worker_slots import WorkerSlots

if TYPE_CHECKING:
    from dynamo.kv_router.rank_arrays import RankArrays

NO_BLOCKS: Mapping[int, int] = {}

Depths = list[tuple[int, int]]
"""Pairs of blocks from the start and slots, as bits, with exactly that many."""


class PromptLookup:
    """Look-up of prompts for one router."""

    def __init__(self, config: RoutingConfig, index: KvIndex, active: ActiveLoad, workers: WorkerSlots) -> None:
        self._config = config
        self._index = index
        self._active = active
        self._workers = workers
        self._slots = workers.slots
        self._predicts_active = config.policy == "balanced"
        """Whether blocks of active requests count as cached: sent to that worker, but its event has not arrived yet."""

    def find(self, route_request: RouteRequest, predicted: Predicted | None, now: float) -> Prompt:
        """Return the ranks' cached blocks of the prompt."""
        config, sequence = self._config, route_request.sequence or route_request.blocks
        overlap: Overlap | None = None
        if route_request.held is None and config.use_kv_events and config.weights.overlap_score_credit:
            overlap = self._index.find(route_request.blocks)
        expected = predicted.overlap(sequence, now) if predicted is not None else []
        active: Depths = []
        if config.track_active_blocks and config.weights.assume_kv_reuse:
            active = self._active.overlap(sequence)
        arrays = self._workers.arrays
        if arrays is None:
            prompt = self._as_dictionaries(route_request, overlap, expected, active)
        else:
            prompt = self._as_arrays(arrays, route_request, overlap, expected, active)
        if self._predicts_active:
            prompt.beginning = _beginning_of(overlap, active)
        return prompt

    def _as_dictionaries(
        self, route_request: RouteRequest, overlap: Overlap | None, expected: Depths, active: Depths
    ) -> Prompt:
        device: dict[int, int] = {}
        host = disk = shared = occupied = NO_BLOCKS
        if route_request.held is not None:
            device, host, disk = (self._held(route_request.held, tier) for tier in range(len(TIERS)))
        elif overlap is not None:
            slot_of, keys = self._slots.get, self._index.rank_keys
            for depth, mask in overlap.depths:
                for index_slot in slots_of(mask):
                    slot = slot_of(keys[index_slot])
                    if slot is not None:
                        device[slot] = depth
            if self._index.lower:
                host, disk = self._lower(overlap, device)
        if active:
            occupied = overlap_by_slot(active)
        if expected or (occupied and self._predicts_active):
            for more in (overlap_by_slot(expected), occupied if self._predicts_active else {}):
                for slot, depth in more.items():
                    if depth > device.get(slot, 0):
                        device[slot] = depth
        if route_request.shared:
            depths = {
                slot: device.get(slot, 0) + host.get(slot, 0) + disk.get(slot, 0) for slot in self._slots.values()
            }
            held = {slot: held_from(route_request.shared, depth) for slot, depth in depths.items()}
            shared = {slot: beyond for slot, beyond in held.items() if beyond}
        blocks = len(route_request.blocks) // WIDTH
        return Prompt(route_request.tokens, blocks, device, host, disk, shared, occupied)

    def _as_arrays(
        self,
        arrays: "RankArrays",
        route_request: RouteRequest,
        overlap: Overlap | None,
        expected: Depths,
        active: Depths,
    ) -> Prompt:
        host: dict[int, int] = {}
        disk: dict[int, int] = {}
        if route_request.held is not None:
            held, host, disk = (self._held(route_request.held, tier) for tier in range(len(TIERS)))
            device = arrays.counts(held)
        else:
            device = arrays.cached(overlap.depths if overlap is not None else [])
            if overlap is not None:
                host, disk = self._lower(overlap, device)
        return arrays.prompt(
            route_request.tokens,
            len(route_request.blocks) // WIDTH,
            device,
            host,
            disk,
            route_request.shared,
            expected,
            active,
            predicts_active=self._predicts_active,
        )

    def _held(self, held: Mapping[Rank, tuple[int, int, int]], tier: int) -> dict[int, int]:
        """Return the blocks by slot that a remote index returned for a tier."""
        found = {self._slots[rank]: tiers[tier] for rank, tiers in held.items() if rank in self._slots}
        return {slot: blocks for slot, blocks in found.items() if blocks}

    def _lower(self, overlap: Overlap, device: Mapping[int, int]) -> tuple[dict[int, int], dict[int, int]]:
        """Return the blocks by slot that follow those of the device on the host, and then on disk."""
        host: dict[int, int] = {}
        disk: dict[int, int] = {}
        for index_slot in self._index.holders_below(overlap):
            slot = self._slots.get(self._index.rank_at(index_slot))
            if slot is None:
                continue
            depth = device.get(slot, 0)
            for tier, found in ((1, host), (2, disk)):
                more = self._index.beyond(overlap, index_slot, depth, tier)
                if more:
                    found[slot] = more
                    depth += more
        return host, disk


def _beginning_of(overlap: Overlap | None, active: Depths) -> tuple[int, int]:
    """Return the blocks of the longest cached beginning, in a cache or computed by an active request, and the number of its slots."""
    depth, slots = max(overlap.depths, default=(0, 0)) if overlap is not None else (0, 0)
    if active:
        other = max(active)
        if other[0] > depth:
            depth, slots = other
        elif other[0] == depth:
            return depth, max(slots.bit_count(), other[1].bit_count())
    return depth, slots.bit_count()
