"""Exploration: few simulations that find the deployment with the fewest GPUs that meets the objectives. Pure.

1. Families: each parallelization of aggregated engines, and each pair of a prefill and a decode engine, ordered by the GPUs
   that an estimate of their rate requires.
2. The number of engines of each family by bisection, under a part of the load. A family is left out when its estimate
   exceeds the best found so far by more than the error of estimates.
3. The best families under the whole load: more engines until the objectives are met, fewer while they are; then other batch
   limits, router policies and queue policies, with fewer engines where they suffice.
4. Planner presets from the best deployment on, if the load lasts long enough.

Estimates only order the work; what is returned has been simulated.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dynamo.profiler.perf.analytic_engine import AnalyticEngine
from dynamo.profiler.recommend.presets import GAIN_MIN
from dynamo.profiler.recommend.routers import KV_ROUTER, ROUTERS, RouterChoice
from dynamo.profiler.recommend.simulation import CandidateDeployment, SimulatedResult
from dynamo.profiler.search import PREFILL_TOKENS, Configuration, EngineChoice, aggregated, decode_rates, prefill_rate
from dynamo.profiler.spec import LatencyTarget, TrafficTarget

PART_MIN = 150
"""Least requests of a simulation under a part of the load."""
PARTS = 5
"""Inverse of the part."""
DOUBT = 1.5
"""Factor by which estimates of the required GPUs may be wrong."""
FAMILIES_MAX = 8
FINALISTS = 3
BATCHES = (32, 64, 128, 256)

SETTING_COST = 0.005
"""Share of the goodput by which another router setting must raise it: differences below are noise of the load."""

Simulate = Callable[[CandidateDeployment, int | None], SimulatedResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentFamily:
    """Deployments that differ only in the number of engines."""

    decode: EngineChoice
    prefill: EngineChoice | None = None
    decode_rps: float
    """Estimated requests per second of one decode or aggregated engine."""
    prefill_rps: float = 0.0

    def deployment(self, scale: float, router: RouterChoice) -> CandidateDeployment:
        """Return the deployment that an estimate gives `scale` requests per second."""
        decode = replace(self.decode, replicas=max(1, math.ceil(scale / self.decode_rps)))
        prefill = self.prefill
        if prefill is not None:
            prefill = replace(prefill, replicas=max(1, math.ceil(scale / self.prefill_rps)))
        return CandidateDeployment(configuration(decode, prefill), router)

    def sizes(self, max_gpus: int, router: RouterChoice) -> list[CandidateDeployment]:
        """Return the deployments of at most `max_gpus` GPUs, smallest first, with balanced roles."""
        found: dict[tuple[int, int], CandidateDeployment] = {}
        steps = {self.decode_rps * one for one in range(1, max_gpus + 1)}
        if self.prefill is not None:
            steps |= {self.prefill_rps * one for one in range(1, max_gpus + 1)}
        for scale in sorted(steps):
            one = self.deployment(scale * 0.999, router)
            if one.gpus > max_gpus:
                break
            prefill = one.config.prefill.replicas if one.config.prefill else 0
            found[prefill, one.config.decode.replicas] = one
        return list(found.values())


def configuration(decode: EngineChoice, prefill: EngineChoice | None) -> Configuration:
    """Return a configuration whose performance is not estimated."""
    return Configuration(prefill=prefill, decode=decode, ttft_ms=0.0, itl_ms=0.0, request_rate=0.0, osl=0)


def families(
    engines: Sequence[AnalyticEngine], traffic: TrafficTarget, target: LatencyTarget, max_gpus: int
) -> list[DeploymentFamily]:
    """Return the families that fit the GPUs, ordered by the estimated GPUs per request and second."""
    found: list[DeploymentFamily] = []
    for engine in engines:
        met = [one for one in aggregated(engine, traffic) if target.met_by(one.ttft_ms, one.itl_ms, traffic.osl)]
        best = max(met or list(aggregated(engine, traffic))[:1], key=lambda one: one.request_rate, default=None)
        if best is not None:
            found.append(
                DeploymentFamily(
                    decode=replace(best.decode, batch=_batch(best.decode.batch), kv_dtype=engine.kv_dtype),
                    decode_rps=best.request_rate,
                )
            )
    for decode in engines:
        rates = list(decode_rates(decode, traffic))
        allowed = [one for one in rates if one[1] <= (target.itl_ms or math.inf)] or rates[:1]
        if not allowed:
            continue
        batch, _, decode_rps = max(allowed, key=lambda one: one[2])
        for prefill in engines:
            if prefill.gpus + decode.gpus > max_gpus or prefill.kv_dtype != decode.kv_dtype:
                continue
            prefill_rps, _ = prefill_rate(prefill, traffic, target.ttft_ms or math.inf)
            found.append(
                DeploymentFamily(
                    decode=EngineChoice(parallel=decode.parallel, batch=_batch(batch), kv_dtype=decode.kv_dtype),
                    decode_rps=decode_rps,
                    prefill=EngineChoice(
                        parallel=prefill.parallel,
                        batch=max(1, PREFILL_TOKENS // traffic.isl),
                        max_tokens=PREFILL_TOKENS,
                        kv_dtype=prefill.kv_dtype,
                    ),
                    prefill_rps=prefill_rps,
                )
            )
    return sorted(found, key=_gpus_per_rps)


def _batch(wanted: int) -> int:
    """Return the smallest batch limit that allows a batch."""
    return next((one for one in BATCHES if one >= wanted), BATCHES[-1])


def _gpus_per_rps(one: DeploymentFamily) -> float:
    gpus = one.decode.parallel.num_gpus / one.decode_rps
    return gpus + (one.prefill.parallel.num_gpus / one.prefill_rps if one.prefill else 0.0)


@dataclass(slots=True)
class Exploration:
    """State of one search."""

    families: Sequence[DeploymentFamily]
    rate: float
    """Offered requests per second."""
    requests: int
    max_gpus: int
    share: float
    """Share of requests that must meet the objectives."""
    simulate: Simulate
    presets: Sequence[str] = ()
    """Planner presets to try."""
    results: list[SimulatedResult] = field(default_factory=list)
    """Outcomes under the whole load."""

    def run(self) -> SimulatedResult | None:
        """Return the best outcome under the whole load; None without a family that fits."""
        sized = self._sized()
        for candidate in sized[:FINALISTS]:
            self._settle(candidate)
        if not self.results:
            return None
        self._refine()
        best = best_of(self.results, self.share).candidate
        for preset in self.presets:
            self._whole(replace(best, preset=preset))
        return best_of(self.results, self.share)

    def _sized(self) -> list[CandidateDeployment]:
        """Return a deployment of each promising family that meets the objectives under a part of the load, best first."""
        part = max(PART_MIN, self.requests // PARTS)
        limit = None if part >= self.requests else part
        found: list[SimulatedResult] = []
        for family in self.families[:FAMILIES_MAX]:
            needed = _gpus_per_rps(family) * self.rate
            least = min((one.candidate.gpus for one in found if one.met_share >= self.share), default=self.max_gpus)
            if needed > DOUBT * least and found:
                continue
            sizes = family.sizes(self.max_gpus, KV_ROUTER)
            if sizes:
                found.append(self._bisected(sizes, needed, limit))
        found.sort(key=lambda one: _order(one, self.share))
        return [one.candidate for one in found]

    def _bisected(self, sizes: Sequence[CandidateDeployment], needed: float, limit: int | None) -> SimulatedResult:
        """Return the outcome of the smallest size that meets the objectives; that of the largest if none does."""
        low, high = 0, len(sizes) - 1
        at = next((index for index, one in enumerate(sizes) if one.gpus >= needed), high)
        known: dict[int, SimulatedResult] = {}
        while low < high:
            known[at] = self.simulate(sizes[at], limit)
            if known[at].met_share >= self.share:
                high = at
                at = max(low, at - 1) if at - 1 not in known else (low + high) // 2
            else:
                low = at + 1
                at = min(high, max(low, at + 1))
        return known.get(high) or self.simulate(sizes[high], limit)

    def _settle(self, candidate: CandidateDeployment) -> None:
        """Add engines until the objectives are met under the whole load, or remove some while they are."""
        least = min((one.candidate.gpus for one in self.results if one.met_share >= self.share), default=self.max_gpus)
        if self.results and candidate.gpus > least:
            return
        found = self._whole(candidate)
        is_met = found.met_share >= self.share
        for _ in range(self.max_gpus):
            nearby = [one for one in neighbours(found.candidate, larger=not is_met) if one.gpus <= self.max_gpus]
            outcomes = [self._whole(one) for one in nearby]
            if not outcomes:
                return
            better = min(outcomes, key=lambda one: _order(one, self.share))
            if is_met and better.met_share < self.share:
                return
            if not is_met and better.met_share <= found.met_share:
                return
            found, was_met = better, is_met
            is_met = found.met_share >= self.share
            if is_met and not was_met:
                return

    def _refine(self) -> None:
        """Try other batch limits of the best deployment, with fewer engines where they suffice, and then other routers."""
        best = best_of(self.results, self.share).candidate
        for batch in BATCHES:
            decode = replace(best.config.decode, batch=batch)
            self._shrink(replace(best, config=replace(best.config, decode=decode)))
        best = best_of(self.results, self.share).candidate
        for router in ROUTERS:
            self._whole(replace(best, router=router))
        better = best_of(self.results, self.share)
        if better.candidate.router != best.router:
            self._shrink(better.candidate)

    def _shrink(self, candidate: CandidateDeployment) -> None:
        """Remove engines while the objectives are met."""
        found = self._whole(candidate)
        while found.met_share >= self.share:
            outcomes = [self._whole(one) for one in neighbours(found.candidate, larger=False)]
            if not outcomes:
                return
            found = min(outcomes, key=lambda one: _order(one, self.share))

    def _whole(self, candidate: CandidateDeployment) -> SimulatedResult:
        known = next((one for one in self.results if one.candidate == candidate), None)
        if known is None:
            known = self.simulate(candidate, None)
            self.results.append(known)
        return known


def neighbours(candidate: CandidateDeployment, *, larger: bool) -> list[CandidateDeployment]:
    """Return the deployments with one engine more or less of one role."""
    config, change = candidate.config, 1 if larger else -1
    found = []
    decode = replace(config.decode, replicas=config.decode.replicas + change)
    if decode.replicas:
        found.append(replace(config, decode=decode))
    if config.prefill is not None and config.prefill.replicas + change:
        prefill = replace(config.prefill, replicas=config.prefill.replicas + change)
        found.append(replace(config, prefill=prefill))
    return [replace(candidate, config=one) for one in found]


def best_of(results: Sequence[SimulatedResult], share: float) -> SimulatedResult:
    """Return the outcome with the fewest GPUs on average among those that meet the objectives, or the nearest to them."""
    return min(results, key=lambda one: _order(one, share))


def _order(one: SimulatedResult, share: float) -> tuple[float, ...]:
    if one.met_share >= share:
        gpus = one.mean_gpus * (1 if one.candidate.preset is None else GAIN_MIN)
        goodput = one.goodput * (1 - SETTING_COST * len(one.candidate.router.settings()))
        return (0, gpus, -round(goodput, 1), one.e2e_ms)
    return (1, -round(one.met_share, 3), one.candidate.gpus, one.e2e_ms)


def front(results: Sequence[SimulatedResult]) -> list[SimulatedResult]:
    """Return the Pareto front of goodput per GPU and latency, lowest latency first."""
    found: list[SimulatedResult] = []
    for one in sorted(results, key=lambda one: (one.e2e_ms, -one.goodput_per_gpu)):
        if not found or one.goodput_per_gpu > found[-1].goodput_per_gpu:
            found.append(one)
    return found
