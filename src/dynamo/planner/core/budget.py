"""GPU and power budgets: fit numbers of replicas into a band of GPUs and below a limit of watts.

A negative bound is no bound. The upper bound is hard; the lower one is relaxed by the GPUs of one replica when both are active,
because replicas of several GPUs cannot reach every total.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dynamo.planner.core.reasons import LoadReason


class Pair(NamedTuple):
    """Numbers of prefill and decode replicas."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class GpuBand:
    """Bounds of the total number of GPUs."""

    min_gpus: int
    max_gpus: int

    @property
    def is_active(self) -> bool:
        """Return whether there is any bound."""
        return self.min_gpus >= 0 or self.max_gpus >= 0

    def contains(self, total: int, tolerance: int) -> bool:
        """Return whether a total is in the band."""
        return not self.exceeds(total) and not self.falls_below(total, tolerance)

    def exceeds(self, total: int) -> bool:
        """Return whether a total is above the upper bound."""
        return 0 <= self.max_gpus < total

    def is_below(self, minimum: int) -> bool:
        """Return whether the upper bound is below the GPUs of the minimum replicas, so that no total is allowed."""
        return 0 <= self.max_gpus < minimum

    def falls_below(self, total: int, tolerance: int) -> bool:
        """Return whether a total is below the lower bound; tolerance applies only if both bounds are active."""
        return self.min_gpus >= 0 and total < self.min_gpus - (tolerance if self.max_gpus >= 0 else 0)


@dataclass(frozen=True, slots=True)
class PairCost:
    """GPUs (or watts) of one replica and minimum replicas, of each role."""

    prefill: int
    decode: int
    prefill_min: int
    decode_min: int

    def of(self, pair: Pair) -> int:
        """Return the total of a pair."""
        return pair.prefill * self.prefill + pair.decode * self.decode

    @property
    def minimum(self) -> int:
        """The total of the minimum replicas."""
        return self.of(Pair(self.prefill_min, self.decode_min))

    @property
    def is_known(self) -> bool:
        """Return whether both costs are positive."""
        return self.prefill > 0 and self.decode > 0


def tolerance_of(costs: Iterable[int]) -> int:
    """Return the relaxation of the lower bound: the largest replica of the pools that change."""
    return max([cost for cost in costs if cost > 0], default=0)


def clamp_pair(pair: Pair, cost: PairCost, band: GpuBand) -> Pair:
    """Return a pair scaled proportionally into the band; (0, 0) if the minimum replicas exceed it."""
    if not band.is_active or not cost.is_known:
        return pair
    total = cost.of(pair)
    if band.exceeds(total):
        return _shrunk(pair, cost, band.max_gpus)
    if band.falls_below(total, tolerance_of((cost.prefill, cost.decode))):
        grown = _grown(pair, cost, band.min_gpus)
        return pair if band.exceeds(cost.of(grown)) else grown
    return pair


def _shrunk(pair: Pair, cost: PairCost, limit: int) -> Pair:
    if limit < cost.minimum:
        return Pair(0, 0)
    scale = limit / cost.of(pair)
    most = (limit - cost.decode_min * cost.decode) // cost.prefill
    prefill = min(max(cost.prefill_min, math.floor(pair.prefill * scale)), most)
    decode = max(cost.decode_min, (limit - prefill * cost.prefill) // cost.decode)
    return Pair(prefill, decode)


def _grown(pair: Pair, cost: PairCost, floor: int) -> Pair:
    total = cost.of(pair)
    if total == 0:
        prefill = max(cost.prefill_min, math.ceil(floor / 2 / cost.prefill))
    else:
        prefill = max(cost.prefill_min, math.ceil(pair.prefill * floor / total))
    rest = max(0, floor - prefill * cost.prefill)
    return Pair(prefill, max(cost.decode_min, math.ceil(rest / cost.decode), pair.decode))


def clamp_single(replicas: int, gpus: int, band: GpuBand, minimum: int) -> int:
    """Return the replicas of a single pool in the band; 0 if the minimum exceeds it."""
    if not band.is_active or gpus <= 0:
        return replicas
    if band.exceeds(replicas * gpus):
        return 0 if band.max_gpus < minimum * gpus else max(minimum, band.max_gpus // gpus)
    if band.falls_below(replicas * gpus, gpus):
        grown = max(minimum, math.ceil(band.min_gpus / gpus))
        return replicas if band.exceeds(grown * gpus) else grown
    return replicas


def fit_directional(current: Pair, proposed: Pair, cost: PairCost, band: GpuBand) -> Pair:
    """Return the pair between current and proposed that is in the band and closest to the proposal.

    A proposal may be reduced but not reversed. If one role grows and the other shrinks, both change or neither does. Among
    equally close pairs, the one with the most proportional progress, then with more progress, then the smaller one.
    """
    delta = Pair(proposed.prefill - current.prefill, proposed.decode - current.decode)
    is_rebalance = delta.prefill * delta.decode < 0
    tolerance = tolerance_of((cost.prefill, cost.decode))
    best: tuple[tuple[int, ...], Pair] | None = None
    for prefill in _between(current.prefill, proposed.prefill):
        for decode in _between(current.decode, proposed.decode):
            done = Pair(abs(prefill - current.prefill), abs(decode - current.decode))
            if is_rebalance and (done.prefill > 0) != (done.decode > 0):
                continue
            found = Pair(prefill, decode)
            if not _is_allowed(found, cost, band, tolerance):
                continue
            rank = (
                abs(proposed.prefill - prefill) + abs(proposed.decode - decode),
                abs(done.prefill * abs(delta.decode) - done.decode * abs(delta.prefill)),
                -(done.prefill + done.decode),
                prefill,
                decode,
            )
            if best is None or rank < best[0]:
                best = (rank, found)
    return current if best is None else best[1]


def _is_allowed(pair: Pair, cost: PairCost, band: GpuBand, tolerance: int) -> bool:
    if pair.prefill < cost.prefill_min or pair.decode < cost.decode_min:
        return False
    return band.contains(cost.of(pair), tolerance)


def _between(first: int, last: int) -> range:
    return range(min(first, last), max(first, last) + 1)


def guard_pair(current: Pair, proposed: Pair, cost: PairCost, band: GpuBand) -> tuple[Pair, LoadReason | None]:
    """Return a proposal within the band that keeps its direction, and the reason if it was changed.

    A budget below the minimum replicas is a mistake in the configuration: the present replicas are held.
    """
    if not band.is_active or not cost.is_known:
        return proposed, None
    if band.is_below(cost.minimum):
        return current, LoadReason.GPU_BUDGET_BELOW_MINIMUM
    tolerance = tolerance_of((cost.prefill, cost.decode))
    total = cost.of(current)
    if band.exceeds(total) or band.falls_below(total, tolerance):
        return clamp_pair(current, cost, band), LoadReason.GPU_BUDGET_RECONCILE
    if proposed == current:
        return current, None
    grows = proposed.prefill > current.prefill or proposed.decode > current.decode
    shrinks = proposed.prefill < current.prefill or proposed.decode < current.decode
    if shrinks and not grows and band.min_gpus >= 0 and total <= band.min_gpus:
        return current, LoadReason.GPU_BUDGET_GUARD_HOLD
    if grows and not shrinks and 0 <= band.max_gpus <= total:
        return current, LoadReason.GPU_BUDGET_GUARD_HOLD
    if band.contains(cost.of(proposed), tolerance):
        return proposed, None
    if grows and shrinks and (0 <= band.max_gpus <= total or total <= band.min_gpus):
        fitted = fit_directional(current, proposed, cost, band)
        return fitted, LoadReason.GPU_BUDGET_GUARD_HOLD if fitted == current else None
    scaled = clamp_pair(proposed, cost, band)
    if all(one in _between(now, target) for one, now, target in zip(scaled, current, proposed, strict=True)):
        return scaled, None
    return current, LoadReason.GPU_BUDGET_GUARD_HOLD


def guard_single(current: int, proposed: int, gpus: int, band: GpuBand, minimum: int) -> tuple[int, LoadReason | None]:
    """Return the proposal of a single pool within the band without a change of direction, and the reason if changed."""
    if not band.is_active or gpus <= 0:
        return proposed, None
    if band.is_below(minimum * gpus):
        return current, LoadReason.GPU_BUDGET_BELOW_MINIMUM
    total = current * gpus
    if band.exceeds(total) or band.falls_below(total, gpus):
        return clamp_single(current, gpus, band, minimum), LoadReason.GPU_BUDGET_RECONCILE
    if proposed < current and total <= band.min_gpus:
        return current, LoadReason.GPU_BUDGET_GUARD_HOLD
    found = proposed
    while found > current and band.exceeds(found * gpus):
        found -= 1
    while found < current and band.falls_below(proposed * gpus, gpus) and found * gpus < band.min_gpus:
        found += 1
    return found, LoadReason.GPU_BUDGET_GUARD_HOLD if found == current != proposed else None
