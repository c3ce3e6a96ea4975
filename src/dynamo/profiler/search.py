"""Search: the best aggregated and disaggregated configurations by the performance model. Pure.

Aggregated engines interleave prefill and decode: at `b` sequences per rank, `b` prompts are computed per answer, so

    ITL = decode step + b x prefill / answer tokens
    TTFT = 1.5 decode steps + prefill + queue

The queue of prompts is that of one server with constant service times and random arrivals (M/D/1). Disaggregated
prefill engines are loaded until that queue uses up the rest of the TTFT objective.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dynamo.planner.config.parallelization import PickedParallelConfig
from dynamo.profiler.perf.analytic_engine import NODE_LINK_GB_S, AnalyticEngine
from dynamo.profiler.spec import LatencyTarget, TrafficTarget

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Sequences per rank that are tried."""
BUSY_MAX = 0.9
"""Highest utilization of a prefill engine: at more, small errors of the estimate make queues long."""
DECODE_SHARE = 0.92
"""Share of the decode rate that is planned with: answers differ in length, so not all slots are always in use."""
PREFILL_TOKENS = 32768
"""Largest number of tokens of one prefill step."""
AGGREGATED_TOKENS = 8192
"""Largest number of tokens of one step of an aggregated engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """Engines of one role."""

    parallel: PickedParallelConfig
    replicas: int = 1
    batch: int = 1
    """Sequences per data-parallel rank."""
    max_tokens: int = AGGREGATED_TOKENS
    """Tokens per step and rank."""
    kv_tokens: int = 0
    kv_dtype: str = "auto"
    """Type of cached values: `auto` (the model's) or `fp8`."""

    @property
    def gpus(self) -> int:
        """Return the GPUs of all replicas."""
        return self.replicas * self.parallel.num_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A deployment and its estimated performance."""

    prefill: EngineChoice | None
    """None: aggregated."""
    decode: EngineChoice
    ttft_ms: float
    itl_ms: float
    request_rate: float
    """Requests per second that all replicas answer within the estimated latencies."""
    osl: int
    gpus_needed: int = 0
    """GPUs that the given load requires; more than `gpus` if the budget does not suffice."""

    @property
    def is_disaggregated(self) -> bool:
        """Return whether prefill and decode have engines of their own."""
        return self.prefill is not None

    @property
    def gpus(self) -> int:
        """Return the GPUs of all engines."""
        return self.decode.gpus + (self.prefill.gpus if self.prefill else 0)

    @property
    def tokens_per_gpu(self) -> float:
        """Return the output tokens per second and GPU."""
        return self.request_rate * self.osl / self.gpus

    @property
    def e2e_ms(self) -> float:
        """Return the latency of a whole request in milliseconds."""
        return self.ttft_ms + self.itl_ms * max(0, self.osl - 1)


def queue_factor(busy: float) -> float:
    """Return the mean time in an M/D/1 queue, service included, as a multiple of the service time."""
    return 1 + busy / (2 * (1 - busy))


def aggregated(engine: AnalyticEngine, traffic: TrafficTarget) -> Iterator[Configuration]:
    """Yield one engine at each batch size that its cache has room for."""
    isl, osl = traffic.isl, traffic.osl
    prefill_ms = engine.prefill_ms(isl)
    ranks = engine.parallel.dp
    capacity = engine.kv_tokens()
    for batch in BATCHES:
        if batch * (isl + osl) > capacity / ranks:
            return
        decode_ms = engine.decode_ms(round(batch * (isl + osl / 2)), capacity, batch)
        itl_ms = decode_ms + batch * prefill_ms / osl
        busy = min(0.98, batch * prefill_ms / (osl * itl_ms))
        ttft_ms = engine.request_ms() + 1.5 * decode_ms + prefill_ms * queue_factor(busy)
        latency_ms = ttft_ms + itl_ms * max(0, osl - 1)
        choice = EngineChoice(parallel=engine.parallel, batch=batch, kv_tokens=capacity)
        yield Configuration(
            prefill=None,
            decode=choice,
            ttft_ms=ttft_ms,
            itl_ms=itl_ms,
            request_rate=1000 * batch * ranks / latency_ms,
            osl=osl,
        )


def prefill_rate(engine: AnalyticEngine, traffic: TrafficTarget, wait_ms: float) -> tuple[float, float]:
    """Return the requests per second of one prefill engine, and the TTFT in ms, where requests may wait `wait_ms` in all."""
    service_ms = engine.prefill_ms(traffic.isl)
    fixed_ms = engine.request_ms() + transfer_ms(engine, traffic.isl)
    slack = max(0.0, (wait_ms - fixed_ms) / service_ms - 1)
    busy = min(BUSY_MAX, 2 * slack / (1 + 2 * slack)) if slack > 0 else 0.5
    return 1000 * busy * engine.parallel.dp / service_ms, fixed_ms + service_ms * queue_factor(busy)


def transfer_ms(engine: AnalyticEngine, tokens: int) -> float:
    """Return the milliseconds to send the cache of a prompt to another node, by the network adapters of all its GPUs."""
    lanes = engine.parallel.tp
    return 1000 * tokens * engine.shape.kv_bytes_per_token / (NODE_LINK_GB_S * 1e9 * 0.8 * lanes)


def decode_rates(engine: AnalyticEngine, traffic: TrafficTarget) -> Iterator[tuple[int, float, float]]:
    """Yield batch size, ITL in ms and requests per second of one decode engine."""
    capacity = engine.kv_tokens()
    for batch in BATCHES:
        if batch * (traffic.isl + traffic.osl) > capacity / engine.parallel.dp:
            return
        itl_ms = engine.decode_ms(round(batch * (traffic.isl + traffic.osl / 2)), capacity, batch)
        yield batch, itl_ms, DECODE_SHARE * 1000 * batch * engine.parallel.dp / (traffic.osl * itl_ms)


def disaggregated(
    prefills: Sequence[AnalyticEngine], decodes: Sequence[AnalyticEngine], traffic: TrafficTarget, target: LatencyTarget
) -> Iterator[Configuration]:
    """Yield one prefill and one decode engine of all kinds and batch sizes; their numbers are not yet balanced."""
    for decode in decodes:
        for batch, itl_ms, decode_rps in decode_rates(decode, traffic):
            for prefill in prefills:
                allowed_ms = target.ttft_ms if target.e2e_ms is None else target.e2e_ms - itl_ms * (traffic.osl - 1)
                prefill_rps, ttft_ms = prefill_rate(prefill, traffic, allowed_ms or 0.0)
                yield Configuration(
                    prefill=EngineChoice(
                        parallel=prefill.parallel,
                        batch=max(1, PREFILL_TOKENS // traffic.isl),
                        max_tokens=PREFILL_TOKENS,
                        kv_tokens=prefill.kv_tokens(),
                    ),
                    decode=EngineChoice(parallel=decode.parallel, batch=batch, kv_tokens=decode.kv_tokens()),
                    ttft_ms=ttft_ms,
                    itl_ms=itl_ms,
                    request_rate=min(prefill_rps, decode_rps),
                    osl=traffic.osl,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Outcome of a search."""

    best: Configuration
    is_met: bool
    """Whether the best configuration meets the objectives."""
    others: tuple[Configuration, ...] = ()
    """The best configurations of each kind, and further ones, best first."""


def search(
    engines: Sequence[AnalyticEngine],
    traffic: TrafficTarget,
    target: LatencyTarget,
    total_gpus: int,
    *,
    mode: str = "default",
    kinds: frozenset[bool] = frozenset({False, True}),
) -> SearchResult | None:
    """Return the best configuration of at most `total_gpus` GPUs; None if none has room for a request.

    `kinds`: whether aggregated (False) and disaggregated (True) deployments are considered. `mode` is the picking mode: `autoscale` yields one prefill and one decode engine, which a planner scales; `load_match`
    the fewest GPUs for the given load; `default` the highest throughput per GPU. If no configuration meets the
    objectives, that with the smallest relative excess is returned.
    """
    by_parallel = {engine.parallel: engine for engine in engines}
    found: list[Configuration] = []
    for one in disaggregated(engines, engines, traffic, target) if True in kinds else ():
        if mode != "autoscale":
            found += _scaled_pair(one, by_parallel, traffic, target, total_gpus)
        elif one.gpus <= total_gpus:
            found.append(_rate(one, by_parallel, traffic, target))
    for engine in engines if False in kinds else ():
        found += [_scaled(one, traffic, total_gpus) for one in aggregated(engine, traffic)]
    if not found:
        return None
    met = [one for one in found if target.met_by(one.ttft_ms, one.itl_ms, one.osl)]
    if not met:
        ranked = sorted(found, key=lambda one: (round(excess(one, target), 3), -one.tokens_per_gpu))
        return SearchResult(best=ranked[0], is_met=False, others=tuple(ranked[:10]))
    ranked = sorted(met, key=lambda one: _rank(one, traffic, mode, total_gpus, target))
    firsts = [next((one for one in ranked if one.is_disaggregated is kind), None) for kind in (False, True)]
    others = [*(one for one in firsts if one is not None), *ranked[:10]]
    return SearchResult(best=ranked[0], is_met=True, others=tuple(dict.fromkeys(others)))


def excess(one: Configuration, target: LatencyTarget) -> float:
    """Return the largest ratio of a latency to its objective."""
    if target.e2e_ms is not None:
        return one.e2e_ms / target.e2e_ms
    return max(one.ttft_ms / (target.ttft_ms or 1.0), one.itl_ms / (target.itl_ms or 1.0))


def _rank(
    one: Configuration, traffic: TrafficTarget, mode: str, total_gpus: int, target: LatencyTarget
) -> tuple[float, ...]:
    if target.prefers_latency:
        return (one.e2e_ms, one.gpus)
    if mode == "load_match":
        return (max(one.gpus_needed, 0), -one.tokens_per_gpu, one.e2e_ms)
    # Idle GPUs are a cost: the throughput counts per GPU of the budget, rounded so that equals prefer fewer GPUs.
    return (-round(one.tokens_per_gpu, 1), one.gpus, one.e2e_ms)


def _rate(
    one: Configuration,
    engines: dict[PickedParallelConfig, AnalyticEngine],
    traffic: TrafficTarget,
    target: LatencyTarget,
) -> Configuration:
    """Return a pair with its rate per GPU as if the planner balanced both roles."""
    if one.prefill is None:
        return one
    prefill_rps, decode_rps = _rates(one, engines, traffic, target)
    gpus_per_rps = one.prefill.parallel.num_gpus / prefill_rps + one.decode.parallel.num_gpus / decode_rps
    return replace(one, request_rate=one.gpus / gpus_per_rps)


def _rates(
    one: Configuration,
    engines: dict[PickedParallelConfig, AnalyticEngine],
    traffic: TrafficTarget,
    target: LatencyTarget,
) -> tuple[float, float]:
    assert one.prefill is not None
    allowed_ms = target.ttft_ms if target.e2e_ms is None else target.e2e_ms - one.itl_ms * (traffic.osl - 1)
    prefill_rps, _ = prefill_rate(engines[one.prefill.parallel], traffic, allowed_ms or 0.0)
    ranks = one.decode.parallel.dp
    return prefill_rps, DECODE_SHARE * 1000 * one.decode.batch * ranks / (traffic.osl * one.itl_ms)


def _scaled_pair(
    one: Configuration,
    engines: dict[PickedParallelConfig, AnalyticEngine],
    traffic: TrafficTarget,
    target: LatencyTarget,
    total_gpus: int,
) -> list[Configuration]:
    """Return the pair with the numbers of engines that serve the load, or the most within the GPUs; none if it exceeds them."""
    assert one.prefill is not None
    prefill_gpus, decode_gpus = one.prefill.parallel.num_gpus, one.decode.parallel.num_gpus
    if prefill_gpus + decode_gpus > total_gpus:
        return []
    prefill_rps, decode_rps = _rates(one, engines, traffic, target)
    needed = 0
    wanted = _wanted_rate(one, traffic)
    if wanted is not None:
        x, y = math.ceil(wanted / prefill_rps), math.ceil(wanted / decode_rps)
        needed = x * prefill_gpus + y * decode_gpus
    if wanted is None or needed > total_gpus:
        x, y = balanced(prefill_rps, decode_rps, prefill_gpus, decode_gpus, total_gpus)
    scaled = replace(
        one,
        prefill=replace(one.prefill, replicas=x),
        decode=replace(one.decode, replicas=y),
        request_rate=min(x * prefill_rps, y * decode_rps),
        gpus_needed=needed,
    )
    return [scaled]


def balanced(
    prefill_rps: float, decode_rps: float, prefill_gpus: int, decode_gpus: int, total_gpus: int
) -> tuple[int, int]:
    """Return the numbers of engines with the highest rate per GPU, of equal ones those with the highest rate."""
    best, found = (0.0, 0.0), (1, 1)
    for x in range(1, (total_gpus - decode_gpus) // prefill_gpus + 1):
        most = (total_gpus - x * prefill_gpus) // decode_gpus
        y = max(1, min(most, math.ceil(x * prefill_rps / decode_rps)))
        rate = min(x * prefill_rps, y * decode_rps)
        score = (round(rate / (x * prefill_gpus + y * decode_gpus), 9), rate)
        if score > best:
            best, found = score, (x, y)
    x, y = found
    copies = max(1, total_gpus // (x * prefill_gpus + y * decode_gpus))
    return x * copies, y * copies


def _scaled(one: Configuration, traffic: TrafficTarget, total_gpus: int) -> Configuration:
    """Return the engine with the number of replicas that serves the load, or the most within the GPUs."""
    gpus = one.decode.parallel.num_gpus
    most = max(1, total_gpus // gpus)
    wanted = _wanted_rate(one, traffic)
    replicas = most if wanted is None else math.ceil(wanted / one.request_rate)
    return replace(
        one,
        decode=replace(one.decode, replicas=min(replicas, most)),
        request_rate=one.request_rate * min(replicas, most),
        gpus_needed=0 if wanted is None else replicas * gpus,
    )


def _wanted_rate(one: Configuration, traffic: TrafficTarget) -> float | None:
    """Return the requests per second of the given load; a concurrency is one by the latency of a request (Little's law)."""
    if traffic.request_rate is not None:
        return traffic.request_rate
    return None if traffic.concurrency is None else 1000 * traffic.concurrency / one.e2e_ms
