"""Cost of the planner core: processor time of a tick, and memory over many of them.

    python -m benchmarks.planner_tick [--ticks 10000] [--workers 64]

The workers are prefill and decode engines in equal numbers; each reports a forward pass per tick. Both kinds of scaling are on
(target sla) with Kalman prediction and live performance models, and each tick is recorded as it is in production. The load is
a sine with noise. Memory is the resident size after each tenth of the ticks. Ends with status 1 if the median tick takes more
than 20 ms, or if the memory grows by more than 5 % after the first tenth.
"""

import math
import random
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.report import write_result
from benchmarks.router_churn import resident_mb
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.engine import PlannerCore
from dynamo.planner.core.record import encode, recorded
from dynamo.planner.core.scaling import WorkerCapabilities
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.protocols.planner import (
    EngineCapabilities,
    FpmObservations,
    RankKey,
    ScheduledTick,
    TickInput,
    TrafficObservation,
    WorkerCounts,
)

SEED = 14
LAPS = 10
TICK_MS_MAX = 20.0
GROWTH_MAX = 0.05
ENGINE = EngineCapabilities(
    num_gpu=1, max_num_batched_tokens=8192, max_num_seqs=256, context_length=32_768, max_kv_tokens=500_000
)
CONFIG = {
    "optimization_target": "sla",
    "enable_load_scaling": True,
    "load_predictor": "kalman",
    "throughput_adjustment_interval": 60,
    "max_gpu_budget": 128,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerTickBench:
    """Cost of the planner core."""

    ticks: int = option(10_000, "--ticks", None, "Ticks, in ten laps")
    workers: int = option(64, "--workers", None, "Workers; half of them are prefill workers")


def steps_of(rng: random.Random, workers: int, load_factor: float) -> dict[RankKey, ForwardPassMetrics]:
    """Return the latest forward pass of each worker of a role."""
    found: dict[RankKey, ForwardPassMetrics] = {}
    for worker in range(workers):
        tokens, requests = rng.randint(100, 8000), rng.randint(1, 128)
        kv = int(requests * rng.randint(500, 3000) * load_factor)
        seconds = 0.01 + tokens * 1e-5 + requests * 1e-5 + kv * 1e-7
        scheduled = ScheduledRequests(
            num_prefill_requests=1, sum_prefill_tokens=tokens, num_decode_requests=requests, sum_decode_kv_tokens=kv
        )
        queued = QueuedRequests(num_prefill_requests=2, sum_prefill_tokens=int(4000 * load_factor))
        name = str(worker)
        found[name, 0] = ForwardPassMetrics(FORWARD_PASS_VERSION, name, 0, 1, seconds, scheduled, queued)
    return found


def input_of(rng: random.Random, scheduled: ScheduledTick, workers: int) -> TickInput:
    """Return the observations of one tick."""
    load_factor = 1.0 + 0.8 * math.sin(scheduled.at_s / 600)
    count = workers // 2
    traffic = TrafficObservation(
        duration_s=60.0, num_req=200 * load_factor + rng.uniform(0, 20), isl=2000.0, osl=300.0, kv_hit_rate=0.3
    )
    return TickInput(
        now_s=scheduled.at_s,
        traffic=traffic if scheduled.need_traffic_metrics else None,
        worker_counts=WorkerCounts(
            ready_num_prefill=count,
            ready_num_decode=count,
            expected_num_prefill=count,
            expected_num_decode=count,
        ),
        fpm_observations=FpmObservations(steps_of(rng, count, load_factor), steps_of(rng, count, load_factor)),
    )


def measure(config: PlannerTickBench) -> dict[str, Any]:
    """Run the ticks and return the figures."""
    rng = random.Random(SEED)
    core = PlannerCore(parse(CONFIG), WorkerCapabilities(prefill=ENGINE, decode=ENGINE))
    scheduled = core.first_tick(0.0)
    taken_ms: list[float] = []
    laps_mb: list[float] = []
    record_bytes = decisions = 0
    for lap in range(LAPS):
        for _ in range(max(1, config.ticks // LAPS)):
            seen = input_of(rng, scheduled, config.workers)
            began = time.process_time()
            recording = recorded(core, scheduled, seen)
            record_bytes += len(encode(recording.tick))
            taken_ms.append((time.process_time() - began) * 1000)
            decisions += recording.decision is not None and recording.decision.scale_to is not None
            scheduled = core.next_tick(scheduled, scheduled.at_s)
        laps_mb.append(resident_mb())
        print(f"lap {lap + 1}: {len(taken_ms)} ticks, {laps_mb[-1]:.1f} MB", flush=True)
    return {
        "ticks": len(taken_ms),
        "workers": config.workers,
        "tick_cpu_ms": {
            "median": statistics.median(taken_ms),
            "p99": statistics.quantiles(taken_ms, n=100)[98],
            "max": max(taken_ms),
        },
        "record_bytes_per_tick": record_bytes / len(taken_ms),
        "ticks_with_a_decision": decisions,
        "laps_mb": laps_mb,
        "growth": min(laps_mb[-3:]) / laps_mb[0] - 1,
    }


def main() -> int:
    """Return 1 if a tick is too expensive or memory grows."""
    config = load(PlannerTickBench, sys.argv[1:])
    found = measure(config)
    cpu = found["tick_cpu_ms"]
    print(f"CPU per tick of {config.workers} workers: median {cpu['median']:.2f} ms, p99 {cpu['p99']:.2f} ms")
    print(f"memory {found['growth']:+.1%} after the first tenth of {found['ticks']} ticks")
    print(f"written to {write_result('planner_tick', found, is_whole=config == PlannerTickBench())}")
    return int(cpu["median"] > TICK_MS_MAX or found["growth"] > GROWTH_MAX)


if __name__ == "__main__":
    exit_on_config_error(main)
