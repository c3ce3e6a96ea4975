"""Arbitration of scale requests under a band of GPUs: pairing of opposite requests, partial admission, apply order. Pure.

Each request is stored as an intent, also if it is rejected. A later request in the opposite direction is paired with the pending
intents, so that GPUs move between deployments without leaving the band. The upper bound is hard; for paired changes the lower
bound is relaxed by the GPUs of the largest replica that may change, because replicas of several GPUs cannot reach every total.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dynamo.planner.core.budget import tolerance_of
from dynamo.protocols.scaling import TargetReplica, WorkerRole

MAX_INTENTS = 4096
"""Stored intents; the oldest is dropped beyond it. Two for each of 2,048 deployments."""
PoolKey = tuple[str, WorkerRole]
"""A deployment, `<Kubernetes namespace>/<name>`, and a role."""


@dataclass(frozen=True, slots=True)
class ReplicaPool:
    """Replicas of one role of a deployment."""

    replicas: int
    gpus_per_replica: int
    """0: does not count."""
    component_name: str | None = None

    def delta(self, desired: int) -> int:
        """Return the change of GPUs by a number of replicas."""
        return (desired - self.replicas) * self.gpus_per_replica


ReplicaPools = Mapping[str, Mapping[WorkerRole, ReplicaPool]]
"""Observed pools by deployment and role."""


@dataclass(frozen=True, slots=True)
class TotalGpuBand:
    """Bounds of the GPUs of all deployments; negative: no bound."""

    min_gpus: int = -1
    max_gpus: int = -1

    @property
    def is_active(self) -> bool:
        """Return whether there is any bound."""
        return self.min_gpus >= 0 or self.max_gpus >= 0

    def exceeds(self, total: int) -> bool:
        """Return whether a total is above the upper bound."""
        return 0 <= self.max_gpus < total

    def falls_below(self, total: int, tolerance: int) -> bool:
        """Return whether a total is below the relaxed lower bound."""
        return self.min_gpus >= 0 and total < self.min_gpus - tolerance

    def breach(self, total: int, tolerance: int) -> str | None:
        """Return the reason why a total is outside the band; None if it is inside."""
        if self.exceeds(total):
            return f"total {total} exceeds ceiling ({self.max_gpus})"
        if self.falls_below(total, tolerance):
            relaxed = f" - tol {tolerance}" if tolerance else ""
            return f"total {total} below floor ({self.min_gpus}{relaxed})"
        return None


@dataclass(frozen=True, slots=True)
class PartnerChange:
    """Change of another pool that is applied together with a request."""

    key: PoolKey
    pool: ReplicaPool
    desired: int

    @property
    def delta(self) -> int:
        """Return the change of GPUs."""
        return self.pool.delta(self.desired)


@dataclass(frozen=True, slots=True)
class ArbitrationResult:
    """Result of a request: the partners to change together with it, or the reason of its rejection."""

    partners: Sequence[PartnerChange] = ()
    rejection: str | None = None


@dataclass(frozen=True, slots=True)
class _Intent:
    desired: int
    stored_at_s: float


class GpuArbiter:
    """Decides scale requests, one after the other; its state is the stored intents."""

    def __init__(self, band: TotalGpuBand, intent_ttl_s: float) -> None:
        self.band = band
        self._ttl_s = intent_ttl_s
        self._intents: dict[PoolKey, _Intent] = {}

    @property
    def pending(self) -> int:
        """Number of stored intents."""
        return len(self._intents)

    def decide(
        self, participant: str, targets: Sequence[TargetReplica], pools: ReplicaPools, now_s: float
    ) -> ArbitrationResult:
        """Store the request's intents, and decide it: paired if possible, else alone if the total stays in the band."""
        own = pools.get(participant, {})
        self._store(participant, targets, own, now_s)
        if not self.band.is_active:
            return ArbitrationResult()
        desired: dict[PoolKey, int] = {(participant, one.sub_component_type): one.desired_replicas for one in targets}
        changes = [
            (own[one.sub_component_type], one.desired_replicas)
            for one in targets
            if one.sub_component_type in own and one.desired_replicas != own[one.sub_component_type].replicas
        ]
        partners = self._partners(participant, desired, changes, pools, now_s)
        if partners:
            return ArbitrationResult(partners)
        has_both = any(n > pool.replicas for pool, n in changes) and any(n < pool.replicas for pool, n in changes)
        tolerance = tolerance_of(pool.gpus_per_replica for pool, _ in changes) if has_both else 0
        reason = self.band.breach(total_gpus(pools, desired), tolerance)
        if reason is None:
            return ArbitrationResult()
        return ArbitrationResult(rejection=f"GPU budget breach: {reason}; no feasible pair packing")

    def _store(
        self,
        participant: str,
        targets: Iterable[TargetReplica],
        own: Mapping[WorkerRole, ReplicaPool],
        now_s: float,
    ) -> None:
        """Store the intents of known pools, newest last, and drop what is expired or too many."""
        for one in targets:
            if one.sub_component_type in own:
                key = (participant, one.sub_component_type)
                self._intents.pop(key, None)
                self._intents[key] = _Intent(one.desired_replicas, now_s)
        expired = [key for key, one in self._intents.items() if now_s - one.stored_at_s > self._ttl_s]
        for key in expired:
            del self._intents[key]
        while len(self._intents) > MAX_INTENTS:
            del self._intents[next(iter(self._intents))]

    def _partners(
        self,
        participant: str,
        desired: Mapping[PoolKey, int],
        changes: Sequence[tuple[ReplicaPool, int]],
        pools: ReplicaPools,
        now_s: float,
    ) -> list[PartnerChange]:
        """Return the pending changes that bring the total into the band together with the request; none if it stays outside."""
        delta = sum(pool.delta(number) for pool, number in changes)
        candidates = self._candidates(participant, desired, delta, pools, now_s)
        if not candidates:
            return []
        costs = [*(pool.gpus_per_replica for pool, _ in changes), *(one.pool.gpus_per_replica for one in candidates)]
        tolerance = tolerance_of(costs)
        total = total_gpus(pools, desired)
        chosen: list[PartnerChange] = []
        for one in candidates:
            after = total + one.delta
            is_approaching = self.band.exceeds(after) if delta > 0 else self.band.falls_below(after, tolerance)
            if self.band.breach(after, tolerance) is None or is_approaching:
                chosen.append(one)
                total = after
                continue
            part = self._partial(one, total, tolerance)  # The whole change would pass through the band.
            if part is not None:
                chosen.append(part)
                total += part.delta
            break
        if chosen and self.band.breach(total, tolerance) is not None:
            before = total - chosen[-1].delta
            part = self._partial(chosen[-1], before, tolerance)
            if part is not None:
                chosen[-1], total = part, before + part.delta
        return [] if self.band.breach(total, tolerance) is not None else chosen

    def _candidates(
        self, participant: str, desired: Mapping[PoolKey, int], delta: int, pools: ReplicaPools, now_s: float
    ) -> list[PartnerChange]:
        """Return the pending changes in the opposite direction: smallest first, of equal ones the same deployment's first."""
        found: list[PartnerChange] = []
        for name, roles in pools.items():
            for role, pool in roles.items():
                intent = self._intents.get((name, role))
                if intent is None or (name, role) in desired or now_s - intent.stored_at_s > self._ttl_s:
                    continue
                one = PartnerChange((name, role), pool, intent.desired)
                if delta * one.delta < 0:
                    found.append(one)
        return sorted(found, key=lambda one: (abs(one.delta), one.key[0] != participant))

    def _partial(self, one: PartnerChange, total: int, tolerance: int) -> PartnerChange | None:
        """Return the largest part of a change that keeps the total at or inside its bound; None if there is none."""
        pool, band = one.pool, self.band
        cost = pool.gpus_per_replica
        if one.desired > pool.replicas:
            headroom = (band.max_gpus - total) // cost
            desired = one.desired if band.max_gpus < 0 else min(one.desired, pool.replicas + headroom)
            return PartnerChange(one.key, pool, desired) if desired > pool.replicas else None
        headroom = math.floor((total - (band.min_gpus - tolerance)) / cost)
        desired = one.desired if band.min_gpus < 0 else max(one.desired, pool.replicas - headroom)
        return PartnerChange(one.key, pool, desired) if desired < pool.replicas else None


def total_gpus(pools: ReplicaPools, desired: Mapping[PoolKey, int] | None = None) -> int:
    """Return the GPUs of all pools, with other numbers of replicas where given."""
    given = desired or {}
    return sum(
        given.get((name, role), pool.replicas) * pool.gpus_per_replica
        for name, roles in pools.items()
        for role, pool in roles.items()
    )


def apply_order(
    participant: str, targets: Sequence[TargetReplica], partners: Sequence[PartnerChange], pools: ReplicaPools
) -> list[tuple[str, list[TargetReplica]]]:
    """Return the targets of each deployment: those that free most GPUs first, so that GPUs are free before they are used."""
    grouped: dict[str, list[TargetReplica]] = {participant: [*targets]}
    for one in partners:
        name, role = one.key
        target = TargetReplica(
            sub_component_type=role, component_name=one.pool.component_name, desired_replicas=one.desired
        )
        grouped.setdefault(name, []).append(target)

    def delta(name: str) -> int:
        own = pools.get(name, {})
        return sum(
            own[one.sub_component_type].delta(one.desired_replicas)
            for one in grouped[name]
            if one.sub_component_type in own
        )

    return [(name, grouped[name]) for name in sorted(grouped, key=delta)]
